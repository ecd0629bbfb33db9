"""Two nodes of a Ray cluster, both on this machine, with a replica each: one of them vanishes."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import WAIT_S, Endpoint, streamed, tiny_endpoint, until

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="ray is not installed: pip install -c constraints.txt -e '.[cluster]'")


class Node:
    """A node with room for one replica."""

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", *more]
        command += ["--object-store-memory", str(100 << 20), "--disable-usage-stats"]
        if "--head" in more:
            command += ["--temp-dir", str(folder), "--include-dashboard", "false"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    @property
    def address(self) -> str:
        found = re.search(r"--address='(\S+)'", self.log.read_text())
        return found[1] if found else ""

    def signal(self, number: int) -> None:
        """To all its processes."""
        parent = psutil.Process(self.process.pid)
        for one in (*parent.children(recursive=True), parent):
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Node], Endpoint]]:
    """(the nodes, the endpoint before them): the first is the head, which has the controller."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    made: list[Node] = []
    endpoint = None
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # the paths of its sockets must be short
        try:
            made.append(Node(Path(folder), tmp_path / "head.log", "--head", "--port", "0"))
            asyncio.run(until(lambda: made[0].address))
            made.append(Node(Path(folder), tmp_path / "second.log", "--address", made[0].address))
            asyncio.run(until(lambda: "Ray runtime started" in made[1].log.read_text()))
            endpoint = tiny_endpoint(tmp_path, made[0].address, context=8192)
            yield made, endpoint.wait()
        finally:
            if endpoint is not None:
                endpoint.end()
            for node in made:
                with suppress(psutil.NoSuchProcess):
                    node.signal(signal.SIGKILL)
                node.process.wait()


async def test_a_node_that_vanishes_costs_what_it_was_doing(nodes: tuple[list[Node], Endpoint], tmp_path: Path) -> None:
    """Its processes neither answer nor end, as where a cable is pulled: Ray gives it up after a minute."""
    (head, second), endpoint = nodes
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        running = [asyncio.ensure_future(streamed(client, endpoint.url, f"tell {n}", 7000)) for n in range(6)]
        await until(lambda: [v >= 1 for v in endpoint.counted("vllm:num_requests_running").values()] == [True, True])
        second.signal(signal.SIGSTOP)
        meanwhile = await asyncio.gather(*(streamed(client, endpoint.url, f"question {n}", 5) for n in range(6)))
        assert all(status == 200 and '"error"' not in text for status, text in meanwhile)
        answers = await asyncio.gather(*running)
    ended = [text for _, text in answers if '"error"' not in text]
    lost = [text for _, text in answers if '"error"' in text]
    assert ended and lost
    assert all('"code":"replica_lost"' in text and text.endswith("data: [DONE]\n\n") for text in lost)
    assert endpoint.ask().status_code == 200
    assert endpoint.replicas == 1
    third = Node(tmp_path, tmp_path / "third.log", "--address", head.address)
    try:
        await until(lambda: endpoint.replicas == 2)
    finally:
        third.signal(signal.SIGKILL)
        third.process.wait()
