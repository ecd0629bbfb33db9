"""EAGLE-3 drafters: one Llama or Qwen3 layer, rarely more, behind a projection of a larger model's hidden states.

Published for Llama, Qwen3, gpt-oss and others in two layouts: that of EAGLE's authors and SpecForge (`midlayer`), and
that of speculators (`transformer_layer_config`). Most have a head for the 32,000 most frequent tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB, Fields
from localllm.checkpoint.mapped_file import bad
from localllm.errors import UnsupportedModel

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig, object_of
from .layers import D2T, Eagle3, LayerFacts, Paired
from .mixers import RopeFacts
from .names import GGUF_LAYER, NameMap

MOST_TAPS = 16
_NESTED = "transformer_layer_config"
_OF_LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # whatever type they state: that of the larger model
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
        nested = text.get(_NESTED)
        return {**text, **(nested if isinstance(nested, dict) else {})}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        top, _ = config.top, object_of(config.top, _NESTED)
        rope, context = config.rope()
        nested = {key: value for key, value in object_of(top, "eagle_config").items() if value not in (None, [])}
        own = Fields(top.path, {**top.values, **nested})
        for key, value in _ALWAYS.items():
            if own.raw(key) not in (None, value):
                raise config.unsupported(f"{config.source} with {key} {own.raw(key)}")
        kind = config.keys.text("model_type", "llama")
        if config.source not in _OF_LLAMA and kind not in ("llama", "qwen3", "speculators"):
            raise config.unsupported(f"{config.source} with layers of type {kind[:60]}")
        stated = own.raw(_LAYERS) or []
        if not isinstance(stated, list) or not all(type(layer) is int and 0 <= layer <= MAX_LAYERS for layer in stated):
            raise own.fail(_LAYERS, "must list layer numbers")
        drafter = Eagle3(
            hidden=own.integer("target_hidden_size", 1, MAX_HIDDEN, config.hidden_size),
            stated=_checked(own, _LAYERS, stated),
            outputs=_LAYERS in nested,
            norm_residual=own.flag("norm_before_residual", top.raw("speculators_model_type") is not None),
            norm_joined=own.flag("norm_before_fc"),
            norm_each=own.flag("fc_norm"),
            norm_output=own.flag("norm_output", own.flag("return_hidden_post_norm")),
        )
        windows: tuple[int | None, ...] = (None,) * config.num_layers
        if config.keys.raw("use_sliding_window") is not False:
            windows = config.windows(lambda layer: False)
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
            norm_output=keys.flag("norm_output"),
        )
        return _facts(config, rope, context, config.windows(), drafter, 0)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            top = {"model.norm": "output_norm", "fc": "fc", "input_norm": "enc.output_norm", "fc_norm": "fc_norm"}
            table, head, layer = "token_embd", "output", "blk.{}."
            inner, sizes = {**GGUF_LAYER, "hidden_norm": "attn_norm_2"}, checkpoint.metadata
            hidden, target = sizes.get("eagle3.embedding_length"), sizes.get("eagle3.target_hidden_size")
        else:
            start = next((one for one in ("", "model.") if f"{one}norm.weight" in checkpoint.tensors), "")
            top = {module: f"{start}{name}" for module, name in _TOP.items()}
            alone = any(name.startswith(f"{start}midlayer.") for name in checkpoint.tensors)
            table, head, layer = f"{start}embed_tokens", "lm_head", f"{start}{'midlayer.' if alone else 'layers.{}.'}"
            inner, sizes = {}, self.hf_values(checkpoint.config)
            hidden, target = sizes.get("hidden_size"), sizes.get("target_hidden_size")
        tables = {"model.embed_tokens": table, "lm_head": head}
        # with the larger model's hidden size, its embedding is used: most files have a copy or none
        text = (layer.partition("{}")[0], *(f"{name}." for name in (*top.values(), head)))
        text = text if target in (None, hidden) else (*text, f"{table}.")
        each = {f"fc_norm.{index}": f"{top['fc_norm']}.{index}" for index in range(MOST_TAPS)}
        return NameMap(top | each | tables, layer, inner, text=text)


def _checked(keys: Fields, key: str, layers: list[int]) -> tuple[int, ...]:
    if layers != sorted(set(layers)) or len(layers) > MOST_TAPS:
        raise keys.fail(key, f"must list at most {MOST_TAPS} different layers of the larger model in order")
    return tuple(layers)


def _facts(
    config: Config, rope: RopeFacts, context: int, windows: tuple[int | None, ...], own: Eagle3, drafted: int
) -> ModelFacts:
    """`drafted`: rows of the head; 0: not stated."""
    tensors, names, vocab_size = config.checkpoint.tensors, config.names, config.vocab_size

    def stored(module: str) -> list[str]:
        return [name for name in tensors if name.startswith(f"{names.source(module)}.")]

    def refused(what: str) -> UnsupportedModel:
        return config.unsupported(f"{config.source} with {what}")

    part = next((part for part in ("fc.bias", "mask_hidden", "conv") if any(part in name for name in tensors)), "")
    if part:
        raise refused(part)
    head = tensors.get(f"{names.source('lm_head')}.weight")
    rows = drafted or (vocab_size if head is None else head.shape[0])
    if not stored("lm_head") and rows != vocab_size:
        raise refused(f"a vocabulary of {rows:,} tokens and no output head")
    has_own = own.hidden != config.hidden_size
    if has_own and not (stored("lm_head") and stored("model.embed_tokens")):
        raise refused(f"{config.hidden_size:,} hidden units for {own.hidden:,}, and no embedding and head of its own")
    own = replace(
        own,
        table=vocab_size if has_own else 0,
        head=rows if stored("lm_head") else 0,
        mapped=D2T in tensors and bool(stored("lm_head")),
        norm_joined=own.norm_joined or bool(stored("input_norm")),
        norm_each=own.norm_each or bool(stored("fc_norm")),
    )
    if own.norm_joined and own.norm_each:
        raise refused("norms over all hidden states and over each")
    if own.head not in (0, vocab_size) and not own.mapped:
        what = f"is missing, but the head has only {own.head:,} of the vocabulary's {vocab_size:,} tokens"
        raise bad(config.checkpoint.path, what, key=D2T)
    attention = config.attention(rope, causal=True, qk_norm=config.stores("self_attn.q_norm.weight"))
    layer = LayerFacts(attention, config.dense(config.activation()))
    _, *rest = repeated(layer, windows)
    first = replace(layer, mixer=replace(attention, window=windows[0], paired=True), fusion=Paired())
    facts = config.facts((first, *rest), context, pooling="")
    return replace(facts, eagle3=own, has_chat_template=False, tied_embeddings=False)
