"""Who may import whom, checked on the source text; no file imports another in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"kernels": "kernels", "quant": "quant", "models": "models", "tui": "tui", "localllm": ""}

OPEN = {"errors", "paths", "request", "terminal", "testing", "_version"}  # to every room but kernels
_MODEL = {"models", "models.architectures", "quant", "kernels", "checkpoint"}
_LLM = _MODEL | {"boot", "engine", "plan", "grammar", "chat", "tokenizer", "hub", "device", "config"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "paths": set(),
    "request": set(),
    "terminal": set(),
    "testing": set(),
    "__init__": {"llm", "program"},
    "schemas": set(),
    "interface": set(),
    "wire": set(),
    "kernels": set(),
    "checkpoint": set(),
    "quant": {"kernels", "checkpoint"},
    "models.architectures": {"checkpoint"},
    "models": {"quant", "kernels", "checkpoint", "models.architectures"},
    "engine": {"models", "kernels"},
    "config": set(),
    "device": set(),
    "history": set(),
    "sandbox": set(),
    "tokenizer": {"checkpoint", "sandbox"},
    "chat": {"tokenizer", "sandbox"},
    "grammar": {"chat", "tokenizer", "sandbox"},
    "hub": {"config", "models.architectures", "tokenizer"},
    "plan": {"interface", "hub", "device", "config", "checkpoint", "models.architectures"},
    "boot": {"engine", "plan", "models", "models.architectures", "kernels", "device", "checkpoint"},
    "llm": _LLM | {"interface"},
    "doctor": {
        "interface",
        "plan",
        "hub",
        "device",
        "config",
        "chat",
        "tokenizer",
        "checkpoint",
        "models.architectures",
        "kernels",
        "sandbox",
    },
    "bench": _LLM | {"llm"},
    "quality": _LLM | {"llm"},
    "backend": {"llm", "doctor", "interface", "wire"},
    "program": {"llm", "wire"},
    "server": {"llm", "chat", "config", "device"},
    "conversation": {"interface", "history", "config", "sandbox"},
    "tui": {"interface", "conversation", "history", "config"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}
FREE = {"__version__"}


def modules() -> list[tuple[Path, tuple[str, ...]]]:
    return [
        (path, tuple(p for p in (prefix, *path.relative_to(ROOT / folder).with_suffix("").parts) if p))
        for folder, prefix in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Imports, and comparisons where there is an architecture to compare: most nodes of a tree are expressions."""
    source = path.read_text()
    tree = ast.parse(source)
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)] if ".architecture" in source else []
    return (*(node for node in statements(tree) if isinstance(node, ast.Import | ast.ImportFrom)), *compared)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node, at any depth."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, part, ()):
            yield inner
            yield from statements(inner)


def imports(path: Path, name: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Dotted names under localllm that `path` imports, absolute or relative, at any depth, for types or not."""
    package = name[:-1]
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            target: tuple[str, ...] | None = (*base, *(node.module or "").split(".")) if node.module else base
            if not node.level:
                target = target[1:] if target and target[0] == "localllm" else None
            if target is not None:
                yield from ((*target, a.name) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (tuple(a.name.split(".")[1:]) for a in node.names if a.name.startswith("localllm."))


def layer_of(module: Sequence[str]) -> str:
    """The row of MAY_IMPORT for a dotted name under localllm: of a folder inside of a layer where that has its own."""
    inner = ".".join(module[:2])
    return inner if inner in MAY_IMPORT else module[0]


def test_imports_point_down() -> None:
    for path, name in modules():
        layer = layer_of(name)
        assert layer in MAY_IMPORT, f"{path.relative_to(ROOT)}: give {layer} a row in MAY_IMPORT and in the design"
        allowed = MAY_IMPORT[layer] | (set() if layer == "kernels" else OPEN) | FREE
        bad = {layer_of(target) for target in imports(path, name)} - {layer} - allowed
        assert not bad, f"{path.relative_to(ROOT)} ({layer}) may not import {sorted(bad)}"


def test_the_table_names_only_what_is_there() -> None:
    there = {layer_of(name) for _, name in modules()}
    assert set(MAY_IMPORT) == there
    assert set().union(*MAY_IMPORT.values()) | OPEN <= there


def file_circle(files: Mapping[tuple[str, ...], set[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Files that import each other in a circle, if any do."""
    try:
        list(TopologicalSorter(files).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Types count: what needs a type from above takes a Protocol from its own floor."""
    paths = {name[:-1] if name[-1] == "__init__" else name: (path, name) for path, name in modules()}
    files = {}
    for module, (path, name) in paths.items():
        targets = ((t if t in paths else t[:-1]) for t in imports(path, name))
        files[module] = {target for target in targets if target in paths and target != module}
    assert not file_circle(files)
    assert file_circle({("a",): {("b",)}, ("b",): {("c",)}, ("c",): {("a",)}}), "a circle is seen"


def test_the_layers_have_no_cycle() -> None:
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert order.index("kernels") < order.index("models") < order.index("engine") < order.index("llm")


def test_side_folders_are_imported_under_our_name() -> None:
    """`import kernels` is somebody else's package on a user's machine."""
    bare = {"kernels", "quant", "models", "tui"}
    for path, node in ((file, node) for file, _ in modules() for node in nodes(file)):
        tops = set()
        if isinstance(node, ast.ImportFrom) and not node.level:
            tops = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Import):
            tops = {a.name.split(".")[0] for a in node.names}
        assert not tops & bare, f"{path.relative_to(ROOT)}:{node.lineno}: write localllm.{(tops & bare).pop()}"


def test_only_a_family_knows_its_name() -> None:
    """What differs between architectures stands in `facts.layers`: nobody compares `facts.architecture`."""
    for path, name, node in ((file, name, node) for file, name in modules() for node in nodes(file)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(isinstance(side, ast.Attribute) and side.attr == "architecture" for side in sides)
            assert not asks or layer_of(name) == "models.architectures" or not any(map(names_a_family, sides)), (
                f"{path.relative_to(ROOT)}:{node.lineno} asks which architecture it is"
            )


def names_a_family(side: ast.expr) -> bool:
    return any(isinstance(inner, ast.Constant) and isinstance(inner.value, str) for inner in ast.walk(side))


def test_seeded_faults_are_caught(tmp_path: Path) -> None:
    """The reader of imports sees every spelling: a test that cannot fail proves nothing."""
    source = tmp_path / "screen.py"
    source.write_text(
        "import localllm.engine.engine\n"
        "from localllm import llm\n"
        "from localllm.kernels import choose\n"
        "from ..models import loader\n"
        "def late():\n    from ..quant.formats import x\n    from ..models.architectures.facts import y\n"
    )
    found = {layer_of(target) for target in imports(source, ("tui", "screen"))}
    assert found == {"engine", "llm", "kernels", "models", "models.architectures", "quant"}
