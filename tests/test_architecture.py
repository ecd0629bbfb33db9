"""Who may import whom, checked on the source text; and every package ships."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"kernels": "kernels", "quant": "quant", "models": "models", "tui": "tui", "localllm": ""}

_TEXT = {"errors", "request", "paths", "config", "checkpoint"}
HUB = {"download", "starter"}  # with hub.py and hub_*.py one layer
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "__init__": {"llm", "request"},
    "errors": set(),
    "request": set(),
    "paths": set(),
    "schemas": set(),
    "terminal": set(),
    "child": {"errors"},
    "child_loop": set(),
    "testing": {"errors"},
    "fake": {"errors", "request", "fake_script"},
    "fake_script": set(),
    "kernels": set(),
    "checkpoint": {"errors"},
    "quant": {"kernels", "checkpoint", "errors"},
    "models": {"kernels", "quant", "checkpoint", "errors"},
    "config": {"errors", "paths", "testing"},
    "device": {"errors", "testing"},
    "catalog": _TEXT | {"device"},
    "hub": _TEXT | {"catalog", "device"},
    "tokenizer": _TEXT,
    "chat": _TEXT | {"tokenizer", "child", "child_loop"},
    "stream": _TEXT | {"tokenizer"},
    "grammar": _TEXT | {"tokenizer", "child", "child_loop"},
    "tool_grammars": _TEXT | {"chat", "grammar"},
    "shaping": _TEXT | {"answer", "chat", "grammar", "tokenizer", "tool_grammars"},
    "history": _TEXT,
    "plan": {"checkpoint", "device", "catalog", "config", "errors", "hub"},
    "calibrate": {"checkpoint", "device", "plan", "paths", "errors"},
    "fit": {"plan", "plan_device", "calibrate", "catalog", "checkpoint", "device", "config", "hub", "errors"},
    "engine": {"models", "quant", "kernels", "checkpoint", "request", "config", "device", "plan", "errors"},
    "measured": {"paths"},
    "proofs": {"paths", "plan", "device", "checkpoint", "_version"},
    "boot": {"engine", "models", "kernels", "plan", "proofs", "device", "checkpoint", "request", "errors", "testing"},
    "llm": {
        "measured",
        "boot",
        "proofs",
        "shaping",
        "answer",
        "engine",
        "plan",
        "fit",
        "calibrate",
        "models",
        "tokenizer",
        "chat",
        "stream",
        "grammar",
        "catalog",
        "device",
        "hub",
    }
    | _TEXT,
    "doctor": {
        "device",
        "plan",
        "plan_device",
        "calibrate",
        "fit",
        "catalog",
        "tokenizer",
        "chat",
        "history",
        "kernels",
        "processes",
    }
    | {"hub", "terminal"}
    | _TEXT,
    "remote": {"errors", "request"},
    "choices": {"plan", "fit", "calibrate", "device", "catalog", "evaluate", "hub"} | _TEXT,
    "backend": {"choices", "llm", "answer", "plan", "device", "chat", "tokenizer", "stream", "catalog", "doctor", "hub"}
    | _TEXT,
    "answer": {"errors", "request", "stream", "tokenizer"},
    "processes": {"paths", "errors"},
    "residents": {"llm", "plan", "device", "config", "request", "errors"},
    "quantize": {"llm", "models", "quant", "kernels", "config", "request", "errors", "checkpoint", "hub"},
    "evaluate": {"llm", "models", "quant", "kernels", "config", "request", "errors", "checkpoint", "hub", "paths"},
    "bench": {"calibrate", "kernels", "llm", "device", "plan", "request", "config", "paths", "errors", "_version"},
    "server": {"residents", "llm", "answer", "chat", "request", "config", "errors"},
    "tui": {"request", "history", "config", "paths", "errors", "terminal"},
    "console": {"errors", "request", "terminal"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
FREE = {"_version", "__version__"}


def layer_of(name: str) -> str:
    if name.startswith("tokenizer_"):
        return "tokenizer"
    if name.startswith("plan_"):
        return "plan"
    return "hub" if name in HUB or name.startswith("hub_") else name


def modules() -> list[tuple[Path, tuple[str, ...]]]:
    return [
        (path, tuple(p for p in (prefix, *path.relative_to(ROOT / folder).with_suffix("").parts) if p))
        for folder, prefix in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def imported_layers(path: Path, name: tuple[str, ...]) -> Iterator[str]:
    """First-level names under localllm that `path` imports, absolute or relative, at any depth, for types or not."""
    package = name[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            target: tuple[str, ...] | None = (*base, *(node.module or "").split(".")) if node.module else base
            if not node.level:
                target = target[1:] if target and target[0] == "localllm" else None
            if target is not None:
                yield from [target[0]] if target else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("localllm."))


@pytest.mark.parametrize(("path", "name"), modules(), ids=lambda v: ".".join(v) if isinstance(v, tuple) else "")
def test_imports_point_down(path: Path, name: tuple[str, ...]) -> None:
    layer = layer_of(name[0])
    assert layer in MAY_IMPORT, f"{path.relative_to(ROOT)}: give {layer} a row in MAY_IMPORT and in the design"
    bad = {layer_of(t) for t in imported_layers(path, name)} - {layer} - MAY_IMPORT[layer] - FREE
    assert not bad, f"{path.relative_to(ROOT)} ({layer}) may not import {sorted(bad)}"


def test_the_layers_have_no_cycle() -> None:
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert order.index("kernels") < order.index("models") < order.index("engine") < order.index("llm")


@pytest.mark.parametrize(("path", "name"), modules(), ids=lambda v: ".".join(v) if isinstance(v, tuple) else "")
def test_side_folders_are_imported_under_our_name(path: Path, name: tuple[str, ...]) -> None:
    """`import kernels` is somebody else's package on a user's machine."""
    bare = {"kernels", "quant", "models", "tui"}
    for node in ast.walk(ast.parse(path.read_text())):
        tops = set()
        if isinstance(node, ast.ImportFrom) and not node.level:
            tops = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Import):
            tops = {a.name.split(".")[0] for a in node.names}
        assert not tops & bare, f"{path.relative_to(ROOT)}:{node.lineno}: write localllm.{(tops & bare).pop()}"


def test_seeded_faults_are_caught(tmp_path: Path) -> None:
    """The reader of imports sees every spelling: a test that cannot fail proves nothing."""
    source = tmp_path / "screen.py"
    source.write_text(
        "import localllm.engine.engine\n"
        "from localllm import llm\n"
        "from localllm.kernels import choose\n"
        "from ..models import loader\n"
        "def late():\n    from ..quant.formats import x\n"
    )
    found = set(imported_layers(source, ("tui", "screen")))
    assert found == {"engine", "llm", "kernels", "models", "quant"}
