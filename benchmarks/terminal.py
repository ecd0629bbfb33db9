"""What a terminal user waits for, with the scripted engine: help, completion, first paint; and the cost of the screen.

    python benchmarks/terminal.py [--json FILE] [--repeat 5] [--model smollm2]

Every row has the median and the minimum of the repetitions, and its target. Run it on an otherwise idle machine. The
last line of stdout is one JSON document, which `--json` also writes to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import fcntl
import gc
import json
import os
import platform
import pty
import re
import resource
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

LOCALLLM = str(Path(sys.executable).with_name("localllm"))
SIZE = (118, 34)


def environment(engine: str = "fake") -> dict[str, str]:
    """Environment that allows the scripted engine, with its own home folder."""
    env = dict(os.environ) | {
        "LOCALLLM_ENGINE": engine,
        "LOCALLLM_TESTING": "1",
        "LOCALLLM_HOME": HOME,
        "TERM": "xterm-256color",
        "PYTHONPYCACHEPREFIX": f"{HOME}/pyc",  # an installed program has bytecode; a checkout may not
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def wall(*words: str, **more: str) -> float:
    """Run a command and return its seconds."""
    started = time.monotonic()
    subprocess.run([LOCALLLM, *words], env=environment() | more, capture_output=True, check=True)
    return time.monotonic() - started


COMPLETION = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run sm", "COMP_CWORD": "2"}


def completion() -> float:
    """Seconds until the shell has completed the names of local models."""
    return wall(**COMPLETION)


def completion_cpu() -> float:
    """CPU seconds of completion, which a busy machine affects less."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall(**COMPLETION)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def doctor() -> float:
    """Seconds of doctor's quick checks; their findings do not matter here."""
    started = time.monotonic()
    subprocess.run([LOCALLLM, "doctor", "--json"], env=environment(), capture_output=True)
    return time.monotonic() - started


