"""Kimi Linear and Ling 3.0 beside their arithmetic: names on the hub, limits of experts, fused layers, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from localllm.device.fake import MACHINES
from localllm.doctor.model import _here
from localllm.errors import BadModelFile, LocalLLMError, UnsupportedModel
from localllm.kernels.cpu import segments
from localllm.kernels.cpu.build import library
from localllm.kernels.segments import REFERENCES
from localllm.models.architectures import KimiDelta, LatentAttention, open_model
from localllm.models.kv_cache import KVCache, StateGroup
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.planner import Planner

from .test_gguf_models import gguf_logits, write_gguf


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def prompt(length: int) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(folder: Path, paged: Any, ids: list[int]) -> Tensor:
    with open_model(folder) as checkpoint:
        return paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [40])


def test_kimi_linear_as_the_hub_has_it(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    """Layers numbered from 1 in an object of their own, and dense layers that are not named as mixtures."""
    model, ids = tiny("kimi-linear"), prompt(60)
    linear = {"full_attn_layers": [2], "head_dim": 18, "num_heads": 3, "short_conv_kernel_size": 4}
    others = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types")
    changes: dict[str, Any] = dict.fromkeys(others) | {"linear_attn_config": linear, "head_dim": 14}
    changes |= {"first_k_dense_replace": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    tensors: dict[str, Any] = {}
    for name, tensor in model.tensors.items():
        if "layers.0.block_sparse_moe." in name:
            tensors |= {name: None, name.replace("block_sparse_moe", "mlp"): tensor}
    found = logits(model.save(tmp_path, tensors, **changes), paged, ids)
    assert torch.equal(found, paged(loaded("kimi-linear")).all_logits(ids, [40]))


def test_ling_as_the_hub_has_it(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    """`head_dim` is that of delta layers, whose outputs have a name of their own; queries may have a latent."""
    model, ids = tiny("ling3"), prompt(60)
    tensors: dict[str, Any] = {}
    for layer in (0, 2):
        name = f"model.layers.{layer}.attention.dense.weight"
        tensors |= {name: None, name.replace("dense", "o_proj"): model.tensors[name]}
    dropped = dict.fromkeys(("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types"))
    changes = dropped | {"head_dim": 18, "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"}
    changes |= {"rope_parameters": model.config["rope_parameters"] | {"partial_rotary_factor": 0.5}}
    found = logits(model.save(tmp_path, tensors, **changes), paged, ids)
    assert torch.equal(found, paged(loaded("ling3")).all_logits(ids, [40]))

    name, low = "model.layers.1.attention.q_proj.weight", torch.randn(16, 42)
    up = model.tensors[name] @ torch.linalg.pinv(low)
    split = tensors | {name: None, name.replace("q_proj", "q_a_proj"): low, name.replace("q_proj", "q_b_proj"): up}
    split |= {name.replace("q_proj", "q_a_layernorm"): torch.ones(16)}
    with open_model(model.save(tmp_path / "latent", split, **changes, q_lora_rank=16)) as checkpoint:
        assert checkpoint.facts.layers[1].mixer.query_rank == 16
        load_model(checkpoint)


def test_an_incomplete_last_group_has_latent_attention(tiny: Callable, tmp_path: Path) -> None:
    facts = open_model(tiny("ling3").save(tmp_path, layer_types=None, num_hidden_layers=3))._understood[0]
    assert [type(layer.mixer) for layer in facts.layers] == [KimiDelta, LatentAttention, LatentAttention]


class Limited(nn.Module):
    """An activation whose product with `up` is clamped: min(silu(gate), limit) * clamp(up)."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: Tensor) -> Any:
        acted, limit = nn.functional.silu(gate).clamp(max=self.limit), self.limit

        class Product:
            def __mul__(self, up: Tensor) -> Tensor:
                return acted * up.clamp(-limit, limit)

        return Product()


LIMITS = {"expert_swiglu_limit_list": [None, 0.25, 0.5], "share_expert_swiglu_limit_list": [0, 0, 0.375]}


