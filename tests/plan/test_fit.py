"""The planner's picks: what a family becomes on each machine, against the rule and the catalogue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.fake import MACHINES, PROFILES
from localllm.hub import catalog
from localllm.plan import fit
from localllm.plan.planner import Planner

GIB = 1 << 30
RUNNABLE = [c for c in catalog.candidates() if not c.needs]


@pytest.mark.parametrize("candidate", RUNNABLE, ids=lambda c: f"{c.name}-{c.format}")
def test_shapes_explain_parameters(candidate: catalog.Candidate) -> None:
    """Seven numbers of a model's shape give its parameters: a typing error in the catalogue would show."""
    from localllm.models.architectures.facts import Norms, count_params

    facts = fit.facts_of(candidate)
    assert facts is not None
    layer = facts.layers[0]
    mixer = replace(layer.mixer, qk_norm=candidate.architecture in ("qwen3", "gemma3"))
    norms = replace(Norms(), after_mixer="a", after_ffn="b") if candidate.architecture == "gemma3" else Norms()
    layers = (replace(layer, mixer=mixer, norms=norms),) * facts.num_layers
    counted = count_params(replace(facts, layers=layers))
    assert counted == pytest.approx(candidate.params, rel=0.01)


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
    floors = fit.FLOORS[fit.device_kind(Planner(machine))]
    roomy = [c for c in choice.considered if c.fits]
    assert choice.best in [c.candidate for c in roomy]
    assert made.max_ctx >= min(floors[-1], choice.best.context)


@pytest.mark.parametrize(
    ("machine", "family", "spec"),
    [
        # as the proposed catalogue has them, of the models that run: weights in 4 bits below sm_89, in 8 where they fit
        ("rtx3060", "qwen", "Qwen/Qwen3-8B-AWQ"),
        ("rtx3090", "qwen", "Qwen/Qwen3-14B-AWQ"),
        ("rtx4090", "qwen", "Qwen/Qwen3-14B-FP8"),
        ("rtx5090", "qwen", "Qwen/Qwen3-32B-AWQ"),
        ("rtxpro6000", "qwen", "Qwen/Qwen3-32B-FP8"),
        ("h100", "qwen", "Qwen/Qwen3-32B-FP8"),
        ("rtx4090", "llama", "nvidia/Llama-3.1-8B-Instruct-FP8"),
        ("rtx3090", "llama", "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"),
        ("rtx5090", "gemma", "RedHatAI/gemma-3-27b-it-quantized.w4a16"),
        ("cpu", "qwen", "unsloth/Qwen3-4B-GGUF:Q4_K_M"),
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


def test_a_local_model_outside_the_catalogue_is_judged_by_its_size() -> None:
    fits = fit.judge(Planner(MACHINES["rtx4090"]), 8192)
    small = catalog.candidate_of("org/mine", "llama", 8 * 10**9, 5 * 10**9, 32768)
    large = catalog.candidate_of("org/big", "llama", 70 * 10**9, 42 * 10**9, 32768)
    assert fits(small)[0] and not fits(large)[0]
    assert fits(small)[1] > 30
    assert fit.facts_of(catalog.members("gpt-oss")[0]) is None
