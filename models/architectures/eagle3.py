"""EAGLE-3 drafters: one Llama or Qwen3 layer, rarely more, behind a projection of a larger model's hidden states.

Published for Llama, Qwen3, gpt-oss and others in two layouts: that of SafeAILab and SpecForge (`midlayer`), and that of
speculators (`transformer_layer_config`). Most have no embedding, and a head for the 32,000 most frequent tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB, Fields

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig, object_of
from .layers import D2T, Eagle3, LayerFacts, Paired
from .mixers import RopeFacts
from .names import GGUF_LAYER, NameMap

MOST_TAPS = 16
_LAYERS = "eagle_aux_hidden_state_layer_ids"
# options of NVIDIA's files whose other value describes another drafter
_ALWAYS = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True} | {
    "use_mtp_layernorm": False, "parallel_draft_step": 1,
}  # fmt: skip
_TOP = {"model.norm": "norm", "fc": "fc", "input_norm": "input_norm", "fc_norm": "fc_norm"}


class Eagle3Drafter(Architecture):
    """The first layer's queries, keys and values come from a token's embedding beside a hidden state."""

    name = "eagle3"
    label = "EAGLE-3 drafters"
    hf_types = {"eagle3": {"num_hidden_layers": 1, "max_position_embeddings": 2048}}
    hf_classes = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
    gguf_types = ("eagle3",)

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the layer, which speculators' files nest, and the drafter's own."""
        return {**text, **(text.get("transformer_layer_config") or {})}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        top, (rope, context) = config.top, config.rope()
        nested = object_of(top, "eagle_config")
        own = Fields(top.path, {**top.values, **nested})
        for key, value in _ALWAYS.items():
            if own.raw(key) not in (None, value):
                raise config.unsupported(f"{config.source} with {key} {own.raw(key)}")
        kind = config.keys.text("model_type", "llama")
        if kind not in ("llama", "qwen3", "speculators"):
            raise config.unsupported(f"{config.source} with layers of type {kind[:60]}")
        stated = own.raw(_LAYERS) or []
        if not isinstance(stated, list) or not all(type(layer) is int and 0 <= layer <= MAX_LAYERS for layer in stated):
            raise own.fail(_LAYERS, "must list layer numbers")
        drafter = Eagle3(
            hidden=own.integer("target_hidden_size", 1, MAX_HIDDEN, config.hidden_size),
            stated=_checked(own, _LAYERS, stated),
            outputs=bool(nested.get(_LAYERS)),
            norm_residual=own.flag("norm_before_residual", top.raw("speculators_model_type") is not None),
            norm_joined=own.flag("norm_before_fc"),
            norm_each=own.flag("fc_norm"),
            norm_output=own.flag("norm_output", own.flag("return_hidden_post_norm")),
        )
        windows = config.windows(lambda layer: False)
        if config.keys.raw("use_sliding_window") is False:
            windows = (None,) * config.num_layers
        return _facts(config, rope, context, windows, drafter, own.integer("draft_vocab_size", 1, MAX_VOCAB, 0))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope(interleaved=True)
        key = "target_layers" if keys.raw("target_layers") is not None else "extract_layers"
        found = keys.raw(key)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
            raise keys.fail(key, "must list layer numbers")
        drafter = Eagle3(
            hidden=keys.integer("target_hidden_size", 1, MAX_HIDDEN, config.hidden_size),
            stated=_checked(keys, key, [int(number) for number in found]),
            norm_residual=keys.flag("norm_before_residual"),
            norm_joined=keys.flag("norm_before_fc"),
        )
        return _facts(config, rope, context, config.windows(), drafter, 0)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            top = {"model.norm": "output_norm", "fc": "fc", "input_norm": "enc.output_norm"}
            tables, layer, inner = {"model.embed_tokens": "token_embd", "lm_head": "output"}, "blk.{}.", GGUF_LAYER
            inner = inner | {"hidden_norm": "attn_norm_2"}
        else:
            start = next((one for one in ("", "model.") if f"{one}norm.weight" in checkpoint.tensors), "")
            top = {module: f"{start}{name}" for module, name in _TOP.items()}
            tables = {"model.embed_tokens": f"{start}embed_tokens", "lm_head": "lm_head"}
            layer, inner = f"{start}layers.{{}}.", {}
            if any(name.startswith(f"{start}midlayer.") for name in checkpoint.tensors):
                layer = f"{start}midlayer."
        top |= {f"fc_norm.{index}": f"{top.get('fc_norm', 'fc_norm')}.{index}" for index in range(MOST_TAPS)}
        text = (layer.partition("{}")[0], *(f"{name}." for name in (*top.values(), *tables.values())))
        return NameMap(top | tables, layer, inner, text=text)


def _checked(keys: Fields, key: str, layers: list[int]) -> tuple[int, ...]:
    if layers != sorted(set(layers)) or len(layers) > MOST_TAPS:
        raise keys.fail(key, f"must list at most {MOST_TAPS} different layers of the larger model in order")
    return tuple(layers)


def _facts(
    config: Config, rope: RopeFacts, context: int, windows: tuple[int | None, ...], own: Eagle3, drafted: int
) -> ModelFacts:
    """`drafted`: rows of the head; 0: not stated."""
    tensors, names = config.checkpoint.tensors, config.names
    rows = {
        module: next((info.shape[0] for info in [tensors.get(f"{names.source(module)}.weight")] if info), 0)
        for module in ("model.embed_tokens", "lm_head")
    }
    head = rows["lm_head"]
    head = drafted or head if any(name.startswith(f"{names.source('lm_head')}.") for name in tensors) else 0
    if not head and drafted not in (0, config.vocab_size):
        raise config.unsupported(f"{config.source} with {drafted:,} tokens and no head")
    if own.hidden != config.hidden_size and not (head and rows["model.embed_tokens"]):
        raise config.unsupported(f"{config.source} for a model of another hidden size, without tables of its own")
    for part in ("fc.bias", "mask_hidden", "conv"):
        if any(part in name for name in tensors):
            raise config.unsupported(f"{config.source} with {part}")
    own = replace(own, table=rows["model.embed_tokens"], head=head, mapped=D2T in tensors)
    if head not in (0, config.vocab_size) and not own.mapped:
        what = f"is missing; it names the {head:,} tokens of the head, of {config.vocab_size:,}"
        raise config.keys.fail(D2T, what)
    attention = config.attention(rope, causal=True, qk_norm=config.stores("self_attn.q_norm.weight"))
    layer = LayerFacts(attention, config.dense(config.activation()))
    _, *rest = repeated(layer, windows)
    first = replace(layer, mixer=replace(attention, window=windows[0], paired=True), fusion=Paired())
    facts = config.facts((first, *rest), context, pooling="")
    return replace(facts, eagle3=own, has_chat_template=False, tied_embeddings=False)
