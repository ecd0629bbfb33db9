"""Images for GGUF models: the vision tower of an `mmproj` file, as the same facts and tensors as from safetensors.

llama.cpp's converter writes it next to the text model: `general.architecture` is clip, `clip.projector_type` or
`clip.vision.projector_type` names the tower, `clip.vision.*` has its hyper-parameters, and `v.*` and `mm.*` are its
tensors. Differences from safetensors: Gemma 3's projector norm already includes the added 1, Qwen's patch embedding is
one tensor per frame, Gemma 4's patches are stored as colour planes, and queries and keys of Mistral 3's tower rotate by
adjacent pairs. The image tokens are looked up in the text model's vocabulary.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localllm.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, Fields
from localllm.checkpoint.mapped_file import bad, shown
from localllm.checkpoint.opening import inside
from localllm.errors import BadModelFile, ModelNotFound, UnsupportedModel
from localllm.paths import folders_near, is_projector, projector_rank

from .facts import ModelFacts
from .gemma3 import gemma3_vision
from .gemma4_vision import TOKENS, gemma4_vision
from .hf import Described
from .pixtral_vision import described_rows
from .qwen_vision import GATED_SECTIONS, SECTIONS, grid_vision, in_sections, interleaved
from .vision import ImageFacts, PooledFacts

AUTO, OFF = "auto", "off"  # the file next to the model, or none; any other value is a path
OTHER_HINT = "use the mmproj file of the same model, or --mmproj off for text only"
_LAYER = "vision.encoder.layers.{}."
_GRID = {
    "v.patch_embd": "vision.patch_embed.proj",
    "v.position_embd": "vision.pos_embed",
    "ln1": "vision.blocks.{}.norm1",
    "attn_qkv": "vision.blocks.{}.attn.qkv",
    "attn_out": "vision.blocks.{}.attn.proj",
    "ln2": "vision.blocks.{}.norm2",
    "ffn_up": "vision.blocks.{}.mlp.linear_fc1",
    "ffn_down": "vision.blocks.{}.mlp.linear_fc2",
    "v.post_ln": "vision.merger.norm",
    "deepstack norm": "vision.deepstack_merger_list.{}.norm",
    **{f"deepstack fc{number}": f"vision.deepstack_merger_list.{{}}.linear_fc{number}" for number in (1, 2)},
    "mm.0": "vision.merger.linear_fc1",
    "mm.2": "vision.merger.linear_fc2",
}
_GATED = {
    **{name: ours for name, ours in _GRID.items() if not name.startswith(("deepstack", "attn", "ffn", "v.position"))},
    **{f"attn_{name}": f"vision.blocks.{{}}.attn.{name}" for name in "qkv"},
    "attn_out": _GRID["attn_out"],
    **{f"ffn_{name}": f"vision.blocks.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_SIGLIP = {
    "v.patch_embd": "vision.embeddings.patch_embedding",
    "v.position_embd": "vision.embeddings.position_embedding",
    "ln1": f"{_LAYER}layer_norm1",
    **{f"attn_{name}": f"{_LAYER}self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
    "ln2": f"{_LAYER}layer_norm2",
    "ffn_up": f"{_LAYER}mlp.fc1",
    "ffn_down": f"{_LAYER}mlp.fc2",
    "v.post_ln": "vision.post_layernorm",
    "mm.soft_emb_norm": "projector.mm_soft_emb_norm",
    "mm.input_projection.weight": "projector.mm_input_projection_weight",
}
_CLIPPED = {
    **{f"attn_{name}": f"{_LAYER}self_attn.{name}_proj" for name in "qkv"},
    "attn_out": f"{_LAYER}self_attn.o_proj",
    **{f"ffn_{name}": f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_POOLED = {
    "v.patch_embd": "vision.patch_embedder.input_proj",
    "v.position_embd.weight": "vision.patch_embedder.position_embedding_table",
    "ln1": f"{_LAYER}input_layernorm",
    **_CLIPPED,
    **{f"{name}.weight": f"{ours}.linear.weight" for name, ours in _CLIPPED.items()},
    "attn_q_norm": f"{_LAYER}self_attn.q_norm",
    "attn_k_norm": f"{_LAYER}self_attn.k_norm",
    "attn_post_norm": f"{_LAYER}post_attention_layernorm",
    "ln2": f"{_LAYER}pre_feedforward_layernorm",
    "ffn_post_norm": f"{_LAYER}post_feedforward_layernorm",
    "v.std_bias": "vision.std_bias",
    "v.std_scale": "vision.std_scale",
    "mm.input_projection": "projector.embedding_projection",
}
_ROW = "vision.transformer.layers.{}."
_ROWS = {
    "v.patch_embd": "vision.patch_conv",
    "v.pre_ln": "vision.ln_pre",
    "ln1": f"{_ROW}attention_norm",
    **{f"attn_{name}": f"{_ROW}attention.{name}_proj" for name in "qkv"},
    "attn_out": f"{_ROW}attention.o_proj",
    "ln2": f"{_ROW}ffn_norm",
    **{f"ffn_{name}": f"{_ROW}feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    "mm.input_norm": "projector.norm",
    "mm.patch_merger": "projector.patch_merger.merging_layer",
    "mm.1": "projector.linear_1",
    "mm.2": "projector.linear_2",
    "v.token_embd.img_break": "vision.img_break",  # unused: a copy of a row of the text model's embedding
}


@dataclass(frozen=True)
class Projector:
    """An open mmproj file with its tensors under canonical names, and its text model."""

    file: Checkpoint
    model: Checkpoint
    text: ModelFacts

    @property
    def keys(self) -> Fields:
        return Fields(self.file.path, self.file.metadata, "clip.vision.")

    def described(self, top: Mapping[str, Any], vision: Mapping[str, Any], **processor: int) -> Described:
        """A `Described` with `top`, and with `vision` and the common keys as `vision_config`."""
        own = self.numbers(num_hidden_layers="block_count", hidden_size="embedding_length", patch_size="patch_size")
        own |= self.numbers(intermediate_size="feed_forward_length", num_attention_heads="attention.head_count")
        path, windows = self.file.path, self.text.windows
        colours = {name: found.tolist() for name in ("image_mean", "image_std")
                   if isinstance(found := self.keys.raw(name), np.ndarray)}  # fmt: skip
        return Described(
            Fields(path, {**top, "vision_config": {**own, **vision}}), Fields(path, colours | processor),
            self.file.nbytes, self.text.hidden_size, self.text.vocab_size, next(filter(None, windows), None),
        )  # fmt: skip

    def numbers(self, **names: str) -> dict[str, int]:
        """Read required sizes: our name -> the key in the file."""
        return {ours: self.keys.integer(theirs, 1, 1 << 20) for ours, theirs in names.items()}

    def tokens(self, **texts: str) -> dict[str, int]:
        """Ids of tokens in the text model's vocabulary; Gemma 3 files often lack the placeholder for a vector."""
        listed = self.model.metadata.get("tokenizer.ggml.tokens", [])
        found = {}
        for name, text in texts.items():
            spelled = next((one for one in (text.encode(), _ALTERNATIVES.get(text)) if one in listed), None)
            if spelled is None:
                what = f"the vocabulary has no {text} token, which images need"
                raise bad(self.model.path, what, key="tokenizer.ggml.tokens", hint=OTHER_HINT, error=UnsupportedModel)
            found[name] = listed.index(spelled)
        return found

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a required tensor with `dims` dimensions."""
        info = self.file.tensors.get(name)
        if info is None or len(info.shape) != dims:
            what = "the tensor is missing" if info is None else f"has shape {list(info.shape)}"
            raise bad(self.file.path, what, key=name)
        return info.shape


_ALTERNATIVES = {"<image_soft_token>": b"<mask>"}  # a control token, which no text can produce


def _grid(found: Projector) -> ImageFacts | None:
    square = found.numbers(image="image_size", patch="patch_size")
    sizes: dict[str, Any] = {"num_position_embeddings": (square["image"] // square["patch"]) ** 2}
    sizes["deepstack_visual_indexes"] = _taps(found.file)
    axes = interleaved(_sections(found, SECTIONS), found.text.ropes[0].dim // 2)
    facts = grid_vision(_described_grid(found, sizes), axes)
    return facts and replace(facts, kernels=("", ".1"))


def _gated(found: Projector) -> ImageFacts | None:
    keys = found.keys
    every, depth = keys.integer("n_wa_pattern", 1, MAX_LAYERS), keys.integer("block_count", 1, MAX_LAYERS)
    sizes = {"window_size": keys.integer("window_size", 1, 1 << 16, 112)}
    whole = {"fullatt_block_indexes": list(range(every - 1, depth, every))}
    axes = in_sections(_sections(found, GATED_SECTIONS)[:3], found.text.ropes[0].dim // 2)
    facts = grid_vision(_described_grid(found, sizes | whole), axes, gated=True)
    return facts and replace(facts, kernels=("", ".1"), apart=True)


def _described_grid(found: Projector, sizes: Mapping[str, Any]) -> Described:
    own = found.numbers(depth="block_count", num_heads="attention.head_count", out_hidden_size="projection_dim")
    own |= {"temporal_patch_size": 1, "spatial_merge_size": found.keys.integer("spatial_merge_size", 1, 16, 2)}
    return found.described(found.tokens(image_token_id="<|image_pad|>"), {**own, **sizes})


def _sections(found: Projector, usual: list[int]) -> list[int]:
    """How many pairs rotate by time, by row and by column."""
    stated = found.model.metadata.get(f"{found.text.source_architecture}.rope.dimension_sections")
    if isinstance(stated, np.ndarray) and stated.dtype.kind in "iu" and len(stated) > 2:
        return list(stated.tolist())
    return usual


def _siglip(found: Projector) -> ImageFacts | None:
    keys, sizes = found.keys, found.numbers(image_size="image_size", patch_size="patch_size")
    step = keys.integer("projector.scale_factor", 1, 64, 4)
    eps = {"layer_norm_eps": keys.number("attention.layer_norm_epsilon", 1e-12, 0.1, 1e-6)}
    across = sizes["image_size"] // sizes["patch_size"] // step
    top = found.tokens(
        image_token_index="<image_soft_token>", boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>"
    )
    return gemma3_vision(found.described(top | {"mm_tokens_per_image": across**2}, sizes | eps))


def _rows(found: Projector) -> ImageFacts | None:
    keys, both = found.keys, Fields(found.file.path, found.file.metadata, "clip.")
    if "projector.patch_merger.merging_layer.weight" not in found.file.tensors or not both.flag("use_silu"):
        return None  # Pixtral 12B, without a patch merger, or another activation
    vision = found.numbers(image_size="image_size", num_hidden_layers="block_count")
    top = found.tokens(image_token_id="[IMG]", image_break_token_id="[IMG_BREAK]", image_end_token_id="[IMG_END]") | {
        "spatial_merge_size": keys.integer("spatial_merge_size", 1, 16, 1)
    }
    top |= {"multimodal_projector_bias": "projector.linear_1.bias" in found.file.tensors}
    eps = keys.number("attention.layer_norm_epsilon", 1e-12, 0.1, 1e-5)
    facts = described_rows(found.described(top, {**vision, "hidden_act": "silu"}), eps)
    return facts and replace(facts, paired=True)


def _pooled(found: Projector) -> ImageFacts | None:
    keys, layer = found.keys, f"{_LAYER}self_attn.".format(0)
    [dim] = found.shape(f"{layer}q_norm.weight", 1)
    step = keys.integer("projector.scale_factor", 1, 16, 3)
    places = found.shape("vision.patch_embedder.position_embedding_table", 3)[1]
    vision = {
        "head_dim": dim,
        "num_key_value_heads": found.shape(f"{layer}k_proj.linear.weight", 2)[0] // dim,
        "pooling_kernel_size": step,
        "position_embedding_size": places,
        "rms_norm_eps": keys.number("attention.layer_norm_epsilon", 1e-12, 0.1, 1e-6),
        "use_clipped_linears": f"{layer}q_proj.input_min" in found.file.tensors,
        "standardize": "vision.std_bias" in found.file.tensors,
    }
    top = found.tokens(image_token_id="<|image|>", boi_token_id="<|image>", eoi_token_id="<image|>")
    # not stored in the file: image tokens attend to each other in all models without per-layer inputs
    given = found.described(top, vision, max_soft_tokens=max(1, min(TOKENS, places // step)))
    facts = gemma4_vision(given, "" if found.text.inputs is not None else "windowed")
    return replace(facts, planar=True) if isinstance(facts, PooledFacts) else None


class Kind(NamedTuple):
    """A supported projector type."""

    decoders: tuple[str, ...]  # `general.architecture` of its text models
    names: Mapping[str, str]  # tensor or module, below `v.blk.N.` or in full -> canonical name, {} for N
    facts: Callable[[Projector], ImageFacts | None]


KINDS = {
    "qwen3vl_merger": Kind(("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), _GRID, _grid),
    "qwen2.5vl_merger": Kind(("qwen2vl",), _GATED, _gated),
    "pixtral": Kind(("llama", "mistral3", "mistral4"), _ROWS, _rows),
    "gemma3": Kind(("gemma3",), _SIGLIP, _siglip),
    "gemma4v": Kind(("gemma4",), _POOLED, _pooled),
}


def tower_of(model: Checkpoint, text: ModelFacts, wish: str) -> tuple[Checkpoint, ImageFacts] | None:
    """The mmproj file to use, with its tensors under canonical names, and its facts; None if there is none.

    wish   AUTO, OFF or a path

    Raises BadModelFile, UnsupportedModel or ModelNotFound if the given file, or every candidate next to the model, is
    unusable. Files next to the model that belong to other model families are skipped.
    """
    if wish == OFF or (wish == AUTO and text.pooling):
        return None
    if wish != AUTO:
        named = Path(wish).expanduser()
        if not named.exists():
            raise ModelNotFound(f"{wish}: no such mmproj file", hint=OTHER_HINT)
        return _read(named, model, text, named=True)
    flaw: BadModelFile | ModelNotFound | None = None
    for path in (
        _candidates(model.path) if any(text.source_architecture in kind.decoders for kind in KINDS.values()) else ()
    ):
        try:
            found = _read(path, model, text)
        except (BadModelFile, ModelNotFound) as error:
            flaw = flaw or error
            continue
        if found is not None:
            return found
    if flaw is not None:
        raise flaw
    return None


def _candidates(path: Path) -> Iterator[Path]:
    """The mmproj files in a model's folder and at the top of its repository, best match first."""
    folders = folders_near(path)
    top = folders[-1]
    for folder in folders:
        found = [file for file in folder.glob("*.gguf") if is_projector(file.name)]

        def likely(file: Path) -> tuple[Any, ...]:
            alike = os.path.commonprefix([file.name.lower(), path.name.lower()])
            return -len(alike), projector_rank(file.name), file.name

        yield from (inside(top, str(file.relative_to(top))) for file in sorted(found, key=likely))


