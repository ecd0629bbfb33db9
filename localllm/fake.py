"""A scripted engine behind `ChatBackend`: for tests, screenshots and demonstrations, without a model or torch.

Used when `LOCALLLM_ENGINE=fake` and only together with `LOCALLLM_TESTING=1`. The model's name chooses how loading goes
(`fake-download`, `fake-slow`, `fake-gated`, `fake-huge`, `fake-missing`, `fake-crash`, `fake-base`, `fake-small`), the
last message how the answer goes (`!md`, `!mixed`, `!list`, `!think`, `!fd2`, `!oom`, `!error`, `!full`, `!escape`,
`long`); any other message is given back. `LOCALLLM_ENGINE=fake:tps=0:load=1.5` sets the speed (0 is as fast as it goes)
and the seconds of every load phase.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from localllm.errors import (
    AuthRequired,
    ContextTooLong,
    DoesNotFit,
    InternalError,
    LocalLLMError,
    ModelNotFound,
    OutOfMemory,
)
from localllm.request import (
    ChatEvent,
    Check,
    Delta,
    Done,
    Facts,
    Failed,
    Message,
    ModelChoice,
    Phase,
    Prefill,
    SamplingParams,
    Timing,
    Usage,
)

MARKDOWN = """\
# A heading

Some *prose* with **bold**, `code`, [markup] and 日本語, 😀 and e\u0301.

1. First item
   - nested **one**
   - nested two
2. Second item

| name | size |
|------|-----:|
| one  | 1    |
| two  | 22   |

> A quotation, over
> two lines.

```python
def double(x):
    return [2 * x]  # [red]not markup[/red]
```

---

The end, and a fence that is never closed:

```
left open [/]
"""
HOSTILE = (
    "\x1b]52;c;ZXZpbA==\x07 \x1b]8;;http://evil\x1b\\x\x1b]0;title\x07 \x1b[6n \x1bP1$r\x1b\\ \x9b31m \x1b[2J"
    + "\x07" * 50
    + " over\rwritten \u202egnp.exe\u202c [link=file:///etc/passwd]x[/link] [/] [red]literal[/red] a"
    + "\u0301" * 500
    + " end"
)
_MIXED = (
    "".join(
        f"Paragraph {n} says something about **kernels**, `tiles` and memory, long enough to take a few lines of a "
        "wide terminal, because that is what most answers look like when somebody wants an explanation.\n\n"
        for n in range(4)
    )
    + "".join(f"{n}. point number {n} of a list, with a few words behind it\n" for n in range(1, 31))
    + "\n```python\n"
    + "".join(f"value_{n} = compute({n}, scale={n * 0.5})  # step {n}\n" for n in range(60))
    + "```\n\n"
)
"""Prose, a list of thirty and sixty lines of code: what the interface's cost is measured with."""
_LOAD = ("import", "weights", "kv", "warmup")


def fake_error(name: str) -> LocalLLMError | None:
    """The error that loading the model called `name` ends in."""
    if name == "fake-gated":
        return AuthRequired(
            "fake-gated asks you to accept its licence first",
            "open https://hub.invalid/fake-gated, accept it, then `hf auth login`",
            fixes=(("hf auth login", "after accepting the licence"),),
        )
    if name == "fake-huge":
        return DoesNotFit(
            "fake-huge needs 26.4 GiB at 32k context, 23.5 GiB are free",
            "a smaller context fits",
            why="weights 17.2 + KV 8.0 + work 1.2 GiB",
            fixes=(("localllm chat fake-huge --ctx 16k", "fits (22.4 GiB)"),),
        )
    if name == "fake-missing":
        return ModelNotFound("fake-missing is not on this machine", "localllm pull fake-missing")
    if name == "fake-crash":
        return InternalError("the engine stopped while loading", "see the log")
    return None


