"""`ChatBackend` over HTTP: uses a running `localllm serve` instead of loading the model a second time.

Works with any OpenAI-compatible endpoint; pages, speeds and prefix hits are shown if it has our /metrics. Nothing here
blocks its caller: requests run in threads, and their events arrive in a queue.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from localllm.errors import LocalLLMError, ModelNotFound, ServerError, ServerGone
from localllm.interface import ChatBackend, Check, Delta, Done, Facts, Failed, ModelChoice, Prefill, Turn
from localllm.request import Constraint, FinishReason, LoadProgress, Timing, Usage, text_of
from localllm.wire import FAILURES, Wire, events_of, meant, refused, usage_of

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between reads of the server's metrics, while somebody asks for them
# kinds of constraint -> their names in our servers' API
_CONSTRAINTS = {
    "json_schema": "json", "json_object": "json_object", "regex": "regex", "grammar": "grammar", "choice": "choice",
}  # fmt: skip
_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{([^}]*)\})? ([0-9.eE+-]+)$", re.MULTILINE)


class RemoteBackend(ChatBackend):
    """See `interface.ChatBackend`.

    url     http://host:port, with or without /v1, or unix:/path
    key     sent as a bearer token, if not empty
    given       called for every turn: the user's sampling, including `stop`
    completes   a base model continues the text instead of refusing it
    constraint  the constraint on every answer; our own servers only
    pid         the server's process, if known; only for display
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        given: Callable[[], Mapping[str, Any]] = dict,
        completes: bool = False,
        constraint: Constraint | None = None,
        pid: int = 0,
    ) -> None:
        super().__init__()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._wire = Wire(self.url, key)
        self._pid = pid
        self._given = given
        self._completes = completes
        self._constraint = constraint
        self._model = ""
        self._is_ours = False  # a server of this program, which reports more
        self._models: list[ModelChoice] = []
        self._facts = Facts()
        self._queried_at = 0.0
        self._polling = False
        self._closed = False
        self._starting: threading.Thread | None = None
        self._refusal: LocalLLMError | None = None  # why the server cannot be used

    # --- the protocol ------------------------------------------------------------------------------------------------

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Ask what is served, in a thread."""
        self._starting = threading.Thread(target=self._start, args=(model or "",), name="remote", daemon=True)
        self._starting.start()

    def _accept(self, turn: Turn) -> None:
        threading.Thread(target=self._answer, args=(turn,), name=f"remote-{turn.id}", daemon=True).start()

    def stop(self, turn: int) -> None:
        """Close the connection; the server then ends the request."""
        with self._lock:
            self._stopped.add(turn)
            connection = self._running.get(turn)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def rest(self) -> None:
        """Does nothing: the server decides."""

    def facts(self) -> Facts:
        """The last known state of the server; asking keeps it fresh."""
        self._queried_at = time.monotonic()
        if self._facts.model and not self._polling and not self._closed:
            self._polling = True
            threading.Thread(target=self._poll_metrics, name="remote-facts", daemon=True).start()
        return self._facts

    def count_tokens(self, text: str) -> int:
        """Ask the server's tokenizer; without one, a quarter of the characters."""
        try:
            with self._wire.send("POST", "/tokenize", {"model": self._model, "prompt": text}) as reply:
                return int(reply.json()["count"])
        except Exception:
            log.debug("no /tokenize at %s", self.url, exc_info=True)
            return -(-len(text) // 4)

    def is_there(self) -> bool:
        try:
            return self._wire.get("/v1/models")[0] == 200
        except FAILURES:
            return False

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

    @property
    def _continues_text(self) -> bool:
        """Whether the prompt is plain text to continue, for a base model without a chat template."""
        return self._completes and not self._facts.has_chat_template

    def _start(self, model: str) -> None:
        self.tell(LoadProgress("resolve", detail=self.url))
        try:
            self._find(model)
        except LocalLLMError as error:
            self._refusal = error
            self.tell(Failed.of(-1, error))
        else:
            self._refusal = None
            self.tell(LoadProgress("ready", detail=self.url))

    def _find(self, model: str) -> None:
        """Find the model among those served. Raises the server's error, or ServerError."""
        try:
            rows = self._list()
            ids = list(rows)
            if not ids or (model and model not in ids):
                served = ", ".join(ids) or "nothing"
                raise ServerError(f"{self.url} does not serve {model or 'a model'}; it serves {served}", "localllm ps")
            self._model = model or ids[0]
            if rows[self._model].get("loaded") is False:
                self._load()
                rows = self._list()
            told = self._owner_view() if self._is_ours else {}
        except (*FAILURES, KeyError, TypeError) as error:
            hint = "see `localllm ps`, or drop --attach-to"
            raise ServerError(f"no server answers at {self.url}, or not with OpenAI's API", hint) from error
        ctx = next(row.max_ctx for row in self._models if row.name == self._model)
        via = f"via {self.url}" + (f" (pid {self._pid})" if self._pid else "")
        meta = rows[self._model]
        self._facts = Facts(
            model=self._model, run_summary=f"{told.get('truth_line') or self._model} · {via}", ctx=ctx, url=self.url,
            pid=self._pid, max_ctx=ctx, device=str(told.get("device") or ""),
            has_chat_template=bool(meta.get("chat", True)), image_tokens=meta.get("image_tokens"),
            decode_tps=float(told.get("decode_tps") or 0.0),
            sampling=tuple((str(n), v, str(why)) for n, (v, why) in (meta.get("sampling") or {}).items()),
            warnings=tuple(map(str, told.get("warnings") or ())),
        )  # fmt: skip

    def _list(self) -> dict[str, dict[str, Any]]:
        """The served models with their metadata. Raises one of FAILURES, or the server's error."""
        status, body = self._wire.get("/v1/models")
        if status >= 400:
            raise refused(status, body)
        rows = [row for row in json.loads(body)["data"] if isinstance(row.get("id"), str)]
        meta = {row["id"]: row.get("meta") or {} for row in rows}
        self._is_ours = any(row.get("owned_by") == "localllm" for row in rows)
        self._models = [
            ModelChoice(
                row["id"], str(meta[row["id"]].get("quant") or ""), int(meta[row["id"]].get("size") or 0), local=True,
                supported=True, max_ctx=int(row.get("max_model_len") or 0),
                params=int(meta[row["id"]].get("n_params") or 0), chat=bool(meta[row["id"]].get("chat", True)),
            )
            for row in rows
        ]  # fmt: skip
        return meta

    def _load(self) -> None:
        """Make the server load the model now, so that errors show before the first question."""
        self.tell(LoadProgress("weights", detail=self._model))
        with self._wire.send("POST", "/tokenize", {"model": self._model, "prompt": ""}) as reply:
            if reply.status >= 400:
                raise refused(reply.status, reply.body.read())

    def _owner_view(self) -> dict[str, Any]:
        """The owner's view of the running model; {} when the server withholds it."""
        status, body = self._wire.get("/localllm/ps")
        told = json.loads(body) if status == 200 else {}
        rows = told.get("models") or []
        row = next((row for row in rows if row["model"] == self._model), rows[0] if len(rows) == 1 else {})
        return row | {"decode_tps": (told.get("decode_tps") or {}).get(row.get("model"))}

    def _body(self, turn: Turn) -> dict[str, Any]:
        messages, template = turn.messages, turn.template
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        body |= self._given()
        if self._is_ours:
            body["timings_per_token"] = True
        if turn.tools is not None:
            body |= {"tools": list(turn.tools.tools), "tool_choice": turn.tools.choice}
        if self._constraint is not None:
            kind = _CONSTRAINTS[self._constraint.kind]
            body["structured_outputs"] = {kind: True if kind == "json_object" else self._constraint.value}
        if self._continues_text:
            return body | {"prompt": "\n\n".join(text_of(m.get("content")) for m in messages)}
        body["messages"] = messages
        if template:
            body["chat_template_kwargs"] = dict(template)
        if messages and messages[-1].get("role") == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _answer(self, sent: Turn) -> None:
        begin, turn, starting = time.monotonic(), sent.id, self._starting
        while starting is not None and starting.is_alive() and turn not in self._stopped:
            starting.join(LOOK_S / 5)

        def opened(line: socket.socket) -> None:
            with self._lock:
                self._running[turn] = line
                if turn in self._stopped:
                    raise ConnectionAbortedError

        try:
            if self._refusal is not None:
                raise self._refusal
            path = "/v1/completions" if self._continues_text else "/v1/chat/completions"
            with self._wire.send("POST", path, self._body(sent), opened=opened) as reply:
                if reply.status >= 400:
                    raise refused(reply.status, reply.body.read())
                self._end(turn, self._read(turn, events_of(reply.lines()), begin))
        except LocalLLMError as error:
            self._fail(turn, error)
        except Exception as error:
            if turn not in self._stopped:
                log.warning("the server at %s failed: %s", self.url, error)
                self._fail(turn, ServerGone(f"lost the connection to the server at {self.url}", "localllm ps"))
        self._end(turn, Done(turn, FinishReason.ABORT, Usage(), Timing(total_s=time.monotonic() - begin)))

    def _read(self, turn: int, chunks: Iterator[dict[str, Any]], begin: float) -> Done:
        first, count, stop, usage = 0.0, 0, "", Usage()
        timings: dict[str, Any] = {}
        try:
            for chunk in chunks:
                if error := chunk.get("error"):
                    raise meant(str(error.get("message", "the server failed"))[:500], error, "send it again")
                timings = chunk.get("timings") or timings
                if told := chunk.get("usage"):
                    usage = usage_of(told)
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    stop = choice.get("finish_reason") or stop
                    calls = [("tool_call", _call(told)) for told in delta.get("tool_calls") or ()]
                    for kind, text in (
                        ("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
                        ("content", delta.get("content") or choice.get("text")),
                        *calls,
                    ):
                        if text:
                            first = first or time.monotonic()
                            count += 1
                            self.tell(Delta(turn, kind, text))  # type: ignore[arg-type]
                if not first:
                    self.tell(Prefill(turn, 0, usage.prompt_tokens))
        except Exception as error:
            if isinstance(error, LocalLLMError) or not (stop or turn in self._stopped):
                raise  # without a finish reason, the answer is incomplete
        if turn in self._stopped and not usage.completion_tokens:  # disconnected before the end
            stop, usage = FinishReason.ABORT, replace(usage, completion_tokens=count)
        end = time.monotonic()
        made, spent = usage.completion_tokens or count, end - first
        timing = Timing(
            ttft_s=max(0.0, first - begin) if first else 0.0,
            total_s=end - begin,
            prefill_tps=float(timings.get("prompt_per_second") or 0.0),
            decode_tps=float(timings.get("predicted_per_second") or 0.0)
            or ((made - 1) / spent if first and made > 1 and spent > 0 else 0.0),
            draft_tokens=int(timings.get("draft_n") or 0),
            accepted_tokens=int(timings.get("draft_n_accepted") or 0),
        )
        return Done(turn, stop or FinishReason.STOP, usage, timing)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _poll_metrics(self) -> None:
        try:
            while not self._closed and time.monotonic() - self._queried_at < 4 * LOOK_S:
                status, body = self._wire.get("/metrics")
                if status != 200:
                    return
                self._facts = _from_metrics(self._facts, body.decode("utf-8", "replace"))
                time.sleep(LOOK_S)
        except Exception:
            log.debug("no metrics at %s", self.url, exc_info=True)
        finally:
            self._polling = False


def _call(told: Mapping[str, Any]) -> str:
    """A piece of a call in the form of `Delta`."""
    function = told.get("function") or {}
    made = {"index": int(told.get("index") or 0), "id": told.get("id"), "name": function.get("name")}
    return json.dumps(made | {"arguments": function.get("arguments") or ""})


def _from_metrics(facts: Facts, text: str) -> Facts:
    """Read facts from the server's metrics; with several models, their sums."""
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
        num_draft_tokens=count("vllm:spec_decode_num_draft_tokens"),
        num_accepted_tokens=count("vllm:spec_decode_num_accepted_tokens"),
        prefix_query_tokens=count("vllm:prefix_cache_queries"),
        prefix_hit_tokens=count("vllm:prefix_cache_hits"),
        kv_store_bytes=count("localllm:kv_store_bytes"),
        kv_store_limit=count("localllm:kv_store_limit_bytes"),
        kv_store_read_tokens=count("localllm:kv_store_read_tokens"),
    )
