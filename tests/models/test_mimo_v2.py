"""MiMo-V2: configurations as published, fused projections of GGUF files, and every KV format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from localllm.errors import UnsupportedModel
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model

from .test_gguf_models import ARCHITECTURE, gguf_logits

SINKS = "self_attn.sinks", "self_attn.attention_sink_bias"


def published(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration under the keys of the hub's files."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    ropes = config["rope_parameters"]
    left_out = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "routed_scaling_factor")
    found = {key: value for key, value in config.items() if key not in left_out}
    return found | {
        "hybrid_layer_pattern": [int(one) for one in windowed],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": config["rms_norm_eps"],
        "sliding_window": config["sliding_window"] - 1,
        "sliding_window_size": config["sliding_window"] - 1,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


@pytest.mark.parametrize("model_type", ["mimo_v2_flash", "mimo_v2"])
def test_published_files(model_type: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("mimo"), torch.randint(0, 99, (30,)).tolist()
    tensors = {name.replace(*SINKS): tensor for name, tensor in model.tensors.items()}
    tensors |= {"model.mtp.layers.0.enorm.weight": torch.ones(42), "visual.x.weight": torch.ones(2, 2)}
    config = published(model.config) | {"model_type": model_type}
    folder = replace(model, config=config, tensors=tensors).save(tmp_path)
    with open_model(folder) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    plain = model.config | {"routed_scaling_factor": 1.0}
    with open_model(replace(model, config=plain).save(tmp_path / "plain")) as checkpoint:
        expected = load_model(checkpoint, LoadOptions(exact=True))
    assert ours.facts.layers == expected.facts.layers
    assert torch.equal(paged(ours).all_logits(ids, [20]), paged(expected).all_logits(ids, [20]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swa_v_head_dim": 12}, "other values in windowed layers"),
        ({"swa_num_attention_heads": 3}, "other query heads in windowed layers"),
        ({"add_full_attention_sink_bias": True}, "sinks in other layers"),
        ({"n_shared_experts": 1}, "shared experts"),
    ],
)
def test_what_it_lacks_is_refused(changes: dict[str, Any], said: str, tiny: Callable, tmp_path: Path) -> None:
    model = tiny("mimo")
    folder = replace(model, config=published(model.config) | changes).save(tmp_path)
    with pytest.raises(UnsupportedModel, match=said), open_model(folder) as checkpoint:
        assert checkpoint.facts


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Queries, keys and values of each layer in one matrix, as V2.5 has them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[name] = tensor
    return found


def test_fused_projections(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("mimo"), torch.randint(0, 99, (40,)).tolist()
    one = replace(model, tensors=fused(model.tensors))
    rows = gguf_logits(one, paged, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, ids)
    expected = model.logits(ids)
    assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-4
    folder = one.save(tmp_path / "fused")
    with pytest.raises(UnsupportedModel, match="fused QKV, except as GGUF"), open_model(folder) as checkpoint:
        assert checkpoint.facts
    assert ARCHITECTURE[model.config["model_type"]] == "mimo2"


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_kv_formats(kv_format: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Zeros after a value change no scale, so most logits stay close to those over float32 pages."""
    model, ids = tiny("mimo"), torch.randint(0, 99, (60,)).tolist()
    with open_model(model.save(tmp_path)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    rows = paged(ours, kv=kv_format).all_logits(ids, [20, 40])
    expected = model.logits(ids)
    most = {"bf16": 0.01, "int8": 0.03, "fp8": 0.15}[kv_format]
    difference = float((rows - expected).abs().median() / expected.abs().median())
    assert difference < most