def first_paint() -> float:
    """Seconds from the command to the first frame with the prompt, in a pseudo-terminal, for a model on disk.

    The file is found by its name and size; loading it later would fail.
    """
    from localllm.hub import catalog
    from localllm.hub.starter import starter_path

    file = starter_path(catalog.starters()["smollm2"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.truncate(file, catalog.starters()["smollm2"].size)
    screen = Screen("chat", "smollm2", engine="")
    screen.until(b"for commands", 30)
    took = time.monotonic() - screen.started
    screen.close()
    file.unlink()
    return took


class Screen:
    """The program in a pseudo-terminal. Counts everything it draws."""

    def __init__(self, *words: str, engine: str = "fake") -> None:
        self.started = time.monotonic()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            env = environment(engine)
            if not engine:
                del env["LOCALLLM_ENGINE"]
            os.execve(LOCALLLM, ["localllm", *words], env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
        self.seen = b""

    def read(self, seconds: float) -> None:
        """Read the output for this long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._fd], [], [], min(left, 0.05))[0]:
                self.seen += os.read(self._fd, 65536)

    def until(self, text: bytes, seconds: float = 120) -> None:
        """Read until a text is drawn."""
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            self.read(0.02)

    def send(self, text: str) -> None:
        """Type."""
        os.write(self._fd, text.encode())

    def cpu(self) -> float:
        """CPU seconds of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


def bytes_a_minute(seconds: float = 20) -> float:
    """Bytes written to the terminal in 60 s of streaming prose at 200 tok/s."""
    screen = Screen("chat", "fake", engine="fake:tps=200")
    screen.until(b"for commands")
    screen.send("long\r")
    screen.until(b"generating")
    had = len(screen.seen)
    screen.read(seconds)
    made = len(screen.seen) - had
    screen.close()
    return made / seconds * 60


def idle(seconds: float = 10) -> float:
    """CPU share of the idle program, in cores."""
    screen = Screen("chat", "fake")
    screen.until(b"for commands")
    screen.read(2)
    cpu = screen.cpu()
    screen.read(seconds)
    share = (screen.cpu() - cpu) / seconds
    screen.close()
    return share


def rate_of(prompt: str, model: str, *flags: str, engine: str = "") -> tuple[float, float]:
    """(tokens per second in `run`, in `chat`), as each reports."""
    env = environment(engine)
    if not engine:
        del env["LOCALLLM_ENGINE"]
    found = subprocess.run(
        [LOCALLLM, "run", model, prompt, "--json", *flags], env=env, capture_output=True, text=True, check=True
    )
    bare = json.loads(found.stdout)["timing"]["decode_tps"]
    screen = Screen("chat", model, prompt, *flags, engine=engine)
    screen.until(b"TTFT")
    rates = re.findall(rb"([\d.]+) tok/s[^s]*TTFT", screen.seen)
    screen.close()
    return float(bare), float(rates[-1]) if rates else 0.0


async def opening(turns: int = 500) -> float:
    """Seconds until a saved chat of 1,000 messages is on the screen."""
    from localllm.backend.scripted import FakeBackend
    from localllm.conversation.saver import Saver
    from localllm.conversation.session import Session
    from localllm.conversation.tree import Conversation
    from localllm.history.records import SavedChat, SavedMessage
    from localllm.history.store import History
    from localllm.tui.app import ChatApp

    path, messages, parent = Path(HOME) / "long.db", [], None
    for n in range(turns):
        text = f"An answer with\n\n- one\n- two\n- three\n\n```python\nx = {n}\n```\n\nand a last paragraph.\n"
        asked = SavedMessage(2 * n + 1, "aaaa", parent, "user", f"question {n}", created=1e9 + n)
        reply = SavedMessage(2 * n + 2, "aaaa", asked.id, "assistant", text, created=1e9 + n + 0.5)
        messages += [asked, reply]
        parent = reply.id
    with History(path) as history:
        history.save(SavedChat("aaaa", "long", "fake", leaf_id=parent), messages)
    backend, saver = FakeBackend(tps=0, load_s=0), Saver(lambda: History(path))
    app = ChatApp(Session(backend, Conversation(), saver, "fake"))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(1)
        started = time.monotonic()
        await app.chat.open_chat("aaaa")
        await pilot.pause()
        took = time.monotonic() - started
    saver.close()
    backend.close()
    return took


async def panel_share(seconds: float) -> float:
    """CPU share added by the open engine panel during an answer, in cores."""
    shares = []
    for keys in ((), ("f4",)):
        share, _, _ = await on_screen("long", 200, seconds, *keys)
        shares.append(share)
    return max(0.0, shares[1] - shares[0])


async def on_screen(prompt: str, tps: float, seconds: float, *keys: str) -> tuple[float, float, float]:
    """(CPU share of the interface's thread, longest gap of its loop, engine rate relative to the requested one)."""
    from localllm.backend.scripted import FakeBackend
    from localllm.conversation.session import Session
    from localllm.conversation.tree import Conversation
    from localllm.tui.app import ChatApp
    from localllm.tui.widgets.prompt import PromptArea

    gc.collect()
    gc.freeze()  # do not scan what an earlier application left
    backend = FakeBackend(tps=tps, load_s=0)
    app = ChatApp(Session(backend, Conversation(), model="fake"))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(0.5)
        await pilot.press(*keys)
        if prompt:
            app.screen.query_one(PromptArea).text = prompt
            await pilot.press("enter")
        await asyncio.sleep(2)
        exchanges = app.session.conversation.exchanges
        had = len(exchanges[0].text) if exchanges else 0
        started, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - started
        share = (time.thread_time() - cpu) / elapsed
        made = (len(exchanges[0].text) - had) / elapsed if exchanges else 0.0
        longest, started = 0.0, time.monotonic()  # measured separately, because polling 200 times a second has a cost
        while time.monotonic() - started < seconds / 2:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - before - 0.005)
    backend.close()
    per_token = await bare(prompt, tps) if prompt else 1.0
    return share, longest, made / per_token if prompt else 1.0


async def bare(prompt: str, tps: float, seconds: float = 3.0) -> float:
    """Characters per second of the scripted engine without an interface."""
    from localllm.backend.scripted import FakeBackend
    from localllm.interface import Delta

    backend = FakeBackend(tps=tps, load_s=0)
    backend.start("fake")
    backend.send([{"role": "user", "content": prompt}])
    await asyncio.sleep(1)
    backend.events().clear()
    await asyncio.sleep(seconds)
    made = sum(len(event.text) for event in list(backend.events()) if isinstance(event, Delta))
    backend.close()
    return made / seconds


def row(name: str, unit: str, line: str, values: list[float]) -> dict[str, Any]:
    """Build one row of the table."""
    return {"name": name, "unit": unit, "line": line, "median": statistics.median(values), "best": min(values)}


def repeated(run: Callable[[], float], times: int) -> list[float]:
    """Results of several calls of `run`."""
    return [run() for _ in range(times)]


def main() -> None:
    """Measure and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", help="real model to compare chat with run: a path, or a name on the hub")
    options = parser.parse_args()
    os.environ |= environment()
    times = options.repeat
    first_paint()  # writes the bytecode
    rows = [
        row("--help", "s", "<= 0.3", repeated(lambda: wall("--help"), times)),
        row("completion of a model's name", "s", "<= 0.15", repeated(completion, times)),
        row("completion of a model's name", "s of a core", "<= 0.1", repeated(completion_cpu, times)),
        row("doctor, quick checks", "s", "<= 2", repeated(doctor, times)),
        row("plan qwen", "s", "<= 1", repeated(lambda: wall("plan", "qwen", "--json"), times)),
        row("first paint of chat", "s", "<= 0.5", repeated(first_paint, times)),
    ]
    rows.append(row("the program, idle", "share of a core", "< 0.01", [idle()]))
    rows.append(row("1,000 messages opened", "s", "<= 1", [asyncio.run(opening()) for _ in range(times)]))
    rows.append(row("engine panel beside an answer", "share of a core", "< 0.01", [asyncio.run(panel_share(10))]))
    rows.append(row("60 s of streaming", "bytes", "<= 2,000,000", [bytes_a_minute()]))
    bare, shown = rate_of("long", "fake", "--max-tokens", "600", engine="fake:tps=200")
    rows.append(row("chat's rate over run's, scripted engine", "share", ">= 0.9", [shown / bare]))
    if options.model:
        story = "Write a story of twelve sentences about a lighthouse."
        flags = ("--temp", "0", "--max-tokens", "200", "--threads", "1")
        bare, shown = rate_of(story, options.model, *flags)
        rows.append(row(f"chat's rate over run's, {Path(options.model).name}", "share", ">= 0.9", [shown / bare]))
    for prompt in ("!mixed", "!list", "long"):
        shares, gaps, rates = zip(*[asyncio.run(on_screen(prompt, 200, 8)) for _ in range(min(3, times))], strict=True)
        rows.append(row(f"interface thread at 200 tok/s, {prompt}", "share of a core", "<= 0.05", list(shares)))
        rows.append(row(f"longest gap of the loop, {prompt}", "s", "< 0.15", list(gaps)))
        rows.append(row(f"engine beside the interface, {prompt}", "share of bare", ">= 0.95", list(rates)))
    for one in rows:
        print(f"{one['name']:45} {one['median']:8.3f} (best {one['best']:.3f}) {one['unit']:16} target {one['line']}")
    result = {
        "rows": rows,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "textual": metadata.version("textual"),
        "load": os.getloadavg()[0],
        "command": "python benchmarks/terminal.py " + " ".join(sys.argv[1:]),
    }
    text = json.dumps(result)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as HOME:
        main()
