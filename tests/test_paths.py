"""A small file is replaced in one step, and read without trust in what it holds."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.paths import read_json, read_small, replace_file


def test_a_file_is_replaced_with_its_folder_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "new" / "settings.json"
    replace_file(file, '{"a": 1}', mode=0o600)
    replace_file(file, b'{"a": 2}', mode=0o640, sync=True)
    assert file.stat().st_mode & 0o777 == 0o640 and read_json(file) == {"a": 2}
    assert os.listdir(file.parent) == [file.name]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    replace_file(file, "{}")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\udc80")
    assert file.read_text() == "{}" and os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe\xfd", b'{"a": "' + b"x" * 100 + b'"}', b"[" * 99_999])
def test_json_that_is_no_small_object_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "facts.json"
    file.write_bytes(content)
    assert read_json(file, 100_000 if content.startswith(b"[") else 50) == {} == read_json(tmp_path / "missing.json")


def test_a_home_without_a_name_is_none() -> None:
    """`/.cache` belongs to nobody; the user's record in the system names the home folder."""
    code = "from localllm import paths; print(paths.cache_dir(), paths.state_dir())"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "LOCALLLM_"))} | {"HOME": ""}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, check=True)
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert done.stdout.split() == [f"{home}/.cache/localllm", f"{home}/.local/state/localllm"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_json(tmp_path / "pipe") == {}
    with pytest.raises(OSError, match="not a regular file"):
        read_small(tmp_path / "pipe", 10)
