"""What hybrid models have beside their arithmetic: calibration, the plan's slots, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.kernels.cpu import segments
from localllm.kernels.cpu.build import library
from localllm.models.architectures import ModelFacts, open_model, registry
from localllm.models.architectures.facts import linear_shapes
from localllm.models.architectures.layers import ROUTERS
from localllm.models.calibration import hessians
from localllm.models.kv_cache import KVCache
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    ["qwen3.5", "qwen3.5-moe", "lfm2", "granite-hybrid", "nemotron-h-moe", "gemma3n", "gemma4-e2b", "gemma4-moe"]
    + ["olmo-hybrid", "falcon-h1"],
)
def test_every_product_is_observed_for_calibration(name: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny(name).save(tmp_path)) as checkpoint:
        found = list(hessians(checkpoint, [list(range(40))]))
        shapes = [linear_shapes(layer, checkpoint.facts.hidden_size) for layer in checkpoint.facts.layers]
    for ours, stated in zip(found, shapes, strict=True):
        wanted = {module: k for module, (_, k) in stated.items() if module not in ROUTERS}
        nowhere = wanted.keys() - ours.keys()  # experts that no token chose
        assert {module: total.shape[0] for module, total in ours.items()} | {m: wanted[m] for m in nowhere} == wanted
        assert all(re.fullmatch(r"mlp\.experts\.\d+\.down_proj", module) for module in nowhere)
    assert all(bool(torch.isfinite(total).all()) for layer in found for total in layer.values())


CALIBRATED = [("gemma4-e2b", "per_layer_input_gate"), ("gemma3n", "per_layer_input_gate"), ("cohere2", "mlp.down_proj")]


@pytest.mark.parametrize(("name", "module"), CALIBRATED)
def test_calibration_runs_layers_as_the_model_does(name: str, module: str, tiny: Callable, tmp_path: Path) -> None:
    """What the last layer's products see follows from all layers before it."""
    ids = list(range(40))
    with open_model(tiny(name).save(tmp_path)) as checkpoint:
        *_, last = hessians(checkpoint, [ids])
    rows: list[torch.Tensor] = []
    watched = tiny(name).reference.model.layers[-1].get_submodule(module)
    handle = watched.register_forward_pre_hook(lambda _, given: rows.append(given[0][0]))
    tiny(name).logits(ids)
    handle.remove()
    expected = rows[0].T @ rows[0]
    found = next(total for modules, total in last.items() if module in modules)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def planned(facts: ModelFacts, machine: str) -> tuple[Plan, Plan]:
    """With and without a prefix cache."""
    planner = Planner(MACHINES[machine])
    return planner.plan(facts), planner.having(prefix_cache=False).plan(facts)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("machine", ["cpu", "rtx4090"])
