"""Builder of a /v1/responses response: takes deltas, and makes the events and the final response object.

Requests without streaming use the same builder, and ignore the events.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields
from typing import Any

from localllm.chat.mcp.client import Result
from localllm.errors import LocalLLMError
from localllm.llm.outputs import OutputDelta
from localllm.request import FinishReason, SamplingParams, TokenLogprob, ToolUse, Usage
from localllm.server.errors import openai_body
from localllm.server.openai.output import TokenNames, new_id
from localllm.server.openai.responses_mcp import McpRounds, call_item, ended, listings
from localllm.server.openai.responses_schemas import ResponsesRequest
from localllm.server.reply import named
from localllm.server.response_stream import AsyncResponseStream, Blocks
from localllm.server.service import Reservation


class ResponseBuilder:
    """Builds one response."""

    def __init__(
        self, body: ResponsesRequest, tool_use: ToolUse | None = None,
        keep: Callable[[dict[str, Any]], None] = lambda _: None,  # called with the finished response
        rounds: McpRounds | None = None,
    ) -> None:  # fmt: skip
        self._body, self._model, self._tool_use = body, body.model or "", tool_use
        self._names: TokenNames | None = None
        self._sampling = SamplingParams()  # defaults for fields that the request leaves out
        self._stream: AsyncResponseStream | None = None
        self._keep = keep
        self._rounds = rounds or McpRounds()
        self._waiting: list[dict[str, Any]] = []  # MCP calls to make before the model continues
        self.id = new_id("resp_")
        self._created = int(time.time())
        self.output: list[dict[str, Any]] = []
        self._num_closed = 0  # leading items of `output` that are finished
        self._blocks = Blocks()
        self._logprobs: list[dict[str, Any]] = []
        self._pending_logprobs: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is still to come
        self._status = "in_progress"
        self._reason: str | None = None
        self._error: dict[str, Any] | None = None
        self._usage: Usage | None = None
        self._completed_at: int | None = None
        self._number = -1

    def opened(self, reservation: Reservation) -> ResponseBuilder:
        """Attach the reservation, once the model is ready. Returns itself."""
        self._model, self._stream = reservation.name, reservation.stream
        self._names = TokenNames(reservation.llm)
        self._sampling = reservation.llm.default_params()
        return self

    async def whole(self) -> dict[str, Any]:
        async for _ in self.chunks():
            pass
        return self.json()

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._stream is not None
        yield b"".join(self.begin())
        try:
            while True:
                async for chunk in self._stream.rendered(lambda _, delta: self.take(delta)):
                    yield chunk
                if not self._waiting or self._rounds.again is None:
                    return
                async for chunk in self._results():
                    yield chunk
                if any(item["type"] == "mcp_approval_request" for item in self.output):
                    yield b"".join(self._end(cut=False))
                    return
                self._stream = await self._rounds.again(self.output)
        finally:
            self._stream.abort()

    async def _results(self) -> AsyncIterator[bytes]:
        """Make the model's MCP calls, one after the other."""
        self._rounds.rounds += 1
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            assert self._rounds.call is not None
            ended(item, await self._rounds.call(item["name"], item["arguments"]))
            yield b"".join(self._end_call(item))

    def _end_call(self, item: dict[str, Any]) -> list[bytes]:
        at = self.output.index(item)
        return [
            self._event(f"response.mcp_call.{item['status']}", item_id=item["id"], output_index=at),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def begin(self) -> list[bytes]:
        return [
            self._event("response.created", response=self.json()),
            self._event("response.in_progress", response=self.json()),
            *(event for item in listings(self._rounds.tools) for event in self._add_tool_list(item)),
            *(event for item in self._rounds.done for event in self._add_made_call(item)),
        ]

    def _add_made_call(self, item: dict[str, Any]) -> list[bytes]:
        """Add a call that was made before the response began."""
        self.output.append(item)
        self._num_closed = len(self.output)
        unfinished = item | {"arguments": "", "output": None, "error": None, "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=len(self.output) - 1, item=unfinished),
            self._event("response.mcp_call_arguments.done", **self._at(), arguments=item["arguments"]),
            *self._end_call(item),
        ]

    def _add_tool_list(self, item: dict[str, Any]) -> list[bytes]:
        """Add the list of an MCP server's tools, an item that is complete at once."""
        self.output.append(item)
        self._num_closed = len(self.output)
        at = len(self.output) - 1
        return [
            self._event("response.output_item.added", output_index=at, item=item),
            self._event("response.mcp_list_tools.completed", item_id=item["id"], output_index=at),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def take(self, delta: OutputDelta) -> list[bytes]:
        events: list[bytes] = []
        logprobs = self._logprob_entries(delta.logprobs)
        if not delta.parts or delta.parts[0][0] == "content":
            logprobs = [*self._pending_logprobs, *logprobs]
        # after reasoning or a call, a token without text may be its closing tag, which is not shown
        is_text = len(self.output) == self._num_closed or self.output[-1]["type"] == "message"
        self._pending_logprobs = logprobs if is_text and not delta.parts else []
        for kind, text in delta.parts:
            begins, part = self._blocks.read(kind, text)
            if begins:
                events += [*self._close(), *self._open(kind, part)]
            if kind != "tool_call":
                events.append(self._add(kind, text, logprobs))
                logprobs = [] if kind == "content" else logprobs
            elif added := part.get("arguments"):
                self.output[-1]["arguments"] += added
                kind = self.output[-1]["type"]
                if kind != "mcp_approval_request":  # shown only when it is complete
                    events.append(self._event(f"response.{kind}_arguments.delta", **self._at(), delta=added))
        if delta.finish_reason is not None:
            if logprobs and len(self.output) > self._num_closed and self.output[-1]["type"] == "message":
                events.append(self._add("content", "", logprobs))
            events += self._finish(delta)
        return events

    def fail(self, error: LocalLLMError) -> bytes:
        """The last event of a response that failed."""
        self._status = "failed"
        self._error = {"code": error.api_code or "server_error", "message": openai_body(error)["error"]["message"]}
        return self._event("response.failed", response=self.json())

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named(kind, {"type": kind, "sequence_number": self._number, **fields})

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _add(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        part = self.output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "content":
            self._logprobs += logprobs
            more = {"logprobs": logprobs}
        return self._event(f"response.{part['type']}.delta", **self._at(), content_index=0, delta=text, **more)

    def _open(self, kind: str, call: dict[str, Any]) -> list[bytes]:
        item: dict[str, Any] = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        elif tool := self._rounds.tools.get(call.get("name") or "") if kind == "tool_call" else None:
            item = call_item(tool)
            if tool.name in self._rounds.guarded:
                call = {"server_label": tool.server, "name": tool.name, "arguments": ""}
                self.output.append({"type": "mcp_approval_request", "id": new_id("mcpr_"), **call})
                return []
        elif kind == "tool_call":
            ids = {"id": new_id("fc_"), "call_id": call.get("id") or new_id("call_")}
            item = {"type": "function_call", **ids, "name": call.get("name") or "", "arguments": ""}
        item["status"] = "in_progress"
        self._logprobs = []
        self.output.append(item)
        added = self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)
        if kind == "tool_call":
            return [added]
        item["content"] = [part]
        return [added, self._event("response.content_part.added", **self._at(), content_index=0, part=part)]

    def _close(self, status: str = "completed") -> list[bytes]:
        if len(self.output) == self._num_closed:
            return []
        self._num_closed = len(self.output)
        item, at = self.output[-1], self._at()
        if item["type"] == "mcp_call":
            return [self._event("response.mcp_call_arguments.done", **at, arguments=item["arguments"])]
        if item["type"] == "mcp_approval_request":
            kinds = ("added", "done")
            return [self._event(f"response.output_item.{k}", output_index=at["output_index"], item=item) for k in kinds]
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **at, **done)]
        else:
            part, more = item["content"][0], {}
            if item["type"] == "message":
                part["logprobs"] = more["logprobs"] = self._logprobs
            text = self._event(f"response.{part['type']}.done", **at, content_index=0, text=part["text"], **more)
            events = [text, self._event("response.content_part.done", **at, content_index=0, part=part)]
        item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=at["output_index"], item=item)]

    def _finish(self, last: OutputDelta) -> list[bytes]:
        cut = last.finish_reason is FinishReason.LENGTH
        self._usage = _sum(self._usage, last.usage)
        self._blocks = Blocks()
        self._waiting = [] if cut else self._rounds.goes_on(self.output)
        return self._close() if self._waiting else self._end(cut)

    def _end(self, cut: bool) -> list[bytes]:
        self._status = "incomplete" if cut else "completed"
        events = self._close(self._status)
        for item in self.output:
            if item["type"] == "mcp_call" and item["status"] == "in_progress":
                ended(item, Result("not run: the response ended, or it made too many calls", failed=True))
                events += self._end_call(item)
        if all(item["type"] in ("mcp_list_tools", "mcp_call") for item in self.output):
            events += [*self._open("content", {}), *self._close(self._status)]  # an empty message
        self._reason = "max_output_tokens" if cut else None
        self._completed_at = None if cut else int(time.time())
        self._keep(self.json())
        return [*events, self._event(f"response.{self._status}", response=self.json())]

    def _logprob_entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if self._names is None or not self._body.wants_logprobs:
            return []
        return [self._names.entry(entry) for entry in logprobs]

    @property
    def _parallel(self) -> bool:
        if self._tool_use is not None:
            return self._tool_use.parallel
        return self._body.parallel_tool_calls is not False

    def json(self) -> dict[str, Any]:
        body, usage = self._body, self._usage
        text = {"format": {"type": "text"}, "verbosity": "medium"}
        if body.text is not None:
            text |= body.text.model_dump(exclude_none=True)
        reasoning, further = body.reasoning, body.model_extra or {}
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": self._status,
            "background": False, "completed_at": self._completed_at, "error": self._error,
            "incomplete_details": {"reason": self._reason} if self._reason else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {}, "model": self._model,
            "output": json.loads(json.dumps(self.output)), "parallel_tool_calls": self._parallel,
            "previous_response_id": body.previous_response_id, "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None, "summary": reasoning.summary if reasoning else None,
            },
            "safety_identifier": body.safety_identifier, "service_tier": "default", "store": body.store is not False,
            "temperature": self._sampling.temperature if body.temperature is None else body.temperature, "text": text,
            "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
            "tools": [_echoed(tool) for tool in body.tools or []],
            "presence_penalty": further.get("presence_penalty") or 0.0,
            "frequency_penalty": further.get("frequency_penalty") or 0.0,
            "top_logprobs": body.top_logprobs or 0, "top_p": self._sampling.top_p if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled", "usage": None if usage is None else _usage(usage),
            "user": body.user,
        }  # fmt: skip


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with all the fields that a response shows."""
    unset = {"description": None, "parameters": None, "strict": False}
    return (unset | tool) if tool.get("type") == "function" else tool


def _sum(before: Usage | None, last: Usage | None) -> Usage | None:
    if before is None or last is None:
        return last or before
    return Usage(*(getattr(before, f.name) + getattr(last, f.name) for f in fields(Usage)))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
