"""The screens of the README: a scripted conversation, fixed numbers, drawn as SVG. Used by `test_screenshots.py`."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import DataTable, OptionList, Static

from localllm.backend.scripted import FakeBackend
from localllm.conversation.saver import Saver
from localllm.conversation.session import Session
from localllm.conversation.storage import restored, saved_chat
from localllm.conversation.tree import Conversation
from localllm.history.records import SavedChat, SavedMessage
from localllm.history.store import History
from localllm.interface import Check, Facts, ModelChoice
from localllm.request import Timing
from localllm.tui.app import ChatApp
from localllm.tui.frame import ScreenOptions
from localllm.tui.widgets.engine import EnginePanel

SIZE = (118, 34)
WHEN = 1_763_733_720.0  # a Friday, 14:02 UTC
GIB, MIB = 1 << 30, 1 << 20
QUESTION = "Why does my Triton kernel recompile on every call?"
ANSWER = """\
Triton specialises a kernel on **integer arguments** that are 1 or divisible by 16, so changing `n` from 1023 to 1024 \
makes a new variant. Two ways out:

1. Tell it not to specialise:

```python
@triton.jit(do_not_specialize=["n"])
def scale(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, 2 * x, mask=offsets < n)
```

2. Or pad `n` to a multiple of 16 before the launch. The mask already hides the rest.

