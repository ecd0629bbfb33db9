"""Every command that a message tells a user to run can be run: it exists, and it knows the options named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.commands import ALIASES, COMMANDS
from localllm.cli.frame.program import Root

ROOT = Path(__file__).parents[2]
FOLDERS = ("localllm", "kernels", "quant", "models", "tui")
NAMES = {name for name, *_ in COMMANDS} | set(ALIASES)
COMMAND = re.compile(r"\blocalllm ([a-z]+)((?: (?!localllm)[^\s`'\"\\);,|<>\]]+)*)")
WORDS = {"help", "serves", "can", "is", "runs", "does", "needs", "and", "itself", "while", "again"}
"""ordinary words that follow the program's name in a sentence"""


@cache
def texts(path: Path) -> list[tuple[int, str]]:
    return list(_texts(path))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """String literals of a file; values inside an f-string read X. Docstrings are no messages."""
    source = path.read_text()
    if "localllm " not in source and "localllm {" not in source:
        return  # most files
    tree = ast.parse(source)
    docs = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values]
            inside.update(node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs | inside:
            yield node.lineno, node.value


def told() -> list[tuple[str, str, str]]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in texts(path):
                found += [(f"{path.relative_to(ROOT)}:{line}", *match.groups()) for match in COMMAND.finditer(text)]
    for path in sorted((ROOT / "localllm").rglob("*.toml")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if not text.lstrip().startswith("#"):
                found += [(f"{path.relative_to(ROOT)}:{number}", *m.groups()) for m in COMMAND.finditer(text)]
    return found


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    root: Any = Root(name="localllm")
    return {
        name: {
            "-h",
            "--help",
            *(flag for p in root.get_command(None, name).params for flag in p.opts + p.secondary_opts),
        }
        for name, *_ in COMMANDS
    }


def test_commands_that_messages_name_can_be_run(options: dict[str, set[str]]) -> None:
    wrong = []
    for where, name, rest in told():
        if name in WORDS:
            continue
        if name not in NAMES:
            wrong.append(f"{where}: there is no localllm {name}")
            continue
        known = options[ALIASES.get(name, name)]
        wrong += [
            f"{where}: localllm {name} has no {flag}"
            for flag in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", rest)
            if flag not in known and not re.fullmatch("-v+", flag)
        ]
    assert not wrong, "\n".join(wrong)


def test_a_hint_is_a_command_or_quotes_it() -> None:
    """`fixes` of an error in JSON are commands: a hint that begins with the program's name is taken whole."""
    prose = re.compile(r"(?<!\S)(lists|shows|frees|starts|drops|takes|fetches|or|first|again)(?!\S)|;")
    wrong = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in texts(path):
                if text.startswith("localllm ") and prose.search(re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", text)):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert not wrong, "\n".join(wrong)


def test_the_reader_finds_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text('"""localllm doc --x"""\ndef f(n):\n    return f"localllm pull {n} --frob", "see `localllm cht`"\n')
    assert [text for _, text in texts(file)] == ["localllm pull X --frob", "see `localllm cht`"]
    assert [m.groups() for _, t in texts(file) for m in COMMAND.finditer(t)] == [("pull", " X --frob"), ("cht", "")]
