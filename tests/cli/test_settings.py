"""`config`: what it shows, and what it changes."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localllm.cli import loading
from localllm.cli.frame.command import Env
from localllm.cli.frame.console import Console
from localllm.cli.names import Choice
from localllm.config import load_config
from localllm.errors import ConfigError
from localllm.tui.keymap import KEYS, VIM, is_key

from .conftest import Invoke, valid


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("LOCALLLM_CONFIG", str(path))
    return path


def test_set_get_unset_keep_comments(invoke: Invoke, file: Path) -> None:
    file.write_text("# mine\n[engine]\nctx = 4096  # small\n")
    assert invoke("config", "set", "sampling.temperature", "0.2").exit_code == 0
    assert invoke("config", "get", "sampling.temperature").stdout == "0.2\n"
    assert invoke("config", "set", "engine.ctx", "32k").exit_code == 0
    for words in (("-1.5",), ("-1.5", "--no-input")):
        assert invoke("config", "set", "sampling.presence_penalty", *words).exit_code == 0
        assert invoke("config", "get", "sampling.presence_penalty").stdout == "-1.5\n"
    assert "no such option: -1" in invoke("config", "list", "--origin", "-1").stderr
    assert invoke("config", "get", "engine.ctx", "--origin").stdout.endswith(f"(file {file})\n")
    assert invoke("config", "unset", "sampling.temperature").exit_code == 0
    text = file.read_text()
    assert "# mine" in text and "# small" in text and "temperature" not in text


def test_what_is_no_setting_and_no_file_is_called_so(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    assert "'engine' is a table, not a setting" in invoke("config", "get", "engine").stderr
    assert f"the settings file {tmp_path} is not a file" in invoke("--config", str(tmp_path), "config").stderr
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "binary.toml is not valid TOML: it is not UTF-8 text" in invoke("--config", str(binary), "config").stderr
    assert "error: missing argument 'MODEL'   [E201]" in invoke("show").stderr
    assert "error: too many arguments: more words   [E201]" in invoke("ps", "more", "words").stderr
    assert "at least 256M, such as 24G, not '1M'" in invoke("plan", "--ram", "1M").stderr


def test_a_whole_preset_can_be_removed(invoke: Invoke, file: Path) -> None:
    for name in ("a", "b"):
        assert invoke("config", "set", f"presets.{name}.system", "hi").exit_code == 0
        assert invoke("config", "set", f"presets.{name}.top_k", "4").exit_code == 0
    assert "presets.a removed from" in invoke("config", "unset", "presets.a").stderr
    assert "presets.a was not set in" in invoke("config", "unset", "presets.a").stderr
    assert "presets.a" not in file.read_text() and load_config().presets["b"].system == "hi"


def test_sizes_are_shown_in_full(invoke: Invoke, file: Path) -> None:
    assert "pull.max_auto = 1500000000 in" in invoke("config", "set", "pull.max_auto", "1.5GB").stderr
    assert invoke("config", "get", "pull.max_auto").stdout == "1500000000\n"


def test_no_variable_for_tests_is_suggested(invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_ENGINE_FOO", "1")
    warned = invoke("config", "get", "model").stderr
    assert "unknown variable LOCALLLM_ENGINE_FOO" in warned and "LOCALLLM_ENGINE?" not in warned


def test_unknown_keys_in_the_file_warn_and_on_the_command_line_fail(invoke: Invoke, file: Path) -> None:
    file.write_text("[engine]\nctxx = 1\n")
    result = invoke("config", "list")
    assert result.exit_code == 0
    assert "unknown key engine.ctxx; did you mean engine.ctx" in result.stderr
    assert invoke("config", "set", "engine.ctxx", "1").exit_code == 2
    assert invoke("config", "get", "engine.ctxx").exit_code == 2


def test_a_flag_wins_over_a_variable_over_the_file(invoke: Invoke, file: Path) -> None:
    file.write_text("[sampling]\ntemperature = 0.1\n")
    used = lambda *words, **env: valid(  # noqa: E731
        invoke("run", "fake", "x", "--json", *words, env=env).stdout, "run-1"
    )["params"]["temperature"]
    assert used() == 0.1
    assert used(LOCALLLM_SAMPLING_TEMPERATURE="0.2") == 0.2
    assert used("--temp", "0.3", LOCALLLM_SAMPLING_TEMPERATURE="0.2") == 0.3


def test_a_variable_that_hides_the_new_value_is_named(invoke: Invoke, file: Path) -> None:
    result = invoke("config", "set", "engine.kv", "f32", env={"LOCALLLM_ENGINE_KV": "bf16"})
    assert "LOCALLLM_ENGINE_KV" in result.stderr


def test_list_and_json(invoke: Invoke, file: Path) -> None:
    result = invoke("config", "list", "--origin")
    assert "engine.ctx" in result.stdout and "default" in result.stdout
    value = valid(invoke("config", "--json").stdout, "config-1")
    assert value["settings"]["engine.ctx"] == {"value": "auto", "origin": "default"}
    assert invoke("config", "path").stdout == f"{file}\n"
    assert "| key |" in invoke("config", "schema").stdout


def test_broken_toml_is_one_sentence(invoke: Invoke, file: Path) -> None:
    file.write_text("[engine\n")
    for words in (("config", "list"), ("run", "fake", "x"), ("ls",)):
        result = invoke(*words)
        assert result.exit_code == 0
        assert result.stderr.count("not valid TOML") == 1 or words == ("ls",)
        assert "using the defaults" in result.stderr or words == ("ls",)
    for words in (("config", "set", "model", "x"), ("config", "unset", "model"), ("config", "list", "--config", file)):
        result = invoke(*map(str, words))
        assert result.exit_code == 2
        assert "not valid TOML" in result.stderr
    assert file.read_text() == "[engine\n"


def test_a_server_does_not_start_with_settings_that_cannot_be_read(
    invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hold its key and its address: the defaults would lay it open."""
    monkeypatch.delenv("LOCALLLM_ENGINE")
    file.write_text("[server\n")
    result = invoke("serve", "smollm2")
    assert result.exit_code == 2
    assert "not valid TOML" in result.stderr


