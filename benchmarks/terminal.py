"""What a terminal user waits for, with the scripted engine: help, completion, first paint; and what the screen costs.

    python benchmarks/terminal.py [--json FILE] [--repeat 5]

Every row is the median of the repetitions with the smallest beside it, and the line it should meet. Run it on an
otherwise quiet machine; the last stdout line is one JSON document, which `--json` also writes to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import fcntl
import json
import os
import platform
import pty
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
    """Where the scripted engine may be used, with a home of its own."""
    return dict(os.environ) | {
        "LOCALLLM_ENGINE": engine,
        "LOCALLLM_TESTING": "1",
        "LOCALLLM_HOME": HOME,
        "TERM": "xterm-256color",
    }


def wall(*words: str, **more: str) -> float:
    """Seconds of a command."""
    started = time.monotonic()
    subprocess.run([LOCALLLM, *words], env=environment() | more, capture_output=True, check=True)
    return time.monotonic() - started


def completion() -> float:
    """Seconds until the shell has the names of local models."""
    words = {"COMP_WORDS": "localllm run sm", "COMP_CWORD": "2"}
    return wall(**{"_LOCALLLM_COMPLETE": "complete_bash", **words})


def first_paint() -> float:
    """Seconds from the command to the first frame with the prompt, in a pseudo-terminal."""
    started = time.monotonic()
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(LOCALLLM, ["localllm", "chat", "fake"], environment())
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    seen = b""
    while b"for commands" not in seen and time.monotonic() - started < 30:
        if select.select([fd], [], [], 0.05)[0]:
            seen += os.read(fd, 65536)
    took = time.monotonic() - started
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(fd)
    return took


async def on_screen(prompt: str, tps: float, seconds: float) -> tuple[float, float, float]:
    """(share of a core the interface's thread takes, longest gap of its loop, engine's rate over the one asked for)."""
    from localllm.fake import FakeBackend
    from localllm.tui.app import ChatApp
    from localllm.tui.conversation import Conversation
    from localllm.tui.widgets.prompt import PromptArea

    backend = FakeBackend(tps=tps, load_s=0)
    app = ChatApp(backend, Conversation(), model="fake")
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(0.5)
        if prompt:
            app.screen.query_one(PromptArea).text = prompt
            await pilot.press("enter")
        await asyncio.sleep(2)
        exchanges = app.conversation.exchanges
        had = len(exchanges[0].text) if exchanges else 0
        started, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - started
        share = (time.thread_time() - cpu) / elapsed
        made = (len(exchanges[0].text) - had) / elapsed if exchanges else 0.0
        longest, started = 0.0, time.monotonic()  # apart, because looking 200 times a second costs too
        while time.monotonic() - started < seconds / 2:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - before - 0.005)
    backend.close()
    per_token = await bare(prompt, tps) if prompt else 1.0
    return share, longest, made / per_token if prompt else 1.0


async def bare(prompt: str, tps: float, seconds: float = 3.0) -> float:
    """Characters per second of the scripted engine with nobody looking."""
    from localllm.fake import FakeBackend
    from localllm.request import Delta

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
    """One line of the table."""
    return {"name": name, "unit": unit, "line": line, "median": statistics.median(values), "best": min(values)}


def repeated(run: Callable[[], float], times: int) -> list[float]:
    """The same thing several times."""
    return [run() for _ in range(times)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= environment()
    times = options.repeat
    rows = [
        row("--help", "s", "<= 0.3", repeated(lambda: wall("--help"), times)),
        row("completion of a model's name", "s", "<= 0.15", repeated(completion, times)),
        row("first paint of chat", "s", "<= 0.5", repeated(first_paint, times)),
    ]
    idle = asyncio.run(on_screen("", 0, 5))
    rows.append(row("interface thread, idle", "share of a core", "< 0.01", [idle[0]]))
    for prompt in ("!mixed", "!list", "long"):
        share, gap, rate = asyncio.run(on_screen(prompt, 200, 8))
        rows.append(row(f"interface thread at 200 tok/s, {prompt}", "share of a core", "<= 0.05", [share]))
        rows.append(row(f"longest gap of the loop, {prompt}", "s", "< 0.15", [gap]))
        rows.append(row(f"engine beside the interface, {prompt}", "share of bare", ">= 0.95", [rate]))
    for one in rows:
        print(f"{one['name']:45} {one['median']:8.3f} (best {one['best']:.3f}) {one['unit']:16} line {one['line']}")
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
