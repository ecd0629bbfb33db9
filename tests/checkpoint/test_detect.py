"""Every stored format is told by its tensors alone; missing scales and foreign layouts are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny

from localllm.checkpoint import Checkpoint, StoredFormat, TensorInfo, open_checkpoint, stored_formats
from localllm.checkpoint.formats import format_label
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.models.architectures import open_model
from localllm.models.architectures.architecture import Architecture
from localllm.models.architectures.names import hf_names
from localllm.models.architectures.registry import ARCHITECTURES

P = "model.layers.0.mlp.up_proj"
N, K = 256, 512


@dataclass
class Stored:
    """A model that has only tensors: suffix -> (dtype, shape), all below `P`."""

    suffixes: dict[str, tuple[str, tuple[int, ...]]]
    quantization_config: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("m")
    kind: str = "safetensors"
    metadata: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_files: dict[str, Path] = field(default_factory=dict)
    license: str = ""
    shape: tuple[int, int] = (N, K)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        sizes = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "I16": 2}
        file = self.path / "model.safetensors"
        return {
            f"{P}.{suffix}": TensorInfo(
                f"{P}.{suffix}", dtype, shape, int(np.prod(shape)) * sizes.get(dtype, 1), file, 0
            )
            for suffix, (dtype, shape) in self.suffixes.items()
        }

    def read(self, name: str) -> np.ndarray:
        assert name == f"{P}.weight_shape"
        return np.array(self.shape, "<i8").view(np.uint8)


def detect(suffixes: dict[str, tuple[str, tuple[int, ...]]], config: dict[str, Any] | None = None) -> StoredFormat:
    found = stored_formats(Stored(suffixes, config or {}))
    assert list(found) == [P]
    return found[P]


F8_BLOCK = {"weight": ("F8_E4M3", (N, K)), "weight_scale_inv": ("BF16", (2, 4))}
AWQ = {"qweight": ("I32", (K, N // 8)), "qzeros": ("I32", (K // 128, N // 8)), "scales": ("F16", (K // 128, N))}
GPTQ = {
    "qweight": ("I32", (K // 8, N)),
    "qzeros": ("I32", (K // 128, N // 8)),
    "scales": ("F16", (K // 128, N)),
    "g_idx": ("I32", (K,)),
}
PACK = {
    "weight_packed": ("I32", (N, K // 8)),
    "weight_scale": ("BF16", (N, K // 128)),
    "weight_shape": ("I64", (2,)),
}
CT_NVFP4 = {
    "weight_packed": ("U8", (N, K // 2)),
    "weight_scale": ("F8_E4M3", (N, K // 16)),
    "weight_global_scale": ("F32", (1,)),
}
MO_NVFP4 = {"weight": ("U8", (N, K // 2)), "weight_scale": ("F8_E4M3", (N, K // 16)), "weight_scale_2": ("F32", ())}
CASES: dict[str, tuple[dict, dict, str, dict]] = {
    # name: (tensors, config, kind, some params)
    "dense": ({"weight": ("BF16", (N, K))}, {}, "dense", {}),
    "dense_though_listed": ({"weight": ("F16", (N, K))}, {"quant_method": "awq", "bits": 4}, "dense", {}),
    "awq_gemm": (AWQ, {"quant_method": "awq"}, "awq_gemm", {"group_size": 128, "zero_point": True}),
    "awq_without_config": (AWQ, {}, "awq_gemm", {"group_size": 128}),
    "awq_gemv": (
        {"qweight": ("I32", (N, K // 8)), "qzeros": ("I32", (N, 1)), "scales": ("F16", (N, 8))},
        {"quant_method": "awq", "version": "gemv", "group_size": 128},
        "awq_gemv",
        {"group_size": 128},
    ),
    "awq_gemv_fast": (
        {"qweight": ("I16", (N // 4, K)), "qzeros": ("F16", (8, N)), "scales": ("F16", (8, N))},
        {"group_size": 128},
        "awq_gemv_fast",
        {"group_size": 128},
    ),
    "gptq": (GPTQ, {"bits": 4, "group_size": 128, "sym": True}, "gptq", {"bits": 4, "sym": True, "v2": False}),
    "gptq_v2": (GPTQ, {"checkpoint_format": "gptq_v2", "sym": False}, "gptq", {"v2": True, "sym": False}),
    "auto_round_as_gptq": (
        GPTQ,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": False},
        "gptq",
        {"v2": False},
    ),
    "auto_round_in_its_own_way": (GPTQ, {"packing_format": "auto_round", "sym": False}, "gptq", {"v2": True}),
    "auto_round_as_gptqmodel": (GPTQ, {"packing_format": "auto_round:gptqmodel"}, "gptq", {"v2": True}),
    "auto_round_of_2024": (
        GPTQ,
        {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2", "sym": False},
        "gptq",
        {"v2": True},
    ),
    "gptq_unlabelled": (GPTQ, {}, "gptq", {"bits": 4, "group_size": 128, "sym": None, "g_idx": True}),
    "gptq_without_g_idx": (
        {key: value for key, value in GPTQ.items() if key != "g_idx"},
        {"bits": 4},
        "gptq",
        {"g_idx": False},
    ),
    "gptq_8_bit": (
        {**GPTQ, "qweight": ("I32", (K // 4, N)), "qzeros": ("I32", (K // 128, N // 4))},
        {},
        "gptq",
        {"bits": 8},
    ),
    "gptq_8_bit_without_g_idx_among_others": (
        {"qweight": ("I32", (K // 4, N)), "qzeros": ("I32", (K // 128, N // 4)), "scales": ("F16", (K // 128, N))},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"a": {"bits": 8}}},
        "gptq",
        {"bits": 8, "group_size": 128},
    ),
    "gptq_whole_column": (
        {**GPTQ, "scales": ("F16", (1, N)), "qzeros": ("I32", (1, N // 8))},
        {"group_size": -1},
        "gptq",
        {"group_size": K},
    ),
    "pack": (PACK, {}, "ct_pack", {"bits": 4, "group_size": 128, "zero_point": None, "dense": True}),
    "pack_zero_points": (
        {**PACK, "weight_zero_point": ("I32", (N // 8, K // 128))},
        {},
        "ct_pack",
        {"zero_point": "packed"},
    ),
    "pack_plain_zero_points": (
        {**PACK, "weight_zero_point": ("I8", (N, K // 128))},
        {},
        "ct_pack",
        {"zero_point": "plain"},
    ),
    "pack_8_bit_channel": (
        {**PACK, "weight_packed": ("I32", (N, K // 4)), "weight_scale": ("F16", (N, 1))},
        {},
        "ct_pack",
        {"bits": 8, "group_size": K},
    ),
    "pack_3_bit_wasteful": (
        {**PACK, "weight_packed": ("I32", (N, 52))},
        {"config_groups": {"group_0": {"weights": {"num_bits": 3}}}},
        "ct_pack",
        {"bits": 3, "dense": False},
    ),
    "ct_nvfp4": (CT_NVFP4, {}, "nvfp4", {"codes": "weight_packed", "divides": True}),
    "modelopt_nvfp4": (MO_NVFP4, {}, "nvfp4", {"world": "weight_scale_2", "divides": False}),
    "mxfp4": (
        {"weight_packed": ("U8", (N, K // 2)), "weight_scale": ("U8", (N, K // 32))},
        {},
        "mxfp4",
        {"codes": "weight_packed"},
    ),
    "modelopt_mxfp4": (
        {"weight": ("U8", (N, K // 2)), "weight_scale": ("U8", (N, K // 32))},
        {},
        "mxfp4",
        {"codes": "weight"},
    ),
    "modelopt_int4": (
        {"weight": ("U8", (N // 2, K)), "weight_scale": ("F32", (N, 4)), "pre_quant_scale": ("BF16", (K,))},
        {},
        "modelopt_int4",
        {},
    ),
    "int8": ({"weight": ("I8", (N, K)), "weight_scale": ("BF16", (N, 1))}, {}, "int8", {}),
    "fp8_block": (F8_BLOCK, {"quant_method": "fp8"}, "fp8", {"scale": "weight_scale_inv"}),
    "fp8_tensor": ({"weight": ("F8_E4M3", (N, K)), "weight_scale": ("F32", ())}, {}, "fp8", {"scale": "weight_scale"}),
    "fp8_channel": (
        {"weight": ("F8_E4M3", (N, K)), "weight_scale": ("BF16", (N, 1))},
        {"quant_method": "compressed-tensors"},
        "fp8",
        {"scale": "weight_scale"},
    ),
    "fp8_modelopt_block": (
        {"weight": ("F8_E4M3", (N, K)), "weight_scale": ("F32", (2, 1, 4, 1))},
        {},
        "fp8",
        {"scale": "weight_scale"},
    ),
    "mxfp8": (
        {"weight": ("F8_E4M3", (N, K)), "weight_scale": ("U8", (N, K // 32))},
        {},
        "mxfp8",
        {"scale": "weight_scale"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_format(name: str) -> None:
    tensors, config, kind, params = CASES[name]
    found = detect({**tensors, "bias": ("F16", (N,))}, config)
    assert (found.kind, found.shape) == (kind, (N, K))
    assert {key: found.params[key] for key in params} == params


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        (without(AWQ, "scales"), "scales"),
        (without(AWQ, "qzeros"), "qzeros"),
        (without(GPTQ, "qzeros"), "qzeros"),
        (without(PACK, "weight_scale"), "weight_scale"),
        (without(CT_NVFP4, "weight_global_scale"), "weight_global_scale"),
        (without(CT_NVFP4, "weight_scale"), "weight_scale"),
        (without(MO_NVFP4, "weight_scale_2"), "weight_scale_2"),
        (without(MO_NVFP4, "weight_scale"), "weight_scale"),
        (without(F8_BLOCK, "weight_scale_inv"), "weight_scale"),
        ({"weight": ("I8", (N, K))}, "weight_scale"),
    ],
)
def test_a_missing_scale_is_an_error_and_never_one(tensors: dict[str, Any], missing: str) -> None:
    with pytest.raises(BadModelFile, match=rf"{P}.{missing}: is missing") as caught:
        stored_formats(Stored(tensors))
    assert caught.value.context["key"] == f"{P}.{missing}"


@pytest.mark.parametrize(
    "tensors",
    [
        {**AWQ, "scales": ("F16", (7, 99))},
        {**AWQ, "qzeros": ("I32", (1, 1))},
        {**GPTQ, "g_idx": ("I32", (K + 1,))},
        {**PACK, "weight_scale": ("BF16", (N, 7))},
        {**PACK, "weight_packed": ("I32", (N, 17))},
        {**CT_NVFP4, "weight_scale": ("F8_E4M3", (N, 1))},
        {**MO_NVFP4, "weight_scale_2": ("F32", (2,))},
        {**F8_BLOCK, "weight_scale_inv": ("F32", (3, 4))},
        {"weight": ("I8", (N, K)), "weight_scale": ("F32", (3,))},
        {"weight": ("F8_E4M3", (K,)), "weight_scale": ("F32", ())},
    ],
)
def test_shapes_that_do_not_fit(tensors: dict[str, Any]) -> None:
    with pytest.raises(BadModelFile, match=P):
        stored_formats(Stored(tensors))


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({"weight": ("U8", (N * K // 2, 1)), "absmax": ("F32", (8,))}, {}, "bitsandbytes"),
        ({"trellis": ("I16", (8, 8, 64))}, {}, "EXL3"),
        ({"W_q": ("U8", (N, K))}, {}, "HQQ"),
        ({"weight": ("U32", (N, K // 8)), "scales": ("F16", (N, 2)), "biases": ("F16", (N, 2))}, {}, "MLX"),
        (GPTQ, {"checkpoint_format": "gptq_p"}, "gptq_p"),
        (GPTQ, {"is_marlin_format": True}, "marlin"),
        (AWQ, {"bits": 3}, "AWQ with 3 bits"),
        ({"weight": ("F8_E5M2", (N, K)), "weight_scale": ("F32", ())}, {}, "F8_E5M2"),
        (F8_BLOCK | {"weight_scale_inv": ("F32", (4, 8))}, {"weight_block_size": [64, 64]}, "blocks of 64 x 64"),
        ({**MO_NVFP4, "svdquant_lora_a": ("BF16", (N, 8))}, {}, "NVFP4_SVD"),
        ({"weight": ("I32", (N, K))}, {}, "matrix of I32"),
        ({"weight": ("U32", (N, K // 8)), "scales": ("U8", (N, K // 32))}, {}, "layout of MLX"),
        ({"weight": ("U8", (N // 4, K)), "weight_scale": ("BF16", (1,))}, {}, "layout of BitNet"),
    ],
)
def test_foreign_layouts_are_named_with_what_works(tensors: dict[str, Any], config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedFormat, match=words) as caught:
        stored_formats(Stored(tensors, config))
    assert "GGUF" in caught.value.hint


@pytest.mark.parametrize(("place", "refused"), [("input", True), ("k_cache", True), ("weight_output", False)])
def test_rotations_outside_of_the_weights_are_refused(place: str, refused: bool) -> None:
    """SpinQuant's R4 turns what a layer takes; R1 and R2 were multiplied into the weights."""
    steps = [{"targets": ["re:.*up_proj$"], "location": "weight_input"}, {"targets": ["Linear"], "location": place}]
    config = {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": steps}}}}
    if not refused:
        assert detect(PACK, config).kind == "ct_pack"
        return
    with pytest.raises(UnsupportedFormat, match=r"transform_config: has layers .* rotated .* \(R4\)") as caught:
        stored_formats(Stored(PACK, config))
    assert "GGUF" in caught.value.hint


def test_vectors_and_lone_scales_are_no_modules() -> None:
    assert stored_formats(Stored({"weight": ("F32", (N,)), "k_scale": ("F32", ()), "sinks": ("BF16", (8,))})) == {}


def test_gguf_modules(tmp_path: Path) -> None:
    with open_model(tiny.tiny_gguf(tmp_path / "a.gguf", "Q4_1")) as checkpoint:
        found = stored_formats(checkpoint)
        assert found["blk.1.ffn_down"].shape == (64, 128)
        assert {stored.label for stored in found.values()} == {"Q4_1"}
        assert set(found) == {name.removesuffix(".weight") for name in checkpoint.tensors if "norm" not in name}
        assert format_label(found) == checkpoint.facts.stored_format == "Q4_1"


def test_quantization_config_is_found_where_tools_put_it(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4}
    folder = tiny.tiny_safetensors(tmp_path / "a", quantization_config=settings)
    assert open_checkpoint(folder).quantization_config == settings
    folder = tiny.tiny_safetensors(tmp_path / "b")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert open_checkpoint(folder).quantization_config["quantization"] == {"quant_algo": "NVFP4"}
    assert open_model(folder).facts.stored_format == "f32", "tensors first"


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.12.attn_output": "model.layers.12.self_attn.o_proj",
    "blk.3.ffn_gate": "model.layers.3.mlp.gate_proj",
    "blk.3.attn_k_norm": "model.layers.3.self_attn.k_norm",
    "blk.3.attn_norm": "model.layers.3.input_layernorm",
}


