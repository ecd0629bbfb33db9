"""Mixtures of experts: how they are stored, what is refused, what a step reads, and how a router chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_weights import FORMATS
from torch import Tensor

from localllm.errors import BadModelFile, UnsupportedModel
from localllm.kernels import OpFacts
from localllm.kernels.experts import route
from localllm.kernels.layer_weights import ExpertsWeights, Norm
from localllm.kernels.segments import composed
from localllm.models.architectures import Experts, open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.samples import model_shapes
from localllm.quant import dequantize, load_weight

from .test_latent_attention import Counting, product

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LAYERS = "model.layers."


def mxfp4(rows: int, inputs: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks, scales, values [experts, rows, inputs]) as gpt-oss stores experts."""
    blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 126, (experts, rows, inputs // 32), dtype=torch.uint8)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = E2M1[codes.long()] * (scales.float() - 127).exp2().unsqueeze(-1)
    return blocks, scales, values.flatten(-2)


def logits(folder: Path, paged: Any, ids: list[int]) -> Tensor:
    with open_model(folder) as checkpoint:
        return paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [20])


def test_mxfp4_experts_of_gpt_oss(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model = tiny("gpt-oss-packable")
    packed: dict[str, Tensor | None] = {}
    plain: dict[str, Tensor | None] = {}
    for name in [key for key in model.tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, rows = model.tensors[name].shape
        blocks, scales, values = mxfp4(rows, inputs, experts)
        packed |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = values.mT
    ids = list(range(3, 40))
    found = logits(model.save(tmp_path / "packed", packed), paged, ids)
    whole = model.save(tmp_path / "plain", plain)
    expected = logits(whole, paged, ids)
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-5
    with open_model(whole) as checkpoint:
        assert model_shapes(checkpoint.facts, OpFacts()).has_sinks, "the self-test of attention has some"


def test_experts_stored_one_by_one(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("mixtral"), list(range(3, 40))
    split: dict[str, Tensor | None] = {}
    for name, tensor in model.tensors.items():
        start, found, last = name.partition(".mlp.")
        block = f"{start}.block_sparse_moe."
        if not found:
            continue
        split[name] = None
        if last == "gate.weight":
            split[f"{block}gate.weight"] = tensor
            continue
        for expert, values in enumerate(tensor):
            parts = zip(("w1", "w3"), values.chunk(2), strict=True) if "gate_up" in last else [("w2", values)]
            split |= {f"{block}experts.{expert}.{kind}.weight": part.clone() for kind, part in parts}
    found = logits(model.save(tmp_path / "split", split), paged, ids)
    assert torch.equal(found, paged(loaded("mixtral")).all_logits(ids, [20]))


def test_minimax_as_it_is_published(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    """Under Mixtral's names, the rotated part of a head as a number of elements."""
    model, ids = tiny("minimax-m2"), list(range(3, 40))
    split: dict[str, Tensor | None] = {}
    for name, tensor in model.tensors.items():
        start, found, last = name.partition(".mlp.")
        if not found:
            continue
        split[name] = None
        block = f"{start}.block_sparse_moe."
        if "experts" not in last:
            split[f"{block}{last}"] = tensor
            continue
        for expert, values in enumerate(tensor):
            parts = zip(("w1", "w3"), values.chunk(2), strict=True) if "gate_up" in last else [("w2", values)]
            split |= {f"{block}experts.{expert}.{kind}.weight": part.clone() for kind, part in parts}
    stated = {"rope_parameters": None, "rope_theta": 10000.0, "rotary_dim": 6}
    found = logits(model.save(tmp_path, split, **stated), paged, ids)
    assert torch.equal(found, paged(loaded("minimax-m2")).all_logits(ids, [20]))


def test_older_names_of_granite(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("granitemoe"), list(range(3, 40))
    old = {
        "router.weight": "router.layer",
        "experts.gate_up_proj": "input_linear",
        "experts.down_proj": "output_linear",
    }
    renamed: dict[str, Tensor | None] = {}
    for name, tensor in model.tensors.items():
        start, found, last = name.partition("block_sparse_moe.")
        renamed |= {name: None, f"{start}{found}{old[last]}.weight": tensor} if found else {}
    rows = logits(model.save(tmp_path / "old", renamed), paged, ids)
    assert torch.equal(rows, paged(loaded("granitemoe")).all_logits(ids, [20]))


def test_ernie_as_it_is_published(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    """The bias lies beside the router, and a head that predicts tokens further ahead beside the layers."""
    model, ids = tiny("ernie-moe"), list(range(3, 40))
    named = ((name, name.replace("gate.moe_statics", "moe_statics"), one) for name, one in model.tensors.items())
    moved: dict[str, Tensor | None] = {}
    for name, published, tensor in named:
        moved |= {name: None, published: tensor} if name != published else {}
    assert len(moved) == 4
    extra = {"model.mtp_block.0.mlp.up_proj.weight": torch.ones(70, 42), "model.mtp_emb_norm.0.weight": torch.ones(42)}
    path = model.save(tmp_path / "published", moved | extra, num_nextn_predict_layers=1)
    assert torch.equal(logits(path, paged, ids), paged(loaded("ernie-moe")).all_logits(ids, [20]))
    with open_model(path) as checkpoint, open_model(model.save(tmp_path / "plain")) as plain:
        assert checkpoint.facts.weight_bytes == plain.facts.weight_bytes
    with pytest.raises(UnsupportedModel, match="with use_bias"):
        _ = open_model(model.save(tmp_path / "biased", use_bias=True)).facts


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8"])
def test_llama4_as_it_is_quantized(form: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Tools take its stacks apart; what is read is compared with a stack of the same values."""
    model, ids = tiny("llama4-packable"), list(range(3, 60))
    split: dict[str, Tensor | None] = {}
    for name, stack in model.tensors.items():
        if ".experts." not in name:
            continue
        split[name] = None
        start, _, kinds = name.removesuffix("_proj").rpartition(".")
        for expert, values in enumerate(stack.mT):
            for kind, part in zip(kinds.split("_"), values.chunk(len(kinds.split("_"))), strict=True):
                packed = FORMATS[form][0](*part.shape)
                split |= {f"{start}.{expert}.{kind}_proj.{suffix}": one for suffix, one in packed.items()}
    path = model.save(tmp_path / "packed", split, quantization_config=FORMATS[form][1])
    stacks = {}
    with open_model(path) as checkpoint:
        for name in (name for name, value in split.items() if value is None):
            start, _, kinds = name.removesuffix("_proj").rpartition(".")
            each = []
            for expert in range(model.tensors[name].shape[0]):
                modules = [f"{start}.{expert}.{kind}_proj" for kind in kinds.split("_")]
                shape = (model.tensors[name].shape[2] // len(modules), model.tensors[name].shape[1])
                found = [load_weight(checkpoint, one, checkpoint.formats[one], shape) for one in modules]
                each.append(torch.cat([dequantize(one) for one in found]).T)
            stacks[name] = torch.stack(each)
    rows = logits(path, paged, ids)
    expected = logits(model.save(tmp_path / "dense", stacks), paged, ids)
    assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-4


def test_layers_that_predict_further_tokens_are_left_out(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("glm4-moe")
    with open_model(model.save(tmp_path / "a")) as checkpoint:
        facts = checkpoint.facts
    spare = {f"{LAYERS}3.{name}.weight": torch.ones(2, 2) for name in ("eh_proj", "mlp.experts.0.up_proj")}
    with pytest.raises(BadModelFile, match="beyond the 3"):
        _ = open_model(model.save(tmp_path / "b", spare)).facts
    with open_model(model.save(tmp_path / "c", spare, num_nextn_predict_layers=1)) as checkpoint:
        assert "model.layers.3.self_attn.q_proj.weight: the weight is missing" in checkpoint.facts.predictor_flaw
        assert replace(checkpoint.facts, extra_layers=0, predictor_flaw="", name=facts.name) == facts
        load_model(checkpoint)


def test_what_a_token_does_not_read_is_not_counted(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("qwen3-moe-mixed")  # two of three layers have five experts, of which two are chosen
    with open_model(model.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    experts = sum(value.nbytes for key, value in model.tensors.items() if ".experts." in key)
    assert facts.num_params == sum(value.numel() for value in model.tensors.values())
    assert facts.active_share * facts.weight_bytes == pytest.approx(facts.weight_bytes - experts * 3 / 5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 8}, "num_experts_per_tok: must be 1 to 7, not 8"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok: must be 1 to 7, not 0"),
        ("qwen3-moe", {"num_local_experts": 9}, r"mlp\.gate\.weight: the weight has shape \[7, 44\]"),
        ("qwen3-moe", {"num_local_experts": 1 << 20}, "num_local_experts: must be 1 to 4,096, not 1,048,576"),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen3-moe", {"moe_intermediate_size": 27}, r"\[26, 44\], expected \[27, 44\]"),
        ("glm4-moe-groups", {"n_group": 5}, "12 experts cannot be split into 5 groups"),
        ("glm4-moe-groups", {"topk_group": 5}, "into 4 groups with 5"),
        ("glm4-moe-groups", {"num_experts_per_tok": 7}, "hold fewer than the 7 experts"),
        ("gpt-oss", {"swiglu_alpha": 2.0}, "swiglu_alpha 2"),
    ],
)
def test_numbers_that_contradict_are_named(
    name: str, changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=words) as caught:
        _ = open_model(tiny(name).save(tmp_path, **changes)).facts
    assert caught.value.hint


def test_experts_of_a_model_that_has_none_are_refused(tiny: Callable, tmp_path: Path) -> None:
    spare = {f"{LAYERS}1.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        load_model(open_model(tiny("llama").save(tmp_path, spare)))


def test_of_equal_experts_the_first_are_chosen(loaded: Callable) -> None:
    weights = loaded("qwen3-moe").layers[0].ffn
    chosen, shares = route(torch.zeros(2, 7), weights)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(shares, torch.full((2, 3), 1 / 3))


def test_softmax_routers_choose_groups_by_their_best(loaded: Callable) -> None:
    weights = replace(loaded("qwen3-moe").layers[0].ffn, groups=3, group_top_k=1, top_k=2, renormalise=False, scale=2.0)
    logits = torch.tensor([[0.0, 1.0, 2.5, -9.0, 2.0, 2.4]])
    chosen, shares = route(logits, weights)
    assert chosen.tolist() == [[2, 3]]
    assert torch.allclose(shares, 2 * torch.softmax(logits, -1)[:, 2:4])


def test_work_and_shapes_follow_from_facts() -> None:
    shapes = Experts(3, 2, 5, shared_inner=7, shared_gate=True).linears(4)
    assert shapes["mlp.gate"] == (3, 4) and shapes["mlp.experts.2.down_proj"] == (4, 5)
    assert shapes["mlp.shared_expert.up_proj"] == (7, 4) and shapes["mlp.shared_expert_gate"] == (1, 4)
    assert len(shapes) == 1 + 9 + 3 + 1


def test_routers_keep_their_numbers_where_others_are_quantized(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("glm4-moe-packable").save(tmp_path)) as checkpoint:
        layer = load_model(checkpoint, LoadOptions(weights="mxfp4")).layers[1].ffn
    assert layer.router.nbytes >= 64 * 64 * 4
    assert layer.down[0].nbytes < 64 * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 1},
        {"top_k": 8, "renormalise": True, "shared_inner": 24, "shared_gate": True, "limit": 9.0, "shared_limit": 5.0},
        {"top_k": 4, "router": "softmax_topk", "act": "swiglu_oai", "limit": 7.0},
        {"top_k": 8, "router": "sigmoid", "choice_bias": True, "groups": 4, "group_top_k": 2, "shared_inner": 24},
        {"top_k": 6, "router": "sigmoid", "act": "relu2", "latent": 16, "shared_inner": 24, "gated": False},
    ],
    ids=lambda values: f"{values['top_k']}-{values.get('act', 'silu')}",
)
def test_the_plan_counts_what_pytorch_starts(values: dict[str, Any]) -> None:
    """For one token on a card, where norms and gates are one kernel each."""
    facts = Experts(**{"num_experts": 16, "inner": 24, **values})
    wide, size, bf16 = 24 * (1 + facts.gated), facts.latent or 32, torch.bfloat16
    weights = ExpertsWeights(
        Norm(torch.ones(32), 1e-6), product(16, 32, bf16), (product(wide, size, bf16),) * 16,
        (product(size, 24, bf16),) * 16, facts.top_k, facts.router, facts.act, facts.renormalise, facts.scale,
        torch.ones(16) if facts.choice_bias else None, facts.groups, facts.group_top_k,
        product(wide, 32, bf16) if facts.shared_inner else None, product(32, 24, bf16) if facts.shared_inner else None,
        product(1, 32, bf16) if facts.shared_gate else None, limit=facts.limit, shared_limit=facts.shared_limit,
        latent_in=product(16, 32, bf16) if facts.latent else None,
        latent_out=product(32, 16, bf16) if facts.latent else None,
    )  # fmt: skip
    one = {"rms_norm": lambda x, *_: x + 1, "silu_mul": lambda x, limit=None: x[:, :24] + 1, "gelu_tanh_mul": None}
    x = torch.randn(1, 32, dtype=bf16)
    with torch.no_grad(), Counting() as counted:
        composed("experts", one)(x, weights)
    assert facts.launches == pytest.approx(len(counted.started), rel=0.15)
