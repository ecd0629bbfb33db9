"""DFlash drafters: small Qwen3-like decoders that fill a block of masks from hidden states of a larger model.

z-lab publishes them for Qwen, Llama and gpt-oss (`DFlashDraftModel`), Meta for Muse Glimmer. They have neither
embedding nor head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_LAYERS, Fields

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig, object_of
from .layers import DFlash, LayerFacts
from .mixers import RopeFacts
from .names import GGUF_LAYER, NameMap

MAX_BLOCK = 64
# parts of tensor names that belong to other drafters with the same class or architecture name
_OTHERS = {
    "markov": "DSpark", "conv": "DFlash 2", "selector": "DFlash 2", "d2t": "a vocabulary of its own",
    "sink": "attention sinks", "hc_": "DSpark",
}  # fmt: skip
_MUSE = "encoder.output_norm_enc"
_STARTS = ("", "model.")


class Dflash(Architecture):
    """Keys and values of earlier tokens come from the larger model's layers."""

    name = "dflash"
    label = "DFlash drafters"
    hf_types = {
        "dflash": {
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
        },
        "muse_glimmer_assistant": {
            "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 5, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0, "sliding_window": 2048, "vocab_size": 202_048, "block_size": 16,
            "mask_token_id": 201_818, "target_layer_ids": [1, 13, 25, 37, 49],
        },
    }  # fmt: skip
    hf_classes = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
    gguf_types = ("dflash",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        own = Fields(keys.path, {**keys.values, **object_of(keys, "dflash_config")})
        if own.integer("target_hidden_size", 1, 1 << 20, config.hidden_size) != config.hidden_size:
            raise config.unsupported(f"{config.source} for a model of another hidden size")
        if own.text("attention_mode", "gqa") not in ("gqa", "mha") or own.flag("causal_head"):
            raise config.unsupported(f"{config.source} with attention_mode or causal_head")
        windows = _windows(config, own)
        layers = own.raw("target_layer_ids")
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise own.fail("target_layer_ids", "must list layer numbers")
        mask = own.integer("mask_token_id", 0, config.vocab_size - 1)
        block = own.integer("block_size", 2, MAX_BLOCK)
        count = own.integer("num_target_layers", 1, MAX_LAYERS, 0)
        # published files state this in three ways; without any, windowed layers are causal in those of z-lab
        by_window = keys.raw("layer_types") is not None and config.model_type == self.name
        causal = tuple(
            own.flag("is_causal", own.flag("causal", by_window and window is not None)) for window in windows
        )
        rope = rope if own.flag("is_neox_style", True) else replace(rope, interleaved=True)
        taps = _checked(own, "target_layer_ids", layers)
        return _facts(config, rope, context, windows, DFlash(taps, block, mask, causal, config.hidden_size, count))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        """llama.cpp counts the inputs of layers, so the output of layer 1 is its number 2."""
        keys, (rope, context) = config.keys, config.rope()
        found = keys.raw("target_layers")
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
            raise keys.fail("target_layers", "must list layer numbers")
        mask = config.general.integer("tokenizer.ggml.mask_token_id", 0, config.vocab_size - 1)
        taps = _checked(keys, "target_layers", [int(number) - 1 for number in found])
        block = keys.integer("block_size", 2, MAX_BLOCK)
        windows = config.windows()
        # no key says so; only those of z-lab have both kinds of layers
        causal = tuple(window is not None and None in windows for window in windows)
        return _facts(config, rope, context, windows, DFlash(taps, block, mask, causal, config.hidden_size))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            top = {"model.norm": "output_norm", "fc": "fc", "hidden_norm": "enc.output_norm"}
            tables = {"model.embed_tokens": "token_embd", "lm_head": "output"}
            text = ("blk.", *(f"{name}." for name in top.values()))
            return NameMap(top | tables, "blk.{}.", GGUF_LAYER, text=text)
        start = next((one for one in _STARTS if f"{one}norm.weight" in checkpoint.tensors), "")
        top = {"model.norm": f"{start}norm", "fc": f"{start}fc", "hidden_norm": f"{start}hidden_norm"}
        if f"{_MUSE}.weight" in checkpoint.tensors:
            top |= {"fc": "encoder.fc", "hidden_norm": _MUSE}
        tables = {"model.embed_tokens": f"{start}embed_tokens", "lm_head": "lm_head"}  # copies of the larger model's
        text = (f"{start}layers.", *(f"{name}." for name in top.values()))
        return NameMap(top | tables, f"{start}layers.{{}}.", text=text)


def _windows(config: HfConfig, own: Fields) -> tuple[int | None, ...]:
    """The window of each layer; drafters of MiMo state one for all layers."""
    if own.flag("use_swa"):
        window = own.integer("swa_window_size", 1, MAX_CONTEXT, own.integer("sliding_window", 1, MAX_CONTEXT))
        return (window,) * config.num_layers
    if config.model_type == Dflash.name and config.keys.raw("layer_types") is None:
        return (None,) * config.num_layers
    return config.windows(lambda layer: True)


def _checked(keys: Fields, key: str, layers: list[int]) -> tuple[int, ...]:
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= MAX_LAYERS:
        raise keys.fail(key, "must list different layers of the larger model in order")
    return tuple(layers)


def _facts(config: Config, rope: RopeFacts, context: int, windows: tuple[int | None, ...], own: DFlash) -> ModelFacts:
    for name in config.checkpoint.tensors:
        part = next((part for part in _OTHERS if part in name), None)
        if part is not None:
            raise config.unsupported(f"{config.source} with {_OTHERS[part]} ({name[:60]})")
    attention = config.attention(rope, qk_norm=True, kv_apart=True, causal=True)
    layer = LayerFacts(attention, config.dense(config.activation()))
    facts = config.facts(repeated(layer, windows), context, pooling="")
    return replace(facts, dflash=own, has_chat_template=False)
