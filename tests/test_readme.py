"""The README matches the program: its commands, folders, links and make targets exist."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 220


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


def test_every_command_exists_and_is_listed() -> None:
    from localllm.cli.commands import COMMANDS

    known = {name for name, *_ in COMMANDS}
    table = README.split("| command |")[1].split("\n\n")[0]
    mentioned = set(re.findall(r"`localllm (\w+)", README)) | set(re.findall(r"`(\w+)`", table))
    assert mentioned <= known, mentioned - known
    assert known <= mentioned, known - mentioned


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ (?:.*\| )?make (?:-s )?([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_layout_block_is_the_layout() -> None:
    block = re.search(r"```\n(localllm/.*?)```", README, re.DOTALL)
    assert block
    named = {line.split("/")[0] for line in block[1].splitlines()}
    assert named == {"localllm", "kernels", "quant", "models", "tui", "tests"}


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11" in README
    from localllm import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_families_it_offers_run() -> None:
    from localllm.hub import catalog

    found = re.search(r"a family \(`([^`]+)`\)", README)
    assert found
    for family in found[1].split():
        assert any(not member.needs for member in catalog.families()[family]), family


def table_of_models() -> str:
    """docs/models.md: the supported architectures, their names in model files, and their catalog entries."""
    from localllm.hub import catalog
    from localllm.models.architectures.registry import ARCHITECTURES

    lines = [
        "# Supported models",
        "",
        "Generated from the architecture registry and the catalog by `UPDATE_DOCS=1 pytest tests/test_readme.py`.",
        "`localllm catalog` shows which models fit a machine, and how fast they run.",
        "",
        "| models | `model_type` in config.json | GGUF architecture | in the catalog |",
        "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for one in ARCHITECTURES:
        names = dict.fromkeys(c.name for c in catalog.candidates() if c.architecture == one.name)
        cells = [
            " ".join(f"`{word}`" for word in words)
            for words in (sorted({*one.hf_types, *one.hf_wrappers}), one.gguf_types)
        ]
        lines.append(f"| {one.label} | {' | '.join(cells)} | {', '.join(names) or '–'} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_models_is_made_of_the_registry() -> None:
    page = ROOT / "docs/models.md"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(table_of_models())
    assert page.read_text() == table_of_models(), "UPDATE_DOCS=1 pytest tests/test_readme.py"


# phrases that readers without the history stumbled over
ODD = (
    "without words is the first screen", "carries cures out", "refused by name, with what would work",
    "as it runs by itself", "What runs is never broken", "Prompts and answers are in none",
    "taken over when it is harmless", "that are no finite ones", "combination that cannot be",
    "the model's own hold", "driver: the CPU computes", "proof pending",
)  # fmt: skip


def test_texts_say_it_plainly() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *(ROOT / "localllm").rglob("*.py")]
    found = [(page.name, words) for page in pages for words in ODD if words in page.read_text()]
    assert not found


def test_a_share_names_what_it_is_of() -> None:
    row = next(line for line in (ROOT / "docs/speed.md").read_text().splitlines() if "busy on one of the cores" in line)
    share, base, ours = (float(re.search(p, row)[1]) for p in (r": ([\d.]+) ×", r"the (\d+) tok/s", r"\| (\d+) tok/s"))
    assert round(ours / base, 2) == share
