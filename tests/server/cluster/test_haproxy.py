"""Two servers behind HAProxy, with the configuration that the documentation shows."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve()
DOCS = HERE.parents[3] / "docs" / "scaling.md"
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")


def server_tests() -> Any:
    """The module with `Served`, the command in a process of its own."""
    spec = importlib.util.spec_from_file_location("server_conftest", HERE.parents[1] / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Any]]]:
    """(the address of HAProxy, the two servers)"""
    if HAPROXY is None:
        pytest.skip("haproxy is not installed (apt install haproxy)")
    module = server_tests()
    import tiny_models

    folder = tmp_path_factory.mktemp("balanced")
    model = tiny_models.tiny_gguf(folder / "tiny.gguf", "Q8_0", context=8192)
    servers = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        servers.append(module.Served(model, folder / name, "--ctx", "4096"))
    proxy = None
    try:
        for served in servers:
            served.wait(180)
        found = re.search(r"```haproxy\n(.*?)```", DOCS.read_text(), re.DOTALL)
        assert found is not None
        port, text = free_port(), found[1]
        for old, new in ((8000, port), (8001, servers[0].port), (8002, servers[1].port)):
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        (folder / "haproxy.cfg").write_text(text)
        checked = subprocess.run([HAPROXY, "-c", "-f", folder / "haproxy.cfg"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        proxy = subprocess.Popen([HAPROXY, "-f", folder / "haproxy.cfg"])
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield url, servers
    finally:
        if proxy is not None:
            proxy.terminate()
            proxy.wait(10)
        for served in servers:
            if served.process.poll() is None:
                served.process.kill()
                served.process.wait()


def asked(url: str, session: str | None, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    headers = {"authorization": "Bearer CANARY-key-4f9d"} | ({"x-session-id": session} if session else {})
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def answered(served: Any) -> float:
    """How many prompt tokens a server has read or found."""
    headers = {"authorization": f"Bearer {served.KEY}"}
    text = httpx.get(f"{served.url}/metrics", headers=headers, timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total"))


def conversation(url: str, session: str | None, number: int) -> tuple[int, int]:
    """(cached tokens, prompt tokens) of the later turns of one."""
    messages = [{"role": "user", "content": f"Question {number}: " + "why is the sky blue? " * 20}]
    cached = total = 0
    for turn in range(3):
        answer = asked(url, session, messages)
        usage = answer["usage"]
        if turn:
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
        said = answer["choices"][0]["message"]["content"] or "-"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    return cached, total


def test_a_conversation_stays_with_its_server(balanced: tuple[str, list[Any]]) -> None:
    url, servers = balanced
    before = [answered(served) for served in servers]
    shares = [conversation(url, f"session-{number}", number) for number in range(8)]
    cached, total = (sum(column) for column in zip(*shares, strict=True))
    assert cached / total > 0.7, "all but the newest turn is in the pages of its server"
    assert all(answered(served) > old for served, old in zip(servers, before, strict=True)), "both have some"


def test_a_stream_is_passed_on_as_it_comes(balanced: tuple[str, list[Any]]) -> None:
    url, _ = balanced
    headers = {"authorization": "Bearer CANARY-key-4f9d", "x-session-id": "stream"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "ignore_eos": True}
    times = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, headers=headers) as answer:
        assert answer.status_code == 200
        lines = []
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                times.append(time.monotonic())
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["object"] == "chat.completion.chunk"
    assert len(lines) > 20
    assert times[len(times) // 2] > times[0], "not all at once at the end"


def test_keys_hold_behind_it(balanced: tuple[str, list[Any]]) -> None:
    url, _ = balanced
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401


def test_the_other_server_answers_when_one_dies(balanced: tuple[str, list[Any]]) -> None:
    url, servers = balanced
    servers[0].process.kill()
    servers[0].process.wait()
    for number in range(8):
        asked(url, f"session-{number}", [{"role": "user", "content": "still there?"}])
        asked(url, None, [{"role": "user", "content": "still there?"}])