def test_the_plan_counts_a_slot_for_every_sequence_and_checkpoint(tiny: Callable, tmp_path: Path, machine: str) -> None:
    with open_model(tiny("qwen3.5").save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    made, without = planned(facts, machine)
    parallel = EngineOptions().max_parallel
    assert made.num_slots == 4 * parallel + 1 and without.num_slots == parallel + 1
    spare = bool(made.graph_buckets)
    pages = sum(made.num_pages) * made.page_size * 2 * 2 * 24 * 2  # bfloat16 keys and values of the one layer
    assert made.kv_bytes == pages + (made.num_slots + spare) * facts.state_bytes
    assert made.speculation == "auto" and made.num_drafts > 0


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "lfm2", "lfm3", "granite-hybrid", "falcon-h1"])
def test_layers_that_keep_states_are_one_call_with_the_others(
    name: str, loaded: Callable, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[object] = []
    made = segments._decoder_plan
    monkeypatch.setattr(segments, "_decoder_plan", lambda *given: plans.append(made(*given)) or plans[-1])
    paged(loaded(name)).all_logits(range(12), (9, 1, 1, 1))
    assert len(plans) >= 3 and all(plan is not None for plan in plans)


def test_a_slot_of_convolutions_holds_their_last_inputs_and_nothing_else(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("lfm2").save(tmp_path)) as checkpoint:
        assert checkpoint.facts.state_bytes == 2 * 42 * 3 * 4
        (group,) = load_model(checkpoint).states
    cache = KVCache((), (), states=[group], num_slots=3)
    assert [kept and kept.state for kept in cache.layers] == [None] * 3 and cache.layers[1] is None
    assert cache.nbytes == 3 * checkpoint.facts.state_bytes


def test_blocks_that_share_a_scale_cannot_be_torn_apart(tiny: Callable, tmp_path: Path) -> None:
    model, config = (
        tiny("qwen3-next"),
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    )
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    stored = {name: model.tensors[name].to(torch.float8_e4m3fn)}

    def folder(*scales: float) -> Path:
        tensors = stored | {f"{name}_scale_inv": torch.tensor(scales).view(2, 1)}
        return model.save(tmp_path / str(scales), tensors, **config)

    with open_model(folder(1.0, 1.0)) as checkpoint:
        load_model(checkpoint)
    with (
        open_model(folder(1.0, 2.0)) as checkpoint,
        pytest.raises(UnsupportedFormat, match=r"in_proj_qkvz: rows stored as fp8 cannot be reordered"),
    ):
        load_model(checkpoint)


LFM2 = [
    ({"layer_types": ["conv"] * 3}, "without a full-attention layer"),
    ({"layer_types": ["conv", "full_attention"]}, "must list 3 layers"),
    ({"layer_types": ["conv", "full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
    ({"conv_L_cache": 1}, "conv_L_cache"),
    ({"conv_L_cache": 3}, "expected \\["),
    ({"block_auto_adjust_ff_dim": False}, "expected \\["),
]


@pytest.mark.parametrize(("change", "words"), LFM2, ids=[str(index) for index in range(len(LFM2))])
def test_what_lfm2_cannot_be_is_refused_by_name(change: dict, words: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("lfm2").save(tmp_path, **change)) as checkpoint, pytest.raises(BadModelFile, match=words):
        _ = checkpoint.facts


def test_an_lfm3_that_says_little_is_the_published_one(tiny: Callable, tmp_path: Path) -> None:
    silent = dict.fromkeys(("layer_types", "rope_parameters", "conv_L_cache", "use_sandwich_norm"))
    with open_model(tiny("lfm3").save(tmp_path, **silent)) as checkpoint:
        facts, _ = registry.understand(checkpoint)
    conv, _, full, _ = (layer.mixer for layer in facts.layers)
    assert conv.conv_width == 7 and facts.layers[0].norms.after_mixer
    assert full.window is None and full.gate == "heads"
    assert (full.rope.theta, full.rope.scaling, full.rope.turning) == (1_000_000.0, "proportional", 3)
    with (
        open_model(tiny("lfm3").save(tmp_path / "none", sliding_window=None)) as checkpoint,
        pytest.raises(BadModelFile, match="sliding_window"),
    ):
        _ = checkpoint.facts


def test_older_configurations_of_lfm2_name_layers_and_sizes_otherwise(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("lfm2")
    with open_model(model.save(tmp_path / "new")) as checkpoint:
        wanted = checkpoint.facts
    old = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": model.config["intermediate_size"]}
    old |= {"intermediate_size": 1, "tie_embedding": True, "tie_word_embeddings": None}
    old |= {"rope_parameters": None, "rope_theta": 10000.0}
    with open_model(model.save(tmp_path / "old", **old)) as checkpoint:
        assert checkpoint.facts.layers == wanted.layers
        assert checkpoint.facts.tied_embeddings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "without a full-attention layer"),
        ({"layer_types": ["linear_attention", "full_attention", "mamba"]}, "layers of type mamba"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ({"linear_key_head_dim": 12}, "expected \\["),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict, words: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("qwen3.5").save(tmp_path, **change)) as checkpoint, pytest.raises(BadModelFile, match=words):
        _ = checkpoint.facts


def test_time_steps_are_cut_off_where_the_file_says_so(
    tiny: Callable, paged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny("granite-hybrid"), list(range(3, 73))
    with open_model(model.save(tmp_path, time_step_limit=[0.02, 0.9])) as checkpoint:
        rows = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [40])
    assert relative_error(rows, model.logits(ids)) > 1e-3
    for layer in model.reference.model.layers:
        if layer.mamba is not None:
            monkeypatch.setattr(layer.mamba, "time_step_limit", (0.02, 0.9))
    assert relative_error(rows, model.logits(ids)) < 1e-4


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'])
def test_no_limit_is_read_however_it_is_written(written: str, tiny: Callable, tmp_path: Path) -> None:
    folder = tiny("nemotron-h").save(tmp_path, time_step_limit=[0.0, 1234.5])
    path = folder / "config.json"
    path.write_text(path.read_text().replace("1234.5", written))
    with open_model(folder) as checkpoint:
        assert checkpoint.facts.layers[0].mixer.steps is None


def test_a_layer_of_one_block_keeps_and_plans_that_block_only(tiny: Callable, loaded: Callable, tmp_path: Path) -> None:
    model = loaded("nemotron-h")
    facts = model.facts
    assert [type(layer.mixer).__name__ for layer in facts.layers] == ["Mamba2", "NoneType", "Attention"] + [
        "NoneType",
        "Mamba2",
        "NoneType",
    ]
    assert [group.layers for group in model.groups] == [(2,)] and [state.layers for state in model.states] == [(0, 4)]
    cache = KVCache(model.groups, [2], states=model.states, num_slots=3, num_layers=facts.num_layers)
    assert [kept is None for kept in cache.layers] == [False, True, False, True, False, True]
    assert facts.state_bytes == 2 * 4 * ((60 + 2 * 2 * 13) * 3 + 6 * 10 * 13)
    made, _ = planned(facts, "cpu")
    pages = sum(made.num_pages) * made.page_size * 2 * 2 * 18 * 2
    assert made.kv_bytes == pages + made.num_slots * facts.state_bytes
    assert model.num_kinds == 3


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("granite-hybrid", {"mamba_n_groups": 4}, "6 heads cannot be split evenly into 4 groups"),
        ("granite-hybrid", {"mamba_d_head": 15}, "6 heads of 15 make 90 values, but the file states 84"),
        ("granite-hybrid", {"mamba_d_head": "auto", "mamba_n_heads": 5}, "which does not divide 84 values evenly"),
        ("granite-hybrid", {"mamba_d_state": 12}, "expected \\["),
        ("granite-hybrid", {"layer_types": ["mamba", "attention"]}, "must list 3 layers"),
        ("granite-hybrid", {"layer_types": ["mamba", "attention", "conv"]}, "layers of type conv"),
        ("granite-hybrid", {"layer_types": ["mamba"] * 3}, "without an attention layer"),
        ("granite-hybrid", {"time_step_limit": [1.0, 0.5]}, "a higher upper limit"),
        ("granite-hybrid", {"time_step_limit": "none"}, "a lower limit of at least 0"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, "must be 2 numbers"),
        ("falcon-h1", {"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0.0]}, "must be 5 numbers"),
        ("falcon-h1", {"mamba_proj_bias": True}, "with mamba_proj_bias"),
        ("falcon-h1", {"mamba_rms_norm": True}, "with mamba_norm_before_gate"),
        ("falcon-h1", {"mamba_d_ssm": 50}, "6 heads of 10 make 60 values, but the file states 50"),
        ("nemotron-h", {"n_groups": 4}, "6 heads cannot be split evenly into 4 groups"),
        ("nemotron-h", {"conv_kernel": 5}, "expected \\["),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "with mlp_hidden_act silu"),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-*-MX"}, "layers of type X"),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-*-"}, "beyond the 4"),
        ("nemotron-h", {"layers_block_type": None}, "must list 6 layers|is missing"),
        ("nemotron-h", {"layers_block_type": ["mamba", "mlp"] * 3}, "without an attention layer"),
    ],
    ids=str,
)
def test_mamba_that_cannot_be_is_refused_by_name(
    name: str, change: dict, words: str, tiny: Callable, tmp_path: Path
) -> None:
    with open_model(tiny(name).save(tmp_path, **change)) as checkpoint, pytest.raises(BadModelFile, match=words):
        _ = checkpoint.facts


def test_names_and_patterns_of_older_files_are_read(tiny: Callable, loaded: Callable, tmp_path: Path) -> None:
    model = tiny("nemotron-h")
    older = dict.fromkeys(model.tensors)
    older |= {name.replace("model.", "backbone.", 1): tensor for name, tensor in model.tensors.items()}
    folder = model.save(tmp_path, older, layers_block_type=None, hybrid_override_pattern="M-*-M-")
    with open_model(folder) as checkpoint:
        assert checkpoint.facts.layers == loaded("nemotron-h").facts.layers