def _read(path: Path, model: Checkpoint, text: ModelFacts, named: bool = False) -> tuple[Checkpoint, ImageFacts] | None:
    """Read one file; None if it belongs to another family and was not `named` by the user."""
    file = open_checkpoint(path)
    try:
        keys = Fields(path, file.metadata, "clip.")
        if Fields(path, file.metadata).text("general.architecture") != "clip":
            raise bad(path, "is a model, not an mmproj file", hint=OTHER_HINT, error=UnsupportedModel)
        name = keys.text("projector_type") or keys.text("vision.projector_type")
        kind = KINDS.get(name)
        if kind is None:
            what = f"the projector type {shown(name) or '(none)'} is not supported; supported: {', '.join(KINDS)}"
            raise bad(path, what, hint=OTHER_HINT, error=UnsupportedModel)
        if text.source_architecture not in kind.decoders:
            if not named:
                file.close()
                return None
            what = f"is for {' and '.join(kind.decoders)}, not for {text.source_architecture}"
            raise bad(path, what, hint=OTHER_HINT, error=UnsupportedModel)
        width = keys.integer("vision.projection_dim", 1, 1 << 20)
        if width != text.hidden_size:
            what = f"is for a model of hidden size {width:,}, but this model's hidden size is {text.hidden_size:,}"
            raise bad(path, what, key="clip.vision.projection_dim", hint=OTHER_HINT, error=UnsupportedModel)
        found = Projector(replace(file, tensors=_renamed(file, kind.names)), model, text)
        facts = kind.facts(found)
        if facts is None:
            raise bad(path, "describes an image encoder that is not supported", hint=OTHER_HINT, error=UnsupportedModel)
        return found.file, facts
    except BaseException:
        file.close()
        raise


