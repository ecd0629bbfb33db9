"""Rows of the model picker agree with what a name would become."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm import fit
from localllm.choices import model_choices
from localllm.device.fake import MACHINES


@pytest.mark.parametrize("name", ["rtx3060", "rtx5090", "h100", "cpu"])
def test_rows_are_what_pull_would_take(empty_home: Path, name: str) -> None:
    machine = MACHINES[name]
    rows = {row.name: row for row in model_choices(facts=machine)}
    assert len(rows) > 15 and "smollm2" in rows
    for row in rows.values():
        if row.name == "smollm2":
            continue
        choice = fit.recommended(row.name, machine)
        assert row.fits is (choice is not None), row
        if choice is not None:
            assert (row.format, row.size_bytes) == (choice.best.format, choice.best.download_bytes)
            assert row.need_bytes <= row.have_bytes and row.tps > 0
            assert sum(value for _, value in row.parts) == row.need_bytes
    large = rows["llama3.3-70b"]
    assert not large.fits or large.have_bytes > 40 << 30


def test_a_smaller_window_needs_less(empty_home: Path) -> None:
    machine = MACHINES["rtx5090"]
    wide = {row.name: row for row in model_choices(facts=machine)}
    narrow = {row.name: row for row in model_choices(2048, facts=machine)}
    for name in ("qwen3-14b", "gemma3-12b"):
        assert narrow[name].ctx == 2048
        assert narrow[name].need_bytes < wide[name].need_bytes
        assert narrow[name].max_ctx == wide[name].max_ctx
