"""What a shell completes, quickly and as Typer would."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from localllm.cli.commands import ALIASES, COMMANDS
from localllm.cli.frame import completion
from localllm.cli.frame.completion import MANY_MODELS, ONE_MODEL, candidates

from .conftest import LOCALLLM, process


@pytest.fixture(autouse=True)
def model(empty_home: Path) -> None:
    """A home with two models, by name only."""
    for name in ("alpha", "beta:x"):
        folder = empty_home / "data/models" / name
        folder.mkdir(parents=True)
        (folder / "weights.gguf").write_bytes(b"GGUF")


def values(*words: str) -> list[str] | None:
    found = candidates(list(words[:-1]), words[-1])
    return None if found is None else [value for value, _ in found]


def test_candidates() -> None:
    assert values("ch") == ["chat"]
    assert values("") == [name for name, *_ in COMMANDS]
    assert values("run", "al") == ["alpha"]
    assert values("rm", "alpha", "") == ["alpha", "beta:x"]
    assert values("fit", "b") == ["beta:x"], "an alias"
    assert values("run", "alpha", "x") is None, "the prompt: Typer says that there is nothing"
    assert values("run", "--temp", "1") is None
    assert values("run", "--k") is None
    assert values("ls", "") is None
    assert values("nonsense", "") is None


def test_the_lists_name_the_commands_that_take_models() -> None:
    """Which commands those are stands in their own parameters; the quick list must not differ."""
    from localllm.cli.frame.program import Root

    root = Root(name="localllm")
    for name, *_ in COMMANDS:
        arguments = [p for p in root.get_command(None, name).params if p.param_type_name == "argument"]
        models = bool(arguments) and completes_models(arguments[0])
        many = models and arguments[0].nargs == -1
        assert (name in MANY_MODELS) is many, f"{name}: put it right in completion.py"
        assert (name in ONE_MODEL) is (models and not many), f"{name}: put it right in completion.py"


def completes_models(param: Any) -> bool:
    """Whether a parameter completes models, asked as a shell would."""
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    return "alpha" in [item.value for item in param.shell_complete(context, "alp")]


BASH = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run al", "COMP_CWORD": "2"}
ZSH = {"_LOCALLLM_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "localllm ru"}
FISH = {"_LOCALLLM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "localllm c"}
FISH |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("env", [BASH, ZSH, FISH], ids=["bash", "zsh", "fish"])
def test_a_shell_gets_what_typer_would_give(env: dict[str, str]) -> None:
    quick = process(env=env)
    assert quick.returncode == 0, quick.stderr
    command = [*LOCALLLM[:-1], "from localllm.cli.frame.program import main; main()"]
    asked = subprocess.run(
        command, capture_output=True, timeout=60, env=dict(os.environ) | env, stdin=subprocess.DEVNULL
    )
    first = [re.findall(r"^(?:_arguments.*\(\()?\"?([\w:]+)", line)[0] for line in quick.stdout.decode().splitlines()]
    assert first == [
        re.findall(r"^(?:_arguments.*\(\()?\"?([\w:]+)", line)[0] for line in asked.stdout.decode().splitlines()
    ]
    assert first


def test_what_is_not_quick_is_left_to_typer() -> None:
    env = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run alpha --tem", "COMP_CWORD": "3"}
    assert b"--temp" in process(env=env).stdout
    assert b"complete -o" in process(env={"_LOCALLLM_COMPLETE": "source_bash"}).stdout


def test_a_broken_cache_completes_nothing_and_says_nothing(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.hub.local.scan", lambda: (_ for _ in ()).throw(OSError("gone")))
    assert completion.local_names() == []
    assert set(ALIASES.values()) <= {name for name, *_ in COMMANDS}


def test_settings_values_and_chats_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.frame import completion

    monkeypatch.setattr(completion, "_chats", lambda: [("last", ""), ("7f3a12", "Build notes")])

    def values(*before: str, incomplete: str = "") -> list[str]:
        return [value for value, _ in completion.candidates(list(before), incomplete) or []]

    assert values("config", incomplete="s") == ["set", "schema"]
    assert values("config", "set", incomplete="engine.k") == ["engine.kv", "engine.kv_store"]
    assert values("config", "set", "engine.kv", incomplete="b") == ["bf16"]
    assert values("config", "set", "engine.graphs") == ["true", "false"]
    assert values("logs", incomplete="sh") == ["show"]
    assert values("logs", "show") == ["last", "7f3a12"] and values("logs", "search") == []


def test_the_actions_that_complete_are_those_there_are() -> None:
    from localllm.cli.commands import config, logs
    from localllm.cli.frame.completion import candidates

    for command, actions in (("config", config.ACTIONS), ("logs", logs.ACTIONS)):
        assert tuple(value for value, _ in candidates([command], "") or ()) == actions


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("run m --kv i", "int8"),
        ("quantize m --to nv", "nvfp4"),
        ("doctor --for v", "vllm"),
        ("doctor --only cpu.i", "cpu.isa"),
    ],
)
def test_values_of_options_complete(words: str, value: str) -> None:
    line = f"localllm {words}"
    env = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert process(env=env).stdout.decode().split() == [value]
