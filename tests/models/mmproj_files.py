"""Tiny models with a tower as llama.cpp's converter writes them: a text model, and an mmproj file beside it.

Tensors get their names from the `gguf` package, which is the converter's own table. What the converter does besides is
in llama.cpp's conversion/base.py (`MmprojModel`), qwen3vl.py and gemma.py: which keys there are; Qwen's patches are
taken apart by frames, its merger is mm.0 and mm.2, the other mergers are called by their layers; the norm of Gemma 3's
projector has 1 added; a patch of Gemma 4 has its colours one after the other, and its bounds are vectors of one number.

llama-cpp-python 0.3.36 (libmtmd 0.5.0) reads those of Gemma 3, Qwen3.5, Qwen3-VL, Mistral 3 and Qwen2.5-VL: its
vectors, on the CPU with flash attention, were within 4e-4, 1e-3, 6e-4, 7e-4 and 7e-4 of the largest element of ours (by
hand, one image).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from localllm.models.architectures.qwen_vision import CLIP_MEAN, CLIP_STD

from .test_gguf_models import write_gguf
from .test_images import Pictured

F32 = gguf.GGMLQuantizationType.F32
TYPES = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl"), "qwen3vl_merger") | {
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
}
TYPES |= {"mistral3": "pixtral", "qwen2_5_vl": "qwen2.5vl_merger"}
TOKENS = {
    **dict.fromkeys(("qwen3vl_merger", "qwen2.5vl_merger"), {"image_token_id": "<|image_pad|>"}),
    "gemma3": {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
               "eoi_token_index": "<end_of_image>"},
    "pixtral": {"image_token_index": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"},
    "gemma4v": {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
}  # fmt: skip
_OF_TEXT = re.compile(r"(model\.)?language_model\.(model\.)?")
_DEEP = re.compile(r"visual\.deepstack_merger_list\.(\d+)\.")
_SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def as_gguf(
    made: Pictured,
    folder: Path,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    name: str = "mmproj-F32.gguf",
    strings: dict[str, str] | None = None,
    tokens: list[str] | None = None,
    **keys: Any,
) -> Path:
    """The text model as model.gguf, which is returned, and its tower beside it under `name`.

    strings   more metadata of the text model; `tokens`: its vocabulary
    keys      of `write_mmproj`
    """
    folder.mkdir(parents=True, exist_ok=True)
    projector = TYPES[made.config["model_type"]]
    text = dict(made.config["text_config"])
    tokens = tokens or [f"t{index}" for index in range(text["vocab_size"])]
    for key, spelled in TOKENS[projector].items():
        tokens[made.config.get(key) or {"break": 12, "end": 13}[key]] = spelled
    own = {_OF_TEXT.sub("model.", one): tensor for one, tensor in made.tensors.items() if "language_model." in one}
    own |= {one: tensor for one, tensor in made.tensors.items() if one.startswith("lm_head.")}
    path = write_gguf(folder / "model.gguf", text | {"tokens": tokens, "strings": strings or {}}, own, F32)
    write_mmproj(folder / name, made, kind, **keys)
    return path


def write_mmproj(path: Path, made: Pictured, kind: gguf.GGMLQuantizationType = F32, **keys: Any) -> Path:
    """`keys` replace those of the file, None leaves one out; `drop` is the start of names of tensors that are not
    written.
    """
    config, vision = made.config, made.config["vision_config"]
    projector = TYPES[config["model_type"]]
    drop = keys.pop("drop", "-")
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    if projector in ("pixtral", "qwen2.5vl_merger"):
        writer.add_vision_use_silu(True)
    else:
        writer.add_vision_use_gelu(True)
    depth = vision.get("depth") or vision["num_hidden_layers"]
    values = {
        "projector_type": projector,
        "projection_dim": config["text_config"]["hidden_size"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": depth,
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **_of_kind(projector, config, vision),
    } | keys
    for key, value in values.items():
        key = "clip.projector_type" if key == "projector_type" and projector != "gemma4v" else f"clip.vision.{key}"
        adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            adders[type(value)](key, value)
    embedding = next(tensor for name, tensor in made.tensors.items() if name.endswith("embed_tokens.weight"))
    more = {"v.token_embd.img_break": embedding[12]} if projector == "pixtral" else {}
    for name, tensor in (*_tensors(projector, vision, made.tensors), *more.items()):
        if name.startswith(drop):
            continue
        plain = tensor.ndim < 2 or "embd" in name or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
        stored = F32 if plain else kind
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _of_kind(projector: str, config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    if projector == "qwen3vl_merger":
        side = round(vision["num_position_embeddings"] ** 0.5)
        taps = vision.get("deepstack_visual_indexes", ())
        sizes = {"image_size": side * vision["patch_size"], "spatial_merge_size": vision.get("spatial_merge_size", 2)}
        return sizes | {"is_deepstack_layers": [layer in taps for layer in range(vision["depth"])]}
    if projector == "qwen2.5vl_merger":
        every = vision["fullatt_block_indexes"][0] + 1
        sizes = {"image_size": 560, "n_wa_pattern": every, "window_size": vision["window_size"]}
        return sizes | {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    if projector == "pixtral":
        sizes = {"image_size": vision["image_size"], "spatial_merge_size": config["spatial_merge_size"]}
        eps = {"attention.layer_norm_epsilon": config["text_config"]["rms_norm_eps"]}
        return sizes | eps | {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    if projector == "gemma4v":
        return {"image_size": 224, "projector.scale_factor": vision["pooling_kernel_size"]}
    side = vision["image_size"] // vision["patch_size"]
    step = side // round(config["mm_tokens_per_image"] ** 0.5)
    return {"image_size": vision["image_size"], "projector.scale_factor": step if step != 4 else None}


def _tensors(projector: str, vision: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    depth = vision.get("depth") or vision["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(depth, 3))  # two of a projector are numbered, too
    for name, tensor in tensors.items():
        if "language_model." in name or name.startswith(("lm_head.", "mtp.")):
            continue
        if projector in ("qwen3vl_merger", "qwen2.5vl_merger"):
            yield from _of_qwen(name.removeprefix("model."), tensor, names, vision)
            continue
        if projector == "pixtral":
            yield from _of_pixtral(name.removeprefix("model."), tensor, names, vision)
            continue
        if projector == "gemma3":
            name = name.removeprefix("model.").replace("_weight", ".weight")
            if name.startswith("vision_tower.") and "vision_model." not in name:
                name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
            tensor = tensor + 1 if "soft_emb_norm" in name else tensor
        else:
            name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(
                ".linear.weight", ".weight"
            )
            name += ".weight" * name.endswith("position_embedding_table")
            tensor = tensor[None] if tensor.ndim == 0 else tensor
            if name.endswith("input_proj.weight"):
                side = round((tensor.shape[1] / 3) ** 0.5)
                tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2)
        yield _mapped(names, name), tensor


def _of_qwen(name: str, tensor: Tensor, names: Any, vision: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif ".qkv." in name and "fullatt_block_indexes" in vision:
        for kind, part in zip("qkv", tensor.chunk(3), strict=True):
            yield _mapped(names, name.replace("qkv", kind)), part
    elif name.startswith("visual.merger."):
        for theirs, own in (("linear_fc1", "mm.0"), ("linear_fc2", "mm.2"), ("norm", "v.post_ln"),
                            ("mlp.0", "mm.0"), ("mlp.2", "mm.2"), ("ln_q", "v.post_ln")):  # fmt: skip
            if f".{theirs}." in name:
                yield f"{own}.{name.rpartition('.')[2]}", tensor
    elif match := _DEEP.match(name):
        layer = vision["deepstack_visual_indexes"][int(match[1])]
        yield _mapped(names, name.replace(match[0], f"model.visual.deepstack_merger_list.{layer}.")), tensor
    else:
        yield _mapped(names, name), tensor


def _of_pixtral(name: str, tensor: Tensor, names: Any, vision: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Queries and keys have the two numbers that turn together side by side."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = (
            tensor.view(vision["num_attention_heads"], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        )
    yield _mapped(names, name), tensor


def _mapped(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=_SUFFIXES)
    assert found is not None, name
    return str(found)


def rounded(tensors: dict[str, Tensor], kind: gguf.GGMLQuantizationType) -> dict[str, Tensor]:
    """Matrices with what is left of them in a block type."""
    return {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.contiguous().numpy(), kind), kind))
        if tensor.ndim == 2 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        else tensor
        for name, tensor in tensors.items()
    }
