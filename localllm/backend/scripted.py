"""A scripted engine behind `ChatBackend`, for tests, screenshots and demonstrations; needs no model and no torch.

Used with `LOCALLLM_ENGINE=fake`, only together with `LOCALLLM_TESTING=1`. The model's name decides how loading goes
(`fake-download`, `fake-slow`, `fake-gated`, `fake-huge`, `fake-missing`, `fake-crash`, `fake-base`, `fake-small`), the
last message how the answer goes (`!md`, `!mixed`, `!list`, `!think`, `!fd2`, `!oom`, `!crash`, `!error`, `!full`,
`!escape`, `long`, `!call NAME ARGUMENTS` when tools are offered); any other message is echoed.
`LOCALLLM_ENGINE=fake:tps=0:load=1.5` sets the speed (0 for no delay) and the seconds of every load phase.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from localllm import errors
from localllm.backend.script import SCRIPT, pieces, script
from localllm.interface import ChatBackend, Check, Delta, Done, Facts, Failed, ModelChoice, Prefill, Turn
from localllm.request import LoadProgress, SamplingParams, Timing, Usage, cannot_chat, num_images, text_of

PAGE = 16  # tokens per page
HAVE_BYTES = 8 << 30
_LOAD = ("import", "weights", "kv", "warmup")


class FakeBackend(ChatBackend):
    """A `ChatBackend` with prepared answers.

    tps      tokens per second; 0 for no delay
    load_s   seconds spent in every load phase
    ctx      context window in tokens; a longer conversation fails as with a real engine
    """

    def __init__(
        self,
        *,
        tps: float | None = None,
        load_s: float | None = None,
        ctx: int = 32_768,
        default_params: Callable[[], SamplingParams] = SamplingParams,
    ) -> None:
        super().__init__()
        given = dict(part.split("=", 1) for part in os.environ.get("LOCALLLM_ENGINE", "").split(":") if "=" in part)
        self.tps = float(given.get("tps", 200)) if tps is None else tps
        self.load_s = float(given.get("load", 0.02)) if load_s is None else load_s
        self._default_params = default_params
        self.ctx = ctx
        self.model = ""
        self.answers: list[str] = []  # the next answers, before any rule applies; set by tests
        self.kv, self.device = "bf16", "cpu"
        self.times_kernels = False
        self.image_tokens = 16
        self._closed = False
        self._used = self._busy = self._steps = self._prompts = 0
        self._thread: threading.Thread | None = None

    # --- the protocol ------------------------------------------------------------------------------------------------

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Start "loading" in a thread, ending what ran before."""
        self.close()
        self._closed = False
        self.model = model or "fake"
        self.ctx = int((changes or {}).get("ctx") or (64 if self.model == "fake-small" else self.ctx))
        self.kv = str((changes or {}).get("kv") or self.kv)
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def stop(self, turn: int) -> None:
        self._stopped.add(turn)

    def rest(self) -> None:
        self.times_kernels = False

    def facts(self) -> Facts:
        """Plain numbers that resemble a small model on a CPU."""
        pages, used, kept = self.ctx // PAGE, -(-self._busy // PAGE), -(-self._used // PAGE)
        states = bytes([1] * min(kept, pages)) + bytes([2] * min(used, max(0, pages - kept)))
        return Facts(
            model=self.model,
            sampling=(("temperature", 1.0, "default"),),
            run_summary=f"{self.model} · cpu · Q4_1 · KV {self.kv} · fake kernels",
            device=self.device,
            times_kernels=self.times_kernels,
            image_tokens=self.image_tokens,
            ctx=self.ctx,
            max_ctx=self.ctx * 4,
            used_tokens=self._used,
            pages_total=pages,
            pages_free=max(0, pages - len(states)),
            pages_cached=states.count(1),
            page_size=PAGE,
            page_map=states.ljust(pages, b"\0"),
            kv=self.kv,
            **SCRIPT["facts"],
            num_running=int(self._busy > 0),
            num_steps=self._steps,
            num_prompt_tokens=self._prompts,
            num_output_tokens=self._steps,
            prefix_query_tokens=self._prompts + self._used,
            prefix_hit_tokens=self._used,
            decode_tps=self.tps or 1000.0,
            has_chat_template=self.model != "fake-base",
        )

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def find(self, name: str) -> str:
        """Resolve names that start with fake, and those in the list; `smol` is short for the starter."""
        known = [row["name"] for row in SCRIPT["choices"]]
        found = next((one for one in known if one.startswith(name)), "")
        if not found and not name.startswith("fake"):
            raise errors.ModelNotFound(f"unknown model {name}", "`localllm ls` lists the local models")
        if name == "fake-base":
            raise cannot_chat(name, embeds=False)
        return found or name

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        return [_choice(row, ctx or 8192) for row in SCRIPT["choices"]]

    def checks(self) -> list[Check]:
        return [Check(**row) for row in SCRIPT["checks"]]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._load():
            return
        for turn in self._queued(lambda: self._closed):
            self._answer(turn, turn.params or self._default_params())

    def _load(self) -> bool:
        self.tell(LoadProgress("resolve", detail=self.model))
        if self.model == "fake-download":
            total = 400 << 20
            for step in range(21):
                if self._pause(self.load_s):
                    return False
                done = total * step // 20
                self.tell(
                    LoadProgress(
                        "download", done, total, rate=90 << 20, eta_s=(total - done) / (90 << 20), file="model.gguf"
                    )
                )
        if self.model in SCRIPT["errors"]:
            if not self._pause(self.load_s):
                self.tell(Failed.of(-1, _error(self.model)))
            return False
        for name in _LOAD:
            steps = 8 if name == "weights" else 1
            wait = 3.0 if name == "import" and self.model == "fake-slow" else self.load_s
            for step in range(steps):
                self.tell(LoadProgress(name, step, steps))
                if self._pause(wait / steps):
                    return False
        self.tell(LoadProgress("ready", detail="cpu"))
        return True

    def _pause(self, seconds: float) -> bool:
        """Wait; True when closed in the meantime."""
        with self._lock:
            return self._lock.wait_for(lambda: self._closed, seconds)

    def _answer(self, asked: Turn, params: SamplingParams) -> None:
        turn, messages = asked.id, asked.messages
        begin = time.monotonic()
        prompt = text_of(messages[-1].get("content")) if messages else ""
        goes_on = bool(messages) and messages[-1].get("role") == "assistant"
        prompt_tokens = sum(1 + len(text_of(m.get("content")).split()) for m in messages)
        prompt_tokens += num_images(messages) * self.image_tokens
        limit = min(params.max_tokens or self.ctx, self.ctx - prompt_tokens)
        if prompt_tokens > self.ctx or prompt.startswith("!full"):
            needed = prompt_tokens if prompt_tokens > self.ctx else self.ctx + 1
            told = f"the prompt has {needed:,} tokens, but the window holds {self.ctx:,}"
            fixes = (("localllm chat fake --ctx 40k", "fits"),)
            counted = {"prompt_tokens": needed, "max_context": self.ctx}
            told_how = "start with --ctx 40k, or shorten the prompt"
            self._fail(turn, errors.ContextTooLong(told, told_how, fixes=fixes, context=counted))
            return
        if prompt == "!error":
            self._fail(turn, _error(prompt))
            return
        if prompt == "!fd2":
            with contextlib.suppress(OSError):
                os.write(2, b"CORRUPT\n")
        for done in range(0, prompt_tokens, 512):
            self.tell(Prefill(turn, done, prompt_tokens))
        self._prompts += prompt_tokens
        count, reasoning, stop = 0, 0, "stop"
        first: float | None = None
        said = pieces(self.answers.pop(0)) if self.answers else pieces(" and so on.") if goes_on else None
        script_parts = script(prompt, asked.tools is not None) if said is None else (("content", p) for p in said)
        for kind, piece in script_parts:
            if turn in self._stopped or self._closed:
                stop = "abort"
                break
            if count >= limit:
                stop = "length"
                break
            if prompt in ("!oom", "!crash") and count == 20:
                self._fail(turn, _error(prompt))
                self._busy = 0
                return
            if self.tps:
                self._pause(1 / self.tps)
            first = first or time.monotonic()
            self.tell(Delta(turn, kind, piece))  # type: ignore[arg-type]
            count += 1
            self._steps += 1
            self._busy = prompt_tokens + count
            reasoning += kind == "reasoning"
        self._used, self._busy = min(self.ctx, prompt_tokens + count), 0
        end = time.monotonic()
        spent = end - (first or end)
        timing = Timing(
            ttft_s=(first or end) - begin,
            total_s=end - begin,
            prefill_tps=prompt_tokens / max((first or end) - begin, 1e-6),
            decode_tps=(count - 1) / spent if count > 1 and spent > 0 else 0.0,
        )
        self._end(turn, Done(turn, stop, Usage(prompt_tokens, 0, count, reasoning), timing))


def _error(name: str) -> errors.LocalLLMError:
    values = dict(SCRIPT["errors"][name])
    return getattr(errors, values.pop("kind"))(**values)


def _choice(row: Mapping[str, Any], window: int) -> ModelChoice:
    """A row of script.toml at this context length, or at its largest."""
    ctx = min(window, row.get("ctx", 0))
    parts = {name: size * ctx if name == "kv" else size for name, size in row.get("parts", {}).items()}
    made = {
        "have_bytes": HAVE_BYTES,
        "need_bytes": sum(parts.values()),
        "parts": tuple(parts.items()),
        "quants": tuple(_choice(one, window) for one in row.get("quants", ())),
    }
    return ModelChoice(
        **(made | {name: value for name, value in row.items() if name not in ("parts", "quants")} | {"ctx": ctx})
    )
