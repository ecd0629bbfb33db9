"""`mcpServers` as other programs write it, and everything that can be wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.mcp.servers import MAX_FILE_BYTES, ServerEntry, read_servers, servers_of
from localllm.errors import ConfigError


def test_a_file_of_claude_desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    file = tmp_path / "mcp.json"
    file.write_text(
        json.dumps(
            {
                "mcpServers": {
                    "files": {
                        "command": "npx",
                        "args": ["-y", "${HOME:-/}"],
                        "env": {"KEY": "${env:MY_KEY}"},
                    },
                    "web": {"type": "http", "url": "https://example.org/mcp", "headers": {"X": "${MY_KEY}"}},
                    "slow": {"command": "x", "timeout": 90_000},
                    "off": {"command": "x", "disabled": True},
                }
            }
        )
    )
    files, web, slow = read_servers(file)
    assert files == ServerEntry("files", "npx", ("-y", os.environ["HOME"]), {"KEY": "s3cret"})
    assert (web.url, web.headers) == ("https://example.org/mcp", {"X": "s3cret"})
    assert slow.timeout_s == 90, "milliseconds, as LM Studio writes them"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "table of entries"),
        ({"a": 1}, "a must be a table"),
        ({"a": {}}, "either a command or a url"),
        ({"a": {"command": "x", "url": "http://y"}}, "either a command or a url"),
        ({"a": {"command": ["x"]}}, "command must be a string"),
        ({"a": {"command": "x", "args": "y"}}, "args must be a list"),
        ({"a": {"command": "x", "args": [1]}}, "args must be a list"),
        ({"a": {"command": "x", "env": {"K": {}}}}, "env must be a table"),
        ({"a": {"command": "x", "timeout": True}}, "timeout must be"),
        ({"a": {"command": "x", "timeout": 0}}, "timeout must be"),
        ({"a": {"command": "x\0y"}}, "command must be a string"),
        ({"a": {"url": "file:///etc/passwd"}}, "http:// or https://"),
        ({"a": {"url": "http://y", "type": "sse"}}, "SSE transport"),
        ({"a": {"command": "${NO_SUCH_VARIABLE_HERE}"}}, "NO_SUCH_VARIABLE_HERE is not set"),
        ({"\x1b[2J": {"command": "x"}}, "printable"),
        ({str(i): {"command": "x"} for i in range(33)}, "the limit is 32"),
    ],
)
def test_what_is_wrong_is_named(value: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        servers_of(value, "mcp.json")
    assert caught.value.message.startswith("mcp.json") and caught.value.hint and "\x1b" not in caught.value.message


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b"[" * 100_000, b" " * (MAX_FILE_BYTES + 1), b"\xff\xfe"])
def test_a_file_that_is_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "mcp.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"mcp\.json"):
        read_servers(file)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigError):
            read_servers(path)
