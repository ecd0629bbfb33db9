"""What loads nothing heavy: the door, the planner, the doctor, the file readers, the interface."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.hub import catalog
from localllm.hub.starter import starter_path

ENGINE = {"torch", "triton", "transformers", "compressed_tensors"}
HEAVY = ENGINE | {"huggingface_hub", "textual"}
CASES = {
    "localllm": HEAVY | {"numpy"},
    "localllm.cli": HEAVY | {"numpy", "httpx", "tokenizers", "jinja2", "fastapi", "gguf"},
    "localllm.hub.resolution": HEAVY | {"numpy", "httpx"},
    "localllm.plan.planner": HEAVY,
    "localllm.doctor": HEAVY,
    "localllm.checkpoint": HEAVY,
    "localllm.models.architectures": HEAVY,
    "localllm.program": HEAVY,
    "localllm.tui": ENGINE | {"huggingface_hub"},
}
# what the first frame of a chat is drawn without
AFTER_THE_FRAME = ENGINE | {
    "numpy", "tokenizers", "jinja2", "gguf", "httpx", "huggingface_hub", "pydantic", "fastapi", "sqlite3", "zipfile",
    "email.utils", "pygments", "markdown_it", "tree_sitter", "textual.widgets._markdown", "textual.widgets._data_table",
    "localllm.plan", "localllm.models", "localllm.checkpoint", "localllm.llm.llm",
}  # fmt: skip
FRAME = """
import gc, os, sys
from localllm.cli import main
from localllm.tui.chat.screen import ChatScreen

async def drawn(screen):
    os.write(1, " ".join([f"collects={gc.isenabled()}", *sys.modules]).encode())
    os._exit(0)

ChatScreen._begin = drawn
sys.argv = ["localllm", "chat", "smollm2"]
main()
"""


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize(("module", "forbidden"), CASES.items())
def test_import_stays_light(module: str, forbidden: set[str]) -> None:
    assert not loaded_after(f"import {module}") & forbidden


def test_help_is_light() -> None:
    """Ten times the line of 0.3 s, in processor seconds: other work on the machine does not count."""
    code = (
        "import sys\nfrom localllm.cli import main\nsys.argv = ['localllm', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
    assert not set(run.stderr.split()) & CASES["localllm.cli"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_the_first_frame_is_drawn_before_the_rest(empty_home: Path) -> None:
    """A model's own name is found by the names of files: what runs it, lists it or plans it is loaded afterwards."""
    starter = catalog.starters()["smollm2"]
    starter_path(starter).parent.mkdir(parents=True)
    with starter_path(starter).open("wb") as file:
        file.truncate(starter.size)
    terminal, inner = pty.openpty()
    run = subprocess.run(
        [sys.executable, "-P", "-c", FRAME], stdin=inner, stderr=inner, stdout=subprocess.PIPE, text=True, timeout=60,
        start_new_session=True, env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(inner)
    os.close(terminal)
    loaded = set(run.stdout.split())
    assert "localllm.tui.chat.screen" in loaded, "nothing was drawn"
    assert "collects=False" in loaded
    assert not loaded & AFTER_THE_FRAME


FAST_IMPORT = """
import sys
from localllm.llm.torch_library import LEFT_OUT, import_fast
import_fast()
import torch
assert LEFT_OUT not in sys.modules and not hasattr(torch, "_meta_registrations")
torch.nn.functional.linear(torch.ones(2, 4), torch.ones(3, 4)).cumsum(0)
from localllm.kernels.verify.cases import seeded
print(torch.rand(1, generator=seeded(7)).item() == torch.rand(1, generator=torch.Generator().manual_seed(7)).item())
print((torch.ones(2, 3, device="meta") @ torch.ones(3, 5, device="meta")).shape == (2, 5))
print(torch._meta_registrations is sys.modules[LEFT_OUT])
"""


def test_torch_comes_without_what_nothing_needs_until_something_does() -> None:
    done = subprocess.run([sys.executable, "-c", FAST_IMPORT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 3, done.stderr


@pytest.mark.slow
def test_another_torch_is_imported_whole() -> None:
    loaded_after(
        "import importlib.metadata as m; m.version = lambda name: '3.0.0'\n"
        "from localllm.llm import torch_library as t; t.import_fast()\nimport sys; assert t.LEFT_OUT in sys.modules"
    )


def test_only_one_place_makes_generators() -> None:
    """A `torch.Generator` fails where torch was imported fast: `seeded` imports what it needs first."""
    root = Path(__file__).parents[1]
    files = [
        path for folder in ("localllm", "kernels", "models", "quant", "tui") for path in (root / folder).rglob("*.py")
    ]
    found = {path.name for path in files if "torch.Generator(" in path.read_text(encoding="utf-8")}
    assert found == {"cases.py"}
