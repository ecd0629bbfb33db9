"""Every command's `--json`: a schema in the package for each, and nothing printed that has none."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import jsonschema
import pytest

from .conftest import Invoke, schema, valid

ROOT = Path(__file__).parents[2]
SHIPPED = {p.stem for p in (ROOT / "localllm/schemas").glob("*.json")}
NOT_EMITTED = {"error-1", "events-1", "doctor-1", "bench-1"}
"""written by other means than `Console.emit`"""


def emitted() -> set[str]:
    """The kinds that commands hand to `Console.emit`."""
    found = set()
    for path in (ROOT / "localllm/cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit":
                kind = node.args[0]
                assert isinstance(kind, ast.Constant), f"{path.name}:{node.lineno}: a kind is written out"
                found.add(str(kind.value).replace("/", "-"))
    return found


def test_what_is_emitted_has_a_schema_and_the_other_way_round() -> None:
    assert emitted() | NOT_EMITTED == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_schemas_are_made_of_the_types(name: str) -> None:
    from localllm.cli.documents.schemas import DOCUMENTS, schema_text

    assert {f"{known}-1" for known in DOCUMENTS} == SHIPPED
    text = (ROOT / f"localllm/schemas/{name}.json").read_text()
    assert text == schema_text(name.removesuffix("-1")), "make schemas"


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_schema_says_whose_it_is(name: str) -> None:
    value = schema(name)
    jsonschema.Draft202012Validator.check_schema(value)
    assert value["$id"] == f"localllm.{name.replace('-', '/')}"
    assert "`localllm" in value["title"] or "`run --json" in value["title"] or "--json" in value["title"]
    if "properties" in value:
        assert value["properties"]["schema"] == {"const": value["$id"]}
        assert {"schema", "version"} <= set(value["required"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("ls",), "ls-1"),
        (("plan",), "plan-1"),
        (("plan", "qwen"), "plan-1"),
        (("doctor",), "doctor-1"),
        (("doctor", "--list"), "checks-1"),
        (("doctor", "--for", "vllm"), "launch-1"),
        (("doctor", "--apply", "-n"), "repair-1"),
        (("config",), "config-1"),
        (("config", "path"), "config-1"),
        (("config", "schema"), "config-1"),
        (("config", "get", "engine.ctx"), "config-1"),
        (("config", "set", "engine.ctx", "4096"), "config-1"),
        (("config", "unset", "engine.ctx"), "config-1"),
        (("rm", "--partial", "-n"), "rm-1"),
        (("run", "fake", "hi"), "run-1"),
        (("logs",), "logs-1"),
    ],
)
def test_one_object_on_stdout(invoke: Invoke, empty_home: Path, words: tuple[str, ...], name: str) -> None:
    result = invoke(*words, "--json", env={"LOCALLLM_FAKE_HW": "rtx4090"})
    assert result.exit_code in (0, 11), result.stderr
    assert result.stdout.count("\n") == 1, "compact off a terminal"
    valid(result.stdout, name)


def test_the_model_commands(invoke: Invoke, smollm2_path: Path) -> None:
    valid(invoke("show", str(smollm2_path), "--json").stdout, "show-1")
    assert (
        "im_start" in valid(invoke("show", str(smollm2_path), "--template", "--json").stdout, "template-1")["template"]
    )
    valid(invoke("doctor", str(smollm2_path), "--json").stdout, "doctor-1")
    valid(invoke("doctor", "--log", "-", "--json", stdin="UVA is not available").stdout, "diagnosis-1")


@pytest.mark.parametrize(
    "words",
    [("ls", "--sort", "x"), ("show", "nothing-here"), ("plan", "--ctx", "x"), ("config", "get", "x.y"), ("rm",),
     ("doctor", "--for", "x"), ("doctor", "--report"), ("run",), ("nonsense",), ("pull", "a/b", "--offline", "-y")],
)  # fmt: skip
def test_failures_have_a_twin_with_a_code_and_a_fix(invoke: Invoke, empty_home: Path, words: tuple[str, ...]) -> None:
    result = invoke(*words, "--json")
    error = valid(result.stdout, "error-1")["error"]
    assert result.exit_code == error["exit"] != 0
    assert error["code"] == f"E{error['exit']}{error['code'][-2:]}"
    assert error["hint"] or error["fixes"]
    assert error["docs"] == f"docs/errors.md#{error['code'].lower()}"
    page = (ROOT / "docs/errors.md").read_text()
    assert re.search(rf"^## {error['code']}\b", page, re.MULTILINE)
    assert json.dumps(error["fixes"])
