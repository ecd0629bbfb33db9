"""The page on programs, run as it stands."""

import doctest
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/programs.md"


@pytest.mark.slow
def test_the_page_on_programs(smollm2_path: Path) -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 45 and not failed
