"""The planner's picks: what a family becomes on each machine, against the rule and the catalog."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from localllm import hub
from localllm.device.fake import MACHINES, PROFILES, fake_host
from localllm.hub import catalog
from localllm.models.architectures.facts import count_params, expert_counts, expert_share, kept_bytes
from localllm.plan import fit
from localllm.plan.choices import model_choices
from localllm.plan.planner import Measured, Planner
from localllm.plan.speeds import Measurement, Speeds

GIB = 1 << 30
SHAPED = [c for c in catalog.candidates() if c.shape is not None]


@pytest.mark.parametrize("candidate", SHAPED, ids=lambda c: f"{c.name}-{c.format}")
def test_shapes_explain_parameters(candidate: catalog.Candidate) -> None:
    """Seven numbers of a model's shape give its parameters: a typing error in the catalog would show."""
    from localllm.models.architectures.layers import Norms

    facts = fit.facts_of(candidate)
    assert facts is not None
    layer = facts.layers[0]
    mixer = replace(layer.mixer, qk_norm=candidate.architecture in ("qwen3", "gemma3"))
    norms = replace(Norms(), after_mixer="a", after_ffn="b") if candidate.architecture == "gemma3" else Norms()
    layers = (replace(layer, mixer=mixer, norms=norms),) * facts.num_layers
    counted = count_params(replace(facts, layers=layers))
    assert counted == pytest.approx(candidate.params, rel=0.01)


# what reads images or sounds, and what predicts further tokens: not of the text model, the rest of a rounded number
BESIDE = {"muse-glimmer-30b": 0.06, "qwen3.5-0.8b": 0.15, "qwen3.5-2b": 0.11, "qwen3.5-4b": 0.05, "qwen3.5-9b": 0.03}
BESIDE |= {"gemma4-e2b": 0.1, "gemma4-e4b": 0.07, "gemma4-26b-a4b": 0.03}


@pytest.mark.parametrize(
    "candidate", {c.name: c for c in catalog.candidates() if c.config}.values(), ids=lambda c: c.name
)
def test_configurations_explain_parameters_and_what_is_kept(candidate: catalog.Candidate) -> None:
    """The numbers that are known without reading a configuration follow from it."""
    facts = fit.facts_of(candidate)
    assert facts is not None and facts.architecture == candidate.architecture and not candidate.needs
    counted = count_params(facts) / candidate.params
    assert 0.985 - BESIDE.get(candidate.name, 0.0) < counted < 1.01
    assert kept_bytes(facts, "bf16") == (candidate.kv_bytes_per_token, candidate.kv_fixed_bytes)
    assert bool(expert_counts(facts)[0]) is ("(experts)" in candidate.title)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("family", ["qwen", "gemma", "llama", "smollm"])
def test_a_pick_fits_with_room_and_pace(name: str, family: str) -> None:
    machine = MACHINES[name]
    choice = fit.recommended(family, Planner(machine), limit=catalog.DownloadLimit(32 * GIB))
    assert choice is not None
    made = fit.plan_of(choice.best, Planner(machine))
    assert made is not None and made.fits
    assert (made.device == "cpu") is (fit.device_kind(Planner(machine)) == "cpu")
    assert choice.best.download_bytes <= 32 * GIB
    assert choice.best in [c.candidate for c in choice.considered if c.fits]
    assert made.max_ctx >= min(fit.MIN_CTX, choice.best.context)


