"""Background downloads during a chat, each by a process running `pull`, so that stopping keeps partial files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from typing import Any

from localllm.terminal import clean_line, gib

# how to call this program, regardless of PATH
OWN = [sys.executable, "-P", "-c", "from localllm.cli import main; main()"]


async def start_own(*words: str, **streams: Any) -> Process:
    """Start a command of this program without input. Streams as in `asyncio.create_subprocess_exec`."""
    return await asyncio.create_subprocess_exec(*OWN, *words, stdin=DEVNULL, limit=1 << 20, **streams)


async def fetch(name: str, tell: Callable[[str], None]) -> None:
    """Download a model; `tell` receives progress lines. An earlier partial download is resumed."""
    process = await start_own("pull", name, "-y", "--progress", "json", stdout=DEVNULL, stderr=PIPE)
    assert process.stderr is not None
    shown, last = -1, ""
    try:
        async for raw in process.stderr:
            last = raw.decode("utf-8", "replace").strip() or last
            done, total = _progress(last)
            if total and done * 20 // total != shown:
                shown = done * 20 // total
                tell(f"downloading {clean_line(name)}: {gib(done)} of {gib(total)}")
        code = await process.wait()
        end = "is downloaded: ^O to choose it" if code == 0 else f"could not be downloaded: {clean_line(last)[:200]}"
        tell(f"{clean_line(name)} {end}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


def _progress(line: str) -> tuple[int, int]:
    try:
        event = json.loads(line)
        return int(event["done"]), int(event["total"])
    except (ValueError, KeyError, TypeError):
        return 0, 0