class FakeBackend:
    """A `ChatBackend` whose answers are written down beforehand.

    tps      tokens per second, 0 for no waiting
    load_s   seconds spent in every load phase
    ctx      context window in tokens; a longer conversation fails as a real one does
    """

    def __init__(
        self,
        *,
        tps: float | None = None,
        load_s: float | None = None,
        ctx: int = 32_768,
        default_params: Callable[[], SamplingParams] = SamplingParams,
    ) -> None:
        self.tps = _setting("tps", 200.0) if tps is None else tps
        self.load_s = _setting("load", 0.02) if load_s is None else load_s
        self._default_params = default_params
        self.ctx = ctx
        self.model = ""
        self.answers: list[str] = []
        """answers given next, before any rule applies: set by tests"""
        self.sent: list[tuple[list[Message], SamplingParams | None]] = []
        """what was asked, for tests"""
        self.emitted: dict[int, str] = {}
        """text of every turn, as the engine sees it"""
        self.stopped_at: dict[int, float] = {}
        self._events: deque[ChatEvent] = deque()
        self._queue: deque[tuple[int, list[Message], SamplingParams | None]] = deque()
        self._wake = threading.Condition()
        self._stopped: set[int] = set()
        self._closed = False
        self._next_turn = 0
        self._used = 0
        self._thread: threading.Thread | None = None

    # --- the protocol ------------------------------------------------------------------------------------------------

    def start(self, model: str | None) -> None:
        """Begin "loading" in a thread."""
        self.model = model or "fake"
        if self.model == "fake-small":
            self.ctx = 64
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def send(self, messages: Sequence[Message], params: SamplingParams | None = None) -> int:
        """Queue a turn."""
        with self._wake:
            turn = self._next_turn
            self._next_turn += 1
            self.sent.append((list(messages), params))
            self._queue.append((turn, list(messages), params))
            self._wake.notify()
        return turn

    def stop(self, turn: int) -> None:
        """End a turn at the next token."""
        self._stopped.add(turn)
        self.stopped_at[turn] = time.monotonic()

    def events(self) -> deque[ChatEvent]:
        """The queue to drain."""
        return self._events

    def facts(self) -> Facts:
        """Plain numbers that look like a small model on a CPU."""
        return Facts(
            model=self.model,
            truth_line=f"{self.model} · cpu · Q4_1 · KV bf16 · fake kernels",
            device="cpu",
            ctx=self.ctx,
            used_tokens=self._used,
            pages_total=self.ctx // 16,
            pages_free=(self.ctx - self._used) // 16,
            weight_bytes=98 << 20,
            kv_bytes=45 << 20,
            has_chat_template=self.model != "fake-base",
        )

    def choices(self) -> list[ModelChoice]:
        """One model."""
        return [ModelChoice("fake", "Q4_1", 98 << 20, local=True, supported=True, max_ctx=self.ctx)]

    def checks(self) -> list[Check]:
        """One check, passed."""
        return [Check("cpu", "hardware", "ok", "a scripted engine")]

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._load():
            return
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                turn, messages, params = self._queue.popleft()
            self._answer(turn, messages, params or self._default_params())

    def _load(self) -> bool:
        self._events.append(Phase("resolve", detail=self.model))
        if self.model == "fake-download":
            total = 400 << 20
            for step in range(21):
                if self._pause(self.load_s):
                    return False
                done = total * step // 20
                self._events.append(
                    Phase("download", done, total, rate=90 << 20, eta_s=(total - done) / (90 << 20), file="model.gguf")
                )
        if (error := fake_error(self.model)) is not None:
            if self._pause(self.load_s):
                return False
            self._events.append(Failed(-1, error.code, error.message, error.hint, error.fixes))
            return False
        for name in _LOAD:
            steps = 8 if name == "weights" else 1
            wait = 3.0 if name == "import" and self.model == "fake-slow" else self.load_s
            for step in range(steps):
                self._events.append(Phase(name, step, steps))
                if self._pause(wait / steps):
                    return False
        self._events.append(Phase("ready", detail="cpu"))
        return True

    def _pause(self, seconds: float) -> bool:
        """Wait; True when closed meanwhile."""
        end = time.monotonic() + seconds
        with self._wake:
            while not self._closed and (left := end - time.monotonic()) > 0:
                self._wake.wait(left)
            return self._closed

    def _answer(self, turn: int, messages: list[Message], params: SamplingParams) -> None:
        begin = time.monotonic()
        prompt = messages[-1].get("content", "") if messages else ""
        prompt_tokens = sum(1 + len(m.get("content", "").split()) for m in messages)
        limit = params.max_tokens or self.ctx
        if prompt_tokens > self.ctx or prompt.startswith("!full"):
            needed = max(prompt_tokens, self.ctx + 1332)
            error: LocalLLMError = ContextTooLong(
                f"prompt has {needed:,} tokens, the window holds {self.ctx:,}", "start with --ctx 40k, or shorten it"
            )
            self._events.append(
                Failed(turn, error.code, error.message, error.hint, (("localllm chat fake --ctx 40k", "fits"),))
            )
            return
        if prompt == "!error":
            self._events.append(Failed(turn, "E101", "the engine lost this request", "send it again", ()))
            return
        if prompt == "!fd2":
            with contextlib.suppress(OSError):
                os.write(2, b"CORRUPT\n")
        for done in range(0, prompt_tokens, 512):
            self._events.append(Prefill(turn, done, prompt_tokens))
        text, count, reasoning, stop = "", 0, 0, "stop"
        first: float | None = None
        for kind, piece in self._script(prompt):
            if turn in self._stopped or self._closed:
                stop = "abort"
                break
            if count >= limit:
                stop = "length"
                break
            if prompt == "!oom" and count == 20:
                failure = OutOfMemory("memory ran out at 29k tokens", "use a smaller --ctx")
                self._events.append(Failed(turn, failure.code, failure.message, failure.hint, failure.fixes))
                return
            if self.tps:
                self._pause(1 / self.tps)
            first = first or time.monotonic()
            self._events.append(Delta(turn, kind, piece))
            count += 1
            if kind == "content":
                text += piece
            else:
                reasoning += 1
        self.emitted[turn] = text
        self._used = min(self.ctx, prompt_tokens + count)
        end = time.monotonic()
        spent = end - (first or end)
        timing = Timing(
            ttft_s=(first or end) - begin,
            total_s=end - begin,
            prefill_tps=prompt_tokens / max((first or end) - begin, 1e-6),
            decode_tps=(count - 1) / spent if count > 1 and spent > 0 else 0.0,
        )
        self._events.append(Done(turn, stop, Usage(prompt_tokens, 0, count, reasoning), timing))

    def _script(self, prompt: str) -> Iterator[tuple[Literal["content", "reasoning"], str]]:
        if self.answers:
            text = self.answers.pop(0)
        elif prompt == "!md":
            text = MARKDOWN
        elif prompt == "!escape":
            text = HOSTILE
        elif prompt == "!mixed":
            text = _MIXED * 20
        elif prompt == "!list":
            text = "".join(f"- item number {i} of a list that goes on\n" for i in range(500))
        elif prompt == "!think":
            for word in _pieces("First I look at it from every side.\nThen I decide.\n"):
                yield "reasoning", word
            text = "The answer is 42."
        elif prompt == "long" or prompt == "!oom":
            text = "".join(f"Sentence number {i} goes on for a while. " for i in range(2000))
        else:
            text = prompt
        for piece in _pieces(text):
            yield "content", piece


def _setting(name: str, default: float) -> float:
    for part in os.environ.get("LOCALLLM_ENGINE", "").split(":"):
        key, _, value = part.partition("=")
        if key == name:
            return float(value)
    return default


def _pieces(text: str) -> Iterator[str]:
    """Text in pieces about as long as tokens, with every character kept."""
    at = 0
    while at < len(text):
        end = at + 1
        while end < len(text) and end - at < 4 and text[end] not in " \n":
            end += 1
        yield text[at:end]
        at = end
