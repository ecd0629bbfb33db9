"""Help, names, options before and after, usage errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from localllm.cli.commands import ALIASES, COMMANDS

from .conftest import LOCALLLM, Invoke, process, schema, valid

NAMES = [name for name, *_ in COMMANDS]


def test_help_fits_a_screen_and_names_every_command(invoke: Invoke) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    for name in NAMES:
        assert f"│ {name} " in result.stdout


def test_no_arguments_is_help_and_success(invoke: Invoke) -> None:
    assert invoke().exit_code == 0
    assert invoke().stdout == invoke("-h").stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(invoke: Invoke, name: str) -> None:
    result = invoke(name, "-h")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"$ localllm {name}" in result.stdout
    assert "--json" in result.stdout  # the global options are there too
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(invoke: Invoke, alias: str, name: str) -> None:
    assert f"localllm {name}" in invoke(alias, "-h").stdout


def test_a_typo_is_answered_with_the_command(invoke: Invoke) -> None:
    result = invoke("cht")
    assert result.exit_code == 2
    assert "Did you mean chat" in result.stderr
    assert "[E201]" in result.stderr
    assert result.stdout == ""
    assert "Did you mean" not in invoke("help", "nosuch").stderr


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("run", "fake", "x", "--frob"),
        ("run", "fake", "x", "-n", "many"),
        ("run", "fake", "x", "--top-k", "x"),
    ],
)
def test_usage_errors_have_the_form_of_all_errors(invoke: Invoke, words: tuple[str, ...]) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "localllm run -h" in result.stderr
    twin = invoke(*words, "--json")
    error = valid(twin.stdout, "error-1")["error"]
    assert (error["code"], error["exit"]) == ("E201", 2)


def test_a_value_outside_its_range_names_the_range(invoke: Invoke) -> None:
    result = invoke("run", "fake", "x", "--temp", "-1")
    assert result.exit_code == 2
    assert "0 to 100" in result.stderr


def test_the_reference_is_what_the_program_says(invoke: Invoke) -> None:
    page = Path(__file__).parents[2] / "docs/cli.md"
    assert invoke("--reference").stdout == page.read_text(), "run `localllm --reference > docs/cli.md`"
    manual = page.with_name("localllm.1")
    assert invoke("--man").stdout == manual.read_text(), "run `localllm --man > docs/localllm.1`"


@pytest.mark.parametrize(("shell", "name"), [("bash", "localllm"), ("zsh", "_localllm"), ("fish", "localllm.fish")])
def test_the_completions_in_the_wheel_are_what_typer_installs(shell: str, name: str) -> None:
    from typer._completion_shared import get_completion_script

    made = get_completion_script(prog_name="localllm", complete_var="_LOCALLLM_COMPLETE", shell=shell)
    assert (Path(__file__).parents[2] / "docs/completions" / name).read_text() == made + "\n"


def test_every_exit_code_of_an_error_is_documented() -> None:
    from localllm import errors
    from localllm.cli.frame.errors import explanations

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.exit_code for kind in kinds} <= set(map(int, explanations()["exits"]))  # type: ignore[attr-defined]


def test_a_command_is_added_by_one_file() -> None:
    """Each file of `commands` holds the command of its name, and says on its first line how `--help` lists it."""
    folder = Path(__file__).parents[2] / "localllm/cli/commands"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(NAMES)
    assert {one.group for one in COMMANDS} == {"Talk", "Serve", "Models", "This machine"}
    assert all(one.summary for one in COMMANDS)


def test_python_m_localllm_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-P", "-m", "localllm", "--version"], capture_output=True, timeout=60)
    assert run.stdout.startswith(b"localllm ")


def test_version(invoke: Invoke) -> None:
    from localllm import __version__

    assert invoke("--version").stdout == f"localllm {__version__}\n"


def test_global_options_stand_before_and_after(invoke: Invoke) -> None:
    after, before = invoke("run", "fake", "hi", "--json"), invoke("--json", "run", "fake", "hi")
    assert json.loads(after.stdout)["output"] == json.loads(before.stdout)["output"]
    assert invoke("-q", "run", "fake", "hi", "--stats").stderr == ""


def test_the_nearer_global_option_wins(invoke: Invoke) -> None:
    result = invoke("--progress", "json", "run", "fake", "hi", "--progress", "none")
    assert result.stderr == ""


@pytest.mark.parametrize("option", [("--color", "sometimes"), ("--progress", "loud"), ("--config", "/no/such/file")])
def test_wrong_global_values_exit_2(invoke: Invoke, option: tuple[str, str]) -> None:
    assert invoke("run", "fake", "hi", *option).exit_code == 2


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
@pytest.mark.parametrize("words", [("--help",), ("run", "-h"), ("ls",), ("doctor",), ("cht",), ("run", "fake", "hi")])
def test_no_escapes_without_colour(invoke: Invoke, words: tuple[str, ...], env: dict[str, str]) -> None:
    result = invoke(*words, env=env)
    assert "\x1b" not in result.output


def test_color_always_is_obeyed(invoke: Invoke) -> None:
    assert "\x1b[31m" in invoke("run", "fake-gated", "x", "--color", "always").stderr


def test_the_fake_engine_is_for_tests(invoke: Invoke) -> None:
    result = invoke("run", "fake", "x", env={"LOCALLLM_TESTING": None})
    assert result.exit_code == 2


def test_an_unexpected_exception_is_one_sentence_and_a_log(invoke: Invoke, empty_home: Any, monkeypatch: Any) -> None:
    import localllm.cli.commands.run as module

    def broken(*_: object) -> None:
        raise RuntimeError("the flux\x1b[2J is out\nsecond line")

    monkeypatch.setattr(module, "gather_prompt", broken)
    result = invoke("run", "fake", "x")
    assert result.exit_code == 1
    assert "unexpected error: RuntimeError: the flux[2J is out" in result.stderr
    assert "Traceback" not in result.output
    log = empty_home / "state/log/localllm.log"
    assert "RuntimeError" in log.read_text()
    assert "\x1b" not in log.read_text()
    assert "Traceback" in invoke("run", "fake", "x", "-vv").stderr


def test_every_shipped_schema_is_a_schema() -> None:
    from importlib import resources

    names = [p.name for p in resources.files("localllm.schemas").iterdir() if p.name.endswith(".json")]
    assert len(names) >= 10
    for name in names:
        jsonschema.Draft202012Validator.check_schema(schema(name.removesuffix(".json")))


def test_completion_knows_commands_and_local_models(smollm2_path: Any) -> None:
    def complete(line: str) -> str:
        env = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        return process(env=env).stdout.decode()

    assert "chat" in complete("localllm c").split()
    assert "smollm2" in complete("localllm run smol").split()
    loaded = subprocess.run(
        [*LOCALLLM[:3], "import sys\nfrom localllm.cli.frame.completion import local_names\nlocal_names()\n"
         "print('torch' in sys.modules, 'huggingface_hub' in sys.modules, 'gguf' in sys.modules)"],
        capture_output=True, text=True, timeout=60, env=dict(os.environ),
    )  # fmt: skip
    assert loaded.stdout.split() == ["False", "False", "False"], loaded.stderr


def test_closed_standard_streams_end_without_a_traceback() -> None:
    for closed in ("<&-", ">&-", "2>&-"):
        run = subprocess.run(
            ["bash", "-c", f'exec "$0" -P -c "$1" run fake hi {closed}', sys.executable, LOCALLLM[-1]],
            capture_output=True, timeout=60, env=dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=0:load=0"},
        )  # fmt: skip
        assert b"Traceback" not in run.stdout + run.stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "env", [{"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"HOME": "/nowhere"}]
)
def test_odd_environments_end_without_a_traceback(env: dict[str, str]) -> None:
    for words in (("--help",), ("run", "fake", "é 日本語")):
        run = process(*words, env=env)
        assert run.returncode == 0, run.stderr
        assert b"Traceback" not in run.stderr


def test_error_codes_are_explained(invoke: Invoke) -> None:
    from localllm.cli.frame.errors import explanations, kinds

    text = invoke("help", "e501").stdout
    assert text.startswith(" E501   exit 5") and "$ localllm plan NAME" in text
    assert explanations()["steps"].keys() <= kinds().keys(), "no code that is none"
    assert "Usage: localllm plan" in invoke("help", "plan").stdout
    unknown = invoke("help", "E999")
    assert unknown.exit_code == 2 and "unknown error code E999" in unknown.stderr and "E501" in unknown.stderr
    page = Path(__file__).parents[2] / "docs/errors.md"
    assert invoke("--errors").stdout == page.read_text(), "run `localllm --errors > docs/errors.md`"


def test_every_error_of_the_program_is_on_the_page() -> None:
    """Found in the source: a class that stands outside `localllm.errors` must be named in `frame.errors.kinds`."""
    from localllm.cli.frame.errors import kinds

    known = {kind.__name__ for kind in kinds().values()} | {"LocalLLMError"}
    root = Path(__file__).parents[2]
    named = set()
    for folder in ("localllm", "kernels", "quant", "models", "tui"):
        for file in (root / folder).rglob("*.py"):
            for name, bases in re.findall(r"^class (\w+)\(([\w, .]+)\):", file.read_text(), re.MULTILINE):
                if known.intersection(re.findall(r"\w+", bases)):
                    named.add(name)
    assert "DoesNotFit" in named
    assert named - known == {"ApiError", "BackendError"}, "those carry the code of another"


FULL = [("ls", "--json"), ("run", "fake", "hi", "--json"), ("run", "fake", "hi"), ("nosuch", "--json")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", FULL, ids=" ".join)
def test_a_full_disk_behind_stdout_is_an_error_with_a_name(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = process(*words, stdout=full, text=True)
    code, name = (2, "[E201]") if "nosuch" in words else (5, "no space left on the disk   [E501]")
    assert done.returncode == code and name in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_full_disk_behind_stderr_costs_no_answer() -> None:
    with open("/dev/full", "w") as full:
        done = process("run", "fake", "hello there", "--stats", stderr=full, text=True)
    assert (done.returncode, done.stdout) == (0, "hello there\n")


@pytest.mark.parametrize("words", [("run", "fake", "hi"), ("run", "fake", "hi", "-f", "/dev/zero")], ids=" ".join)
def test_a_text_without_an_end_is_refused(words: tuple[str, ...]) -> None:
    with open("/dev/zero" if "-f" not in words else os.devnull, "rb") as stdin:
        done = process(*words, stdin=stdin, text=True)
    assert done.returncode == 2 and "has more than 16 MiB of text   [E201]" in done.stderr


def test_ps_shows_what_a_chat_runs_on(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.device.processes import Running

    one = Running(1, "chat", "", ("tiny",), 1.0, device="cpu", ctx=8192, bytes=3 << 30)
    monkeypatch.setattr("localllm.cli.commands.ps.running", lambda: [one])
    (row,) = valid(invoke("ps", "--json").stdout, "ps-1")["processes"]
    assert (row["device"], row["ctx"], row["bytes"]) == ("cpu", 8192, 3 << 30)
    line = invoke("ps").stdout.splitlines()[1]
    assert "cpu" in line and "8,192" in line and "3.0 GiB" in line


def test_one_user_gets_keys_and_values_for_one_sequence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from localllm.cli.frame.command import Env, Options
    from localllm.cli.frame.options import EngineFlags

    env = Env(Options())
    assert EngineFlags().config(env, {}, parallel=1).engine.max_parallel == 1
    assert EngineFlags().config(env, {}).engine.max_parallel == 4
    monkeypatch.setenv("LOCALLLM_ENGINE_MAX_PARALLEL", "3")
    assert EngineFlags().config(env, {}, parallel=1).engine.max_parallel == 3


def test_the_record_of_a_chat_tells_what_was_loaded(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    from types import SimpleNamespace

    from localllm.cli import start as starting
    from localllm.device import processes

    made: dict[str, Any] = {}
    monkeypatch.setattr(starting, "make_backend", lambda *words, **more: made.update(more))
    begun: Any = SimpleNamespace(record=processes.Record("chat"), sampling=None, attached=None, shares=False)
    starting.backend_of(None, None, begun)  # type: ignore[arg-type]
    plan = SimpleNamespace(device="cpu", ctx=4096)
    made["on_loaded"]("tiny", SimpleNamespace(plan=plan, resident_bytes=7))
    (one,) = processes.running()
    assert (one.models, one.device, one.ctx, one.bytes) == (("tiny",), "cpu", 4096, 7)
    begun.record.remove()
