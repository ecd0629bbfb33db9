"""`serve --ray` in a process of its own, and who asks it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

if "RAY_ADDRESS" not in os.environ:  # Ray reads it once, when it is imported: this process is a client of that cluster
    os.environ["RAY_AUTH_MODE"] = "token"

CHAT = "/v1/chat/completions"
START_S = 600.0  # Ray, and two processes that import torch, on a machine that does other things
WAIT_S = 300.0
HELLO = [{"role": "user", "content": "hello there"}]


class Endpoint:
    """The command with two replicas, in a process of its own. `more` follows `--ray`."""

    def __init__(self, folder: Path, model: Path, roomy: Path, *more: str) -> None:
        self.folder, self.model, self.roomy, self.url = folder, model, roomy, ""
        self.log, self.home = folder / "serve.log", folder / "home"
        self.home.mkdir()
        command = ["-c", "from localllm.cli import main; main()", "serve", str(model), "--ray", *more, "--port", "0"]
        command += ["--replicas", "2", "--alias", "org/tiny", "--parallel", "8", "--threads", "1"]
        environment = dict(os.environ) | {"LOCALLLM_HOME": str(self.home)}
        if not more:
            del environment["RAY_AUTH_MODE"]  # a Ray of its own: as people start it
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)

    def wait(self) -> Endpoint:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            files = list((self.home / "run").glob("serve-*.json"))
            if files:
                record = json.loads(files[0].read_text())
                self.url, self.token = record["url"], record["token"]
                if self.get("/health").status_code == 200 and "ready" in self.log.read_text():
                    return self
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **more)

    def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0} | fields
        return httpx.post(f"{self.url}{CHAT}", json=body, timeout=WAIT_S)

    @property
    def replicas(self) -> int:
        """How many answer."""
        return int(self.get("/health").json().get("replicas", 0))

    @property
    def cluster(self) -> str:
        found = re.search(r"Ray cluster (\S+)", self.log.read_text())
        assert found is not None
        return found[1]

    def counted(self, name: str) -> dict[str, float]:
        """A metric by replica."""
        lines = re.findall(rf'^{name}{{[^}}]*replica="(\w+)"[^}}]*}} (\S+)$', self.get("/metrics").text, re.MULTILINE)
        return {replica: float(value) for replica, value in lines}


def tiny_endpoint(folder: Path, *more: str, context: int = 256) -> Endpoint:
    """It begins to start, with a model of this context."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "checkpoint"))
    import tiny_models

    model = tiny_models.tiny_gguf(folder / "first.gguf", "Q8_0", context=context).rename(
        folder / "tiny"
    )  # what clients say
    return Endpoint(folder, model, tiny_models.tiny_gguf(folder / "second.gguf", "Q8_0", context=8192), *more)


async def streamed(client: httpx.AsyncClient, url: str, content: str, tokens: int) -> tuple[int, str]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    body |= {"stream": True, "ignore_eos": True}
    async with client.stream("POST", f"{url}{CHAT}", json=body) as answer:
        return answer.status_code, "".join([text async for text in answer.aiter_text()])


async def until(check: Any, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(check):
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.2)
