"""Rows of the model picker agree with what a name would become."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.device.fake import MACHINES
from localllm.interface import ModelChoice
from localllm.plan import choices, fit
from localllm.plan.choices import model_choices
from localllm.plan.planner import Planner


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["rtx5070ti", "cpu", *(pytest.param(hw, marks=pytest.mark.slow) for hw in ("rtx3060", "rtx5090", "h100"))]
)
def test_rows_are_what_pull_would_take(empty_home: Path, name: str) -> None:
    machine = MACHINES[name]
    rows = {row.name: row for row in model_choices(Planner(machine))}
    assert len(rows) > 15 and "smollm2" in rows
    for row in rows.values():
        if row.name == "smollm2":
            continue
        choice = fit.recommended(row.name, Planner(machine))
        assert row.fits is (choice is not None), row
        if choice is not None:
            assert (row.format, row.size_bytes) == (choice.best.format, choice.best.download_bytes)
            assert row.need_bytes <= row.have_bytes and row.tps > 0
            assert sum(value for _, value in row.parts) == row.need_bytes
    large = rows["llama3.3-70b"]
    assert not large.fits or large.have_bytes > 40 << 30


@pytest.mark.slow
def test_other_formats_of_a_model_are_offered_beside_it(empty_home: Path) -> None:
    rows = {row.name: row for row in model_choices(Planner(MACHINES["rtx5090"]))}
    for row in rows.values():
        formats = [row.format, *(other.format for other in row.quants)]
        assert len(formats) == len(set(formats)), row.name
        assert [o.size_bytes for o in row.quants] == sorted(o.size_bytes for o in row.quants)
    others = {other.format: other for other in rows["qwen3-8b"].quants}
    assert len(others) == 4
    for other in others.values():
        assert "/" in other.name and other.params == rows["qwen3-8b"].params  # what `pull` takes
        assert not other.fits or other.need_bytes <= other.have_bytes
    assert any(other.tps > 0 for other in others.values())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "qwen38b"),
        ("Qwen/Qwen3-8B", "qwen38b"),
        ("Qwen/Qwen3-8B-AWQ", "qwen38b"),
        ("qwen3-8b:IQ4_XS", "qwen38b"),
        ("Qwen/Qwen3-8B-Coder", ""),
        ("Qwen3-8B-Instruct-2507", ""),
        ("mistral-7b", ""),
    ],
)
def test_a_fine_tune_is_another_model(name: str, model: str) -> None:
    row = ModelChoice(name, "", 1, local=True, supported=True)
    assert choices._model_of(row, {"qwen38b": []}) == model


@pytest.mark.slow
def test_a_smaller_window_needs_less(empty_home: Path) -> None:
    machine = MACHINES["rtx5090"]
    wide = {row.name: row for row in model_choices(Planner(machine))}
    narrow = {row.name: row for row in model_choices(Planner(machine).having(ctx=2048))}
    for name in ("qwen3-14b", "gemma3-12b"):
        assert narrow[name].ctx == 2048
        assert narrow[name].need_bytes < wide[name].need_bytes
        assert narrow[name].max_ctx == wide[name].max_ctx
