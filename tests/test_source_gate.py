"""What the source may not contain: ways to run what a file or a stranger says, a second template sandbox."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("localllm", "kernels", "quant", "models", "tui", "benchmarks")
BAD_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BAD_NAMES = {"eval", "exec", "__import__"}
BAD_METHODS = {("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen"), ("numpy", "load")}
SUSPECT = BAD_MODULES | BAD_NAMES | {"shell", "trust_remote_code", "allow_pickle"}
SANDBOX = "ImmutableSandboxedEnvironment"


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def _keyword(call: ast.Call, name: str) -> object:
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def breaches(tree: ast.AST) -> list[str]:
    """`line: what` for everything that could run foreign code."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{node.lineno}: import {n}" for n in names if n.split(".")[0] in BAD_MODULES]
        if not isinstance(node, ast.Call):
            continue
        if _keyword(node, "shell") is True:
            found.append(f"{node.lineno}: shell=True")
        if _keyword(node, "trust_remote_code") is True:
            found.append(f"{node.lineno}: trust_remote_code=True")
        if _keyword(node, "allow_pickle") is True:
            found.append(f"{node.lineno}: allow_pickle=True")
        if isinstance(node.func, ast.Name) and node.func.id in BAD_NAMES:
            found.append(f"{node.lineno}: {node.func.id}(")
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            pair = (node.func.value.id, node.func.attr)
            if pair in BAD_METHODS:
                found.append(f"{node.lineno}: {'.'.join(pair)}(")
            if pair == ("torch", "load") and _keyword(node, "weights_only") is not True:
                found.append(f"{node.lineno}: torch.load( without weights_only=True")
    return found


def is_suspect(source: str) -> bool:
    """Whether the words of a breach are there at all: reading every tree takes seconds."""
    words = set(re.findall(r"\w+", source))
    return bool(words & SUSPECT) or any(words >= set(pair) for pair in (*BAD_METHODS, ("torch", "load")))


def test_nothing_runs_foreign_code() -> None:
    for path in sources():
        source = path.read_text()
        assert not is_suspect(source) or not breaches(ast.parse(source)), path.relative_to(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "exec(code)",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(x, shell=True)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_gate_sees(line: str) -> None:
    assert is_suspect(line) and breaches(ast.parse(line))


@pytest.mark.parametrize("line", ["model.eval()", "torch.load(path, weights_only=True)", "retrieval(x)", "'eval('"])
def test_the_gate_passes(line: str) -> None:
    assert not breaches(ast.parse(line))


def test_one_environment_and_it_is_the_sandbox() -> None:
    made = []
    for path in sources():
        text = path.read_text()
        if "Environment" not in text:
            continue
        tree = ast.parse(text)
        bases = {
            node.name: {ast.unparse(base).split(".")[-1] for base in node.bases}
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).split(".")[-1]
                if name.endswith("Environment"):
                    made.append((str(path.relative_to(ROOT)), name, name == SANDBOX or SANDBOX in bases.get(name, ())))
    assert len(made) == 1, made
    assert made[0][2], f"{made[0][:2]} is not a {SANDBOX}"