@pytest.mark.parametrize(
    "words", [("frob",), ("get",), ("set", "engine.ctx"), ("list", "engine.ctx"), ("set", "engine.ctx", "x")]
)
def test_wrong_words_exit_2(invoke: Invoke, file: Path, words: tuple[str, ...]) -> None:
    assert invoke("config", *words).exit_code == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--threads", "0"), "drop --threads, or use --threads auto"),
        (("--temp", "-1"), "drop --temp"),
        (("--max-tokens", "0"), "drop --max-tokens"),
        (("--device", "bogus"), "drop --device, or use --device auto"),
        (("--adapter", "x="), "drop --adapter"),
    ],
)
def test_a_wrong_flag_is_named_as_it_was_typed(invoke: Invoke, file: Path, words: tuple[str, str], hint: str) -> None:
    result = invoke("run", "fake", "hi", *words)
    assert result.exit_code == 2 and f"error: {words[0]} must be " in result.stderr
    assert result.stderr.endswith(f"try   {hint}\n")


def test_a_wrong_setting_of_a_preset_is_named_as_it_was_typed(invoke: Invoke, file: Path) -> None:
    result = invoke("config", "set", "presets.p.temprature", "1")
    assert result.exit_code == 2
    assert "unknown setting 'presets.p.temprature'; did you mean temperature?" in result.stderr
    assert "presets.p.top_k must be" in invoke("config", "set", "presets.p.top_k", "x").stderr


def test_a_word_that_no_progress_is_shown_as_is_refused_everywhere(invoke: Invoke, file: Path) -> None:
    for words in (["--progress", "bogus", "ls"], ["ls", "--progress", "bogus"], ["run", "fake", "--progress", "x"]):
        result = invoke(*words)
        assert result.exit_code == 2 and "--progress must be one of auto, plain, json, none" in result.stderr


def test_edit_runs_the_editor(invoke: Invoke, file: Path) -> None:
    assert invoke("config", "edit", env={"EDITOR": "true", "VISUAL": None}).exit_code == 0
    assert file.exists()
    assert invoke("config", "edit", env={"EDITOR": None, "VISUAL": None}).exit_code == 2
    assert invoke("config", "edit", env={"EDITOR": "no-such-editor", "VISUAL": None}).exit_code == 2


