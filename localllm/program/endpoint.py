"""Programs on a server: ours, or another OpenAI-compatible one; `select` needs /tokenize as in ours and vLLM."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from localllm.errors import Aborted, LocalLLMError, ServerError, ServerGone
from localllm.request import SamplingParams, Usage
from localllm.wire import FAILURES, Reply, Wire, events_of, meant, refused, usage_of

from .calls import Answer, Calls, Prefixes, Sampled, Written, shared_tokens
from .expressions import Gen

CHARACTERS = 64  # per piece of a shared prefix: about a page of tokens
_ALWAYS_SENT = ("temperature", "top_p")  # sent whenever sampling was given; every server knows them
_OWN = ("n", "stop", "max_tokens", "logprobs", "prompt_logprobs", "prompt_logprobs_from")  # set by the program itself
_NAMES = {"include_stop": "include_stop_str_in_output"}


class Endpoint:
    """A server that programs run on, like on an `LLM`.

    url    http://host:port, with or without /v1, or unix:/path
    model  "": the first one it serves
    key    sent as a bearer token, if not empty

    `select` sends every choice with the whole text before it. Our server reads that text once; vLLM, which does not
    support `logprobs_from`, reads it for each choice. Servers drop a trailing space of an answer that `gen` continues.
    """

    def __init__(self, url: str, model: str = "", key: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wire = Wire(self._url, key)
        self._asked = model
        self._prefixes = Prefixes(CHARACTERS)

    def generate(self, written: Written, gen: Gen, how: Sampled, calls: Calls) -> Answer:
        body = {**self._prompt(written), **_sampling(gen, how), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if gen.constraint is not None:
            kind = {"json_schema": "json", "regex": "regex"}[gen.constraint.kind]
            body["structured_outputs"] = {kind: gen.constraint.value}
        key = written.text or json.dumps(written.messages)
        end_reading = self._prefixes.begin(key)
        try:
            path = "/v1/chat/completions" if written.messages else "/v1/completions"
            with self._reply(path, body, calls) as reply:
                answer = _read(events_of(reply.lines()), end_reading)
        finally:
            end_reading()
        self._prefixes.add(key + answer.text)
        return answer

    def score(self, written: Written, choices: Sequence[str], calls: Calls) -> tuple[list[list[float]], Usage]:
        before, *prompts = (
            self._tokens(one, calls) for one in (written, *(written.followed_by(choice) for choice in choices))
        )
        start = shared_tokens(before, prompts)
        key = written.text or json.dumps(written.messages)
        end_reading = self._prefixes.begin(key)
        try:  # the first request reads the prefix for the others
            asked = [prompts] if self._prefixes.was_read(key) else [prompts[:1], prompts[1:]]
            rows: list[list[float]] = []
            usages: list[Usage] = []
            for some in filter(None, asked):
                told, usage = self._scored(some, start, calls)
                rows += told
                usages.append(usage)
                end_reading()
        finally:
            end_reading()
        total = Usage(sum(one.prompt_tokens for one in usages), sum(one.cached_tokens for one in usages))
        return [row[start : len(ids)] for row, ids in zip(rows, prompts, strict=True)], total

    def _scored(self, prompts: list[list[int]], start: int, calls: Calls) -> tuple[list[list[float]], Usage]:
        """Log-probabilities of each prompt's tokens; those before `start` are not needed."""
        body = {"model": self.model, "prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0}
        with self._reply("/v1/completions", body | {"logprobs_from": start}, calls) as reply:
            told = reply.json()
        choices = sorted(told["choices"], key=lambda one: one["index"])
        return [one["logprobs"]["token_logprobs"] for one in choices], usage_of(told.get("usage") or {})

    @cached_property
    def model(self) -> str:
        """The model's name in requests. Raises ServerError."""
        if self._asked:
            return self._asked
        with self._failing():
            status, body = self._wire.get("/v1/models")
            if status >= 400:
                raise refused(status, body)
            return str(json.loads(body)["data"][0]["id"])

    def _prompt(self, written: Written) -> dict[str, Any]:
        if not written.messages:
            return {"model": self.model, "prompt": written.text}
        body: dict[str, Any] = {"model": self.model, "messages": written.messages}
        return body | ({"continue_final_message": True, "add_generation_prompt": False} if written.is_open else {})

    def _tokens(self, written: Written, calls: Calls) -> list[int]:
        body = ({"add_generation_prompt": True} if written.messages else {}) | self._prompt(written)
        with self._reply("/tokenize", body, calls) as reply:
            return [int(one) for one in reply.json()["tokens"]]

    @contextmanager
    def _reply(self, path: str, body: Any, calls: Calls) -> Iterator[Reply]:
        lines: list[socket.socket] = []

        def opened(line: socket.socket) -> None:
            lines.append(line)
            if calls.is_stopped:
                raise ConnectionAbortedError

        def hang_up() -> None:
            for line in lines:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

        sent = self._wire.send("POST", path, body, opened=opened)
        with self._failing(calls), calls.running(hang_up), sent as reply:
            if reply.status >= 400:
                raise refused(reply.status, reply.body.read())
            yield reply

    @contextmanager
    def _failing(self, calls: Calls | None = None) -> Iterator[None]:
        """Raise ServerGone for connection failures and invalid responses."""
        try:
            yield
        except LocalLLMError:
            raise
        except (*FAILURES, EOFError, LookupError, TypeError) as error:
            if calls is not None and calls.is_stopped:
                raise Aborted("the program was stopped") from error
            raise ServerGone(f"no server answers at {self._url}, or not with OpenAI's API", "localllm ps") from error


def _sampling(gen: Gen, how: Sampled) -> dict[str, Any]:
    """The sampling fields of a request; fields left to the server are omitted."""
    usual = SamplingParams()
    params = gen.params(how.params or usual, how.place)
    body: dict[str, Any] = {"max_tokens": params.max_tokens, "stop": list(params.stop)}
    for name in SamplingParams.__slots__:
        value = getattr(params, name)
        asked = value != getattr(usual, name) or (how.params is not None and name in _ALWAYS_SENT)
        if asked and name not in _OWN:
            body[_NAMES.get(name, name)] = value
    return body | ({} if gen.temperature is None else {"temperature": gen.temperature})


def _read(chunks: Iterator[dict[str, Any]], on_read: Callable[[], None]) -> Answer:
    """Read a streamed answer. Raises ServerError when the server reports a failure."""
    text, reason, usage = "", "", Usage()
    for chunk in chunks:
        if error := chunk.get("error"):
            raise meant(str(error.get("message", "the server failed"))[:500], error, "run it again")
        usage = usage_of(chunk["usage"]) if chunk.get("usage") else usage
        for choice in chunk.get("choices") or ():
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            reason = choice.get("finish_reason") or reason
            if piece or reason:
                on_read()
            text += piece
    if not reason:
        raise ServerError("the server ended an answer without a finish reason", "run it again")
    return Answer(text, reason, usage)