_BLOCK, _TOP = re.compile(r"v\.blk\.(\d{1,4})\.(\w+)(\..+)"), re.compile(r"()((?:v|mm)\.\w+)(.*)")
_DEEP = re.compile(r"v\.deepstack\.(\d{1,4})\.(\w+)(\..+)")


def _taps(file: Checkpoint) -> list[int]:
    """The tower layers whose outputs go to the decoder's first layers (DeepStack)."""
    stated = file.metadata.get("clip.vision.is_deepstack_layers")
    return np.flatnonzero(stated).tolist() if isinstance(stated, np.ndarray) else []


def _renamed(file: Checkpoint, names: Mapping[str, str]) -> dict[str, TensorInfo]:
    """A tower's tensors under canonical names, without audio (a.*, mm.a.*). Raises UnsupportedModel."""
    found: dict[str, TensorInfo] = {}
    inner = file.metadata.get("clip.vision.feed_forward_length")
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    if down is not None and down.shape[0] == inner and down.shape[-1] != inner:  # early Gemma 3 files swap the names
        names = {**names, "ffn_up": names["ffn_down"], "ffn_down": names["ffn_up"]}
    taps = _taps(file)
    for name, info in file.tensors.items():
        if name.startswith(("a.", "mm.a.")):
            continue
        deep = _DEEP.fullmatch(name)
        match = deep or _BLOCK.fullmatch(name) or _TOP.fullmatch(name)
        module, rest = (match[2], match[3]) if match else (name, "")
        if deep:  # numbered by tower layer, not by index in `taps`
            module = f"deepstack {module}"
        whole = names.get(module + rest)
        ours = whole or names.get(module, "")
        known = match and ours and (int(deep[1]) in taps if deep else not match[1] or int(match[1]) < MAX_LAYERS)
        if not match or not known:
            raise bad(file.path, "belongs to an image encoder that is not supported", key=name, hint=OTHER_HINT,
                      error=UnsupportedModel)  # fmt: skip
        ours = ours.format(taps.index(int(deep[1])) if deep else match[1]) + ("" if whole else rest)
        shape = info.shape
        if ours == "vision.patch_embedder.input_proj.weight":
            shape = (shape[0], math.prod(shape[1:]))
        found[ours] = replace(info, name=ours, shape=shape)
    return found
