"""`chat --web`: one link for one browser, loopback only, one engine for all tabs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.web import Gate
from localllm.config import load_config
from localllm.history.store import History

LOCALLLM = [sys.executable, "-P", "-c", "from localllm.cli import main; main()"]
pytest.importorskip("textual_serve")


def test_a_token_is_good_once_and_hosts_and_origins_are_checked() -> None:
    gate = Gate(("127.0.0.1:9",))
    assert gate.check("127.0.0.1:9", None, "", None)[0] == 403
    assert gate.check("127.0.0.1:9", None, "", "wrong")[0] == 403
    assert gate.check("evil.example", None, "", gate.token)[0] == 403
    assert gate.check("127.0.0.1:9", "http://evil.example", "", gate.token)[0] == 403
    status, cookie = gate.check("127.0.0.1:9", None, "", gate.token)
    assert status == 302 and cookie
    assert gate.check("127.0.0.1:9", None, "", gate.token)[0] == 403
    assert gate.check("127.0.0.1:9", "http://127.0.0.1:9", cookie, None)[0] == 200
    assert gate.check("127.0.0.1:9", "null", cookie, None)[0] == 403
    assert gate.check("127.0.0.1:9", None, "é", None)[0] == 403


def test_a_tab_gets_what_the_flags_said(invoke: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "my notes.txt"
    file.write_text("text")
    served: list[list[str]] = []
    monkeypatch.setattr("localllm.cli.web._serve", lambda env, command, key: served.append(command) or 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    flags = "--web --no-save --temp 0 --kv int8 --ctx 2k --no-animations --theme nord --think off --stop END -a"
    words = ["chat", "fake", "hello you", *flags.split(), str(file), "--system"]
    done = invoke(*words, "@brief")
    assert done.exit_code == 2  # no such file: --system is read here, not by every tab
    done = invoke(*words, "be brief")
    assert done.exit_code == 0, done.stderr
    told = served[0][served[0].index("chat") + 2 :]
    assert told == ["--think", "off", "--stop=END", f"--attach={file}", "--", "fake", "hello you"]
    config = load_config({}, environ=os.environ)
    assert not config.chat.save and config.sampling.temperature == 0 and config.engine.kv == "int8"
    assert config.engine.ctx == 2048 and config.ui.animations is False and config.ui.theme == "nord"
    assert config.chat.system == "be brief"


@pytest.mark.parametrize("flag", ["--plain", "--inline"])
def test_a_browser_is_no_terminal(invoke: Any, flag: str) -> None:
    done = invoke("chat", "fake", "--web", flag)
    assert done.exit_code == 2 and f"--web opens a chat in a browser, {flag}" in done.stderr


class Web:
    """A running `chat --web`."""

    def __init__(self, *words: str, engine: str = "fake", home: Path) -> None:
        env = os.environ | {"LOCALLLM_HOME": str(home), "LOCALLLM_SAMPLING_TEMPERATURE": "0"}
        env |= {"LOCALLLM_ENGINE": engine} if engine else {}
        self.process = subprocess.Popen(
            [*LOCALLLM, "chat", "--web", *words], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stderr is not None
        seen = ""
        while not (found := re.search(r"(http://127\.0\.0\.1:(\d+))/\?token=(\S+)", seen)):
            line = self.process.stderr.readline()
            assert line, seen
            seen += line
        self.base, self.port, self.token = found[1], int(found[2]), found[3]

    def close(self) -> None:
        """Ctrl+C."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.stderr is not None
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    running = Web("fake", home=tmp_path)
    yield running
    running.close()


def status(url: str, opener: urllib.request.OpenerDirector | None = None, **headers: str) -> int:
    """What a request is answered with."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with (opener or urllib.request.build_opener()).open(request, timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_only_the_browser_with_the_link_gets_in(web: Web) -> None:
    assert status(web.base) == 403
    assert status(f"{web.base}/ws") == 403
    assert status(f"{web.base}/static/js/textual.js") == 403
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    assert status(f"{web.base}/?token={web.token}", browser) == 200
    assert status(f"{web.base}/static/js/textual.js", browser) == 200
    assert status(f"{web.base}/", browser, Host="evil.example") == 403
    assert status(f"{web.base}/?token={web.token}") == 403
    outside = socket.gethostbyname(socket.gethostname())
    if not outside.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((outside, web.port), timeout=2).close()


class Browser:
    """A headless Chromium, spoken to through its debugging port."""

    def __init__(self, program: str, profile: Path) -> None:
        words = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            "--window-size=1180,760",
        ]
        self.process = subprocess.Popen(
            [program, *words, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._port_file = profile / "DevToolsActivePort"
        self._number = 0

    async def __aenter__(self) -> Browser:
        import aiohttp

        end = time.monotonic() + 60
        while not self._port_file.is_file() or not self._port_file.read_text().strip():
            assert time.monotonic() < end, "Chromium did not start"
            await asyncio.sleep(0.1)
        port = self._port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            (page, *_) = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._socket.close()
        await self._session.close()
        self.process.terminate()
        self.process.wait(30)

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == self._number:
                return dict(answer["result"])
        raise AssertionError("Chromium went away")

    async def type(self, text: str) -> None:
        """Click on the prompt, type, then Enter."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=400, y=568, button="left", clickCount=1)
        await asyncio.sleep(0.5)
        await self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            await self.call("Input.dispatchKeyEvent", type=kind, **key)

    async def picture(self) -> bytes:
        """A PNG of the page."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@pytest.mark.slow
async def test_a_chat_in_chromium_over_one_engine(tmp_path: Path, smollm2_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed")
    home = tmp_path / "home"
    running = Web(str(smollm2_path), engine="", home=home)
    try:
        async with Browser(chromium, tmp_path / "profile") as browser:
            for url in (f"{running.base}/?token={running.token}", running.base):  # the second visit is another tab
                await browser.call("Page.navigate", url=url)
                await asyncio.sleep(8)
            await browser.type("What is the capital of France?")
            with History(home / "data/chats.db") as history:
                end = time.monotonic() + 120
                while not [m for c in history.chats() for m in history.messages(c.id) if m.status == "stop"]:
                    assert time.monotonic() < end, "no answer came"
                    await asyncio.sleep(0.5)
                (found,) = history.chats()
                assert "Paris" in history.messages(found.id)[-1].content
            await asyncio.sleep(1)
            picture = await browser.picture()
        assert len(picture) > 15_000  # a drawn screen, not an empty page
        if keep := os.environ.get("KEEP_SCREENSHOT"):
            Path(keep).write_bytes(picture)
        serves = subprocess.run(["pgrep", "-f", "serve .*--preload"], capture_output=True, text=True).stdout.split()
        assert len([pid for pid in serves if _child_of(int(pid), running.process.pid)]) == 1
    finally:
        running.close()


def _child_of(pid: int, parent: int) -> bool:
    try:
        return f"PPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
