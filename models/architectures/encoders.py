"""Embedding models with bidirectional attention: BERT, XLM-RoBERTa, Nomic BERT, ModernBERT.

The input is the normed sum of word embedding, learned position embedding (if any) and first token type. LayerNorms
follow each residual sum, except in ModernBERT, where they precede the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB
from localllm.checkpoint.mapped_file import shown

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gemma3 import LOCAL_THETA, halved
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Entry, LayerFacts, Norms
from .mixers import RopeFacts
from .names import GGUF_LAYER, NameMap

EPS = 1e-12
WORDS = "embeddings.word_embeddings.weight"
NORMS = Norms(None, None, over_mixer="post_attention_layernorm", over_ffn="post_mlp_layernorm", centred=True, bias=True)
GGUF_TOP = {
    "model.embed_tokens": "token_embd",
    "model.position_embeddings": "position_embd",
    "model.token_type_embeddings": "token_types",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
GGUF_INNER = GGUF_LAYER | {"post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm"}
HF_TOP = {
    "model.embed_tokens": "embeddings.word_embeddings",
    "model.position_embeddings": "embeddings.position_embeddings",
    "model.token_type_embeddings": "embeddings.token_type_embeddings",
    "model.embedding_norm": "embeddings.LayerNorm",
}
HF_INNER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_mlp_layernorm": "output.LayerNorm",
}
NOMIC_INNER = {
    "self_attn.qkv_proj": "attn.Wqkv",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}
MODERN_EPS, MODERN_WINDOW, MODERN_EVERY, MODERN_THETA = 1e-5, 128, 3, 160_000.0
MODERN_ACTS = {"gelu": "gelu_erf", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MODERN_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn.Wqkv",
    "self_attn.o_proj": "attn.Wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": "mlp.Wi",
    "mlp.down_proj": "mlp.Wo",
}


class Encoder(Architecture):
    """Base of all encoders."""

    layers_name: ClassVar[str] = "encoder.layer.{}."
    inner: ClassVar[Mapping[str, str]] = HF_INNER

    def names(self, checkpoint: Checkpoint) -> NameMap:
        """The names; files saved with a head have a prefix, the family's name."""
        if checkpoint.kind == "gguf":
            return NameMap(GGUF_TOP, "blk.{}.", GGUF_INNER)
        prefix = next((name.removesuffix(WORDS) for name in checkpoint.tensors if name.endswith(WORDS)), "")
        top = {module: prefix + name for module, name in HF_TOP.items()} | {"lm_head": "lm_head"}
        return NameMap(top, prefix + self.layers_name, self.inner, text=(prefix,))

    def made(self, config: Config, eps: str, context: int, rope: RopeFacts, ffn: Dense, offset: int = 0) -> ModelFacts:
        """Build the facts; `eps` is the key of the epsilon, `offset` the row of the first position."""
        rows = {name: _rows(config, f"model.{name}_embeddings") for name in ("position", "token_type")}
        entry = Entry(rows["position"], offset, rows["token_type"])
        if entry.positions:
            context = min(context, entry.positions - offset)
        layer = LayerFacts(config.attention(rope, causal=False), ffn, NORMS)
        number = config.keys.number(eps, 1e-14, 0.1, EPS)
        values = {"tied_embeddings": True, "entry": entry, "final_norm": False, "rms_norm_eps": number}
        return config.facts((layer,) * config.num_layers, context, eps=EPS, **values)


def _rows(config: Config, module: str) -> int:
    info = config.checkpoint.tensors.get(f"{config.names.source(module)}.weight")
    return 0 if info is None else info.shape[0]


