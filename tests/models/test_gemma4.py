"""What Gemma 4 has beside its arithmetic: shared keys and values, inputs of layers, wrappers, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.kernels import OpFacts
from localllm.kernels.cpu import segments as cpu
from localllm.kernels.triton.ops import _attention_fits as attention_fits
from localllm.models.architectures import kv_bytes_per_token, open_model
from localllm.models.kv_cache import KVCache
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.memory import activation_bytes
from localllm.plan.placement import chosen_device
from localllm.plan.planner import Planner

IDS = list(range(3, 60))


def test_layers_read_the_keys_of_the_last_of_their_kind(loaded: Callable) -> None:
    model = loaded("gemma4-e2b")
    full, window = model.groups
    assert (full.layers, dict(full.readers)) == ((2,), {5: 2})
    assert (window.layers, dict(window.readers)) == ((0, 1), {3: 1, 4: 1})
    cache = KVCache(model.groups, [3, 5], 16, "bf16")
    assert cache.layers[5] is cache.layers[2] and cache.layers[3] is cache.layers[4] is cache.layers[1]
    counted = [
        kv_bytes_per_token([model.facts.layers[layer] for layer in group.layers], "bf16") for group in model.groups
    ]
    assert cache.nbytes == 16 * (3 * counted[0] + 5 * counted[1])
    assert kv_bytes_per_token(model.facts.layers, "bf16") == sum(counted) == 2 * 2 * (28 + 2 * 20)
    assert list(model.layers[5].mixer.qkv.parts)[0].shape == (4 * 28, 44)


@pytest.mark.parametrize("machine", ["cpu", "rtx4090"])
def test_the_plan_counts_a_table_that_is_held_and_not_read(machine: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("gemma4-e2b").save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.num_params == sum(tensor.numel() for tensor in tiny("gemma4-e2b").tensors.values()) - 6  # the scales
    assert facts.inputs is not None and facts.inputs.nbytes == 99 * 6 * 9 * 4
    made, less = (Planner(MACHINES[machine]).plan(one) for one in (facts, replace(facts, inputs=None)))
    assert made.weight_bytes - made.read_bytes >= facts.inputs.nbytes // 2
    assert activation_bytes(facts, 512, 4) >= activation_bytes(replace(facts, inputs=None), 512, 4) + 512 * 54 * 4
    assert less.num_pages == made.num_pages and len(made.num_pages) == 2


def test_a_card_without_tensor_cores_gathers_keys_of_large_heads(loaded: Callable) -> None:
    """Layers that see all have heads of 512, which kernels take from sm_80 on; the plan counts what PyTorch does."""
    small = loaded("gemma4-e2b").facts
    layers = tuple(replace(one, mixer=replace(one.mixer, head_dim=512)) for one in small.layers)
    wide, (gpu,) = replace(small, layers=layers), MACHINES["rtx4090"].gpus

    def work(facts: Any, capability: int) -> int:
        machine = replace(MACHINES["rtx4090"], gpus=(replace(gpu, capability=capability),))
        memory, _ = next(Planner(machine).formats(chosen_device(machine, "auto"), facts))
        return memory.work_terms(256)["activations"]

    assert work(small, 75) == work(small, 89)
    assert work(wide, 75) - work(wide, 89) == 4 * 256 * wide.num_kv_heads * 512 * 4 + (16 << 20)
    ops = replace(OpFacts(), device="cuda", dtype="float16", kv_format="fp16", head_dim=512)
    assert attention_fits(replace(ops, capability=89)) is None
    assert "at most 256" in str(attention_fits(replace(ops, capability=75)))


def test_a_wrapper_loads_its_text_part_and_says_so(
    tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path
) -> None:
    """As published: names below the wrapper, a tower, images that see both ways, tensors of layers that read others."""
    model = tiny("gemma4-e2b")
    text = {key: value for key, value in model.config.items() if key != "architectures"}
    tensors: dict[str, Any] = dict.fromkeys(model.tensors)
    tensors |= {name.replace("model.", "model.language_model.", 1): value for name, value in model.tensors.items()}
    spare = {f"model.language_model.layers.4.self_attn.{name}_proj.weight": torch.ones(20, 44) for name in "kv"}
    tower = {"model.vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight": torch.ones(4, 4)}
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    config |= {"text_config": text | {"use_bidirectional_attention": "vision"}}
    with open_model(model.save(tmp_path / "m", tensors | spare | tower, **config)) as checkpoint:
        facts = checkpoint.facts
        assert facts.architecture == "gemma4" and "vision_tower is not supported" in checkpoint.unread
        assert facts.weight_bytes == sum(tensor.nbytes for tensor in model.tensors.values())
        ours = load_model(checkpoint, LoadOptions(exact=True))
    assert torch.equal(paged(ours).all_logits(IDS, [40]), paged(loaded("gemma4-e2b")).all_logits(IDS, [40]))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma4-e2b", {"num_kv_shared_layers": 7}, "num_kv_shared_layers: must be 0 to 5, not 7"),
        ("gemma4-e2b", {"num_kv_shared_layers": 4}, "layer 2: shares the KV cache of a full-attention layer"),
        ("gemma4-e2b", {"num_kv_shared_layers": 2}, r"layers\.3\.self_attn\.k_proj\.weight: the weight is missing"),
        ("gemma4-e2b", {"use_double_wide_mlp": False}, r"the weight has shape \[140, 44\]"),
        ("gemma4-e2b", {"vocab_size_per_layer_input": 98}, "98 rows for a vocabulary of 99"),
        ("gemma4-e2b", {"hidden_size_per_layer_input": 10}, r"\[99, 54\], expected \[99, 60\]"),
        ("gemma4-e2b", {"use_bidirectional_attention": "all"}, "bidirectional attention"),
        ("gemma4-moe", {"top_k_experts": 6}, "top_k_experts: must be 1 to 5, not 6"),
        ("gemma4-moe", {"num_experts": None}, "num_experts: is missing"),
        ("gemma4-moe", {"moe_intermediate_size": 23}, r"\[22, 44\], expected \[23, 44\]"),
        ("gemma4-moe", {"hidden_size_per_layer_input": 8}, r"embed_tokens_per_layer\.weight: the weight is missing"),
    ],
)
def test_numbers_that_contradict_are_named(
    name: str, changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    with open_model(tiny(name).save(tmp_path, **changes)) as checkpoint:
        with pytest.raises((BadModelFile, UnsupportedModel), match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


def test_c_declines_what_it_has_never_heard_of(loaded: Callable) -> None:
    dense, mixture = loaded("qwen3").layers[0], loaded("qwen3-moe").layers[0]
    own, apart = loaded("gemma4-e2b").layers[0].ffn.input, loaded("gemma4-moe").layers[0].ffn.apart
    assert cpu.attention_layer(dense.mixer) and cpu.mlp_layer(dense.ffn) and cpu.experts_layer(mixture.ffn)
    for change in ({"reads_only": True}, {"k_is_v": True}):
        assert cpu.attention_layer(replace(dense.mixer, **change)) is None
    assert cpu.mlp_layer(replace(dense.ffn, input=own)) is None
    for change in ({"apart": apart}, {"expert_scales": torch.ones(7)}, {"layer_scale": 0.5}, {"input": own}):
        assert cpu.experts_layer(replace(mixture.ffn, **change)) is None
