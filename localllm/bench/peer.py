"""Another engine on the same files, in a process of its own: `Peer`."""

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

# engine -> what must be installed for the Python that runs it
PACKAGES = {
    "llama.cpp": "llama-cpp-python",
    "ik_llama.cpp": "ik-llama-cpp-python",
    "transformers": "transformers",
}


class Peer:
    """A child that loads the model and answers lines of JSON. Raises ConfigError when it fails."""

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
        """`python` is the interpreter that has the peer's package; ours without one. `kv`: "int8", or as it is made."""
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
            self._child.communicate(timeout=5)  # it ends with its input
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
        self._log.close()

    def ask(self, **asked: Any) -> dict[str, Any]:
        """One line there, one back. Raises ConfigError with what the peer says."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(asked) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "missing" in answer:
            raise ConfigError(
                f"{PACKAGES[self.name]} is not installed for {self._python}: {answer['error']}",
                f"pip install {PACKAGES[self.name]}, or --peer-python PATH of an interpreter that has it",
            )
        if "error" in answer:
            raise ConfigError(f"{self.name} failed: {answer['error']}", "run without --against")
        return answer

    def prefill(self, context: Sequence[int], ids: Sequence[int]) -> tuple[float, float | None]:
        """The time to the first token is that of reading."""
        seconds: float = self.ask(do="prefill", context=list(context), ids=list(ids))["seconds"]
        return len(ids) / seconds, seconds

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        answer = self.ask(do="decode", prompts=[list(ids) for ids in prompts], count=count)
        return len(prompts) * count / float(answer["seconds"])

    def scores(self, ids: Sequence[int], file: Path) -> int:
        """Logits of every position into a file, raw float32 [num_tokens, vocab] (not transformers); returns vocab."""
        return int(self.ask(do="scores", ids=list(ids), file=str(file))["vocab"])

    def result(self, rows: Sequence[BenchRow]) -> PeerResult:
        return PeerResult(self.name, tuple(rows), peak_rss_bytes(self._child.pid), self.versions)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended ({lines[-1][:200] if lines else 'no message'})"
