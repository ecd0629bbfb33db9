"""`catalog`: every entry with fit and speed, by the same plans and the same choice as `plan`, `pull` and the home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.device.fake import MACHINES
from localllm.hub import catalog, download_limit
from localllm.plan import fit
from localllm.plan.choices import model_choices
from localllm.plan.planner import Planner

from .conftest import Invoke, valid

NAMES = list(dict.fromkeys(one.name for one in catalog.candidates()))
HARDWARE = ["rtxpro6000", *(pytest.param(hw, marks=pytest.mark.slow) for hw in ("rtx4060", "cpu"))]


def models(invoke: Invoke, *words: str, hw: str = "rtx4090") -> dict[str, Any]:
    result = invoke("catalog", *words, "--json", env={"LOCALLLM_FAKE_HW": hw})
    assert result.exit_code == 0, result.stderr
    return {row["model"]: row for row in valid(result.stdout, "catalog-1")["models"]}


@pytest.mark.parametrize("hw", HARDWARE)
def test_plan_says_of_every_entry_whether_it_fits_and_agrees(invoke: Invoke, empty_home: Path, hw: str) -> None:
    listed = models(invoke, hw=hw)
    assert list(listed) == NAMES
    result = invoke("plan", *NAMES, "--ctx", "auto", "--json", env={"LOCALLLM_FAKE_HW": hw})
    rows = valid(result.stdout, "plan-1")["rows"]
    for name, entry in listed.items():
        specs = {one.spec for one in catalog.members(name)}
        own = {row["model"]: row for row in rows if row["model"] in specs}
        assert own, f"plan {name} says nothing"
        assert all("need_bytes" in row or row["reason"] for row in own.values())
        runs = any(row["fits"] and not row["needs"] and row["max_ctx"] >= fit.MIN_CTX for row in own.values())
        assert entry["fits"] is runs and bool(entry["reason"]) is not runs, name
        if runs:
            row, plan = own[entry["file"]["spec"]], entry["plan"]
            assert (row["max_ctx"], row["ctx"], row["device"]) == (plan["max_ctx"], plan["ctx"], plan["device"])
            assert (row["decode_tps"]["value"], row["prefill_tps"]) == (plan["decode_tps"], plan["prefill_tps"])


@pytest.mark.slow
@pytest.mark.parametrize("hw", HARDWARE)
def test_it_recommends_what_the_other_places_do(invoke: Invoke, empty_home: Path, hw: str) -> None:
    planner = Planner(MACHINES[hw])
    listed, plans = models(invoke, hw=hw), fit.Plans()
    assert [name for name, row in listed.items() if row["recommended"]] == [
        row.name for row in model_choices(planner) if row.recommended
    ]
    for name, row in listed.items():
        choice = fit.recommended(name, planner, made_before=plans)
        assert row["fits"] is (choice is not None)
        assert choice is None or row["file"]["spec"] == choice.best.spec
    family = fit.recommended("gemma", planner, download_limit())
    assert family is not None
    assert [n for n, row in models(invoke, "--family", "gemma", hw=hw).items() if row["recommended"]] == [
        family.best.name
    ]


def test_two_families_contradict_each_other(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("catalog", "qwen", "--family", "gemma")
    assert result.exit_code == 2 and "qwen and --family gemma contradict each other" in result.stderr


@pytest.mark.slow
def test_a_family_what_fits_and_another_card(invoke: Invoke, empty_home: Path, unrunnable: str) -> None:
    qwen = models(invoke, "Qwen")
    assert {row["family"] for row in qwen.values()} == {"qwen"}
    small, large = (models(invoke, "--fits", "--gpu", card, hw="cpu") for card in ("3060", "h100"))
    assert set(small) < set(large) < set(NAMES)
    assert {row["plan"]["device"] for row in large.values()} == {"cuda:0"}
    wrong = invoke("catalog", "qwn")
    assert wrong.exit_code == 2 and "localllm catalog qwen" in wrong.stderr
    assert invoke("catalog", "--vram", "many").exit_code == 2


@pytest.mark.slow
def test_the_table_says_why_not(invoke: Invoke, empty_home: Path, unrunnable: str) -> None:
    result = invoke("catalog", env={"LOCALLLM_FAKE_HW": "rtx4090"})
    assert result.exit_code == 0
    head, *lines = result.stdout.splitlines()
    assert head.split() == [
        "FAMILY",
        "MODEL",
        "PARAMS",
        "RELEASED",
        "FILE",
        "SIZE",
        "FITS",
        "DECODE",
        "PREFILL",
        "LICENSE",
    ]
    rows = {line.replace("★ ", "").split()[1]: line for line in lines}
    assert list(rows) == NAMES
    assert sum("★" in line for line in lines) == 1
    assert "30.5 B, 3.3 B active" in rows["qwen3-30b-a3b"] and "✓ 40k" in rows["qwen3-30b-a3b"]
    assert "✗" in rows["llama3.3-70b"] and "at 2k tokens of context, 22.1 GiB free" in rows["llama3.3-70b"]
    assert rows[unrunnable].endswith("needs a newer localllm")
    on_cpu = invoke("catalog", "--ram", "160G", env={"LOCALLLM_FAKE_HW": "cpu"}).stdout
    assert "runs only on a GPU" in next(line for line in on_cpu.splitlines() if "qwen3.5-122b-a10b" in line)
