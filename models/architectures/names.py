"""Names of tensors: GGUF's and the wrappers' of multi-modal files, to and from the canonical Hugging Face ones.

Canonical module names are `model.embed_tokens`, `model.layers.{i}.self_attn.q_proj`, ..., `model.norm`, `lm_head`; a
name stands without the last component (`.weight`, `.bias`, `.weight_scale`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .tensor_info import StoredModel

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The same GGUF name means another norm where attention and MLP have one on each side.
_GEMMA_LAYER = {
    **_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)")
_DECODER = re.compile(r"model\.layers\.(0|[1-9]\d{0,3})\.([\w.]+)")
_WRAPPERS = ("language_model.model.", "model.language_model.")


def _layer_names(architecture: str) -> dict[str, str]:
    return _GEMMA_LAYER if architecture.startswith("gemma") else _LAYER


def canonical(module: str, architecture: str) -> str | None:
    """A GGUF module's canonical name: "blk.0.attn_q" -> "model.layers.0.self_attn.q_proj"; None when it has none."""
    if module in _TOP:
        return _TOP[module]
    match = _BLOCK.fullmatch(module)
    inner = _layer_names(architecture).get(match[2]) if match else None
    return f"model.layers.{match[1]}.{inner}" if match and inner else None


def gguf_name(module: str, architecture: str) -> str | None:
    """The reverse: "model.layers.0.self_attn.q_proj" -> "blk.0.attn_q"; None when GGUF has no name for it."""
    for theirs, ours in _TOP.items():
        if module == ours:
            return theirs
    match = _DECODER.fullmatch(module)
    if match is None:
        return None
    inner = next((theirs for theirs, ours in _layer_names(architecture).items() if ours == match[2]), None)
    return f"blk.{match[1]}.{inner}" if inner else None


def wrapper(names: Iterable[str]) -> str:
    """What stands in a file's names where canonical ones have "model.": "model.", or a multi-modal wrapper's prefix."""
    for name in names:
        for prefix in ("model.", *_WRAPPERS):
            if name.startswith(prefix + "embed_tokens."):
                return prefix
    return "model."


class SourceNames:
    """Canonical module names -> the names in one checkpoint, and back."""

    def __init__(self, model: StoredModel, architecture: str) -> None:
        """`architecture` is the canonical one (`ModelFacts.architecture`)."""
        self.gguf = model.kind == "gguf"
        self.architecture = architecture
        self.prefix = "" if self.gguf else wrapper(model.tensors)
        # Old wrappers keep the head beside their inner model, new ones at the top.
        old = self.prefix == _WRAPPERS[0] and any(name.startswith("language_model.lm_head.") for name in model.tensors)
        self.head = "language_model.lm_head" if old else "lm_head"

    def source(self, module: str) -> str:
        """The name in the file of a canonical module. KeyError for one that GGUF has no name for."""
        if self.gguf:
            name = gguf_name(module, self.architecture)
            if name is None:
                raise KeyError(module)
            return name
        return self.head if module == "lm_head" else self.prefix + module.removeprefix("model.")

    def canonical(self, module: str) -> str | None:
        """The canonical name of a module in the file; None for what is no part of the text model."""
        if self.gguf:
            return canonical(module, self.architecture)
        if module == self.head:
            return "lm_head"
        return "model." + module.removeprefix(self.prefix) if module.startswith(self.prefix) else None
