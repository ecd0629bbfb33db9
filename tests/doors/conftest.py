"""Doors for bad files: a command line in this process with the real engine, or in a process of its own, measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

MAX_S = 2.0
MAX_GROWTH_KIB = 256 << 10
SLACK = 10  # for elapsed time, on machines that do other things too


@dataclass(frozen=True)
class Result:
    """One command line's end."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    """elapsed"""
    cpu_seconds: float
    """of this process; 0 for one of its own"""
    growth_kib: int
    """peak of resident memory above what was resident before"""

    @property
    def error(self) -> dict[str, Any]:
        """The JSON twin of the error."""
        return json.loads(self.stdout)["error"]  # type: ignore[no-any-return]


Door = Callable[..., Result]


@pytest.fixture(scope="session")
def built_once() -> Callable[..., Any]:
    """The maker of commands, which is most of the time of a command line that fails at once."""
    from localllm.cli.frame.command import build

    return cache(build)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, built_once: Callable[..., Any]) -> Iterator[Door]:
    """Run a command line in this process, with the real engine."""
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    from localllm.cli import session
    from localllm.cli.frame import logs, program

    monkeypatch.setattr(session, "POLL_S", 0.002)
    monkeypatch.setattr(program, "build", built_once)

    def enter(*words: str | Path) -> Result:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak of resident memory is now the present size
        before, begin, cpu = _peak_kib(), time.perf_counter(), time.process_time()
        try:
            result = CliRunner().invoke(program.app, [str(word) for word in words])
        finally:
            logs.stop()
        took = time.perf_counter() - begin, time.process_time() - cpu
        return Result(result.exit_code, result.stdout, result.stderr, *took, _peak_kib() - before)

    yield enter


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


_CHILD = """
import atexit, sys
report = sys.argv.pop()
atexit.register(lambda: open(report, 'w').write(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]))
from localllm.cli import main
main()
"""


def process(report: Path, *words: str | Path) -> Result:
    """Run a command line as a shell would. `report` is a file for the peak of its memory (`growth_kib`: all of it)."""
    env = {name: value for name, value in os.environ.items() if name not in ("LOCALLLM_ENGINE", "RUST_BACKTRACE")}
    command = [sys.executable, "-P", "-c", _CHILD, *map(str, words), str(report)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    return Result(done.returncode, done.stdout, done.stderr, seconds, 0.0, int(report.read_text()))


_ERROR = re.compile(r"^error: (?P<what>.+?)   \[E(?P<code>\d+)\]$", re.MULTILINE)
_TRY = re.compile(r"^  try   (?P<hint>.+)$", re.MULTILINE)


def refused(result: Result, *named: str, codes: tuple[int, ...] = (12,)) -> tuple[str, str]:
    """Check that a command ended as it must for a bad file: one sentence and a next step. Returns both."""
    assert result.code in codes, result
    assert "Traceback" not in result.stderr
    found = _ERROR.findall(result.stderr)
    assert len(found) == 1, result.stderr
    what, code = found[0]
    assert int(code) // 100 == result.code
    assert what.isprintable() and len(what) < 700, what
    assert not named or any(name in what for name in named), what
    hint = _TRY.search(result.stderr)
    assert hint is not None, result.stderr
    return what, hint["hint"]


def quick_and_small(result: Result, max_s: float = MAX_S) -> None:
    """Check time and memory of one bad file."""
    assert result.cpu_seconds < max_s and result.seconds < max_s * SLACK, result
    assert result.growth_kib < MAX_GROWTH_KIB, result
