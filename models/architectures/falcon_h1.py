"""Falcon-H1: in every layer attention and Mamba-2 read the same norm, and the outputs of both are added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEAD_DIM, MAX_HEADS

from .architecture import Architecture
from .facts import ModelFacts, linear_shapes
from .gguf import GgufConfig
from .granite_hybrid import mamba_of_granite
from .hf import HfConfig
from .layers import LayerFacts, Norms, Runs
from .mamba2 import GGUF_MAMBA, mamba_of_gguf
from .mixers import Mamba2
from .names import NameMap

_NORMS = Norms(before_ffn="pre_ff_layernorm")
_MULTIPLIERS = (
    *("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    "key_multiplier",
)
_BIASES = ("attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias")


class FalconH1(Architecture):
    """Multipliers on embedding, logits and the weights of most modules; GGUF files hold the products."""

    name = "falcon_h1"
    label = "Falcon-H1"
    hf_types = {
        "falcon_h1": {
            "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto",
            "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_norm_before_gate": True,
        }
    }  # fmt: skip
    hf_classes = ("FalconH1ForCausalLM",)
    hf_inner = {
        "mlp.gate_proj": "feed_forward.gate_proj",
        "mlp.up_proj": "feed_forward.up_proj",
        "mlp.down_proj": "feed_forward.down_proj",
    }
    gguf_types = ("falcon-h1",)
    gguf_inner = GGUF_MAMBA | {"pre_ff_layernorm": "ffn_norm"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        biased = next((name for name in _BIASES if keys.flag(name)), None)
        if biased is not None:
            raise config.unsupported(f"{config.source} with {biased}")
        normed = keys.flag("mamba_rms_norm")
        if normed and keys.flag("mamba_norm_before_gate", True):
            raise config.unsupported(f"{config.source} with mamba_norm_before_gate")
        inner = keys.integer("mamba_expand", 1, 64) * config.hidden_size
        if not config.is_null("mamba_d_ssm"):
            inner = keys.integer("mamba_d_ssm", 1, MAX_HEADS * MAX_HEAD_DIM)
        rope, context = config.rope()
        mamba = mamba_of_granite(config, inner, normed=normed)
        layer = LayerFacts(config.attention(rope), config.dense(config.activation()), _NORMS, second=mamba)
        layer = replace(layer, factors=_factors(config, layer, mamba))
        names = ("embedding_multiplier", "lm_head_multiplier")
        embedding, head = (keys.number(name, 1e-6, 1e6, 1.0) for name in names)
        return config.facts((layer,) * config.num_layers, context, embedding_scale=embedding, logit_scale=head)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        mamba = replace(mamba_of_gguf(config), normed=any("ssm_norm" in name for name in config.checkpoint.tensors))
        layer = LayerFacts(config.attention(rope), config.dense(), _NORMS, second=mamba)
        return config.facts((layer,) * config.num_layers, context)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        found = super().inner_names(checkpoint)
        if checkpoint.kind != "gguf" or "blk.0.ffn_norm.weight" in checkpoint.tensors:
            return found
        return {**found, "pre_ff_layernorm.weight": "ffn_norm"}  # as llama.cpp's converter names it

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return found
        start = found.top["model.norm"].removesuffix("norm")
        return replace(found, top={**found.top, "model.norm": f"{start}final_layernorm"})


def _factors(config: HfConfig, layer: LayerFacts, mamba: Mamba2) -> tuple[tuple[str, Runs], ...]:
    """The multipliers of inputs and outputs as factors on the rows of weights."""
    keys, shapes = config.keys, linear_shapes(layer, config.hidden_size)
    reads, writes, scans, scanned, key = (keys.number(name, 1e-6, 1e6, 1.0) for name in _MULTIPLIERS)
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    shared = mamba.num_groups * mamba.state_size
    rows = mamba.inner, mamba.inner, shared, shared, mamba.num_heads  # gates, values, B, C, time steps
    parts = zip(rows, _multipliers(config, "ssm_multipliers", len(rows)), strict=True)
    factors = {
        "self_attn.q_proj": reads, "self_attn.k_proj": reads * key, "self_attn.v_proj": reads,
        "self_attn.o_proj": writes, "mamba.out_proj": scanned, "mlp.gate_proj": gate, "mlp.down_proj": down,
    }  # fmt: skip
    runs: dict[str, Runs] = {name: ((shapes[name][0], factor),) for name, factor in factors.items()}
    runs["mamba.in_proj"] = tuple((count, scans * factor) for count, factor in parts)
    return tuple((name, each) for name, each in runs.items() if any(factor != 1.0 for _, factor in each))


def _multipliers(config: HfConfig, key: str, count: int) -> list[float]:
    """A list of multipliers; all 1 if it is not stated."""
    stated = config.keys.raw(key)
    if stated is None:
        return [1.0] * count
    numbers = [float(one) for one in stated if type(one) in (int, float)] if isinstance(stated, list) else []
    if len(numbers) != count or not all(1e-6 <= one <= 1e6 for one in numbers):
        raise config.keys.fail(key, f"must be {count} numbers from 0.000001 to 1,000,000")
    return numbers
