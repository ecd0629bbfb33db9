"""`NameMap`: canonical module names -> the names in one checkpoint.

Canonical module names are Hugging Face's, without the last component (`.weight`, `.bias`, `.weight_scale`):
`model.embed_tokens`, `model.layers.{i}.self_attn.q_proj`, ..., `model.norm`, `lm_head`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)")
_ONE_OF_MANY = re.compile(r"(mlp\.experts\.|self_attn\.[kv]_b_proj\.)(\d+)((?:\.\w+)?)")  # experts, or heads
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
TOWER = ("vision.", "projector.")  # prefixes of canonical names of a vision tower
MTP = "mtp."  # prefix of the MTP head in Qwen files
_WRAPPERS = ("language_model.model.", "model.language_model.", "model.text_model.", "language_model.")
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    CHOICE_BIAS: "exp_probs_b.bias",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps.{}",
    "mlp.experts.{}.up_proj": "ffn_up_exps.{}",
    "mlp.experts.{}.down_proj": "ffn_down_exps.{}",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}


@dataclass(frozen=True)
class NameMap:
    """Canonical module names -> stored ones."""

    top: Mapping[str, str]  # modules outside the layers
    layer: str  # prefix of a layer's modules, with `{}` for its number
    # modules and whole tensors below a layer with other names; `{}` is the number of an expert or head
    inner: Mapping[str, str] = field(default_factory=dict)
    # canonical prefix of a part outside the layers (vision tower, MTP head) -> its stored prefix
    parts: Mapping[str, str] = field(default_factory=dict)
    # number of an MTP head's layer -> its stored prefix, where that is another than the layers have
    heads: Mapping[int, str] = field(default_factory=dict)
    text: tuple[str, ...] = ("",)  # prefixes of the text model's tensors; others are not loaded
    # modules below a layer -> their names in Transformers, and so in adapters, where neither canonical nor stored
    trained: Mapping[str, str] = field(default_factory=dict)

    def source(self, module: str) -> str:
        """The stored name of a canonical module."""
        part = next((part for part in self.parts if module.startswith(part)), None)
        if part is not None:
            return self.parts[part] + module.removeprefix(part)
        match = _LAYER.fullmatch(module)
        if match is None:
            return self.top[module]
        one = _ONE_OF_MANY.fullmatch(match[2])
        if one is None:
            return self._start(match[1]) + self.inner.get(match[2], match[2])
        of_all = f"{one[1]}{{}}{one[3]}"
        return self._start(match[1]) + self.inner.get(of_all, of_all).format(one[2])

    def _start(self, layer: str) -> str:
        return self.heads.get(int(layer)) or self.layer.format(layer)

    def every(self, module: str) -> tuple[str, ...]:
        """All names of a canonical module: itself first, the stored one last."""
        match = _LAYER.fullmatch(module)
        trained = None if match is None else self.trained.get(match[2])
        names = () if match is None or trained is None else (f"model.layers.{match[1]}.{trained}",)
        return module, *names, self.source(module)

    def tensor(self, name: str) -> str:
        """The stored name of a canonical tensor that is not the weight of a linear module."""
        if name.startswith(tuple(self.parts)):
            return self.source(name)
        match = _LAYER.fullmatch(name)
        if match is not None and match[2] in self.inner:
            return self._start(match[1]) + self.inner[match[2]]
        module, _, last = name.rpartition(".")
        return f"{self.source(module)}.{last}"

    def beyond(self, tensors: Iterable[str], num_layers: int) -> Iterator[str]:
        """The tensors of layers numbered `num_layers` or higher."""
        if "{}" not in self.layer:  # a single layer without a number
            return iter(())
        layer = re.compile(re.escape(self.layer).replace(r"\{\}", r"(\d{1,9})"))
        found = ((layer.match(name), name) for name in tensors)
        return (name for match, name in found if match and int(match[1]) >= num_layers)


def predictor_names(number: object) -> dict[str, str]:
    """Entries for `parts` with Qwen's names of the MTP head, whose canonical name is layer `number`."""
    start = f"model.layers.{number}."
    outer = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    outer |= {"e_proj": "fc_embedding", "h_proj": "fc_hidden", "shared_head.norm": "norm"}
    outer["hyper_connection_mixer"] = "hyper_connection_mixer"  # with residual streams
    names = {start + name: MTP + theirs for name, theirs in outer.items()}
    return names | {start: f"{MTP}layers.0."}


def gguf_names(inner: Mapping[str, str]) -> NameMap:
    """The names that llama.cpp's converter writes, with `inner` on top of `GGUF_LAYER`; a tower's tensors already have
    canonical names (`mmproj`).
    """
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return NameMap(top, "blk.{}.", {**GGUF_LAYER, **inner}, {part: part for part in TOWER})


def hf_names(tensors: Collection[str], inner: Mapping[str, str] | None = None) -> NameMap:
    """Hugging Face's names, which are canonical except for `inner` and the prefixes of wrappers and headless models."""
    prefixes = ("model.", *_WRAPPERS, "")
    prefix = next((p for n in tensors for p in prefixes if n.startswith(f"{p}embed_tokens.")), "model.")
    # Old wrappers have the head next to their inner model, new ones at the top level.
    old = prefix == _WRAPPERS[0] and any(name.startswith("language_model.lm_head.") for name in tensors)
    head = "language_model.lm_head" if old else "lm_head"
    top = {"model.embed_tokens": f"{prefix}embed_tokens", "model.norm": f"{prefix}norm", "lm_head": head}
    return NameMap(top, prefix + "layers.{}.", inner or {}, text=(prefix, f"{head}."))