def test_experts_are_limited_as_they_were_trained(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("ling3"), prompt(60)
    limited = replace(model, config=model.config | LIMITS)
    found = logits(limited.save(tmp_path), paged, ids)
    layers = model.reference.model.layers
    routed, shared = LIMITS.values()
    changed = [(layers[i].mlp.experts, routed[i]) for i in (1, 2)] + [(layers[2].mlp.shared_experts, shared[2])]
    plain = [module.act_fn for module, _ in changed]
    for module, limit in changed:
        module.act_fn = Limited(limit)
    wanted = model.logits(ids)
    for (module, _), before in zip(changed, plain, strict=True):
        module.act_fn = before
    assert relative_error(found, wanted) < 1e-4 < relative_error(wanted, model.logits(ids))
    kind = gguf.GGMLQuantizationType.F32
    listed = {key: [value or 0.0 for value in values] for key, values in LIMITS.items()}
    stored = replace(model, config=model.config | listed)
    assert relative_error(gguf_logits(stored, paged, tmp_path / "a.gguf", kind, ids), wanted) < 1e-4


def test_an_old_file_of_ling_flash_is_doubted(tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.models.architectures.kimi_linear.FLASH", (3, 42))
    model, kind = tiny("ling3"), gguf.GGMLQuantizationType.F32
    for name, config in (("old", model.config), ("new", model.config | {"expert_swiglu_limit_list": [0.0, 0.0, 4.0]})):
        with open_model(write_gguf(tmp_path / f"{name}.gguf", config, model.tensors, kind)) as checkpoint:
            assert ("converted before August 2026" in checkpoint.doubt) == (name == "old")
            told = dict(islice(_here(checkpoint, "ling3", Planner(MACHINES["cpu"])), 2))["format"]
            assert told.fix == ("download a newer file" if name == "old" else "")


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
@pytest.mark.parametrize("name", ["kimi-linear", "ling3"])
def test_c_gives_what_single_ops_give_and_a_prompt_the_bits_of_its_tokens(name: str, loaded: Callable) -> None:
    model = loaded(name)
    weights, facts = model.layers[0].mixer, model.facts.layers[0].mixer
    draw = torch.Generator().manual_seed(3)
    x, starts = torch.randn(160, 42, generator=draw), torch.tensor([0, 150, 150, 160]).int()

    def run(segment: Any, rows: slice, starts: Tensor, slots: list[int], kept: Any) -> Tensor:
        return segment(x[rows].clone(), weights, kept, torch.tensor(slots), starts)

    def ours(*given: Any) -> Tensor:
        return segments.gated_delta(lambda *_: pytest.fail("composed"), *given)

    def slots() -> Any:
        group = StateGroup((0,), facts.conv_shape, facts.state_shape)
        kept = KVCache((), (), states=[group], num_slots=4).layers[0]
        kept.state.copy_(torch.randn(kept.state.shape, generator=torch.Generator().manual_seed(1)))
        return kept

    first, second, third = slots(), slots(), slots()
    whole = run(ours, slice(0, 160), starts, [3, 1, 0], first)
    wanted = run(REFERENCES["gated_delta"], slice(0, 160), starts, [3, 1, 0], second)
    assert relative_error(whole, wanted) < 1e-5 and relative_error(first.state, second.state) < 1e-5
    parts = [slice(0, 70), *(slice(t, t + 1) for t in range(70, 150))]
    each = [run(ours, part, torch.tensor([0, part.stop - part.start]).int(), [3], third) for part in parts]
    assert torch.equal(torch.cat(each), whole[:150]) and torch.equal(third.state[3], first.state[3])


BAD = [
    ("ling3", {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "BailingMoeV2_5ForCausalLM .linear attention without"),
    ("ling3", {"no_kda_lora": False}, "with no_kda_lora False"),
    ("ling3", {"gated_attention_proj_granularity_type": "element_wise"}, "element_wise"),
    ("ling3", {"kda_lower_bound": 5.0}, "kda_lower_bound"),
    ("ling3", {"layer_types": ["linear_attention", "full_attention"]}, "must list 3 layers"),
    ("ling3", {"layer_types": ["mamba", "full_attention", "linear_attention"]}, "layers of type mamba"),
    ("ling3", {"expert_swiglu_limit_list": "4"}, "expert_swiglu_limit_list"),
    ("ling3", {"expert_swiglu_limit_list": [0, -1.0, 0]}, "expert_swiglu_limit_list"),
    ("ling3", {"head_dim": 6, "linear_head_dim": None}, "expected \\["),
    ("kimi-linear", {"linear_head_dim": 1}, "linear_head_dim"),
    ("kimi-linear", {"mla_use_nope": False}, "with RoPE"),
    ("kimi-linear", {"moe_router_activation_func": "softmax"}, "over softmax"),
    ("kimi-linear", {"layer_types": None, "linear_attn_config": {"full_attn_layers": "2"}}, "must list layer numbers"),
    ("kimi-linear", {"layer_types": ["linear_attention"] * 3}, "without a full-attention layer"),
]


@pytest.mark.parametrize(("name", "change", "words"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_what_they_cannot_be_is_refused_by_name(
    name: str, change: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    with (
        open_model(tiny(name).save(tmp_path, **change)) as checkpoint,
        pytest.raises((BadModelFile, UnsupportedModel), match=words),
    ):
        _ = checkpoint.facts


def test_gguf_files_that_say_otherwise_are_refused(tiny: Callable, tmp_path: Path) -> None:
    model, kind = tiny("ling3"), gguf.GGMLQuantizationType.F32
    for key, value in (("kda_lower_bound", 0.0), ("linear_head_dim", 7)):
        path = write_gguf(tmp_path / f"{key}.gguf", model.config | {key: value}, model.tensors, kind)
        with open_model(path) as checkpoint, pytest.raises(LocalLLMError):
            _ = checkpoint.facts


def test_a_gguf_file_with_experts_of_several_widths_is_refused(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("kimi-linear")
    path = write_gguf(tmp_path / "a.gguf", model.config, model.tensors, gguf.GGMLQuantizationType.F32)
    with open_model(path) as checkpoint:
        checkpoint.metadata["kimi-linear.expert_feed_forward_length"] = np.array([26, 26, 20])
        with pytest.raises(UnsupportedModel, match="differs from layer to layer"):
            _ = checkpoint.facts