@pytest.mark.parametrize(
    ("machine", "family", "spec"),
    [
        # what people who know these cards take, of the models that run: a size more counts more than 32k of context or
        # a few tokens a second; weights in 4 bits below sm_89, in 8 where they fit
        ("rtx4060", "qwen", "unsloth/Qwen3.5-9B-GGUF:Q4_K_M"),
        ("rtx2070", "qwen", "unsloth/Qwen3.5-9B-GGUF:Q4_K_M"),
        ("rtx3060", "qwen", "RedHatAI/Qwen3.5-9B-quantized.w4a16"),
        ("rtx3090", "qwen", "RedHatAI/Qwen3.8-27B-INT4"),
        ("rtx4090", "qwen", "RedHatAI/Qwen3.8-27B-INT4"),
        ("rtx5090", "qwen", "unsloth/Qwen3.8-27B-NVFP4"),
        ("gb10", "qwen", "nvidia/Qwen3.6-35B-A3B-NVFP4"),  # where memory is shared, mixtures first
        ("cpu-small", "qwen", "unsloth/Qwen3-1.7B-GGUF:Q4_K_M"),
        ("rtxpro6000", "qwen", "Qwen/Qwen3.8-27B-FP8"),
        ("h100", "qwen", "Qwen/Qwen3.8-27B-FP8"),
        ("rtx4090", "llama", "nvidia/Llama-3.1-8B-Instruct-FP8"),
        ("rtx3090", "llama", "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"),
        ("rtx5090", "gemma", "google/gemma-4-31B-it-qat-w4a16-ct"),
        ("cpu", "qwen", "unsloth/Qwen3.6-35B-A3B-MTP-GGUF:UD-Q4_K_M"),  # a mixture decodes at its active bytes
    ],
)
def test_picks(machine: str, family: str, spec: str) -> None:
    choice = fit.recommended(family, Planner(MACHINES[machine]), limit=catalog.DownloadLimit(32 * GIB))
    assert choice is not None
    assert choice.best.spec == spec


def test_a_gpu_that_torch_cannot_use_is_no_gpu() -> None:
    machine = MACHINES["rtx5070ti"]  # its torch holds no code for sm_120
    assert fit.device_kind(Planner(machine)) == "cpu"
    choice = fit.recommended("qwen", Planner(machine))
    assert choice is not None
    assert choice.best.device == "any"
    assert fit.device_kind(Planner(replace(machine, torch_cuda="13.0"))) == "cuda"
    assert fit.device_kind(Planner(MACHINES["rtx4090"]).having(device="cpu")) == "cpu"


def test_a_local_model_outside_the_catalog_is_judged_by_its_size() -> None:
    fits = fit.judge(Planner(MACHINES["rtx4090"]), 8192)
    small = catalog.candidate_of("org/mine", "llama", 8 * 10**9, 5 * 10**9, 32768)
    large = catalog.candidate_of("org/big", "llama", 70 * 10**9, 42 * 10**9, 32768)
    assert fits(small)[0] and not fits(large)[0]
    assert fits(small)[1] > 30


@pytest.mark.parametrize("candidate", catalog.candidates(), ids=lambda c: f"{c.name}-{c.format}-{c.repo}")
def test_every_entry_can_be_planned(candidate: catalog.Candidate) -> None:
    """Also those that this version cannot run: their bytes are known. They are never picked."""
    card = replace(MACHINES["h100"].gpus[0], total_bytes=900 * GIB, free_bytes=880 * GIB)
    large = replace(MACHINES["rtxpro6000"], gpus=(card,))
    made = fit.plan_of(candidate, Planner(large).having(ctx=8192))
    assert made is not None and made.fits
    kept = candidate.kv_fixed_bytes + 8192 * candidate.kv_bytes_per_token
    assert candidate.shape or candidate.config or made.sequence_bytes == pytest.approx(kept, rel=0.02)
    facts = fit.facts_of(candidate)
    again = 1 if facts is None else facts.loops  # layers that run several times are read as often
    assert made.read_bytes <= again * candidate.download_bytes * candidate.active_params / candidate.params
    assert fit.judge(Planner(large), 2048)(candidate)[0] is not bool(candidate.needs)


MIXTURES = [c for c in catalog.candidates() if 2 * c.active_params < c.params]


@pytest.mark.parametrize("candidate", MIXTURES, ids=lambda c: f"{c.name}-{c.format}-{c.repo}")
def test_experts_explain_active_parameters(candidate: catalog.Candidate) -> None:
    """What the experts are counted as for a plan that divides them is what their sizes make of the parameters."""
    facts, mixture = fit.facts_of(candidate), candidate.experts
    assert facts is not None and mixture is not None
    assert expert_counts(facts) == (mixture.num, mixture.top_k)
    matrices = 2 if candidate.architecture == "nemotron_h" else 3  # relu2 has no gate
    counted = mixture.layers * mixture.num * matrices * mixture.inner * mixture.width / candidate.params
    assert expert_share(facts) == pytest.approx(counted, rel=0.04) and counted < 1


