"""The README says only what is there: its commands, folders, links and routes exist."""

from __future__ import annotations

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
