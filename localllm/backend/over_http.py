"""`ChatBackend` over HTTP: a chat that uses a running `localllm serve` instead of loading the model a second time.

Works with any OpenAI-compatible endpoint; pages, speeds and prefix hits are shown where it has our /metrics. Nothing
here blocks its caller: requests run in threads, and their events arrive in a queue.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.errors import LocalLLMError, ModelNotFound, ServerError
from localllm.interface import ChatBackend, Check, Delta, Done, Facts, Failed, ModelChoice, Prefill, Turn
from localllm.request import FinishReason, LoadProgress, Timing, Usage

log = logging.getLogger(__name__)

CONNECT_S = 5.0
LOOK_S = 0.5  # between two looks at the server's numbers, while somebody asks for them
_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{([^}]*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_CODES = {"context_length_exceeded": "E901", "model_not_found": "E301", "invalid_api_key": "E401"}


class RemoteBackend(ChatBackend):
    """See `interface.ChatBackend`.

    url     http://host:port, with or without /v1, or unix:/path
    key     sent as a bearer token where the server wants one
    given   sampling that the user set; read at every turn
    stop    strings that end an answer
    pid     the server's process, where that is known; it is only told
    """

    def __init__(
        self, url: str, key: str = "", *, given: Mapping[str, Any] | None = None, stop: Sequence[str] = (), pid: int = 0
    ) -> None:
        super().__init__()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._pid = pid
        self._given = given if given is not None else {}
        self._stop = list(stop)
        self._model = ""
        self._models: list[ModelChoice] = []
        self._facts = Facts()
        self._asked_at = 0.0
        self._looking = False
        self._closed = False

    # --- the protocol ------------------------------------------------------------------------------------------------

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Ask what is served, in a thread."""
        threading.Thread(target=self._start, args=(model or "",), name="remote", daemon=True).start()

    def _accept(self, turn: Turn) -> None:
        body = self._body(turn)
        threading.Thread(target=self._answer, args=(turn.id, body), name=f"remote-{turn.id}", daemon=True).start()

    def stop(self, turn: int) -> None:
        """Hang up: the server ends the request then."""
        with self._lock:
            self._stopped.add(turn)
            connection = self._running.get(turn)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def rest(self) -> None:
        """The server's affair."""

    def facts(self) -> Facts:
        """What the server said last; asking keeps the numbers fresh."""
        self._asked_at = time.monotonic()
        if self._facts.model and not self._looking and not self._closed:
            self._looking = True
            threading.Thread(target=self._look, name="remote-facts", daemon=True).start()
        return self._facts

    def count_tokens(self, text: str) -> int:
        """Asks the server's tokenizer; a quarter of the characters where it has none."""
        try:
            with self._client() as client:
                found = client.post("/tokenize", json={"model": self._model, "prompt": text}, timeout=CONNECT_S)
                return int(found.json()["count"])
        except Exception:
            log.debug("no /tokenize at %s", self.url, exc_info=True)
            return -(-len(text) // 4)

    def find(self, name: str) -> str:
        served = [row.name for row in self._models]
        if name not in served:
            raise ModelNotFound(f"{self.url} does not serve {name}", f"it serves {', '.join(served) or 'nothing'}")
        return name

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        return list(self._models)

    def checks(self) -> list[Check]:
        return [Check("server.running", "software", "ok" if self._facts.model else "fail", f"attached to {self.url}")]

    def close(self) -> None:
        self._closed = True
        for turn in list(self._running):
            self.stop(turn)

    # --- the wire ----------------------------------------------------------------------------------------------------

    def _client(self) -> Any:
        import httpx

        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        if self.url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:"))
            return httpx.Client(base_url="http://localhost", headers=headers, timeout=timeout, transport=transport)
        # a proxy of the environment has no business between a chat and its own machine
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def _start(self, model: str) -> None:
        self.tell(LoadProgress("resolve", detail=self.url))
        try:
            self._find(model)
        except LocalLLMError as error:
            self.tell(Failed.of(-1, error))
        else:
            self.tell(LoadProgress("ready", detail=self.url))

    def _find(self, model: str) -> None:
        """What is served. Raises what the server's refusal means, or ServerError."""
        import httpx

        try:
            with self._client() as client:
                found = client.get("/v1/models", timeout=CONNECT_S)
                if found.status_code >= 400:
                    raise _refused(found.status_code, found.text)
                rows = [row for row in found.json()["data"] if isinstance(row.get("id"), str)]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, OSError) as error:
            hint = "localllm ps; or leave --attach-to out"
            raise ServerError(f"no server answers at {self.url} ({type(error).__name__})", hint) from error
        self._models = [
            ModelChoice(
                row["id"], "", int((row.get("meta") or {}).get("size") or 0), local=True, supported=True,
                max_ctx=int(row.get("max_model_len") or 0), params=int((row.get("meta") or {}).get("n_params") or 0),
            )
            for row in rows
        ]  # fmt: skip
        ids = [row.name for row in self._models]
        if not ids or (model and model not in ids):
            served = ", ".join(ids) or "nothing"
            raise ServerError(f"{self.url} does not serve {model or 'a model'}; it serves {served}", "localllm ps")
        self._model = model or ids[0]
        ctx = next(row.max_ctx for row in self._models if row.name == self._model)
        via = f"via {self.url}" + (f" (pid {self._pid})" if self._pid else "")
        self._facts = Facts(
            model=self._model, run_summary=f"{self._model} · {via}", ctx=ctx, url=self.url, pid=self._pid, max_ctx=ctx
        )

    def _body(self, turn: Turn) -> dict[str, Any]:
        messages, template = turn.messages, turn.template
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | dict(self._given)
        if self._stop:
            body["stop"] = self._stop
        if turn.tools:
            body["tools"] = list(turn.tools)
        if template:
            body["chat_template_kwargs"] = dict(template)
        if messages and messages[-1].get("role") == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _answer(self, turn: int, body: dict[str, Any]) -> None:
        begin = time.monotonic()
        try:
            with self._client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _refused(response.status_code, response.text)
                with self._lock:
                    self._running[turn] = response.extensions["network_stream"].get_extra_info("socket")
                    stopped = turn in self._stopped
                if not stopped:
                    self._end(turn, self._read(turn, _data(response.iter_lines()), begin))
        except LocalLLMError as error:
            self._fail(turn, error)
        except Exception as error:
            if turn not in self._stopped:
                log.warning("the server at %s failed: %s", self.url, error)
                gone = f"the server at {self.url} went away ({type(error).__name__})"
                self._fail(turn, ServerError(gone, "localllm ps"))
        self._end(turn, Done(turn, FinishReason.ABORT, Usage(), Timing(total_s=time.monotonic() - begin)))

    def _read(self, turn: int, chunks: Iterator[dict[str, Any]], begin: float) -> Done:
        first, count, stop, usage = 0.0, 0, "stop", Usage()
        try:
            for chunk in chunks:
                if error := chunk.get("error"):
                    raise ServerError(str(error.get("message", "the server failed"))[:500], "send it again")
                if told := chunk.get("usage"):
                    usage = _usage(told)
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    stop = choice.get("finish_reason") or stop
                    calls = [("tool_call", _call(told)) for told in delta.get("tool_calls") or ()]
                    for kind, text in (
                        ("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
                        ("content", delta.get("content")),
                        *calls,
                    ):
                        if text:
                            first = first or time.monotonic()
                            count += 1
                            self.tell(Delta(turn, kind, text))  # type: ignore[arg-type]
                if not first:
                    self.tell(Prefill(turn, 0, usage.prompt_tokens))
        except Exception as error:
            if isinstance(error, LocalLLMError) or turn not in self._stopped:
                raise
        if turn in self._stopped and not usage.completion_tokens:  # hung up before the end came
            stop, usage = FinishReason.ABORT, replace(usage, completion_tokens=count)
        end = time.monotonic()
        made, spent = usage.completion_tokens or count, end - first
        timing = Timing(
            ttft_s=max(0.0, first - begin) if first else 0.0,
            total_s=end - begin,
            decode_tps=(made - 1) / spent if first and made > 1 and spent > 0 else 0.0,
        )
        return Done(turn, stop, usage, timing)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            while not self._closed and time.monotonic() - self._asked_at < 4 * LOOK_S:
                with self._client() as client:
                    found = client.get("/metrics", timeout=CONNECT_S)
                if found.status_code != 200:
                    return
                self._facts = _from_metrics(self._facts, found.text)
                time.sleep(LOOK_S)
        except Exception:
            log.debug("no metrics at %s", self.url, exc_info=True)
        finally:
            self._looking = False


def _data(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith("data:"):
            text = line[5:].strip()
            if text == "[DONE]":
                return
            value = json.loads(text)
            if isinstance(value, dict):
                yield value


def _call(told: Mapping[str, Any]) -> str:
    """A piece of a call, as `Delta` has it."""
    function = told.get("function") or {}
    made = {"index": int(told.get("index") or 0), "id": told.get("id"), "name": function.get("name")}
    return json.dumps(made | {"arguments": function.get("arguments") or ""})


def _usage(told: Mapping[str, Any]) -> Usage:
    prompt, completion = told.get("prompt_tokens_details") or {}, told.get("completion_tokens_details") or {}
    return Usage(
        int(told.get("prompt_tokens") or 0), int(prompt.get("cached_tokens") or 0),
        int(told.get("completion_tokens") or 0), int(completion.get("reasoning_tokens") or 0),
    )  # fmt: skip


def _refused(status: int, text: str) -> LocalLLMError:
    """What a server's refusal means here."""
    try:
        error = json.loads(text)["error"]
        message, code = str(error["message"])[:500], str(error.get("code") or "")
        param = str(error.get("param") or "")
    except (ValueError, KeyError, TypeError):
        message, code, param = f"the server answered {status}", "", ""
    made = ServerError(message, "localllm ps", param=param)
    known = _CODES.get(code) or ("E401" if status == 401 else "")
    if known:
        made.exit_code, made.number = int(known[1:-2]), int(known[-2:])
        made.hint = {"E401": "`export LOCALLLM_API_KEY=…`", "E901": "shorten it"}.get(known, made.hint)
    return made


def _from_metrics(facts: Facts, text: str) -> Facts:
    """The server's numbers as ours; of several models the sum."""
    totals: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if "le=" not in labels:
            totals[name] = totals.get(name, 0.0) + float(value)

    def count(name: str) -> int:
        return int(totals.get(name, totals.get(f"{name}_total", 0.0)))

    free, cached = count("localllm:kv_pages_free"), count("localllm:kv_pages_cached")
    return replace(
        facts,
        pages_total=count("localllm:kv_pages_total"),
        pages_free=max(0, free - cached),
        pages_cached=cached,
        num_running=count("vllm:num_requests_running"),
        num_waiting=count("vllm:num_requests_waiting"),
        num_steps=count("vllm:iteration_tokens_total_count"),
        num_prompt_tokens=count("vllm:prompt_tokens"),
        num_output_tokens=count("vllm:generation_tokens"),
        num_preemptions=count("vllm:num_preemptions"),
        prefix_query_tokens=count("vllm:prefix_cache_queries"),
        prefix_hit_tokens=count("vllm:prefix_cache_hits"),
    )
