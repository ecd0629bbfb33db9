"""A scripted engine, the real door, and schemas to hold answers against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

LOCALLLM = [sys.executable, "-P", "-c", "from localllm.cli import main; main()"]

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Run a command line in this process with the scripted engine, as fast as it goes."""
    monkeypatch.setenv("LOCALLLM_ENGINE", "fake:tps=0:load=0")
    monkeypatch.setenv("COLUMNS", "100")
    from localllm.cli.frame import logs
    from localllm.cli.frame.program import app

    def run(*words: str, stdin: str | bytes | None = None, env: Mapping[str, str | None] | None = None) -> Result:
        try:
            return CliRunner().invoke(app, list(words), input=stdin, env=dict(env or {}))
        finally:
            logs.stop()

    return run


def process(*words: str, engine: str = "fake:tps=0:load=0", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command line as a user's shell would."""
    env = dict(os.environ) | {"LOCALLLM_ENGINE": engine} | options.pop("env", {})
    options.setdefault("stdin", subprocess.DEVNULL)
    if "input" in options:
        del options["stdin"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([*LOCALLLM, *words], timeout=60, env=env, **streams)


def schema(name: str) -> dict[str, Any]:
    """One of the shipped schemas."""
    return json.loads(resources.files("localllm.schemas").joinpath(f"{name}.json").read_text())  # type: ignore[no-any-return]


def valid(text: str, name: str) -> dict[str, Any]:
    """The one JSON object in `text`, held against a schema."""
    value = json.loads(text)
    validator(name).validate(value)
    return value  # type: ignore[no-any-return]


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of a shipped schema, which `test_schemas` checks: a check for every document took most of the time."""
    return jsonschema.Draft202012Validator(schema(name))
