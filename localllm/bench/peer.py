"""`Peer`: another engine on the same files, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localllm.errors import ConfigError

from .results import BenchRow, PeerResult, peak_rss_bytes

# engine -> the package that its Python must have
PACKAGES = {
    "llama.cpp": "llama-cpp-python",
    "ik_llama.cpp": "ik-llama-cpp-python",
    "transformers": "transformers",
}


class Peer:
    """A child process that loads the model and answers lines of JSON. Raises ConfigError if it fails."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        threads: int,
        ctx: int,
        streams: int = 1,
        kv: str = "",
        python: str | None = None,
    ) -> None:
        """`python`: interpreter that has the peer's package, by default ours. `kv`: "int8", or "" for its default."""
        self.name = name
        self._python = python or sys.executable
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            self._child = subprocess.Popen(
                [self._python, "-P", str(Path(__file__).with_name("peer_engines.py")), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"{self._python} does not start: {error.strerror}", "pass --peer-python PATH of a Python interpreter"
            ) from error
        try:
            facts = self.ask(do="load", path=str(path), threads=threads, ctx=ctx, streams=streams, kv=kv)
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = facts["versions"]

    def close(self) -> None:
        try:
            self._child.communicate(timeout=5)  # it exits when its input ends
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
        self._log.close()

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Send one line and read one back. Raises ConfigError with the peer's error."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(asked) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._exit_reason()}
        if "missing" in answer:
            raise ConfigError(
                f"{PACKAGES[self.name]} is not installed for {self._python}: {answer['error']}",
                f"pip install {PACKAGES[self.name]}, or --peer-python PATH of an interpreter that has it",
            )
        if "error" in answer:
            raise ConfigError(f"{self.name} failed: {answer['error']}", "run without --against")
        return answer

    def prefill(self, context: Sequence[int], ids: Sequence[int]) -> tuple[float, float | None]:
        """The time to first token equals the prefill time."""
        seconds: float = self.ask(do="prefill", context=list(context), ids=list(ids))["seconds"]
        return len(ids) / seconds, seconds

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        answer = self.ask(do="decode", prompts=[list(ids) for ids in prompts], count=count)
        return len(prompts) * count / float(answer["seconds"])

    def scores(self, ids: Sequence[int], file: Path) -> int:
        """Write the logits of every position to a file, raw float32 [num_tokens, vocab]; returns vocab.

        Not available for transformers.
        """
        return int(self.ask(do="scores", ids=list(ids), file=str(file))["vocab"])

    def result(self, rows: Sequence[BenchRow]) -> PeerResult:
        return PeerResult(self.name, tuple(rows), peak_rss_bytes(self._child.pid), self.versions)

    def _exit_reason(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended ({lines[-1][:200] if lines else 'no message'})"
