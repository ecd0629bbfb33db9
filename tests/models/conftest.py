"""Tiny random models of every architecture as checkpoints, and a driver that pages sequences through a model."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.models.architectures import open_model
from localllm.models.inputs import AttentionInputs, ForwardBatch
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model

from .ling2 import as_ling2

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {
    "vocab_size": 99,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "rope_parameters": PLAIN,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.2, 1.5, 1.7],
    "long_factor": [1.2, 1.9, 4.0, 9.0, 20.0, 31.0],
}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.45, "rope_theta": 1e6},
    "sliding_attention": PLAIN,
}
LAGUNA_ROPE = {
    "full_attention": YARN | {"partial_rotary_factor": 0.5},
    "sliding_attention": PLAIN | {"rope_theta": 500.0},
}
# whose files name tensors differently than the modules of transformers
RENAMED = (
    "kimi_linear",
    "bailing_hybrid",
    "olmo_hybrid",
    "hy_v3",
    "kolibri1",
    "exaone_moe",
    "step3p7",
    "flint",
    "glm5_next",
    "deepseek_v4",
)
NORM = re.compile(r"norm(_\d)?\.weight$|router\.\w*scale$")  # what is about 1
# whose norms are stored less 1
ZERO_CENTRED = ("gemma", "gemma2", "gemma3_text")
ZERO_CENTRED += ("step3p5",)
ZERO_CENTRED += ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text", "muse_glimmer_text")
LATENT = {
    "hidden_size": 45, "intermediate_size": 70, "q_lora_rank": 22, "kv_lora_rank": 34, "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10, "v_head_dim": 18, "n_routed_experts": 7, "num_experts_per_tok": 3,
    "moe_intermediate_size": 26, "n_shared_experts": 1,
}  # fmt: skip
DEEPSEEK_KINDS = ("sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse", "heavily_compressed")
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# name -> (model_type, configuration): odd sizes, head_dim != hidden / heads, tied and not, every GQA ratio, biases
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "rope_parameters": LLAMA3}),
    "llama-bias": (
        "llama",
        {"hidden_size": 30, "intermediate_size": 50, "heads": (3, 3, 10), "attention_bias": True, "mlp_bias": True}
        | {"tie_word_embeddings": True, "rope_parameters": LINEAR},
    ),
    "llama-yarn": ("llama", {"hidden_size": 40, "intermediate_size": 64, "heads": (4, 1, 16), "rope_parameters": YARN}),
    "llama-packable": ("llama", {"hidden_size": 64, "intermediate_size": 128, "heads": (4, 2, 32)}),
    "mistral": ("mistral", {"hidden_size": 40, "intermediate_size": 64, "heads": (4, 2, 14), "sliding_window": 9}),
    "qwen2": ("qwen2", {"hidden_size": 36, "intermediate_size": 52, "heads": (6, 2, 6), "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18)}),
    "qwen3-moe": (
        "qwen3_moe",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "norm_topk_prob": True}
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 26},
    ),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "mlp_only_layers": [1]}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26},
    ),
    "phi3": (
        "phi3",
        {"hidden_size": 48, "intermediate_size": 70, "heads": (3, 1, 16), "sliding_window": 40}
        | {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "gemma": ("gemma", {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 1, 18)}),
    "gemma2": (
        "gemma2",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "sliding_window": 13}
        | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 8.0, "attn_logit_softcapping": 3.0},
    ),
    "gemma3n": (
        "gemma3n_text",
        {"hidden_size": 44, "intermediate_size": [70, 66, 70, 70, 66], "heads": (4, 2, 18), "sliding_window": 11}
        | {"hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": 91, "num_kv_shared_layers": 2}
        | {"num_hidden_layers": 5, "laurel_rank": 7, "final_logit_softcapping": 8.0}
        | {"activation_sparsity_pattern": [0.8, 0.0, 0.3, 0.0, 0.6]}
        | {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"]}
        | {"rope_parameters": {"full_attention": PLAIN | {"rope_theta": 1e6}, "sliding_attention": PLAIN}},
    ),
    "gemma4": (
        "gemma4_text",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 20), "sliding_window": 11, "global_head_dim": 28}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
        | {"num_hidden_layers": 4, "final_logit_softcapping": 8.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": GEMMA4_ROPE},
    ),
    "gemma4-e2b": (
        "gemma4_text",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 1, 20), "sliding_window": 11, "global_head_dim": 28}
        | {"hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": 99, "num_kv_shared_layers": 3}
        | {"use_double_wide_mlp": True, "num_hidden_layers": 6, "final_logit_softcapping": 8.0}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": GEMMA4_ROPE},
    ),
    "gemma4-moe": (
        "gemma4_text",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 20), "sliding_window": 11, "global_head_dim": 28}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 22}
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": GEMMA4_ROPE},
    ),
    "smollm3": (
        "smollm3",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_hidden_layers": 5}
        | {"tie_word_embeddings": True},
    ),
    "smollm3-windows": (
        "smollm3",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (3, 1, 12), "no_rope_layers": [0, 1, 0]}
        | {"use_sliding_window": True, "sliding_window": 11},
    ),
    "granite": (
        "granite",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "tie_word_embeddings": True}
        | {"embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22}
        | {"logits_scaling": 7.0},
    ),
    "granite-swa": (
        "granite_swa",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "sliding_window": 11, "num_hidden_layers": 5}
        | {"embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22}
        | {"logits_scaling": 7.0, "layer_rope_theta": [0, 10000.0, 10000.0, 0, 10000.0], "tie_word_embeddings": True},
    ),
    "granitemoe-swa": (
        "granitemoe_swa",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 12), "sliding_window": 11, "num_local_experts": 5}
        | {"num_experts_per_tok": 2, "shared_intermediate_size": 30, "embedding_multiplier": 12.0}
        | {"attention_multiplier": 0.11, "residual_multiplier": 0.22, "logits_scaling": 7.0},
    ),
    "granitemoe-shared": (
        "granitemoeshared",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 12), "num_local_experts": 5}
        | {"num_experts_per_tok": 2, "shared_intermediate_size": 30, "embedding_multiplier": 12.0}
        | {"attention_multiplier": 0.11, "residual_multiplier": 0.22, "logits_scaling": 7.0},
    ),
    "granitemoe": (
        "granitemoe",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 12), "num_local_experts": 5}
        | {"num_experts_per_tok": 2, "embedding_multiplier": 12.0, "attention_multiplier": 0.11}
        | {"residual_multiplier": 0.22, "logits_scaling": 7.0},
    ),
    "olmo2": ("olmo2", {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18)}),
    "olmo3": (
        "olmo3",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "sliding_window": 11}
        | {"num_hidden_layers": 4, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "olmo-hybrid": (  # as published: no RoPE, negative eigenvalues, twice as many values as keys
        "olmo_hybrid",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (3, 3, 14), "rope_parameters": {"rope_theta": None}}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "olmo-hybrid-rope": (
        "olmo_hybrid",
        {"hidden_size": 44, "intermediate_size": 52, "heads": (4, 2, 18), "attention_bias": True}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 11}
        | {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 3, "linear_allow_neg_eigval": False}
        | {"rope_parameters": YARN, "num_hidden_layers": 5},
    ),
    "seed-oss": (
        "seed_oss",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 10), "attention_bias": True},
    ),
    "glm": (
        "glm",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 20), "attention_bias": True}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "ministral": (
        "ministral",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_hidden_layers": 4, "sliding_window": 9}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "cwm": (
        "cwm",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_hidden_layers": 5, "sliding_window": 9},
    ),
    "vaultgemma": (
        "vaultgemma",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 4, 18), "sliding_window": 13}
        | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 8.0, "attn_logit_softcapping": None},
    ),
    "hyperclovax": (
        "hyperclovax",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (7, 1, 6), "embedding_multiplier": 12.0}
        | {"residual_multiplier": 0.22, "logits_scaling": 0.4, "rms_norm_eps": 1e-3},
    ),
    "nemotron": (
        "nemotron",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 20), "norm_eps": 1e-3, "mlp_bias": True}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "stablelm": (
        "stablelm",
        {"hidden_size": 40, "intermediate_size": 70, "heads": (4, 2, 10), "layer_norm_eps": 1e-3, "use_qkv_bias": True}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.4}},
    ),
    "stablelm-parallel": (
        "stablelm",
        {"hidden_size": 40, "intermediate_size": 70, "heads": (4, 4, 10), "use_parallel_residual": True}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.4}},
    ),
    "glm4": (
        "glm4",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 20), "attention_bias": True}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "ministral3": (
        "ministral3",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12)}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}},
    ),
    "cohere": ("cohere", {"hidden_size": 42, "intermediate_size": 70, "heads": (3, 1, 14), "logit_scale": 0.7}),
    "cohere2": (
        "cohere2",
        {"hidden_size": 40, "intermediate_size": 70, "heads": (4, 2, 10), "sliding_window": 9, "logit_scale": 0.3}
        | {"num_hidden_layers": 5},
    ),
    "cohere2-packable": (
        "cohere2",
        {"hidden_size": 64, "intermediate_size": 128, "heads": (4, 2, 16), "sliding_window": 16, "logit_scale": 0.3}
        | {"num_hidden_layers": 4, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2-moe": (  # as North Mini: the first layer is dense and rotates without a window
        "cohere2_moe",
        {"hidden_size": 40, "intermediate_size": 26, "heads": (4, 2, 10), "sliding_window": 9, "logit_scale": 0.3}
        | {"num_hidden_layers": 6, "num_experts": 7, "num_experts_per_tok": 3, "expert_selection_fn": "sigmoid"}
        | {"norm_topk_prob": False, "prefix_dense_intermediate_size": 70, "first_k_dense_replace": 1}
        | {"rope_theta": 10_000.0, "rms_norm_eps": None},
    ),
    "cohere2-moe-shared": (  # as Command A+
        "cohere2_moe",
        {"hidden_size": 40, "intermediate_size": 26, "heads": (4, 2, 10), "sliding_window": 9, "logit_scale": 0.3}
        | {"num_hidden_layers": 4, "num_experts": 7, "num_experts_per_tok": 3, "expert_selection_fn": "sigmoid"}
        | {"num_shared_experts": 2, "rope_theta": 10_000.0, "rms_norm_eps": None},
    ),
    "cohere2-moe-sum": (
        "cohere2_moe",
        {"hidden_size": 40, "intermediate_size": 26, "heads": (4, 2, 10), "sliding_window": 9, "logit_scale": 0.3}
        | {"num_hidden_layers": 4, "num_experts": 7, "num_experts_per_tok": 3, "num_shared_experts": 1}
        | {"shared_expert_combination_strategy": "sum", "tie_word_embeddings": False},
    ),
    "phi3-packable": ("phi3", {"hidden_size": 64, "intermediate_size": 128, "heads": (4, 2, 16)}),
    "gpt-oss": (
        "gpt_oss",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (4, 2, 12), "num_local_experts": 5, "sliding_window": 9}
        | {"num_experts_per_tok": 2, "rope_parameters": YARN | {"truncate": False}, "attention_bias": True},
    ),
    "gpt-oss-packable": (
        "gpt_oss",
        {"hidden_size": 64, "intermediate_size": 32, "heads": (4, 2, 12), "num_local_experts": 3}
        | {"num_experts_per_tok": 2, "num_hidden_layers": 2},
    ),
    "mixtral": (
        "mixtral",
        {"hidden_size": 42, "intermediate_size": 30, "heads": (6, 2, 12), "sliding_window": None}
        | {"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "glm4-moe": (
        "glm4_moe",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (4, 2, 16), "attention_bias": True, "use_qk_norm": True}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 26, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "ling2": (  # what it has in transformers' words; `ling2_of` turns them into its own
        "glm4_moe",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (4, 2, 16), "use_qk_norm": True, "n_group": 4}
        | {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 26, "topk_group": 2}
        | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "exaone4": (
        "exaone4",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "sliding_window": 11, "num_hidden_layers": 5}
        | {"sliding_window_pattern": 3, "rope_parameters": LLAMA3},
    ),
    "exaone4-small": (
        "exaone4",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "sliding_window": None}
        | {"layer_types": ["full_attention"] * 3},
    ),
    "exaone-moe": (
        "exaone_moe",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "sliding_window": 11, "num_hidden_layers": 5}
        | {"sliding_window_pattern": 4, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 26}
        | {"n_group": 4, "topk_group": 2},
    ),
    "ernie": ("ernie4_5", {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12)}),
    "ernie-moe": (
        "ernie4_5_moe",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "tie_word_embeddings": False}
        | {"num_hidden_layers": 4, "moe_k": 3, "moe_num_experts": 7, "moe_intermediate_size": 26}
        | {"moe_layer_interval": 2},
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "tie_word_embeddings": True}
        | {"rope_parameters": PLAIN | {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "hy3": (
        "hy_v3",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "router_scaling_factor": 1.7},
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 3, 14), "num_experts": 7, "moe_topk": 3},
    ),
    "llama4": (
        "llama4_text",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 12), "num_hidden_layers": 4}
        | {"intermediate_size_mlp": 70, "interleave_moe_layer_step": 2, "num_local_experts": 5}
        | {"attention_chunk_size": 45, "floor_scale": 20, "attn_scale": 0.4, "no_rope_layers": [1, 1, 0, 1]}
        | {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}},
    ),
    "llama4-packable": (
        "llama4_text",
        {"hidden_size": 64, "intermediate_size": 32, "heads": (4, 2, 16), "num_hidden_layers": 2}
        | {"num_local_experts": 3, "use_qk_norm": False},
    ),
    "llama4-published": (  # as GGUF files mean it
        "llama4_text",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (4, 2, 14), "num_hidden_layers": 5}
        | {"intermediate_size_mlp": 70, "interleave_moe_layer_step": 2, "num_local_experts": 5}
        | {"num_experts_per_tok": 2, "rope_parameters": LLAMA3},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 12), "num_local_experts": 7}
        | {"num_experts_per_tok": 3, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {"hidden_size": 48, "intermediate_size": 70, "heads": (4, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34},
    ),
    "qwen2-moe-mixed": (
        "qwen2_moe",
        {"hidden_size": 48, "intermediate_size": 70, "heads": (4, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34, "mlp_only_layers": [1]}
        | {"norm_topk_prob": True},
    ),
    "olmoe": (
        "olmoe",
        {"hidden_size": 48, "intermediate_size": 26, "heads": (4, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"rms_norm_eps": 1e-5},
    ),
    "afmoe": (
        "afmoe",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "num_shared_experts": 2, "num_dense_layers": 2, "route_scale": 1.5}
        | {"num_hidden_layers": 5, "sliding_window": 11, "mup_enabled": True},
    ),
    "mellum": (
        "mellum",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "sliding_window": 11, "num_hidden_layers": 4, "norm_topk_prob": True}
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN | {"rope_theta": 500.0}}},
    ),
    "mellum-mixed": (
        "mellum",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": False}
        | {"rope_parameters": {"full_attention": PLAIN}},
    ),
    "laguna": (
        "laguna",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34, "moe_routed_scaling_factor": 1.5}
        | {"num_hidden_layers": 5, "sliding_window": 11, "num_attention_heads_per_layer": [6, 4, 4, 4, 6]}
        | {"layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "sliding", "full")]}
        | {"rope_parameters": LAGUNA_ROPE},
    ),
    "laguna-elements": (
        "laguna",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34, "gating": "per-element"}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": LAGUNA_ROPE},
    ),
    "apertus": ("apertus", {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12)}),
    "arcee": ("arcee", {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12)}),
    "solar-open": (
        "solar_open",
        {"hidden_size": 42, "heads": (4, 2, 16), "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    ),
    "dots1": (
        "dots1",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (4, 4, 16), "n_routed_experts": 8, "norm_topk_prob": True}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 26, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 1, "sliding_window": None},
    ),
    "kolibri": (
        "kolibri1",
        {"hidden_size": 42, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3, "sliding_window": 11}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34, "num_hidden_layers": 6},
    ),
    "kolibri-normed": (
        "kolibri1",
        {"hidden_size": 42, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3, "sliding_window": 11}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34, "norm_topk_prob": True},
    ),
    "glm5-next": (
        "glm5_next",
        LATENT
        | {"heads": (4, 4, 16), "qk_rope_head_dim": 0, "num_hidden_layers": 5, "swiglu_limit": 0.05}
        | {"linear_head_dim": 12, "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "index_topk": 8}
        | {"index_head_dim": 20, "index_n_heads": 13, "index_kpool": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 4}
        | {"layer_types": [f"{kind}_attention" for kind in ("linear", "indexed", "linear", "linear", "indexed")]}
        | {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}},
    ),
    "deepseek-v4": (
        "deepseek_v4",
        {"hidden_size": 45, "moe_intermediate_size": 26, "heads": (6, 1, 26), "q_lora_rank": 22, "o_groups": 3}
        | {"o_lora_rank": 14, "n_routed_experts": 7, "num_experts_per_tok": 3, "num_hidden_layers": 5, "index_topk": 6}
        | {
            "index_n_heads": 13,
            "index_head_dim": 20,
            "sliding_window": 37,
            "swiglu_limit": 0.05,
            "hc_sinkhorn_iters": 4,
        }
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}}
        | {"layer_types": [f"{kind}_attention" for kind in DEEPSEEK_KINDS], "partial_rotary_factor": 0.4}
        | {"mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"], "compress_rope_theta": 500.0}
        | {"rope_parameters": {key: YARN[key] for key in YARN if key != "rope_theta"}, "rope_theta": 100.0},
    ),
    "mimo": (
        "mimo_v2_flash",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 1, 24), "v_head_dim": 14, "n_routed_experts": 7}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 26, "sliding_window": 12, "num_hidden_layers": 7}
        | {"attention_value_scale": 0.6, "routed_scaling_factor": 1.5}
        | {
            "rope_parameters": {
                "full_attention": PLAIN | {"rope_theta": 1e6, "partial_rotary_factor": 0.334},
                "sliding_attention": PLAIN | {"partial_rotary_factor": 0.334},
            }
        },
    ),
    "flint": (
        "flint",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "num_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 26, "shared_expert_intermediate_size": 34, "sliding_window": 11}
        | {"num_hidden_layers": 5},
    ),
    "step": (
        "step3p7",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "moe_num_experts": 7, "moe_top_k": 3}
        | {"moe_intermediate_size": 26, "share_expert_dim": 34, "moe_router_scaling_factor": 1.5, "sliding_window": 11}
        | {"num_hidden_layers": 5, "moe_layers_enum": "1,2,3,4", "attention_other_setting": {"num_attention_heads": 4}}
        | {"layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "sliding", "full")]}
        | {"rope_theta": [500_000.0, *[10_000.0] * 3, 500_000.0], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5]}
        | {"swiglu_limits": [0.0, 0.0, 0.0, 0.5, 0.5], "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.0, 0.7]}
        | {"rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}, "rope_parameters": None}
        | {"pad_token_id": 1}
        | {"vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "mlp_ratio": 2.0, "num_attention_heads": 2}},
    ),
    "internlm3": (
        "internlm3",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "attention_bias": True, "mlp_bias": True},
    ),
    "glm4-moe-packable": (
        "glm4_moe",
        {"hidden_size": 64, "intermediate_size": 64, "heads": (4, 2, 16), "n_routed_experts": 64}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "num_hidden_layers": 2},
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (4, 2, 16), "norm_topk_prob": False}
        | {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 26,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "qwen3.5-packable": (
        "qwen3_5_text",
        {"hidden_size": 64, "intermediate_size": 128, "heads": (4, 2, 32), "num_hidden_layers": 2}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
        | {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {"hidden_size": 44, "intermediate_size": 52, "heads": (4, 2, 24), "num_hidden_layers": 3}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10}
        | {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 4}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    ),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {"hidden_size": 44, "heads": (4, 2, 24), "num_hidden_layers": 2}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10}
        | {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26}
        | {"shared_expert_intermediate_size": 30, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    ),
    "qwen4-exp": (
        "qwen4_exp_text",
        {"hidden_size": 44, "heads": (4, 2, 24), "num_hidden_layers": 4}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10}
        | {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid"}
        | {"layer_types": ["linear_attention", "indexed_attention"] * 2}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26, "hc_count": 3, "hc_lowrank": 9}
        | {"shared_expert_intermediate_size": 30, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}
        | {"indexer_n_heads": 9, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 12}
        | {"indexer_compress_ratio": 4, "ple_layer_ids": [3], "ple_embed_dim": 24, "heads_per_ngram": 2}
        | {"ple_conv_kernel_size": 3, "ngram_vocab_size_base": 50, "split_ngram_parts": 4, "eos_token_id": 7}
        | {"make_ngram_vocab_size_divisible_by": 8, "tie_word_embeddings": False},
    ),
    "muse-glimmer-packable": (
        "muse_glimmer",
        {"hidden_size": 64, "intermediate_size": 128, "heads": (4, 2, 32), "num_hidden_layers": 2}
        | {"vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}},
    ),
    "muse-glimmer": (
        "muse_glimmer",
        {"hidden_size": 48, "intermediate_size": 52, "heads": (4, 2, 20), "num_hidden_layers": 5, "sliding_window": 24}
        | {"qk_scale_factor": 2.5, "output_multiplier": 0.6, "rms_norm_eps": 1e-3, "post_norm_eps": 1e-5}
        | {"vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}},
    ),
    "qwen3-next": (
        "qwen3_next",
        {"hidden_size": 44, "heads": (4, 2, 24), "num_hidden_layers": 2}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10}
        | {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 4}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26}
        | {"shared_expert_intermediate_size": 30, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    ),
    "qwen3-next-mixed": (
        "qwen3_next",
        {"hidden_size": 32, "intermediate_size": 52, "heads": (2, 1, 16), "mlp_only_layers": [0]}
        | {"num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 32}
        | {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 2}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 26, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 30, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    ),
    "lfm2": (
        "lfm2",
        {"hidden_size": 42, "intermediate_size": 70, "block_multiple_of": 7, "block_ffn_dim_multiplier": 1.3}
        | {"heads": (6, 2, 12), "conv_L_cache": 4, "conv_bias": True, "norm_eps": 1e-5}
        | {"layer_types": ["conv", "full_attention", "conv"]},
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "layer_types": ["conv", "full_attention"]}
        | {"num_hidden_layers": 2, "num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 26, "routed_scaling_factor": 1.5, "norm_eps": 1e-5},
    ),
    "lfm3": (
        "lfm3",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (6, 2, 12), "conv_L_cache": 7, "sliding_window": 24}
        | {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "num_hidden_layers": 4}
        | {"norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": None},
    ),
    "lfm3-plain": (
        "lfm3",
        {"hidden_size": 40, "intermediate_size": 70, "heads": (5, 5, 10), "conv_L_cache": 3, "conv_bias": True}
        | {"layer_types": ["sliding_attention", "conv", "full_attention"], "sliding_window": 9}
        | {"use_sandwich_norm": False, "use_attention_gate": False, "norm_eps": 1e-5, "num_hidden_layers": 3}
        | {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN | {"rope_theta": 500.0}}},
    ),
    "deepseek-v2": (  # as the Lite ones: queries without a latent, YaRN with both of its scales
        "deepseek_v2",
        LATENT
        | {"heads": (3, 3, 10), "q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        LATENT
        | {"heads": (3, 3, 10), "first_k_dense_replace": 0, "topk_method": "group_limited_greedy", "n_group": 4}
        | {"topk_group": 2, "n_routed_experts": 12, "routed_scaling_factor": 3.0, "attention_bias": True},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        LATENT
        | {"heads": (3, 3, 10), "first_k_dense_replace": 1, "n_routed_experts": 12, "n_group": 4, "topk_group": 2}
        | {"num_nextn_predict_layers": 0, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "mistral4": (
        "mistral4",
        LATENT
        | {"heads": (3, 3, 24), "first_k_dense_replace": 1}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "youtu": (
        "youtu",
        {"hidden_size": 45, "intermediate_size": 70, "heads": (3, 3, 10), "tie_word_embeddings": True}
        | {key: LATENT[key] for key in LATENT if key.startswith(("q", "kv", "v"))}
        | {"rope_parameters": PLAIN | {"rope_theta": 1_600_000.0}},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", LATENT | {"heads": (5, 5, 10), "routed_scaling_factor": 1.8}),
    "glm4-moe-lite-packable": (
        "glm4_moe_lite",
        LATENT
        | {"heads": (2, 2, 8), "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
        | {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 8, "v_head_dim": 64}
        | {"num_hidden_layers": 2},
    ),
    "kimi-linear": (
        "kimi_linear",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (3, 3, 10), "num_hidden_layers": 3, "v_head_dim": 14}
        | {"kv_lora_rank": 34, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 10}
        | {"linear_head_dim": 18, "linear_num_heads": 3, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 26, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "rope_parameters": None}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "ling3": (
        "bailing_hybrid",
        {"hidden_size": 42, "intermediate_size": 70, "heads": (4, 4, 18), "num_hidden_layers": 3, "v_head_dim": 14}
        | {"kv_lora_rank": 34, "qk_nope_head_dim": 12, "qk_rope_head_dim": 10, "layer_group_size": 2}
        | {"num_local_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 26, "n_group": 4}
        | {"topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "kimi-linear-packable": (
        "kimi_linear",
        {"hidden_size": 64, "intermediate_size": 64, "heads": (2, 2, 8), "num_hidden_layers": 3, "v_head_dim": 64}
        | {"kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 8}
        | {"linear_head_dim": 32, "linear_num_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "rope_parameters": None}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "ling3-packable": (
        "bailing_hybrid",
        {"hidden_size": 64, "intermediate_size": 64, "heads": (2, 2, 32), "num_hidden_layers": 3, "v_head_dim": 64}
        | {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 8, "layer_group_size": 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 8), "num_local_experts": 5}
        | {"num_experts_per_tok": 2, "shared_intermediate_size": 30, "embedding_multiplier": 12.0}
        | {"attention_multiplier": 0.11, "residual_multiplier": 0.22, "logits_scaling": 7.0}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mamba_n_heads": 6, "mamba_d_head": 14, "mamba_n_groups": 3, "mamba_d_state": 11, "mamba_d_conv": 3}
        | {"tie_word_embeddings": True},
    ),
    "granite-hybrid-dense": (
        "granitemoehybrid",
        {"hidden_size": 42, "intermediate_size": 30, "heads": (6, 2, 8), "num_local_experts": 0}
        | {"num_experts_per_tok": 0, "shared_intermediate_size": 30, "residual_multiplier": 0.22}
        | {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}
        | {"mamba_n_heads": 4, "mamba_d_head": 21, "mamba_d_state": 16, "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "position_embedding_type": "rope"},
    ),
    "falcon-h1": (
        "falcon_h1",
        {"hidden_size": 42, "intermediate_size": 26, "heads": (6, 2, 8), "mamba_d_ssm": 60, "mamba_n_heads": 6}
        | {"mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 11, "embedding_multiplier": 5.7}
        | {"lm_head_multiplier": 0.4, "mlp_multipliers": [0.88, 0.59], "key_multiplier": 0.39}
        | {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.94, "ssm_in_multiplier": 1.25}
        | {"ssm_out_multiplier": 0.24, "ssm_multipliers": [0.35, 0.25, 0.36, 0.5, 0.37]},
    ),
    "falcon-h1-normed": (
        "falcon_h1",
        {"hidden_size": 44, "intermediate_size": 30, "heads": (4, 2, 10), "mamba_d_ssm": 88, "mamba_n_heads": 4}
        | {"mamba_d_state": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False}
        | {"tie_word_embeddings": True, "num_hidden_layers": 2},
    ),
    # time_step_min: transformers 5.23 keeps steps above it, which its pull request 48989 calls a bug; ours keeps them
    # within time_step_limit, as the published code does.
    "nemotron-h": (
        "nemotron_h",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "time_step_min": 1e-9}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"]}
        | {"mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 13, "conv_kernel": 4},
    ),
    "nemotron-h-moe": (
        "nemotron_h",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 2, 18), "time_step_min": 1e-9}
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]}
        | {"mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 1, "ssm_state_size": 16, "use_bias": True}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 26, "moe_latent_size": 20}
        | {"moe_shared_expert_intermediate_size": 34, "routed_scaling_factor": 1.5},
    ),
    "gemma3": (
        "gemma3_text",
        {"hidden_size": 44, "intermediate_size": 70, "heads": (4, 1, 20), "sliding_window": 11}
        | {"num_hidden_layers": 4, "query_pre_attn_scalar": 24, "final_logit_softcapping": 8.0}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": PLAIN,
            }
        },
    ),
}


@dataclass
class Tiny:
    """A transformers model in float32, and its configuration and tensors as a checkpoint has them."""

    reference: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
        """Write a safetensors checkpoint; `tensors` and `config` replace or, when None, remove what the model has."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | config))
        kept = {name: tensor for name, tensor in (self.tensors | (tensors or {})).items() if tensor is not None}
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / "model.safetensors")
        return folder

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [num_tokens, vocab] from transformers."""
        with torch.no_grad():
            return self.reference(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@pytest.fixture(scope="session")
def tiny_of() -> Callable[..., Tiny]:
    """What transformers makes of a model_type and values, multi-modal ones included, with random weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    def make(model_type: str, values: dict[str, Any], seed: int = 0) -> Tiny:
        config = AutoConfig.for_model(model_type, **copy.deepcopy(values))  # some change what they are given
        torch.manual_seed(seed)
        kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM
        model = kind.from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()
        zero_centred = config.get_text_config().model_type in ZERO_CENTRED
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if NORM.search(key):
                    offset = zero_centred and not key.endswith("linear_attn.norm.weight")
                    parameter.copy_(1 - offset + 0.2 * torch.randn_like(parameter))
                elif key.endswith("A_log"):
                    parameter.copy_(torch.randn_like(parameter))
                elif "conv1d" in key or key.endswith("conv.conv.weight"):
                    parameter.copy_(torch.randn_like(parameter) * 0.5)
                elif key.endswith("bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.copy_(torch.randn_like(parameter) * max(parameter.shape[-1:], default=1) ** -0.5)
            for key, buffer in model.named_buffers():
                if key.endswith(("correction_bias", "expert_bias")):
                    buffer.copy_(0.3 * torch.randn_like(buffer))
                elif key.endswith("tid2eid"):
                    draws = torch.rand(len(buffer), config.n_routed_experts)
                    buffer.copy_(draws.argsort(1)[:, : buffer.shape[1]])
            for key, buffer in model.named_buffers():
                if key.endswith("layer_scalar"):
                    buffer.fill_(0.5 + float(torch.rand(())))
        tensors = {key: value.detach().clone() for key, value in model.state_dict().items()}
        if model_type in RENAMED:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                tensors = load_file(Path(folder) / "model.safetensors")
        if getattr(config, "tie_word_embeddings", False):
            del tensors["lm_head.weight"]
        described = json.loads(config.to_json_string(use_diff=False))
        described["architectures"] = [type(model).__name__]
        return Tiny(model, described, tensors)

    return make


def ling2_of(made: Tiny) -> Tiny:
    """GLM-4.5 as Ling 2.0 stores it, which transformers does not have: the same layers under other names."""
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {names.get(key, key): value for key, value in made.config.items()}
    config |= {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid"}
    return Tiny(made.reference, config, as_ling2(made.tensors))


@pytest.fixture(scope="session")
def tiny(tiny_of: Callable[..., Tiny]) -> Callable[[str], Tiny]:
    """name of TINY -> `Tiny`, made once."""
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            made[name] = _tiny(tiny_of, name, TINY[name][1])
        return made[name]

    return make


def _tiny(tiny_of: Callable[..., Tiny], name: str, values: dict[str, Any]) -> Tiny:
    heads, kv_heads, head_dim = values["heads"]
    settings = COMMON | {key: value for key, value in values.items() if key != "heads"}
    settings |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    if "vision_config" in settings:
        vision = settings.pop("vision_config")
        settings = {"text_config": settings, "vision_config": vision}
    found = tiny_of(TINY[name][0], settings, sum(map(ord, name)))
    return ling2_of(found) if name == "ling2" else found


@pytest.fixture(scope="session")
def tiny_for_gpu(tiny_of: Callable[..., Tiny]) -> Callable[[str], Tiny]:
    """name of TINY -> `Tiny` in sizes that kernels of a GPU have: heads of a multiple of 8."""

    def make(name: str) -> Tiny:
        values = TINY[name][1]
        (heads, kv_heads, dim), others = values["heads"], [key for key in ("global_head_dim",) if key in values]
        if "hidden_size" in values and name.startswith(("stablelm", "olmoe")):  # which have no head_dim of their own
            values = values | {"hidden_size": heads * 16}
            dim = 16
        larger = {key: -(-values[key] // 8) * 8 for key in others}
        return _tiny(tiny_of, name, values | {"heads": (heads, kv_heads, -(-dim // 8) * 8)} | larger)

    return make


@pytest.fixture(scope="session")
def tiny_names() -> tuple[str, ...]:
    """All names of TINY."""
    return tuple(TINY)


@dataclass
class Paged:
    """Sequences in a paged cache: hands out pages, drops those that leave a window, and runs steps."""

    model: Model
    page_size: int = 16
    kv: str = "f32"
    num_pages: int = 96
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_slots: int = 9

    def __post_init__(self) -> None:
        """Pages are handed out in an order that is not ascending."""
        groups = self.model.groups
        counts = [self.num_pages] * len(groups)
        self.cache = self.model.new_cache(counts, self.page_size, self.kv, torch.device("cpu"), self.num_slots)
        self.free = [[(i * 37 + 11) % self.num_pages for i in range(self.num_pages)] for _ in groups]
        assert sorted(self.free[0]) == list(range(self.num_pages))

    def step(self, new: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Run one forward with new tokens per sequence; float32 logits [new tokens, vocab] for each."""
        batch = self.batch(new)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.cache))
        rows = logits.split(list(batch.query_lens))
        return dict(zip(new, rows, strict=True))

    def batch(self, new: dict[int, Sequence[int]]) -> ForwardBatch:
        """The inputs of one step."""
        positions, seq_lens = [], []
        for key, ids in new.items():
            known = self.tokens.setdefault(key, [])
            positions += range(len(known), len(known) + len(ids))
            known.extend(ids)
            seq_lens.append(len(known))
        query_lens = tuple(len(ids) for ids in new.values())
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        groups = tuple(self._group(index, new, starts, positions) for index in range(len(self.model.groups)))
        return ForwardBatch(
            token_ids=torch.tensor([i for ids in new.values() for i in ids]),
            positions=torch.tensor(positions),
            query_lens=query_lens,
            seq_lens=tuple(seq_lens),
            cu_query_lens=starts,
            seq_lens_tensor=torch.tensor(seq_lens).int(),
            logits_indices=torch.arange(sum(query_lens)),
            groups=groups,
            slots=torch.tensor([self.slot(key) for key in new]) if self.model.states else None,
        )

    @staticmethod
    def slot(key: int) -> int:
        """Where a sequence's states are, in an order that is not ascending."""
        return 7 - key

    def _group(
        self, index: int, new: dict[int, Sequence[int]], starts: Tensor, positions: list[int]
    ) -> AttentionInputs:
        window, size = self.model.groups[index].window, self.page_size
        slots: list[int] = []
        for place, (key, ids) in enumerate(new.items()):
            table = self.tables.setdefault(key, [[] for _ in self.model.groups])[index]
            while len(table) * size < len(self.tokens[key]):
                table.append(self.free[index].pop())
            at = positions[int(starts[place]) : int(starts[place + 1])]
            if window is not None:
                for page in range(max(0, at[0] - window + 1) // size):
                    if table[page] >= 0:
                        self.free[index].insert(0, table[page])
                        table[page] = -1
            slots += [table[p // size] * size + p % size for p in at]
            assert len(at) == len(ids)
        tables = [self.tables[key][index] for key in new]
        width = max(map(len, tables))
        padded = torch.tensor([table + [-1] * (width - len(table)) for table in tables]).int()
        return AttentionInputs(padded, torch.tensor(slots))

    def all_logits(self, token_ids: Sequence[int], chunks: Sequence[int], key: int = 0) -> Tensor:
        """Logits of every token of a sequence that is computed in chunks of these lengths, the rest one by one."""
        rows, start = [], 0
        lengths = [*chunks, *[1] * (len(token_ids) - sum(chunks))]
        for length in lengths:
            rows.append(self.step({key: token_ids[start : start + length]})[key])
            start += length
        return torch.cat(rows)


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    """The driver, for tests, which cannot import this file."""
    return Paged


@pytest.fixture(scope="session")
def loaded(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """name of TINY -> our model, loaded once from safetensors."""
    made: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in made:
            with open_model(tiny(name).save(tmp_path_factory.mktemp(name))) as checkpoint:
                made[name] = load_model(checkpoint, LoadOptions(exact=True))
        return made[name]

    return load


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from two threads, which wait long for each other where other programs run, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