def test_presets_are_listed_as_words(invoke: Invoke, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('[presets.strict]\nsystem = "Be brief."\ntemperature = 0.1\n')
    shown = invoke("config", "list", "--config", str(settings)).stdout
    assert "system 'Be brief.', temperature 0.1" in shown and "Preset(" not in shown


def test_a_theme_that_does_not_exist_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.touch()
    done = invoke("config", "set", "ui.theme", "nordd", "--config", str(settings))
    assert done.exit_code == 2 and "did you mean nord" in done.stderr
    assert invoke("config", "set", "ui.theme", "nord", "--config", str(settings)).exit_code == 0


def test_the_themes_that_are_known_are_those_there_are() -> None:
    from textual.theme import BUILTIN_THEMES

    from localllm import tui
    from localllm.config.kinds import THEMES
    from localllm.paths import toml_beside

    assert set(THEMES) == {*BUILTIN_THEMES, *toml_beside(str(Path(tui.__file__)), "themes.toml")}


def test_a_key_binding_is_checked(invoke: Invoke, file: Path) -> None:
    assert invoke("config", "set", "keys.chat.stop", "ctrl+x, f5,upper_g,slash").exit_code == 0
    assert "'notakey' is not a key" in invoke("config", "set", "keys.chat.stop", "escape,notakey").stderr
    assert "'esc' is not a key" in invoke("config", "set", "keys.chat.stop", "esc").stderr
    assert "did you mean chat.stop?" in invoke("config", "set", "keys.chat.stob", "escape").stderr
    assert "chat --list-keys" in invoke("config", "set", "keys.foo.bar", "escape").stderr
    assert invoke("config", "get", "keys.chat.stop").stdout == "ctrl+x, f5,upper_g,slash\n"
    assert invoke("config", "unset", "keys.chat.stop").exit_code == 0
    own = [key for keys in (*(row.keys for row in KEYS.values()), *VIM.values()) for key in keys.split(",")]
    assert [key for key in own if not is_key(key)] == []


def test_a_context_is_within_what_the_models_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the settings it is lowered, with a note; a flag is refused, unless several models are served."""
    monkeypatch.setattr(loading, "max_context", lambda name: {"small": 8192, "large": 131_072}[name])
    small, large = Choice("small", "small"), Choice("large", "large")

    def run(choices: list[Choice], flags: dict[str, str]) -> tuple[Any, str]:
        err = io.StringIO()
        env = cast(Env, SimpleNamespace(console=Console(stderr=err)))
        return loading.within_models(env, load_config(flags), choices).engine.ctx, err.getvalue()

    flag = {"engine.ctx": "32k"}
    assert run([large], flag) == (32_768, "")
    with pytest.raises(ConfigError, match=r"--ctx 32,768 exceeds small's maximum context of 8,192 tokens"):
        run([small], flag)
    both = "warning: small runs with 8,192 tokens, its maximum; --ctx asks for 32,768\n"
    assert run([small, large], flag) == (32_768, both)
    monkeypatch.setenv("LOCALLLM_ENGINE_CTX", "32k")
    told = "warning: small runs with 8,192 tokens, its maximum; engine.ctx (env LOCALLLM_ENGINE_CTX) asks for 32,768\n"
    assert run([small], {}) == (8192, told)


def test_a_damaged_file_of_ones_own_is_not_to_be_pulled(invoke: Invoke, tmp_path: Path) -> None:
    """`pull --repair` takes names, not paths."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    for words in (("quantize", "--to", "int8"), ("eval",), ("show",)):
        stderr = invoke(*words, str(tmp_path / "m.gguf")).stderr
        assert "[E1201]" in stderr and "try   use another copy of the model" in stderr, stderr
    wrong = invoke("quantize", str(tmp_path / "m.gguf"), "--to", "int3").stderr
    assert f"try   localllm quantize {tmp_path / 'm.gguf'} --to int4" in wrong


def test_what_a_format_does_not_use_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    words = ("quantize", str(tmp_path / "m.gguf"), "--to", "int8")
    told = " ".join(invoke(*words, "--calib", str(tmp_path / "none.txt")).stderr.split())
    assert "--calib is for int4, int4-sym, nvfp4, mxfp4; int8 is not calibrated" in told and "try drop --calib" in told
    told = invoke(*words, "--group", "32").stderr
    assert "it takes none, not 32" in told and f"try   localllm quantize {tmp_path / 'm.gguf'} --to int8" in told


def test_a_full_disk_is_no_matter_of_permissions(invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("localllm.paths.replace_file", full)
    said = invoke("config", "set", "engine.ctx", "4k").stderr
    assert "No space left on device" in said and "try   free some space on its disk" in said


@pytest.mark.parametrize("words", [("eval",), ("quantize", "--to", "int8"), ("plan",)])
def test_a_model_that_is_not_here_exits_3_everywhere(invoke: Invoke, empty_home: Path, words: tuple[str, ...]) -> None:
    found = invoke(*words, "smollm2")
    assert found.exit_code == 3 and "[E301]" in found.stderr, found.stderr


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-5"])
def test_bench_checks_against_a_speed(invoke: Invoke, empty_home: Path, value: str) -> None:
    """Nothing is slower than nan: the check would always pass."""
    found = invoke("bench", "smollm2", f"--check={value}", env={"LOCALLLM_ENGINE": None})
    assert found.exit_code == 2 and "--check must be a number of tokens per second" in found.stderr
