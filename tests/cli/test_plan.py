"""`plan`: the table, the bar, cards that are not here, benches that calibrate."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.plan_view import shares
from localllm.hub import catalog
from localllm.hub.catalog import DownloadLimit
from localllm.plan.speeds import ANSWERS
from localllm.quality import evaluate
from localllm.quality.evaluate import Quality

from .conftest import Invoke, valid

GIB = 1 << 30


@pytest.fixture
def home(empty_home: Path, smollm2_path: Path) -> Path:
    """A home with the small model in it."""
    folder = empty_home / "data/models/smollm2"
    folder.mkdir(parents=True)
    (folder / smollm2_path.name).symlink_to(smollm2_path.resolve())
    return empty_home


def rows(invoke: Invoke, *words: str, hw: str = "rtx4090", code: int = 0) -> list[dict[str, Any]]:
    result = invoke("plan", *words, "--json", env={"LOCALLLM_FAKE_HW": hw})
    assert result.exit_code in (code, 5), result.stderr
    return valid(result.stdout, "plan-1")["rows"]  # type: ignore[no-any-return]


def test_every_term_is_in_bytes_and_adds_up(invoke: Invoke, empty_home: Path) -> None:
    for row in rows(invoke, "qwen", "llama"):
        assert sum(row["parts"].values()) == row["need_bytes"] == sum(row["terms"].values())
        assert row["fits"] == (row["need_bytes"] <= row["have_bytes"])
        assert row["need_bytes"] == row["least_bytes"] or not row["fits"], "room for more requests is no need"
        assert row["fits"] or row["alternatives"]


@pytest.mark.parametrize(
    "hw",
    ["gb10", *(pytest.param(hw, marks=pytest.mark.slow) for hw in ("rtx3060", "rtx4090", "rtx5090", "h100", "cpu"))],
)
def test_the_recommended_row_is_what_pull_would_take(invoke: Invoke, empty_home: Path, hw: str) -> None:
    from localllm.device.fake import MACHINES
    from localllm.hub import catalog
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    for family in ("qwen", "gemma", "llama"):
        stars = {row["model"] for row in rows(invoke, family, hw=hw) if row["recommended"]}
        choice = fit.recommended(family, Planner(MACHINES[hw]), limit=catalog.DownloadLimit(32 * GIB))
        assert choice is not None
        assert stars == {choice.best.spec}


def test_table_bar_and_marks(invoke: Invoke, home: Path) -> None:
    result = invoke("plan", "qwen3-32b", "smollm2", env={"LOCALLLM_FAKE_HW": "rtx4090"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    heads = "MODEL FORMAT WEIGHTS 8k 32k MEM CTX TOK/S 0 → 32k FIRST TOKEN 8k DOWNLOAD"
    assert " ".join(lines[0].split()) == heads
    awq = lines[1]
    assert awq.startswith("★ qwen3-32b ") and "✓" in awq and "✗ −" in awq and awq.endswith("18.0 GiB")
    assert "4 more files" in result.stderr
    small = next(line for line in lines if line.startswith("smollm2"))
    assert "on disk" in small and "own" in small
    assert len(re.findall("recommended", result.stdout)) == 1
    for line in ("fastest good model: smollm2", "largest that fits: qwen3-32b"):
        assert result.stdout.count(line) == 1
    drawn = next(line for line in lines if line.startswith(("VRAM [", "RAM  [")))
    assert "█" in drawn and drawn.endswith(" GiB")
    assert "RTX 4090, 23.5 GiB free, 1,008 GB/s" in result.stderr
    assert "η 0.75 (default" in result.stderr


def test_the_largest_context_is_one_number(invoke: Invoke, empty_home: Path) -> None:
    """Whatever windows are weighed; what is taken without --ctx may be less, which is said."""
    listed = rows(invoke, "qwen3-32b", "--ctx", "8k,32k,auto")
    own = [row for row in listed if row["quant"] == "awq"]
    (largest,) = {row["max_ctx"] for row in own}
    assert 8192 < own[-1]["ctx"] < largest < 32768 and own[0]["fits"] and not own[1]["fits"]
    assert own[1]["alternatives"][0]["cmd"].endswith(f"--ctx {largest}")
    near = rows(invoke, "qwen3-32b", "--quant", "awq", "--ctx", f"{largest},{largest + 256}")
    assert [row["fits"] for row in near] == [True, False]
    result = invoke("plan", "qwen3-32b", env={"LOCALLLM_FAKE_HW": "rtx4090"})
    assert f" {largest / 1000:.0f}k " in result.stdout.splitlines()[1]
    told = result.stderr
    assert f"★ context {own[-1]['ctx']:,}: the largest that fits" in told and f"up to {largest:,}" in told


def test_the_next_command_starts_what_was_planned(invoke: Invoke, home: Path) -> None:
    def following(*words: str) -> str:
        told = invoke("plan", "smollm2", *words, env={"LOCALLLM_FAKE_HW": "rtx5090x2"}).stderr
        return next(line for line in told.splitlines() if line.startswith("Next: "))

    assert following() == "Next: localllm chat smollm2"
    split = following("--tensor-parallel", "2", "--split", "layers", "--kv", "fp8")
    assert split == "Next: localllm chat smollm2 --kv fp8 --tensor-parallel 2 --split layers"
    drafted = following("--draft", "smollm2", "--ctx", "4k,32k", "--device", "cpu")
    assert drafted == "Next: localllm chat smollm2 --ctx 8192 --device cpu --draft smollm2"
    assert following("--batch", "16") == "Next: localllm serve smollm2 --parallel 16"
    other = rows(invoke, "qwen3-32b", "--quant", "Q4_K_M", "--kv", "fp8", "--split", "layers", hw="rtx3060")[0]
    (cpu,) = [one["cmd"] for one in other["alternatives"] if "--device" in one["cmd"]]
    assert cpu.endswith(" --device cpu --kv fp8")


def test_a_window_that_is_too_small_is_refused_with_the_least(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("plan", "smollm2", "--ctx", "8")
    assert result.exit_code == 2 and "--ctx must be numbers of at least 16, such as 8k,32k, not '8'" in result.stderr


def test_without_names_what_is_here_and_what_could_be(invoke: Invoke, home: Path) -> None:
    result = invoke("plan", env={"LOCALLLM_FAKE_HW": "rtx5090"})
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("★ qwen3.8-27b")
    assert any(line.startswith("smollm2 ") and "on disk" in line for line in result.stdout.splitlines())
    assert "qwen3-32b" in result.stdout
    assert "gemma4-31b" in result.stdout
    shown = {line.split()[0] for line in result.stdout.splitlines() if "GiB" in line}
    assert not shown & {c.name for c in catalog.candidates() if c.needs}, "this version cannot run them"
    assert "FIRST TOKEN" in result.stdout


@pytest.mark.slow
def test_what_matters_is_on_narrow_terminals(invoke: Invoke, empty_home: Path) -> None:
    """A row for each model, the one to take on top; the context that fits is shown, the download is not."""
    env = {"LOCALLLM_FAKE_HW": "rtx4060", "COLUMNS": "80"}
    result = invoke("plan", "qwen", env=env)
    lines = result.stdout.splitlines()
    assert lines[1].startswith("★ qwen3.5-9b") and "38k" in lines[1] and " 7.3 ✓" in lines[1]
    names = [line.split()[0] for line in lines[2 : lines.index("")]]
    assert len(names) == len(set(names)) < 20
    every = invoke("plan", "qwen", "--all", env=env).stdout.splitlines()
    assert len(every) > len(lines) + 15


def test_what_other_engines_run_is_named(invoke: Invoke, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are newer than the best one here, and nothing older."""
    known = catalog.candidates()
    monkeypatch.setattr(
        catalog,
        "candidates",
        lambda: tuple(replace(c, architecture="next") if c.name == "qwen3.8-27b" else c for c in known),
    )
    text = invoke("plan", "qwen", env={"LOCALLLM_FAKE_HW": "rtx4060", "COLUMNS": "200"}).stdout
    (line,) = (line for line in text.splitlines() if "for other engines" in line)
    assert line.startswith("Qwen3.5 9B dates from 2026-03; newer, for other engines: Qwen3.8 27B")
    assert "Qwen3 " not in line and "Qwen3.5 35B" not in line, "these are older"
    assert "localllm doctor --for llama.cpp qwen3.8-27b" in text


