"""Multi-modal models whose text part runs here: its logits against transformers, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.checkpoint import Checkpoint
from localllm.models.architectures import open_model, registry
from localllm.models.loader import LoadOptions, load_model

TEXT = {
    "vocab_size": 99, "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = {  # whatever a tower calls its sizes
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_attention_heads": 2,
    "num_heads": 2, "out_hidden_size": 40, "patch_size": 14, "image_size": 28, "embed_dim": 64, "d_model": 64,
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16,
}  # fmt: skip
TOKENS = dict.fromkeys(("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"), 98)
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 1]}
WIDE = {"head_dim": 16, "rope_parameters": MROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_MOE = EXPERTS | {"n_routed_experts": 6, "head_dim": 16}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "head_dim": 24,
}  # fmt: skip
# transformers multiplies no logits in these wrappers, which the models were trained with: 1 in the tests
COHERE = {"logit_scale": 1.0, "sliding_window": 24}
LLAMA = {"model_type": "llama"}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
WRAPPERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": MROPE},
    "llava": LLAMA,
    **dict.fromkeys(("llava_next", "llava_next_video", "video_llava", "vipllava", "idefics3", "smolvlm"), LLAMA),
    **dict.fromkeys(("janus", "deepseek_vl", "deepseek_vl_hybrid", "voxtral"), LLAMA),
    "idefics2": {"model_type": "mistral"},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3_vl": WIDE,
    "qwen3_vl_moe": WIDE | EXPERTS,
    **dict.fromkeys(("internvl", "llava_onevision", "got_ocr2", "fast_vlm", "ovis2"), {"model_type": "qwen2"}),
    **dict.fromkeys(("video_llama_3", "qwen2_audio"), {"model_type": "qwen2"}),
    "lighton_ocr": {"model_type": "qwen3", "head_dim": 16},
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"), {"model_type": "qwen3_5_text"} | DELTA),
    "lfm3_vl": {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "sliding_attention"]},
    "lfm2_vl": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    **dict.fromkeys(("aya_vision", "cohere2_vision"), {"model_type": "cohere2"} | COHERE),
    "exaone4_5": {"model_type": "exaone4", "head_dim": 16, "sliding_window": 24, "layer_types": WINDOWS},
    "glm4v": {"rope_parameters": MROPE},
    "glm46v": {"model_type": "glm4v_text", "rope_parameters": MROPE},
    "glm4v_moe": GLM_MOE | {"rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "granite4_vision": GRANITE | {"logits_scaling": 7.0},
    "granite_docling": GRANITE,
    "llava_next-granite": {"model_type": "granite", **GRANITE},
    "internvl-qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
}
SEE = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # whose towers are computed
OTHERS: dict[str, dict[str, Any]] = {
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "fast_vlm": {"vision_config": TOWER | {"model_type": "clip_vision_model"}},  # its own needs another package
    "qwen2_5_vl": {"vision_config": TOWER | {"fullatt_block_indexes": [1]}},
    **dict.fromkeys(SEE[1:], {"vision_config": TOWER | {"deepstack_visual_indexes": [0]}}),
}
FAST = ("qwen2_vl", "llava")
NAMES = tuple(name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in WRAPPERS)
IDS = torch.randint(3, 96, (80,), generator=torch.Generator().manual_seed(0)).tolist()


def made(name: str, tiny_of: Callable) -> Any:
    """The tiny model of that entry of WRAPPERS."""
    wrapper, tower = name.partition("-")[0], {f"{sense}_config": dict(TOWER) for sense in ("vision", "audio")}
    values = {**tower, **TOKENS, "text_config": TEXT | WRAPPERS[name], "projector_hidden_size": 32, "pad_token_id": 0}
    if wrapper not in ("voxtral", "qwen2_audio"):
        del values["audio_config"]
    return tiny_of(wrapper, values | OTHERS.get(wrapper, {}))


@pytest.mark.parametrize("name", NAMES)
def test_text_parts_match_transformers_and_say_that_they_are_all(
    name: str, tiny_of: Callable, paged: Any, tmp_path: Path
) -> None:
    model = made(name, tiny_of)
    model.reference.save_pretrained(tmp_path)  # by the names that are published
    with open_model(tmp_path) as checkpoint:
        facts = checkpoint.facts
        text_only = checkpoint.unread.endswith("is not supported: the model reads text only")
        assert text_only == (name not in SEE) and bool(checkpoint.unread) == text_only
        if "-" not in name:
            assert registry.canonical(facts.source_architecture) == facts.architecture
        ours = load_model(checkpoint, LoadOptions(exact=True))
    reference = model.logits(IDS)
    assert float((paged(ours).all_logits(IDS, [33, 1, 40]) - reference).abs().max() / reference.abs().max()) < 1e-4


def test_flat_configurations_of_qwen2_vl_are_read(tiny_of: Callable, tmp_path: Path) -> None:
    """As published: the text model's values beside the tower's, positions in three dimensions called by their name."""
    model = made("qwen2_vl", tiny_of)
    text = {key: value for key, value in model.config.pop("text_config").items() if key not in ("model_type",)}
    scaling = {"type": "mrope", "mrope_section": [2, 2, 1]}
    flat = text | model.config | {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 1e6}
    model.config = flat
    with open_model(model.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.architecture == "qwen2" and facts.ropes[0].theta == 1e6 and facts.ropes[0].scaling == "none"
    assert facts.hidden_size == 40 and facts.rms_norm_eps == text["rms_norm_eps"]


def test_sizes_that_llava_leaves_out_are_those_of_its_text_model() -> None:
    text = {"model_type": "llama", "vocab_size": 32_064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    config = {"model_type": "llava", "text_config": text}
    facts, _ = registry.understand(Checkpoint(Path("llava"), "safetensors", {}, {}, config=config))
    assert (facts.hidden_size, facts.num_layers, facts.num_heads, facts.intermediate_size) == (4096, 32, 32, 11_008)
    assert (facts.vocab_size, facts.max_context) == (32_064, 4096)


def test_experts_of_qwen3_vl_lie_either_way_round(tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """Published files have inputs along the rows, those of transformers 5 along the columns."""
    model = made("qwen3_vl_moe", tiny_of)
    stacks = {name: tensor.transpose(1, 2) for name, tensor in model.tensors.items() if ".experts." in name}
    with open_model(model.save(tmp_path, stacks)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    reference = model.logits(IDS)
    assert float((paged(ours).all_logits(IDS, [40]) - reference).abs().max() / reference.abs().max()) < 1e-4


def test_llama4_as_it_is_published(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    model = tiny("llama4")
    names = {f"language_model.{name}": tensor for name, tensor in model.tensors.items()}
    tower = {
        "vision_model.layernorm_pre.weight": torch.ones(8),
        "multi_modal_projector.linear_1.weight": torch.ones(42, 8),
    }
    top = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": model.config}
    with open_model(replace(model, config=top, tensors=names | tower).save(tmp_path)) as checkpoint:
        assert checkpoint.facts.architecture == registry.canonical(checkpoint.facts.source_architecture) == "llama4"
        assert checkpoint.unread == "vision_model is not supported: the model reads text only"
        ours = load_model(checkpoint, LoadOptions(exact=True))
    assert torch.equal(paged(ours).all_logits(IDS, [33, 1, 40]), paged(loaded("llama4")).all_logits(IDS, [33, 1, 40]))