@pytest.mark.parametrize(("name", "spec"), [("gpt-oss", "openai/gpt-oss-20b"), ("qwen3-coder-30b-a3b", "")])
def test_a_mixture_is_divided_before_it_is_downloaded_as_after_it(name: str, spec: str) -> None:
    planner = Planner(MACHINES["rtx3060"])
    best = fit.best_file(name, planner)
    assert best.plan is not None and best.plan.fits and not best.reason and best.file.spec.startswith(spec)
    assert best.plan.device == "cuda:0" and 0 < best.plan.host_experts < catalog.members(name)[0].experts.num
    assert best.plan.host_bytes + best.plan.weight_bytes == pytest.approx(best.file.download_bytes, rel=0.01)
    assert any(line.startswith("experts:") and "MiB of host memory" in line for line in best.plan.reasons)
    whole = fit.best_file(name, planner.having(experts="device"))
    assert whole.reason and whole.plan is not None and not whole.plan.host_experts


@pytest.mark.parametrize("gigabytes", [17.2, 19.7, 20.1])
def test_what_is_against_a_model_is_that_of_a_file_it_could_run(gigabytes: float) -> None:
    """On a machine that has room for a shorter context than is of use, too."""
    machine = replace(MACHINES["cpu"], ram_available_bytes=int(gigabytes * GIB))
    for name in ("gemma4-31b", "qwen3-30b-a3b", "qwen3-32b"):
        best = fit.best_file(name, Planner(machine))
        assert best.file.device != "gpu" and best.plan is not None and (not best.reason) is best.plan.fits
        if best.reason:
            need, have = map(float, re.findall(r"([0-9.]+) GiB", best.reason))
            assert need > have and " at 2k tokens of context" in best.reason


def test_pace_is_a_preference() -> None:
    """Twice the size at nine tenths of the wish is worth more; at a third of it, it is not."""
    small, large = (catalog.members(name)[0] for name in ("qwen3-14b", "qwen3-32b"))
    wish = catalog.WISHES["gpu"]
    value = lambda one, tps, ctx=32_768: catalog.worth(one, tps, ctx, wish)  # noqa: E731
    assert value(large, 27.0) > value(small, 60.0) > value(large, 10.0)
    assert value(large, 40.0, 20_000) > value(small, 60.0) > value(large, 40.0, 6_000)
    assert value(small, 60.0) == value(small, 600.0), "faster than one reads is not better"


def test_the_newer_of_equals_is_taken() -> None:
    """Across families the date counts, not parameters alone: mistral-7b is of 2024."""
    for hw in ("rtx2070", "wsl2"):
        made = fit.advised(Planner(MACHINES[hw]))
        assert made is not None and made.best.model.released >= "2025-01"


