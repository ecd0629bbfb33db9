"""Llama 2 and 3.x, SmolLM2, and Mistral, whose layers may have a window. Biases if the file has them."""

from __future__ import annotations

from collections.abc import Callable

from localllm.checkpoint import Checkpoint

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .names import NameMap
from .pixtral_vision import row_vision, with_rows

# defaults for keys that configurations may omit, mainly below a wrapper: LLaVA's have no sizes
SIZES = {
    "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
MISTRAL = {
    **SIZES, "intermediate_size": 14_336, "max_position_embeddings": 131_072, "sliding_window": 4096,
    "num_key_value_heads": 8,
}  # fmt: skip
CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# by type: which layers have a window if the file does not list them
WINDOWED: dict[str, Callable[[int], bool]] = {
    "mistral": lambda layer: True,
    "ministral": lambda layer: True,
    "cwm": lambda layer: layer % 4 != 0,
}


class Llama(Architecture):
    """Two norms, RoPE, SiLU."""

    name = "llama"
    label = "Llama 2 and 3, SmolLM2, Mistral, Ministral, InternLM3, IQuest-Coder, CWM"
    hf_types = {
        "llama": SIZES | {"intermediate_size": 11_008, "max_position_embeddings": 2048},
        "mistral": MISTRAL,
        "ministral": MISTRAL,
        "cwm": {"vocab_size": 128_256, "hidden_size": 6144, "intermediate_size": 21_504, "num_hidden_layers": 64}
        | {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072}
        | {"rms_norm_eps": 1e-5, "sliding_window": 8192, "rope_parameters": CWM_ROPE},
        "internlm3": {"vocab_size": 128_512, "hidden_size": 4096, "intermediate_size": 10_240, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32_768}
        | {"rms_norm_eps": 1e-5},
        "iquestcoder": {"vocab_size": 76_800, "hidden_size": 5120, "intermediate_size": 27_648}
        | {"num_hidden_layers": 80, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
        | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    }
    hf_wrappers = dict.fromkeys(("mistral3", "idefics2"), "mistral") | dict.fromkeys(
        ("llava", "llava_next", "llava_next_video", "video_llava", "vipllava", "idefics3", "smolvlm", "janus")
        + ("deepseek_vl", "deepseek_vl_hybrid", "voxtral"),
        "llama",
    )
    hf_classes = (
        *("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
        *("InternLM3ForCausalLM", "IQuestCoderForCausalLM", "CwmForCausalLM"),
    )
    gguf_types = ("llama",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope), config.dense(config.activation()))
        windowed = WINDOWED.get(config.model_type)  # Llama has no window, even if its config contains one
        windows = config.windows(windowed) if windowed is not None else (None,) * config.num_layers
        return config.facts(repeated(layer, windows), context, vision=row_vision(config))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return with_rows(super().names(checkpoint), checkpoint)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        ffn = config.mixture() if config.num_experts else config.dense()
        layer = LayerFacts(config.attention(rope), ffn)
        return config.facts(repeated(layer, config.windows()), context)