class Bert(Encoder):
    """Learned positions, and a feed-forward layer without a gate."""

    name = "bert"
    label = "BERT"
    hf_types = {"bert": {}}
    hf_classes: ClassVar[tuple[str, ...]] = ("BertModel", "BertForMaskedLM")
    gguf_types: ClassVar[tuple[str, ...]] = ("bert",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        act, kind = config.keys.text("hidden_act", "gelu"), config.keys.text("position_embedding_type", "absolute")
        if act != "gelu" or kind != "absolute":
            raise config.unsupported(f"{config.source} with {act} and {kind} positions")
        offset = self.first_position(config)
        return self.made(config, "layer_norm_eps", config.context, _no_rope(config), _ungated(config), offset)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        context = config.keys.integer("context_length", 1, MAX_CONTEXT)
        return self.made(config, "attention.layer_norm_epsilon", context, _no_rope(config), _ungated(config))

    def first_position(self, config: HfConfig) -> int:
        return 0


class XlmRoberta(Bert):
    """Positions start after that of the padding token. GGUF uses the name bert and omits the rows before."""

    name = "xlm-roberta"
    label = "XLM-RoBERTa"
    hf_types = {"xlm-roberta": {}, "roberta": {}}
    hf_classes = ("XLMRobertaModel", "XLMRobertaForMaskedLM", "RobertaModel", "RobertaForMaskedLM")
    gguf_types = ()

    def first_position(self, config: HfConfig) -> int:
        return config.keys.integer("pad_token_id", 0, MAX_VOCAB, 1) + 1


class NomicBert(Encoder):
    """RoPE and a gated feed-forward layer, without biases."""

    name = "nomic-bert"
    label = "Nomic BERT"
    hf_types = {"nomic_bert": {"rope_theta": 1000.0}}
    hf_renamed = {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
        "rotary_emb_fraction": "partial_rotary_factor",
    }  # fmt: skip
    hf_classes = ("NomicBertModel",)
    gguf_types = ("nomic-bert",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        act = keys.text("activation_function", keys.text("hidden_act", "silu"))
        if act not in ("silu", "swiglu") or keys.flag("prenorm") or keys.raw("rotary_emb_interleaved"):
            raise config.unsupported(f"{config.source} with {act}, prenorm or interleaved rotation")
        rope, context = config.rope()
        # longer contexts need dynamic RoPE scaling, which is not supported
        trained = keys.integer("max_trained_positions", 1, MAX_CONTEXT, context)
        return self.made(config, "layer_norm_eps", min(context, trained), rope, config.dense())

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        return self.made(config, "attention.layer_norm_epsilon", context, rope, config.dense())

    def names(self, checkpoint: Checkpoint) -> NameMap:
        """The names of Transformers or of the published files."""
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return found
        prefix = found.text[0]
        if not any(".attn.Wqkv." in name for name in checkpoint.tensors):
            return replace(found, layer=prefix + "layers.{}.", inner={})
        top = {**found.top, "model.embedding_norm": f"{prefix}emb_ln"}
        return replace(found, top=top, layer=prefix + "encoder.layers.{}.", inner=NOMIC_INNER)


class ModernBert(Encoder):
    """Pre-norm, except in the first layer's attention; two of three layers have a window and their own RoPE base."""

    name = "modernbert"
    label = "ModernBERT"
    hf_types = {
        "modernbert": {
            "vocab_size": 50_368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
            "num_attention_heads": 12, "max_position_embeddings": 8192, "rms_norm_eps": MODERN_EPS,
            "sliding_window": MODERN_WINDOW,
        }
    }  # fmt: skip
    hf_renamed = {
        "norm_eps": "rms_norm_eps", "local_attention": "sliding_window", "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    }  # fmt: skip
    hf_classes = ("ModernBertModel", "ModernBertForMaskedLM")
    gguf_types = ("modern-bert",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, (rope, local_rope, context) = config.keys, config.ropes(MODERN_THETA, LOCAL_THETA)
        every = keys.integer("global_attn_every_n_layers", 1, MAX_LAYERS, MODERN_EVERY)
        windows = config.windows(lambda layer: layer % every != 0)
        return self._facts(config, rope, local_rope, context, windows)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0) or None
        pattern = keys.raw("attention.sliding_window_pattern")
        if isinstance(pattern, np.ndarray):
            windows = config.windows()
        else:
            every = keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, MODERN_EVERY)
            windows = tuple(window if layer % every else None for layer in range(config.num_layers))
        theta = keys.number("rope.freq_base_swa", 1.0, 1e15, LOCAL_THETA)
        eps = {"rms_norm_eps": keys.number("attention.layer_norm_epsilon", 1e-14, 0.1, MODERN_EPS)}
        return self._facts(config, rope, replace(rope, theta=theta), context, windows, **eps)

    def _facts(
        self, config: Config, rope: RopeFacts, local_rope: RopeFacts, context: int, windows: tuple[int | None, ...],
        **changes: Any,
    ) -> ModelFacts:  # fmt: skip
        """Build the facts; `windows` are the positions a layer sees, both sides together."""
        act = config.keys.text("hidden_activation", "gelu")
        if act not in MODERN_ACTS:
            raise config.unsupported(f"{config.source} with {shown(act)}")
        norms = Norms(centred=True, bias=config.stores("post_attention_layernorm.bias"))
        layer = LayerFacts(config.attention(rope, causal=False), config.dense(MODERN_ACTS[act]), norms)
        first, *others = repeated(layer, halved(windows, causal=False), local_rope)
        layers = (replace(first, norms=replace(norms, before_mixer=None)), *others)
        return config.facts(layers, context, eps=MODERN_EPS, tied_embeddings=True, entry=Entry(), **changes)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            top = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm"}
            top |= {"model.norm": "output_norm", "lm_head": "output"}
            return NameMap(top, "blk.{}.", GGUF_LAYER | {"mlp.gate_up_proj": "ffn_up"})
        words = "embeddings.tok_embeddings"
        begin = next((n.partition(words)[0] for n in checkpoint.tensors if n.endswith(f"{words}.weight")), "")
        top = {"model.embed_tokens": begin + words, "model.embedding_norm": f"{begin}embeddings.norm"}
        top |= {"model.norm": f"{begin}final_norm", "lm_head": "decoder"}
        return NameMap(top, begin + "layers.{}.", MODERN_INNER, text=(begin,))


def _no_rope(config: Config) -> RopeFacts:
    """No rotation."""
    return RopeFacts(10_000.0, config.head_dim, "off")


def _ungated(config: Config) -> Dense:
    return replace(config.dense("gelu"), gated=False)