| argument | specialised on |
|---|---|
| `n` | equal to 1, divisible by 16 |
| `BLOCK` | every value: it is a `constexpr` |
"""
FACTS = Facts(
    model="qwen3-4b",
    run_summary="qwen3-4b · Q4_K_M · cuda:0 · bfloat16 activations · KV bf16 · ctx 32,768 · graphs on",
    device="cuda:0",
    ctx=32_768,
    max_ctx=40_960,
    pages_total=8192,
    pages_free=5021,
    pages_cached=1830,
    page_size=16,
    page_map=bytes([1] * 900 + [2] * 700 + [1] * 930 + [2] * 641 + [0] * 5021),
    kv="bf16",
    plan_parts=(("weights", 2500 * MIB), ("kv", 4608 * MIB), ("work", 1100 * MIB), ("margin", 512 * MIB)),
    have_bytes=int(22.1 * GIB),
    held_bytes=int(7.9 * GIB),
    num_running=2,
    num_waiting=1,
    num_steps=5120,
    num_prompt_tokens=18_311,
    num_output_tokens=9_204,
    prefix_query_tokens=61_004,
    prefix_hit_tokens=42_693,
    decode_tps=170.0,
    power_w=212.0,
)
CHOICES = [
    ModelChoice(
        "qwen3-4b", "Q4_K_M", int(2.3 * GIB), local=True, supported=True, max_ctx=40_960, tps=163.0, basis="measured",
        ctx=32_768, params=4_022_000_000, license="apache-2.0", need_bytes=int(8.5 * GIB), have_bytes=int(22.1 * GIB),
        parts=FACTS.plan_parts, last_used=3.0,
        quants=(
            ModelChoice("Qwen/Qwen3-4B-FP8", "fp8", int(4.8 * GIB), local=False, supported=True),
            ModelChoice("Qwen/Qwen3-4B", "bf16", int(7.5 * GIB), local=False, supported=True),
        ),
    ),
    ModelChoice(
        "smollm2", "Q4_1", 94 * MIB, local=True, supported=True, max_ctx=8192, tps=900.0, ctx=8192, params=134_515_008,
        license="apache-2.0", need_bytes=int(1.2 * GIB), have_bytes=int(22.1 * GIB), last_used=2.0,
    ),
    ModelChoice(
        "mistral-7b", "Q4_K_M", int(4.1 * GIB), local=False, supported=True, max_ctx=32_768, tps=110.0, ctx=32_768,
        params=7_248_000_000, license="apache-2.0", need_bytes=int(9.2 * GIB), have_bytes=int(22.1 * GIB),
    ),
    ModelChoice(
        "qwen3-14b", "awq", int(9.3 * GIB), local=False, supported=True, max_ctx=40_960, tps=62.0, ctx=32_768,
        params=14_768_000_000, license="apache-2.0", need_bytes=int(15.6 * GIB), have_bytes=int(22.1 * GIB),
    ),
    ModelChoice(
        "llama-70b", "Q4_K_M", int(39.6 * GIB), local=False, supported=True, fits=False, max_ctx=131_072, ctx=32_768,
        params=70_554_000_000, license="llama3.1", need_bytes=int(51.2 * GIB), have_bytes=int(22.1 * GIB),
    ),
]  # fmt: skip


class SceneBackend(FakeBackend):
    """Numbers that never change."""

    def facts(self) -> Facts:
        """Those of `FACTS`."""
        return replace(FACTS, model=self.model)

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        """Those of `CHOICES`."""
        return CHOICES

    def checks(self) -> list[Check]:
        """A machine with a GPU."""
        return [
            Check("gpu.present", "hardware", "ok", "RTX 4090, 24.0 GiB (22.1 free)"),
            Check("cpu", "hardware", "ok", "Ryzen 7950X, 16 cores"),
            Check("ram", "hardware", "warn", "61 of 64 GiB free"),
        ]


def fill(path: Path) -> None:
    """Some saved chats, of today and days before, at whatever hour this runs."""
    today = time.localtime()
    midnight = time.mktime((today.tm_year, today.tm_mon, today.tm_mday, 0, 0, 0, 0, 0, -1))
    with History(path) as history:
        for number, (title, hours) in enumerate(
            [("Haiku about GPUs", 0), ("Commit message", 2), ("SQL explain", 4), ("Rename photos by date", 60)]
        ):
            one = SavedMessage(number + 1, f"c{number}", None, "user", title, created=WHEN)
            history.save(SavedChat(f"c{number}", title, "qwen3-4b", updated=midnight - hours * 3600), [one])


def conversation() -> Conversation:
    """A question answered before, and one more."""
    stats = {"prompt": 1204, "cached": 1024, "completion": 312, "reasoning": 212, "ttft_s": 0.041, "total_s": 3.5}
    stats |= {"decode_tps": 163.4, "thought_s": 3.1}
    messages = [
        SavedMessage(1, "aaaa", None, "user", QUESTION, created=WHEN),
        SavedMessage(
            2,
            "aaaa",
            1,
            "assistant",
            ANSWER,
            "The user calls a kernel in a loop …",
            "qwen3-4b",
            {},
            stats,
            WHEN + 1,
            "stop",
        ),
    ]
    chat = SavedChat("aaaa", "Fix the CUDA build", "qwen3-4b", params={"sampling": {"temperature": 0.7}}, leaf_id=2)
    return restored(chat, messages)


async def until(pilot: Pilot[None], done: Callable[[], object]) -> None:
    """Wait for something to become true, and until nothing moves any more."""
    end = time.monotonic() + 200
    while not done():
        assert time.monotonic() < end
        await pilot.pause(0.05)
    await pilot.pause()


@asynccontextmanager
async def stage(
    path: Path | None = None, talk: Conversation | None = None, home: bool = False
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """The application with its scripted backend."""
    backend = SceneBackend(tps=0, load_s=0)
    saver = Saver((lambda: History(path)) if path is not None else None)
    app = ChatApp(Session(backend, talk or Conversation(), saver, "" if home else "qwen3-4b"), ScreenOptions(home=home))
    try:
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: home or app.chat.phase == "ready")
            yield app, pilot
    finally:
        saver.close()
        backend.close()


async def chat(path: Path) -> str:
    """An answer with thinking, code and a table; the chats on the left."""
    fill(path)
    talk = conversation()
    with History(path) as history:
        history.save(saved_chat(talk))
    async with stage(path, talk) as (app, pilot):
        await pilot.press("f3")
        await until(pilot, lambda: app.chat.query_one("#chat-list", OptionList).option_count)
        await app.chat.query("Notice").remove()
        app.chat.state.text = "ready"
        app.chat.prompt.put("and what about constexpr?")
        await until(pilot, lambda: "ready" in str(app.chat.query_one("#state", Static).render()))
        app.chat.transcript.scroll_home(animate=False)
        await until(pilot, lambda: app.chat.transcript.scroll_y == 0)
        return picture(app)


async def models(path: Path) -> str:
    """The picker with fit and speed."""
    async with stage(path, conversation()) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query_one(DataTable).row_count)
        return picture(app)


async def engine(path: Path) -> str:
    """The engine panel in the middle of work."""
    async with stage(path, conversation()) as (app, pilot):
        await app.chat.query("Notice").remove()
        app.chat.state.text = "ready"
        await pilot.press("f4")
        panel = app.chat.query_one(EnginePanel)
        panel._timer.stop()
        for number in range(38):
            panel._prefill.append([0, 0, 0, 4100, 900, 0, 0, 0, 0][number % 9])
            panel._decode.append(150 + 13 * (number % 5) + (90 if number % 9 > 4 else 0))
        panel._step_ms = 6.1
        for number in range(40):
            panel.add(Timing(ttft_s=0.03 + 0.02 * (number % 4), decode_tps=150 + 4.0 * (number % 5)))
        panel._before = None
        await pilot.pause()
        panel.look()
        await pilot.pause()
        return picture(app)


async def home(path: Path) -> str:
    """What `localllm` shows without words."""
    fill(path)
    with History(path) as history:
        for saved in history.chats():
            history.save(replace(saved, updated=WHEN - 3600 * int(saved.id[1:])))
    async with stage(path, home=True) as (app, pilot):
        await until(pilot, lambda: "doctor" in str(app.chat.query_one("#home-machine", Static).render()))
        return picture(app)


SCENES: dict[str, Callable[[Path], Awaitable[str]]] = {"chat": chat, "models": models, "engine": engine, "home": home}


def picture(app: ChatApp) -> str:
    """The screen as an SVG that fetches nothing: the fonts of whoever looks at it."""
    svg = app.export_screenshot(title="localllm", simplify=True)
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace(
        "font-family: Fira Code, monospace", "font-family: 'Fira Code', 'DejaVu Sans Mono', Menlo, monospace"
    )
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    return re.sub(r"terminal-\d+-", "t-", svg).strip() + "\n"


def words(svg: str) -> list[str]:
    """The lines of a picture as text."""
    import html

    rows: dict[float, str] = {}
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        found = re.search(r'\by="([\d.]+)"', attributes)
        if found:
            rows[float(found[1])] = rows.get(float(found[1]), "") + html.unescape(text).replace("\xa0", " ")
    return [rows[y].rstrip() for y in sorted(rows)]