@pytest.mark.slow
def test_one_noisy_bench_changes_no_choice(tmp_path: Path) -> None:
    """A machine that was busy, or a clock that ran free: the shown pace follows, the choice does not."""
    for hw in ("rtx4090", "cpu"):
        quiet = Planner(MACHINES[hw])
        calm = fit.advised(quiet)
        assert calm is not None
        for factor in (0.1, 3.0):
            device = "cpu" if hw == "cpu" else MACHINES[hw].gpus[0].name
            noisy = Measurement(("qwen3", 1, "Q4_K_M", 1), device, 30.0, factor * calm.best.plan.bandwidth)
            made = fit.advised(replace(quiet, measured=Measured(Speeds((noisy, noisy)))))
            assert made is not None and made.best.model == calm.best.model
            assert made.best.plan.decode_tps != calm.best.plan.decode_tps
        slow = tuple(Measurement((str(i), 1, "x", 1), device, 3.0, 0.05 * calm.best.plan.bandwidth) for i in range(5))
        made = fit.advised(replace(quiet, measured=Measured(Speeds(slow))))
        assert made is not None and made.best.worth < calm.best.worth - 1, "what many benches say counts"
        assert hw == "cpu" or made.best.model != calm.best.model  # a mixture that reads little is the best at any pace


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "hw", ["rtx5070ti", "cpu", *(pytest.param(hw, marks=pytest.mark.slow) for hw in ("rtx3060", "rtx4090", "gb10"))]
)
def test_all_places_recommend_the_same_model(empty_home: Path, hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home screen, `plan`, `doctor`, and what a family's name becomes for `chat` and `pull`."""
    from localllm.config import UserConfig
    from localllm.doctor import Survey
    from localllm.doctor.advice import advice
    from localllm.tui.widgets.home import _offered

    monkeypatch.setattr(hub, "download_limit", lambda *_, **__: catalog.DownloadLimit(32 * GIB))
    planner = Planner(MACHINES[hw])
    made = fit.advised(planner, catalog.DownloadLimit(32 * GIB))
    assert made is not None
    name = made.best.model.name
    rows = model_choices(planner)
    assert [row.name for row in rows if row.recommended] == [name]
    assert _offered(rows)[0].name == name
    (model,) = (one for one in advice(Survey(MACHINES[hw], fake_host(hw)), UserConfig()) if one.id == "model")
    assert model.cmd == f"localllm chat {name}"
    family = fit.recommended(made.best.model.family, planner, catalog.DownloadLimit(32 * GIB))
    assert family is not None and family.best == made.best.model


def test_figures_that_were_wrong() -> None:
    """Gemma 4's keys and values, and AWQ files, which keep the embedding in 16 bits: it is not read for a token."""
    kept = {
        name: catalog.members(name)[0].kv_bytes_per_token for name in ("gemma4-31b", "gemma4-12b", "gemma4-26b-a4b")
    }
    assert kept == {"gemma4-31b": 10 * 2 * 4 * 512 * 2, "gemma4-12b": 16_384, "gemma4-26b-a4b": 20_480}
    (awq,) = (one for one in catalog.members("qwen3-8b") if one.format == "awq")
    made = fit.plan_of(awq, Planner(MACHINES["rtx3060"]))
    assert made is not None and 50 < made.decode_tps < 53
    assert 0.5 < made.first_token_s(8192) < 30 and made.first_token_s(16_384) > made.first_token_s(8192)


def test_a_slow_machine_gets_a_model_it_can_run() -> None:
    """A name that stands for a 24B and a 3B is no 24B at a token a second."""
    machine = MACHINES["cpu"]
    slow = replace(machine, cpu=replace(machine.cpu, bandwidth=20e9, cores_usable=2))
    choice = fit.recommended("mistral", Planner(slow))
    assert choice is not None and choice.best.name == "ministral3-3b"


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("hw", "wanted"),
    [("rtx4090", "qwen3-14b"), ("cpu", "qwen3-8b"), pytest.param("rtx4060", "qwen3-8b", marks=pytest.mark.slow)],
)
def test_a_chat_without_a_name_takes_what_home_offers_first(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, hw: str, wanted: str
) -> None:
    """Of models that are here, none of them used yet: the same one in `chat`, at home, in `plan` and in `doctor`."""
    models = [
        hub.LocalModel(
            f"my-{one.name}", Path(one.name), "folder", size_bytes=one.download_bytes, architecture=one.architecture,
            params=one.params, max_context=one.context, chat=True, facts=fit.facts_of(one), format=one.format,
        )
        for name in ("smollm2-1.7b", "qwen3-8b", "qwen3-14b", "llama3.3-70b")
        for one in catalog.members(name)
        if one.format in ("Q4_K_M", "Q8_0")
    ]  # fmt: skip
    for place in ("localllm.hub.list_local", "localllm.hub.local.list_local"):
        monkeypatch.setattr(place, lambda: models)
    planner = Planner(MACHINES[hw])
    rows = [row for row in model_choices(planner) if row.local and row.fits]
    assert fit.default_model(planner) == rows[0].name == f"my-{wanted}"
    here = fit.pick([one for model in models if (one := fit.local_option(model, planner))], planner)
    assert here is not None and here.best.model.name == rows[0].name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("machine", ["cpu-small", "rtx4060"])
def test_no_part_of_a_plan_is_less_than_nothing(machine: str) -> None:
    planner = Planner(MACHINES[machine])
    for one in catalog.candidates():
        made = fit.plan_of(one, planner)
        assert made is None or (min(made.parts().values()) >= 0 and made.decode_tps < 2000), one.spec
