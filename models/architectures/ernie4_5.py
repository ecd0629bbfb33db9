"""ERNIE 4.5: Llama with interleaved RoPE; the routers of its MoE models have a choice bias."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from localllm.checkpoint.fields import MAX_EXPERTS, MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS

# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 103_424, "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"count": "moe_num_experts", "top_k": "moe_k", "inner": "moe_intermediate_size"}


class Ernie4_5(Architecture):
    """Dense models; GGUF files do not permute their rows."""

    name = "ernie4_5"
    label = "ERNIE 4.5"
    hf_types = {
        "ernie4_5": DEFAULTS
        | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16}
        | {"num_key_value_heads": 2, "head_dim": 128},
    }
    hf_classes: ClassVar[tuple[str, ...]] = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
    gguf_types = ("ernie4_5",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        if config.keys.flag("use_bias"):
            raise config.unsupported(f"{config.source} with use_bias")
        facts = config.facts(self.layers(config, replace(rope, interleaved=True)), context)
        more = sum(one.nbytes for name, one in config.checkpoint.tensors.items() if name.startswith("model.mtp_"))
        return replace(facts, weight_bytes=facts.weight_bytes - more)  # without the MTP head, which is not read

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        return config.facts(self.layers(config, replace(rope, permuted=False)), context)

    def layers(self, config: HfConfig | GgufConfig, rope: RopeFacts) -> tuple[LayerFacts, ...]:
        return (LayerFacts(config.attention(rope), config.dense(config.activation())),) * config.num_layers


class Ernie4_5Moe(Ernie4_5):
    """The first layers are dense; n shared experts become one that is n times as wide."""

    name = "ernie4_5_moe"
    label = "ERNIE 4.5 MoE"
    hf_types = {
        "ernie4_5_moe": DEFAULTS
        | {"hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28, "num_attention_heads": 20}
        | {"num_key_value_heads": 4, "moe_k": 6, "moe_num_experts": 64, "moe_intermediate_size": 1536}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    }
    hf_classes = ("Ernie4_5_MoeForCausalLM",)
    gguf_types = ("ernie4_5-moe",)
    hf_inner = SHARED

    def layers(self, config: HfConfig | GgufConfig, rope: RopeFacts) -> tuple[LayerFacts, ...]:
        keys, attention, act, last = config.keys, config.attention(rope), config.activation(), config.num_layers - 1
        if isinstance(config, HfConfig):
            experts = config.experts(EXPERTS, act)
            first, every, shared = "moe_layer_start_index", "moe_layer_interval", "moe_num_shared_experts"
            stated = keys.integer("moe_layer_end_index", -1, MAX_LAYERS, -1)
            last = last if stated < 0 else stated
        else:
            experts = config.mixture()
            first, every, shared = "leading_dense_block_count", "interleave_moe_layer_step", "expert_shared_count"
        start, step = keys.integer(first, 0, MAX_LAYERS, 0), keys.integer(every, 1, MAX_LAYERS, 1)
        sparse = [start <= layer <= last and (layer + 1) % step == 0 for layer in range(config.num_layers)]
        if True in sparse:
            bias = config.names.tensor(f"model.layers.{sparse.index(True)}.{CHOICE_BIAS}")
            experts = replace(experts, choice_bias=bias in config.checkpoint.tensors)
        experts = replace(experts, shared_inner=keys.integer(shared, 0, MAX_EXPERTS, 0) * experts.inner)
        kinds = LayerFacts(attention, config.dense(act)), LayerFacts(attention, experts)
        return tuple(kinds[one] for one in sparse)