def test_a_limit_of_downloads_is_told_and_holds_for_no_other_machine(
    invoke: Invoke, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of this machine says nothing about another one, and a model that was named is taken whole."""
    monkeypatch.setattr("localllm.hub.download_limit", lambda *_, **__: DownloadLimit(20 * GIB, "40% of the disk"))
    env = {"LOCALLLM_FAKE_HW": "rtxpro6000"}
    family = invoke("plan", "qwen", env=env).stdout
    assert "★ qwen3.8-27b" in family and " int4 " in family.splitlines()[1]
    assert "qwen3.8-27b fp8 is left out: its download exceeds the limit of 20.0 GiB (40% of the disk)" in family
    assert " fp8 " in invoke("plan", "qwen3.8-27b", env=env).stdout.splitlines()[1]
    assert " fp8 " in invoke("plan", "qwen", "--gpu", "RTX PRO 6000", env=env).stdout.splitlines()[1]


@pytest.mark.parametrize(
    "hw", ["rtx4060", *(pytest.param(hw, marks=pytest.mark.slow) for hw in ("rtx4090", "gb10", "cpu"))]
)
def test_plan_without_names_recommends_what_home_and_doctor_do(invoke: Invoke, empty_home: Path, hw: str) -> None:
    from localllm.device.fake import MACHINES
    from localllm.hub import download_limit
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    made = fit.advised(Planner(MACHINES[hw]), download_limit())
    shown = invoke("plan", env={"LOCALLLM_FAKE_HW": hw}).stdout
    assert made is not None and shown.splitlines()[1].startswith(f"★ {made.best.model.name} ")
    for one in (made.fast, made.largest):
        assert one is None or f"{one.model.name} " in shown


def test_exit_5_when_a_named_model_fits_nowhere(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("plan", "llama3.3-70b", env={"LOCALLLM_FAKE_HW": "rtx4060"})
    assert result.exit_code == 5
    assert "needs" in result.stdout and "★" not in result.stdout
    assert invoke("plan", "qwen3-0.6b", "llama3.3-70b", env={"LOCALLLM_FAKE_HW": "rtx4060"}).exit_code == 5
    assert invoke("plan", "qwen3-0.6b", env={"LOCALLLM_FAKE_HW": "rtx4060"}).exit_code == 0


def test_a_card_that_is_not_here(invoke: Invoke, home: Path) -> None:
    named = rows(invoke, "qwen3-14b", "--gpu", "3090", hw="cpu")
    assert {row["device"] for row in named} == {"cuda:0"}
    assert {row["have_bytes"] for row in named} == {int(24 * GIB * 0.92)}
    own = rows(invoke, "qwen3-14b", "--vram", "24G", "--bw", "936", hw="cpu")
    assert [row["need_bytes"] for row in own] == [row["need_bytes"] for row in named]
    assert [row["decode_tps"]["value"] for row in own] == [row["decode_tps"]["value"] for row in named]
    double = rows(invoke, "qwen3-14b", "--vram", "24G", "--bw", "1872", hw="cpu")
    assert double[0]["decode_tps"]["value"] > 1.5 * own[0]["decode_tps"]["value"]
    assert rows(invoke, "smollm2", "--ram", "16G", hw="cpu")[0]["have_bytes"] == 16 * GIB
    text = invoke("plan", "qwen3-14b", "--gpu", "h100", env={"LOCALLLM_FAKE_HW": "cpu"})
    assert "H100 (not here)" in text.stderr
    two = invoke("plan", "qwen3-14b", "--gpu", "4060 Ti", env={"LOCALLLM_FAKE_HW": "cpu"})
    assert "comes with other memory sizes: --vram 16G" in two.stdout
    for name in ("3060 8GB", "RTX 3060 8 GB", "3060-8G"):
        assert {row["have_bytes"] for row in rows(invoke, "qwen3-4b", "--gpu", name, hw="cpu")} == {int(8 * GIB * 0.92)}
    wrong = invoke("plan", "--gpu", "RTX 5O9O")
    assert wrong.exit_code == 2
    assert "did you mean RTX" in wrong.stderr
    assert invoke("plan", "--bw", "900", env={"LOCALLLM_FAKE_HW": "cpu"}).exit_code == 2
    assert invoke("plan", "--vram", "many").exit_code == 2


@pytest.mark.slow
def test_batch_kv_quant_and_target(invoke: Invoke, empty_home: Path) -> None:
    one, many = (rows(invoke, "qwen3-8b", "--batch", n, "--ctx", "8k") for n in ("1", "16"))
    assert many[0]["batch"] == 16 and many[0]["pool_bytes"] > one[0]["pool_bytes"]
    assert {row["kv"] for row in rows(invoke, "qwen3-8b", "--kv", "fp8")} == {"fp8"}
    assert {row["quant"] for row in rows(invoke, "qwen3-8b", "--quant", "int4")} == {"awq", "Q4_K_M"}
    assert invoke("plan", "qwen3-8b", "--quant", "q9").exit_code == 2
    stars = [row["model"] for row in rows(invoke, "qwen", "--target-tps", "100") if row["recommended"]]
    assert stars and all(
        row["decode_tps"]["value"] >= 100 for row in rows(invoke, "qwen", "--target-tps", "100") if row["recommended"]
    )
    assert not [r for r in rows(invoke, "qwen", "--target-tps", "100000") if r["recommended"]]


def test_verbose_prints_every_term_and_the_formulas(invoke: Invoke, home: Path) -> None:
    text = invoke("plan", "smollm2", "--ctx", "2k", "-v", env={"LOCALLLM_FAKE_HW": "cpu"}).stdout
    found = {
        name: int(number.replace(",", "")) for name, number in re.findall(r"^  (\w+) +([\d,]+) B ", text, re.MULTILINE)
    }
    need, have = found.pop("need"), found.pop("have")
    assert sum(found.values()) == need <= have
    assert {"weights", "kv", "margin"} <= set(found)
    assert "decode = 1 / (" in text and "KV = 2 × 30 layers × 3 heads × 64 values" in text
    assert "context 2,048: as requested" in text


def test_a_draft_model_that_is_not_here_is_counted_as_the_catalog_has_it(invoke: Invoke, home: Path) -> None:
    """Nobody asked for offline mode: it must not be what is said."""
    plain = rows(invoke, "qwen3-14b", "--quant", "Q4_K_M", "--gpu", "4090")
    drafted = rows(invoke, "qwen3-14b", "--quant", "Q4_K_M", "--gpu", "4090", "--draft", "qwen3-0.6b")
    more = [b["parts"]["weights"] - a["parts"]["weights"] for a, b in zip(plain, drafted, strict=True)]
    assert more == [639_446_688] * len(plain)
    assert any(reason.startswith("draft qwen3-0.6b: drafts") for reason in drafted[0]["reasons"])
    unknown = invoke("plan", "qwen3-14b", "--draft", "some/thing", "--gpu", "4090")
    assert unknown.exit_code == 3 and "draft model some/thing is not on this machine" in unknown.stderr
    assert "offline" not in unknown.stderr


def test_verbose_counts_only_layers_that_keep_something_each_with_its_own_sizes(invoke: Invoke, home: Path) -> None:
    """Gemma 4 E2B: 20 of 35 layers read what another keeps; those that see all have wider heads."""
    text = invoke("plan", "gemma4-e2b", "--quant", "Q4_K_M", "-v", env={"LOCALLLM_FAKE_HW": "cpu"}).stdout
    assert "KV = 2 × 3 layers × 1 heads × 512 values in bf16: 2,048 B" in text
    assert "KV = 2 × 12 layers that keep a window of 512 × 1 heads × 256 values in bf16: 1,024 B" in text


def bench_file(home: Path, tps: float, **subject: Any) -> Path:
    """What `localllm bench` would have saved for the small model on the fake CPU."""
    from localllm.device.fake import MACHINES
    from localllm.models.architectures import open_model
    from localllm.plan.planner import Planner
    from localllm.plan.speeds import subject as subject_of

    with open_model(next((home / "data/models/smollm2").iterdir())) as checkpoint:
        what = subject_of(checkpoint.facts, Planner(MACHINES["cpu"]).plan(checkpoint.facts), MACHINES["cpu"])
    made = home / "data/bench" / f"smollm2-{tps:.0f}.json"
    made.parent.mkdir(exist_ok=True)
    saved = {"subject": what | subject, "rows": [{"test": "pp512", "tps": 9999}, {"test": "tg128", "tps": tps}]}
    made.write_text(json.dumps(saved))
    return made


def test_a_bench_marks_its_model_and_corrects_the_others(invoke: Invoke, home: Path) -> None:
    before = rows(invoke, "qwen3-4b", hw="cpu")[0]
    assert before["decode_tps"]["basis"] == "estimate"
    estimate = rows(invoke, "smollm2", hw="cpu")[0]["decode_tps"]["value"]
    bench_file(home, estimate * 0.8)
    measured = rows(invoke, "smollm2", hw="cpu")[0]["decode_tps"]
    assert (measured["basis"], measured["value"]) == ("measured", pytest.approx(estimate * 0.8, rel=0.01))
    after = rows(invoke, "qwen3-4b", hw="cpu")[0]
    assert after["decode_tps"]["basis"] == "estimate"
    assert after["decode_tps"]["value"] < before["decode_tps"]["value"]
    text = invoke("plan", "smollm2", env={"LOCALLLM_FAKE_HW": "cpu"})
    assert "✓ " in text.stdout and "from benches here" in text.stderr
    assert "default" in invoke("plan", "smollm2", "--gpu", "4090", env={"LOCALLLM_FAKE_HW": "cpu"}).stderr
    assert "✓ " in next(line for line in invoke("ls", env={"LOCALLLM_FAKE_HW": "cpu"}).stdout.splitlines()[1:])


def test_the_pace_of_answers_is_no_bench(invoke: Invoke, home: Path) -> None:
    made = bench_file(home, 50)
    made.write_text(json.dumps(json.loads(made.read_text()) | {"from": ANSWERS}))
    shown = invoke("plan", "smollm2", env={"LOCALLLM_FAKE_HW": "cpu"})
    assert "✓ 50" in shown.stdout and "η 0.70 (default" in shown.stderr


def test_what_the_marks_mean_is_said_of_rows_that_are_shown(invoke: Invoke, empty_home: Path) -> None:
    best = invoke("plan", "qwen3-14b", env={"LOCALLLM_FAKE_HW": "rtx5090"})
    assert "→fp8" not in best.stdout and "bf16→fp8" not in best.stderr
    every = invoke("plan", "qwen3-14b", "--all", env={"LOCALLLM_FAKE_HW": "rtx5090"})
    assert "→fp8" in every.stdout and "bf16→fp8" in every.stderr


def test_the_first_token_is_foretold_of_a_prompt_that_fits(invoke: Invoke, empty_home: Path) -> None:
    shown = invoke("plan", "qwen3-32b", "--ram", "21G", env={"LOCALLLM_FAKE_HW": "cpu"}).stdout
    row, said = (next(line for line in shown.splitlines() if line.startswith(w)) for w in ("★", "largest that fits"))
    window = re.search(r"Q4_K_M, (\S+) tokens of context", said)
    assert window and window[1] != "8k" and f"first token of {window[1]} after" in said
    assert not re.search(r"\d s\b", row), "8k tokens are more than there is room for"


def test_benches_of_other_machines_and_damaged_ones_are_passed_over(invoke: Invoke, home: Path) -> None:
    for number, change in enumerate([{"cpu": "another"}, {"cores": 3}, {"device": "NVIDIA H100"}, {"params": "x"}]):
        bench_file(home, 10 + number, **change)
    folder = home / "data/bench"
    (folder / "a.json").write_text("{")
    (folder / "b.json").write_text("[]")
    (folder / "c.json").mkdir()
    (folder / "d.json").write_bytes(b"\xff" * 10)
    (folder / "e.json").write_text(json.dumps({"subject": {}, "rows": []}))
    bench_file(home, 0)
    bench_file(home, 1e9)
    assert rows(invoke, "smollm2", hw="cpu")[0]["decode_tps"]["basis"] == "estimate"


def test_the_newest_bench_counts(invoke: Invoke, home: Path) -> None:
    old, new = bench_file(home, 50), bench_file(home, 70)
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    assert rows(invoke, "smollm2", hw="cpu")[0]["decode_tps"]["value"] == 70


def test_measured_quality_is_said_for_the_formats_it_was_measured_with(invoke: Invoke, home: Path) -> None:
    def kept(kv: str, kl: float | None, weights: str = "Q4_1") -> None:
        path = next((home / "data/models").rglob("*.gguf"))
        row = Quality("smollm2", "exact", weights, kv, 100, 28.0, kl_mean=kl, kl_p99=kl, path=str(path))
        evaluate.save(row)

    def said(*words: str) -> list[str]:
        result = invoke("plan", "smollm2", *words, env={"LOCALLLM_FAKE_HW": "cpu"})
        return [line for line in result.stderr.splitlines() if "quality" in line]

    def found(*words: str) -> Any:
        return rows(invoke, "smollm2", *words, hw="cpu")[0]["quality"]

    assert said() == [] and found() is None
    kept("bf16", None)  # without a reference only perplexity is known
    kept("bf16", 0.5, weights="fp8")
    assert said() == [] and found() is None
    kept("int8", 0.25)
    kept("bf16", 0.125)
    assert said() == ["quality of smollm2 Q4_1: KL 0.12500, p99 0.1250 (KV bf16), measured here"]
    assert found()["kl_mean"] == 0.125 and found()["reference"] == "exact"
    assert found("--kv", "int8")["kl_p99"] == 0.25 and found("--kv", "f32") is None
    assert "KV int8" in said("--kv", "int8")[0] and said("--kv", "f32") == []


@pytest.mark.slow
def test_plain_terminals_get_plain_characters(invoke: Invoke, home: Path) -> None:
    from .conftest import process

    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LOCALLLM_FAKE_HW": "rtx4090"}
    run = process("plan", "smollm2", env=env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.isascii()
    assert b"VRAM [#" in run.stdout and b"+" in run.stdout


@pytest.mark.parametrize(("sizes", "width"), [([1], 20), ([1, 1, 1], 20), ([10**9, 1, 1], 20), ([3, 5, 9, 11], 64)])
def test_shares_of_a_bar(sizes: list[int], width: int) -> None:
    lengths = shares(sizes, width)
    assert sum(lengths) == width
    assert min(lengths) >= 1
    assert max(lengths) - lengths[sizes.index(max(sizes))] <= 1


def test_a_family_this_version_cannot_run_is_refused_by_name(invoke: Invoke, empty_home: Path, unrunnable: str) -> None:
    result = invoke("plan", unrunnable)
    assert result.exit_code == 12
    assert "this version cannot run Mistral Small 4" in result.stdout
    assert "localllm doctor --for llama.cpp mistral-small4" in result.stdout
    found = rows(invoke, unrunnable, hw="rtxpro6000", code=12)
    assert found and all(row["needs"] and row["need_bytes"] > 0 and not row["recommended"] for row in found)
    assert invoke("plan", "no-such-model", "--offline").exit_code == 3
    assert invoke("plan", "smollm2", "--offline").exit_code in (2, 3), "known, but not here"


def test_states_are_explained_beside_keys_and_values() -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    from localllm.cli.plan_view import _model_lines
    from localllm.models.architectures import Attention, Dense, GatedDelta, LayerFacts, ModelFacts, RopeFacts

    delta = LayerFacts(GatedDelta(2, 4, 8, 8, 4), Dense(16))
    layers = (delta, delta, LayerFacts(Attention(4, 2, 16, RopeFacts(1e4, 16)), Dense(16)))
    facts = ModelFacts("x", "x", "x", 64, 100, 512, 1e-6, layers)
    row: Any = SimpleNamespace(plan=SimpleNamespace(kv="bf16"), subject=SimpleNamespace(facts=facts))
    _, kept, state = _model_lines(cast(Any, row))
    assert "2 × 1 layers × 2 heads × 16 values" in kept and "128 B per layer and token" in kept
    assert state == f"state = 2 layers of constant size: {2 * 4 * (64 * 3 + 4 * 8 * 8):,} B per sequence"


def test_latents_are_explained_as_what_is_kept() -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    from localllm.cli.commands.show import _attention
    from localllm.cli.plan_view import _model_lines
    from localllm.models.architectures import Dense, LatentAttention, LayerFacts, ModelFacts, RopeFacts

    layers = (LayerFacts(LatentAttention(20, 512, 192, 256, RopeFacts(1e6, 64), 0.1), Dense(16)),) * 47
    facts = ModelFacts("x", "x", "x", 64, 100, 512, 1e-6, layers)
    row: Any = SimpleNamespace(plan=SimpleNamespace(kv="bf16"), subject=SimpleNamespace(facts=facts))
    _, kept = _model_lines(cast(Any, row))
    assert kept == "KV = 47 layers × (512 + 64) values in bf16: 1,152 B per layer and token"
    assert _attention(facts) == "20 heads over latents of 512 values, plus 64 rotary"


@pytest.mark.slow
def test_both_splits_are_shown_with_a_link_that_is_assumed(invoke: Invoke, empty_home: Path) -> None:
    told = invoke("plan", "llama3.3-70b", "--gpu", "2x 3090", env={"LOCALLLM_FAKE_HW": "cpu"})
    lines = [line for line in (told.stdout + told.stderr).splitlines() if "--tensor-parallel 2 --split" in line]
    assert [line.split("--split ")[1].split(":")[0] for line in lines] == ["tensor", "layers"]
    assert all(line.endswith("; link assumed") for line in lines)
