"""Nemotron-H, Nemotron Nano v2 and Nemotron 3: each layer is a single block of Mamba-2, attention or feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HIDDEN
from localllm.checkpoint.mapped_file import shown

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts, Norms
from .mamba2 import ATTENTION, GGUF_MAMBA, MAMBA, mamba_of_gguf, mamba_of_hf, no_rope
from .mixers import Attention, Mamba2
from .names import CHOICE_BIAS, NameMap

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KEYS = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "num_groups": "n_groups",
    "state_size": "ssm_state_size",
    "conv_width": "conv_kernel",
}
_MLP = ("up_proj", "down_proj")
# files call every block a mixer, whatever its kind
_HF = {
    "input_layernorm": "norm",
    "self_attn": "mixer",
    **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
    **{f"mamba.{name}": f"mixer.{name}" for name in ("in_proj", "out_proj", "conv1d", "norm", "A_log", "D", "dt_bias")},
    **{f"mlp.{name}": f"mixer.{name}" for name in _MLP},
    **{f"mlp.experts.{{}}.{name}": f"mixer.experts.{{}}.{name}" for name in _MLP},
    **{f"mlp.shared_expert.{name}": f"mixer.shared_experts.{name}" for name in _MLP},
    "mlp.gate": "mixer.gate",
    CHOICE_BIAS: "mixer.gate.e_score_correction_bias",
    "mlp.latent_in": "mixer.fc1_latent_proj",
    "mlp.latent_out": "mixer.fc2_latent_proj",
}


class NemotronH(Architecture):
    """No RoPE; relu² without gates; a sigmoid router if there are experts."""

    name = "nemotron_h"
    label = "Nemotron-H to 3"
    hf_types = {
        "nemotron_h": {
            "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
            "mlp_hidden_act": "relu2", "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        }
    }  # fmt: skip
    hf_renamed = {"layer_norm_epsilon": "rms_norm_eps", "layers_block_type": "layer_types"}
    hf_classes = ("NemotronHForCausalLM",)
    gguf_types = ("nemotron_h", "nemotron_h_moe")
    gguf_inner = GGUF_MAMBA | {"mlp.latent_in": "ffn_latent_down", "mlp.latent_out": "ffn_latent_up"}

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Derive the number of layers from their list, next to which it is not stated."""
        found = super().hf_values(text)
        pattern = found.get("hybrid_override_pattern")
        if isinstance(pattern, str) and found.get("layer_types") is None:
            found["layer_types"] = [PATTERN.get(letter, letter) for letter in pattern]
        listed = found.get("layer_types")
        return found | ({"num_hidden_layers": len(listed)} if isinstance(listed, list) and listed else {})

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        for key, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if keys.text(key, known) != known:
                raise config.unsupported(f"{config.source} with {key} {shown(keys.text(key), 60)}")
        kinds = config.layer_types((*MAMBA, *ATTENTION, "mlp", "moe"))
        biases = {"bias": keys.flag("use_bias"), "conv_bias": keys.flag("use_conv_bias", True)}
        attention = config.attention(no_rope(config))
        blocks: dict[str, Attention | Mamba2 | Dense | Experts] = dict.fromkeys(ATTENTION, attention)
        if not {*MAMBA}.isdisjoint(kinds):
            blocks |= dict.fromkeys(MAMBA, mamba_of_hf(config, _KEYS, **biases))
        if "mlp" in kinds:
            inner = config.size("inner", 1, MAX_HIDDEN * 4)
            blocks["mlp"] = Dense(inner, "relu2", keys.flag("mlp_bias"), gated=False)
        if "moe" in kinds:
            blocks["moe"] = _experts_of_hf(config)
        return config.facts(_layers(config, [blocks[kind] for kind in kinds]), config.context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        attention, mamba = config.attention(no_rope(config)), mamba_of_gguf(config)
        heads = config.each(config.KEYS["kv_heads"], 0, 1 << 20, 0)
        inner = config.each(config.KEYS["inner"], 0, MAX_HIDDEN * 4, 0)
        blocks: list[Attention | Mamba2 | Dense | Experts] = []
        experts = _experts_of_gguf(config) if config.num_experts else None
        for layer in range(config.num_layers):
            if inner[layer]:
                routed = experts is not None and f"blk.{layer}.ffn_gate_inp.weight" in config.checkpoint.tensors
                blocks.append(experts if experts and routed else Dense(inner[layer], "relu2", gated=False))
            else:
                blocks.append(attention if heads[layer] else mamba)
        return config.facts(_layers(config, blocks), config.keys.integer("context_length", 1, MAX_CONTEXT))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            return super().names(checkpoint)
        prefix = "backbone." if any(name.startswith("backbone.") for name in checkpoint.tensors) else "model."
        top = {"model.embed_tokens": f"{prefix}embeddings", "model.norm": f"{prefix}norm_f", "lm_head": "lm_head"}
        return NameMap(top, prefix + "layers.{}.", _HF, text=(prefix, "lm_head."))


def _layers(config: Config, blocks: list[Attention | Mamba2 | Dense | Experts]) -> tuple[LayerFacts, ...]:
    if not any(isinstance(block, Attention) for block in blocks):
        raise config.unsupported(f"{config.source} without an attention layer")
    mixing, feeding = Norms(before_ffn=None), Norms(before_mixer=None, before_ffn="input_layernorm")
    return tuple(
        LayerFacts(None, block, feeding) if isinstance(block, Dense | Experts) else LayerFacts(block, None, mixing)
        for block in blocks
    )


def _experts_of_hf(config: HfConfig) -> Experts:
    keys = config.keys
    shared = keys.integer("moe_shared_expert_intermediate_size", 1, MAX_HIDDEN * 4)
    return config.mixture(
        "n_routed_experts", "moe_intermediate_size", "relu2",
        shared_inner=shared * keys.integer("n_shared_experts", 0, MAX_EXPERTS),
        latent=0 if keys.raw("moe_latent_size") is None else keys.integer("moe_latent_size", 1, MAX_HIDDEN),
        router="sigmoid", choice_bias=True, gated=False, **config.router(),
    )  # fmt: skip


def _experts_of_gguf(config: GgufConfig) -> Experts:
    keys = config.keys
    return config.mixture(
        act="relu2",
        grouped=True,
        shared_inner=keys.integer("expert_shared_feed_forward_length", 0, MAX_HIDDEN * 4, 0)
        * keys.integer("expert_shared_count", 0, MAX_EXPERTS, 1),
        latent=keys.integer("moe_latent_size", 0, MAX_HIDDEN, 0),
        router="sigmoid", choice_bias=True, gated=False,
    )  # fmt: skip