PLAIN = [one for one in ARCHITECTURES if one.name in ("llama", "qwen2", "qwen3", "gemma3")]


@pytest.mark.parametrize("architecture", PLAIN, ids=lambda one: one.name)
def test_names_in_gguf(architecture: Architecture) -> None:
    gemma = architecture.name == "gemma3"
    last = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    names = architecture.names(Checkpoint(Path("m.gguf"), "gguf", {}, {}))
    for theirs, ours in {**NAMES, "blk.1.ffn_norm": f"model.layers.1.{last}"}.items():
        assert names.source(ours) == theirs
    if gemma:
        assert names.source("model.layers.0.post_feedforward_layernorm") == "blk.0.post_ffw_norm"
        assert names.source("model.layers.0.post_attention_layernorm") == "blk.0.post_attention_norm"


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head"),
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
    ],
)
def test_names_of_wrapped_models(prefix: str, head: str) -> None:
    names = hf_names([f"{prefix}embed_tokens.weight", f"{head}.weight", "vision_tower.encoder.weight"])
    assert names.source("model.layers.2.mlp.up_proj") == f"{prefix}layers.2.mlp.up_proj"
    assert names.source("lm_head") == head and names.source("model.norm") == f"{prefix}norm"
    assert f"{head}.weight".startswith(names.text) and f"{prefix}norm.weight".startswith(names.text)
    assert not "vision_tower.encoder.weight".startswith(names.text)
    assert hf_names([]).source("lm_head") == "lm_head"
