"""The tiny models written as GGUF, with GGUF's names, permuted rows and baked norms, against safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from localllm.checkpoint import Checkpoint
from localllm.kernels.rope import inverse_frequencies, scale_llama3
from localllm.models.architectures import open_model, registry
from localllm.models.architectures.deepseek_v4 import PUBLISHED
from localllm.models.loader import LoadOptions, load_model

# where GGUF has another word for a model_type
ARCHITECTURE = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3"}
ARCHITECTURE |= {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen4_exp_text": "qwen4exp",
    "qwen3_vl_text": "qwen3vl",
    "qwen2_5_vl_text": "qwen2vl",
}
ARCHITECTURE |= {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe"}
ARCHITECTURE |= {"lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "granitemoehybrid": "granitehybrid"}
ARCHITECTURE |= {"deepseek_v2": "deepseek2", "glm4_moe_lite": "deepseek2", "youtu": "deepseek2"}
ARCHITECTURE |= {"olmo3": "olmo2", "ministral3": "mistral3", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4"}
ARCHITECTURE |= {"cohere": "command-r", "ernie4_5_moe": "ernie4_5-moe"}
ARCHITECTURE |= {"hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe"}
ARCHITECTURE |= {"llama4_text": "llama4", "minimax_m2": "minimax-m2", "muse_glimmer_text": "muse-glimmer"}
ARCHITECTURE |= {"qwen2_moe": "qwen2moe", "granitemoe_swa": "granite_swa", "granitemoeshared": "granitemoe"}
ARCHITECTURE |= {
    "falcon_h1": "falcon-h1",
    "solar_open": "glm4moe",
    "internlm3": "llama",
    "glm": "chatglm",
    "ministral": "llama",
}
ARCHITECTURE |= {"cohere2_moe": "cohere2moe", "exaone_moe": "exaone-moe", "step3p5": "step35"}
ARCHITECTURE |= {"kimi_linear": "kimi-linear", "bailing_hybrid": "bailingmoe3", "bailing_moe": "bailingmoe2"}
ARCHITECTURE |= {
    "k2_horizon": "k2-horizon",
    "glm5_next_text": "glm5-next",
    "mimo_v2_flash": "mimo2",
    "deepseek_v4": "deepseek4",
}
HC = ("fn", "base", "scale")
CLAMPS = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
OWN_PATTERN = ("gemma2", "gpt-oss", "cohere2")  # whose files do not say which layers are windowed
LFM2 = {  # what it calls differently
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "embedding_norm": "norm",
    "q_layernorm": "q_norm", "k_layernorm": "k_norm", "self_attn.out_proj": "self_attn.o_proj",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias", "feed_forward": "mlp",
}  # fmt: skip
USUAL = {
    "mlp.router.": "mlp.gate.", "mlp.shared_experts.": "mlp.shared_expert.",
    "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
}  # fmt: skip
KIMI = {  # in order
    "attention.": "self_attn.", "word_embeddings": "embed_tokens", "block_sparse_moe.": "mlp.", "dense.": "o_proj.",
    "gate.expert_bias": "gate.e_score_correction_bias", "shared_experts": "shared_expert",
    "final_layernorm": "shared_head.norm",
    ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.",
}  # fmt: skip
LING2 = {
    "word_embeddings": "embed_tokens", "attention.query_key_value": "self_attn.qkv_proj",
    "attention.query_layernorm": "self_attn.q_norm", "attention.key_layernorm": "self_attn.k_norm",
    "attention.dense": "self_attn.o_proj", "gate.expert_bias": "gate.e_score_correction_bias",
    "final_layernorm": "shared_head.norm",
}  # fmt: skip
AFMOE = {
    "router.gate": "gate", "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm",
}  # fmt: skip
# model_type -> in order, what it calls differently
OWN = {
    "hy_v3": {
        "mlp.expert_bias": "mlp.gate.e_score_correction_bias", "shared_mlp.": "shared_expert.", "router.gate.": "gate.",
        "final_layernorm": "shared_head.norm",
    },
    "exaone_moe": {"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    "kolibri1": {
        "moe.router.expert_bias": "mlp.gate.e_score_correction_bias", "post_attn_norm": "post_self_attn_layernorm",
        "post_ffn_norm": "post_mlp_layernorm",
    },
    "step3p5": {
        "moe.router_bias": "mlp.gate.e_score_correction_bias", "moe.gate.": "mlp.gate.", "g_proj": "gate_proj",
        "share_expert.": "mlp.shared_expert.",
    },
}  # fmt: skip
# whose converter permutes rows of q and k
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3", "arcee")
PERMUTED += ("granite_swa", "muse-glimmer", "eagle3", "nanbeige", "minicpm")


def permuted(rows: Tensor, heads: int) -> Tensor:
    """As converters for llama store q and k: pairs (j, j + half) become neighbours."""
    split = rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    kind: gguf.GGMLQuantizationType,
    apart: bool = True,
) -> Path:
    """A GGUF file of a tiny model, its matrices stored as `kind`.

    config   besides what transformers has: `tokens`, the vocabulary, and `strings`, more metadata
    apart    matrices of latents by heads, as today
    """
    arch = ARCHITECTURE.get(config["model_type"], config["model_type"])
    arch += "_moe" if "moe" in config.get("layers_block_type", ()) else ""
    writer = gguf.GGUFWriter(path, arch)
    family = next(one for one in registry.ARCHITECTURES if arch in one.gguf_types)
    names = family.names(Checkpoint(path, "gguf", {}, {}, {"general.architecture": arch}))
    writer.add_block_count(config.get("num_hidden_layers") or len(config["layers_block_type"]))
    if config.get("nextn"):
        writer.add_nextn_predict_layers(config["nextn"])
    if arch == "k2-horizon":
        writer.add_uint32("k2-horizon.attention.group_norm_groups", config["layernorm_num_groups"])
    if arch == "spark2_5":
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_rope_dimension_count_swa(config["head_dim"])
    if arch == "nanbeige":
        writer.add_uint32("nanbeige.num_loops", config["num_loops"])
        writer.add_bool("nanbeige.skip_loop_final_norm", config.get("skip_loop_final_norm", False))
    if arch in ("kimi-linear", "bailingmoe3"):
        config, tensors = _kimi(writer, config, tensors)
    if arch == "glm5-next":
        config, tensors = _glm5(writer, config, tensors)
    if arch == "deepseek4":
        config, tensors = _deepseek4(writer, config, tensors)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(_inner(config, tensors))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["qk_rope_head_dim"]
    writer.add_head_count(heads)
    of_layers = config.get("layer_types", ())
    writer.add_head_count_kv(
        kv_heads
        if isinstance(kv_heads, list)
        else [kv_heads * (kind != "conv") for kind in of_layers]
        if "conv" in of_layers
        else kv_heads
    )
    writer.add_key_length(dim)
    if arch == "mimo2":
        config, dim = _mimo(writer, config), config["head_dim"]
    else:
        writer.add_value_length(dim)
    turned = int(dim * config["rope_parameters"].get("partial_rotary_factor", 1.0)) * (arch != "glm5-next")
    writer.add_rope_dimension_count(turned)
    eps = config.get("norm_eps") or config.get("layer_norm_epsilon") or config["rms_norm_eps"]
    if arch in ("command-r", "cohere2", "cohere2moe"):
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    elif arch in ("nemotron", "stablelm"):
        writer.add_layer_norm_eps(config.get("norm_eps") or config["layer_norm_eps"])
        writer.add_parallel_residual(config.get("use_parallel_residual", False))
    else:
        writer.add_layer_norm_rms_eps(eps)
    _rope(writer, config, turned)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if config.get("layer_types") and arch not in OWN_PATTERN:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch in ("gemma2", "gemma3"):
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        if config["final_logit_softcapping"]:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch.startswith("gemma4"):
        _heads_of_two_sizes(writer, config)
        tensors = _gemma4(writer, config, tensors)
    if arch == "apertus":
        layers = range(config["num_hidden_layers"])
        for one in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [float(tensors[f"model.layers.{layer}.mlp.act_fn.{one}"]) for layer in layers]
            writer.add_array(f"xielu.{one}", values)
        norms = {"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"}
        for theirs, ours in norms.items():
            tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items() if "act_fn" not in name}
    if arch == "qwen4exp":
        config, tensors = _qwen4(writer, config, tensors)
    if arch == "gemma3n":
        tensors = _gemma3n(writer, config, tensors)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if arch.startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "minicpm" and not config.get("legacy"):
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] * config["num_hidden_layers"] ** -0.5)
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    if "layer_rope_theta" in config and arch == "granite_swa":
        writer.add_array("granite_swa.attention.rope_pattern", [theta > 0 for theta in config["layer_rope_theta"]])
    if config.get("shared_intermediate_size") and arch in ("granite_swa", "granitemoe"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if arch == "granitemoe":
        tensors = _gate_and_up(tensors)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch == "afmoe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_weights_scale(config["route_scale"])
        for theirs, ours in AFMOE.items():
            tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    for theirs, ours in OWN.get(config["model_type"], {}).items():
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    if arch in ("hy_v3", "cohere2moe", "exaone-moe", "dots1", "kolibri1", "step35", "mimo2"):
        tensors = _mixture(writer, config, tensors)
    if arch == "bailingmoe2":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
        for theirs, ours in LING2.items():
            tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    if arch == "laguna":
        heads = config["num_attention_heads_per_layer"]
        writer.add_head_count(heads)
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
        writer.add_leading_dense_block_count(1)
        rope = config["rope_parameters"]
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_rope_dimension_count(int(dim * rope["full_attention"]["partial_rotary_factor"]))
        writer.add_rope_dimension_count_swa(dim)
        tensors = {name.replace("g_proj", "gate_proj"): tensor for name, tensor in tensors.items()}
    if arch == "mellum":
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if arch == "muse-glimmer":
        tensors = _muse_glimmer(writer, config, tensors)
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
    if config.get("num_experts_per_tok") and arch != "nemotron_h":
        count = config.get("num_local_experts") or config.get("n_routed_experts") or config["num_experts"]
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if arch != "llama":
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "glm4moe":
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 0))
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "ernie4_5-moe":
        writer.add_expert_count(config["moe_num_experts"])
        writer.add_expert_used_count(config["moe_k"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(2 * config["moe_intermediate_size"])
        tensors = {
            name.replace("moe_statics.", ""): tensor.squeeze(0) if "moe_statics" in name else tensor
            for name, tensor in tensors.items()
        }
    if arch.startswith("hunyuan"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        tensors = _hunyuan(writer, config, tensors)
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        tensors = {name.replace("mlp.e_score", "mlp.gate.e_score"): tensor for name, tensor in tensors.items()}
    if arch == "llama4":
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        tensors = {name.replace("feed_forward", "mlp"): tensor for name, tensor in tensors.items()}
        tensors = {name: tensor.mT if ".experts." in name else tensor for name, tensor in tensors.items()}
    if arch in ("deepseek2", "mistral4", "kimi-linear", "bailingmoe3"):
        tensors = _latent(writer, config, tensors, apart)
    if arch == "dflash":
        writer.add_uint32("dflash.block_size", config["block_size"])
        writer.add_array("dflash.target_layers", [layer + 1 for layer in config["target_layer_ids"]])
        writer.add_uint32("tokenizer.ggml.mask_token_id", config["mask_token_id"])
    if arch == "eagle3":
        writer.add_array("eagle3.target_layers", [layer + 1 for layer in config["taps"]])
        writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
        for key in ("norm_before_residual", "norm_before_fc"):
            writer.add_bool(f"eagle3.{key}", config.get(key, False))
        writer.add_tensor("d2t", config["d2t"].numpy())
    vocabulary = config["vocab_size"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(config.get("tokens") or [f"t{i}" for i in range(vocabulary)])
    for key, text in config.get("strings", {}).items():
        writer.add_string(key, text)
    writer.add_token_scores([-float(i) for i in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    if "linear_num_key_heads" in config:
        tensors = _hybrid(writer, config, tensors)
    if arch.startswith("lfm2"):
        tensors = {
            _usual(name): tensor.squeeze(1) if tensor.ndim == 3 and ".conv." in name else tensor
            for name, tensor in tensors.items()
        }
    if arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        tensors = _mamba(writer, config, tensors)
    if arch == "falcon-h1":
        tensors = _falcon_h1(writer, config, tensors)
    for name, tensor in stacked(tensors).items():
        module, _, suffix = (f"{name}.weight" if name.endswith("layer_scalar") else name).rpartition(".")
        if arch in PERMUTED and module.endswith(("q_proj", "k_proj")):
            tensor = permuted(tensor, heads if module.endswith("q_proj") else kv_heads)
        if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if module.endswith("shared_expert_gate"):
            tensor = tensor.squeeze(0)  # as llama-quantize leaves it
        plain = tensor.ndim == 1 or suffix in ("bias", "A_log", "D")
        plain |= any(part in name for part in ("ffn_gate_inp", "conv1d", ".conv.conv."))
        stored = gguf.GGMLQuantizationType.F32 if plain else kind
        data = gguf.quants.quantize(tensor.contiguous().numpy(), stored)
        name = "per_layer_token_embd.weight" if name == "ngrams.weight" else name
        known = name.startswith(("blk.", "altup_", "per_layer_"))
        written = name if known else names.tensor(name)
        written += ".bias" if config.get("legacy") and written.endswith("exp_probs_b") else ""
        writer.add_tensor(written, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _inner(config: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Of a dense layer; LFM2's is made of the configuration's."""
    made = tensors.get("model.layers.0.feed_forward.w1.weight")
    stated = config.get("prefix_dense_intermediate_size") or config.get("intermediate_size", 0)
    return stated if made is None else made.shape[0]


def _usual(name: str) -> str:
    """LFM2's name of a tensor as other families have it."""
    for theirs, usual in LFM2.items():
        name = name.replace(theirs, usual)
    return name


def _mixture(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The keys of newer mixtures, and their tensors."""
    kinds = config.get("mlp_layer_types") or ["sparse"] * config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace") or kinds.count("dense")
    arch, inner = writer.arch, config.get("moe_intermediate_size") or config["intermediate_size"]
    count = config.get("num_shared_experts") or config.get("n_shared_experts") or 0
    shared = config.get("shared_expert_intermediate_size") or config.get("share_expert_dim") or count * inner
    if arch != "hy_v3":
        writer.add_leading_dense_block_count(dense)
    if shared:
        writer.add_expert_shared_count(count)
        writer.add_expert_shared_feed_forward_length(shared)
    writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    names = ("router_scaling_factor", "routed_scaling_factor", "moe_router_scaling_factor")
    writer.add_expert_weights_scale(next((config[name] for name in names if name in config), 1.0))
    if arch == "exaone-moe":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if arch != "step35":
        return tensors
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads = [config["num_sliding_attention_heads"] if one else config["num_attention_heads"] for one in windowed]
    ropes, dim = config["rope_parameters"], config["head_dim"]
    writer.add_head_count(heads)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_array("step35.swiglu_clamp_exp", [float(value or 0) for value in config["swiglu_limits"]])
    writer.add_array("step35.swiglu_clamp_shexp", [float(value or 0) for value in config["swiglu_limits_shared"]])
    found = {}
    for name, tensor in tensors.items():
        block = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1.", name)
        if match := re.search(r"\.moe\.(\w+)_proj\.weight", name):
            found[f"{block}ffn_{match[1]}_exps.weight"] = tensor
        elif name.startswith(("model.", "lm_head")):
            found[name] = tensor + 1 if name.endswith("norm.weight") else tensor
    return found


def _mimo(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Its own keys, and the configuration as the others read it. The file does not count a token itself."""
    kv_heads, windowed = config["num_key_value_heads"], [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([kv_heads * (1 + one) for one in windowed])
    writer.add_value_length(config["v_head_dim"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    rope = config["rope_parameters"]["full_attention"]
    return config | {"sliding_window": config["sliding_window"] - 1, "rope_parameters": rope}


def _hunyuan(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The keys of the mixtures, and all tensors under canonical names."""
    if "moe_topk" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_topk"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(1)
    usual = {"query_layernorm": "q_norm", "key_layernorm": "k_norm", "gate.wg": "gate", "shared_mlp": "shared_expert"}
    found = {}
    for name, tensor in tensors.items():
        for theirs, ours in usual.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


def _gate_and_up(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The two halves of Granite's shared expert apart."""
    found = {}
    for name, tensor in tensors.items():
        start, split, _ = name.partition("shared_mlp.input_linear")
        halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
        found |= {f"{start}mlp.shared_expert.{k}_proj.weight": t for k, t in halves} if split else {name: tensor}
    return found


def _muse_glimmer(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scale of scores is the weight of the norm of queries; 1 is in the norms of the layers."""
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_logit_scale(config["output_multiplier"])
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(("model.language_model.", "lm_head")):
            shift = 1 if name.endswith("layernorm.weight") else 0
            found[name.replace("language_model.", "")] = tensor + shift
    for layer in range(config["num_hidden_layers"]):
        start, ones = f"model.layers.{layer}.self_attn", torch.ones(config["head_dim"])
        found |= {f"{start}.q_norm.weight": config["qk_scale_factor"] * ones, f"{start}.k_norm.weight": ones}
    return found


def _latent(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor], apart: bool
) -> dict[str, Tensor]:
    """The keys of a model with latent attention, and its tensors."""
    rank, turned, still = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    heads, values, rope = config["num_attention_heads"], config["v_head_dim"], config["rope_parameters"]
    if config["model_type"] == "youtu":
        writer.add_leading_dense_block_count(config["num_hidden_layers"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)
    else:
        dense = config.get("mlp_layer_types", []).count("dense") or config["first_k_dense_replace"]
        writer.add_leading_dense_block_count(dense)
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if not apart:  # as older files have it, which say nothing of the router either
        writer.add_key_length(still + turned)
        writer.add_value_length(values)
        return tensors
    writer.add_head_count_kv(config.get("kept", 1))
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(still + turned)
    writer.add_value_length_mla(values)
    if config["model_type"] == "mistral4":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    if config["model_type"] == "glm4_moe_lite":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        keys, rows = tensor.view(heads, still + values, rank).split([still, values], 1)
        layer = name.split(".")[2]
        found |= {f"blk.{layer}.attn_k_b.weight": keys.mT, f"blk.{layer}.attn_v_b.weight": rows}
    return found


def _kimi(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of a model with Kimi Delta Attention; its configuration and tensors under the usual names."""
    ling = config["model_type"] == "bailing_hybrid"
    names = {"max_position_embeddings": "model_max_length", "n_shared_experts": "num_shared_experts"}
    names |= {"num_experts_per_tok": "num_experts_per_token", "norm_topk_prob": "moe_renormalize"}
    usual = {ours: config[theirs] for ours, theirs in names.items()}
    usual |= {"q_lora_rank": None, "rope_parameters": config.get("rope_parameters") or {"rope_theta": 10_000.0}}
    usual["rope_parameters"].setdefault("rope_type", "default")
    kinds = config["layer_types"] + ["full_attention"] * config.get("nextn", 0)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if ling:
        writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
        writer.add_expert_group_count(config["num_expert_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_norm(config["moe_renormalize"])
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"])
        for key, theirs in CLAMPS.items():
            if config.get(theirs):
                writer.add_array(f"bailingmoe3.{key}", config[theirs])
    found = {}
    for name, tensor in tensors.items():
        for theirs, ours in KIMI.items():
            name = name.replace(theirs, ours)
        match = re.fullmatch(r"(model\.layers\.(\d+))\.(.+)", name)
        if match and kinds[int(match[2])] == "linear_attention" and "self_attn" in name:
            name = name.replace("self_attn", "linear_attn").replace("o_norm", "norm").replace("o_proj", "out_proj")
        elif match and name.endswith("g_proj.weight"):
            name = name.replace("g_proj", "gate_proj")
        if name.endswith("A_log"):
            tensor = (1 if ling else -1) * tensor.exp().reshape(-1, 1)
        found[name] = tensor.squeeze(1).unsqueeze(1).unsqueeze(0) if "conv1d" in name else tensor
    for layer in range(len(kinds)):
        for part in ("gate", "up", "down"):
            each = [f"model.layers.{layer}.mlp.experts.{i}.{part}_proj.weight" for i in range(config["num_experts"])]
            if each[0] in found:
                whole = torch.stack([found.pop(name) for name in each])
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = whole
    return config | usual | {"kept": [int(kind == "full_attention") for kind in kinds]}, found


def _deepseek4(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of DeepSeek V4; its configuration and tensors under the usual names."""
    key, ropes, rates = "deepseek4.", config["rope_parameters"], config["compress_rates"]
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_uint32(f"{key}attention.output_group_count", config["o_groups"])
    writer.add_uint32(f"{key}attention.output_lora_rank", config["o_lora_rank"])
    ratios = config.get("ratios") or [rates.get(kind, 0) for kind in config["layer_types"]] + [0]
    writer.add_array(f"{key}attention.compress_ratios", ratios)
    writer.add_float32(f"{key}attention.compress_rope_freq_base", ropes["compress"]["rope_theta"])
    for name, theirs in {"head_count": "n_heads", "key_length": "head_dim", "top_k": "topk"}.items():
        writer.add_uint32(f"{key}attention.indexer.{name}", config[f"index_{theirs}"])
    writer.add_uint32(f"{key}hyper_connection.count", config["hc_mult"])
    writer.add_uint32(f"{key}hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"])
    writer.add_float32(f"{key}hyper_connection.epsilon", config["hc_eps"])
    writer.add_uint32(f"{key}hash_layer_count", config["mlp_layer_types"].count("hash_moe"))
    writer.add_array(f"{key}swiglu_clamp_exp", [config["swiglu_limit"]] * config["num_hidden_layers"])
    writer.add_uint32(f"{key}expert_gating_func", 4)
    writer.add_nextn_predict_layers(1)  # whose tensors are not in the file
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    usual = {theirs: ours for ours, theirs in PUBLISHED.items()} | {"attn.norm": "self_attn.kv_norm"}
    usual |= {"ffn.gate.bias": "mlp.gate.e_score_correction_bias"}
    outer = {"head.weight": "lm_head.weight"} | {f"model.hc_head.hc_{one}": f"model.hc_head_{one}.weight" for one in HC}
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(model\.layers\.\d+)\.(.+?)(\.weight)?", name)
        if match is None:
            found[outer.get(name, name)] = tensor
            continue
        inner, number = re.subn(r"\.experts\.(\d+)\.", ".experts.{}.", match[2])
        inner = usual.get(inner, inner).format(*re.findall(r"\.experts\.(\d+)\.", match[2]))
        whole = match[3] or ".weight" * inner.startswith("hc_")
        if inner.endswith("tid2eid"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_gate_tid2eid.weight", tensor.int().numpy())
        else:
            found[f"{match[1]}.{inner}{whole}"] = tensor
    rope = ropes["compress"] | {"rope_theta": ropes["main"]["rope_theta"]}
    return config | {"rope_parameters": rope, "layer_types": []}, found


def _glm5(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of GLM-5.3 Flash; its configuration and tensors under the usual names, without its tower."""
    key, kinds = "glm5-next.", config["layer_types"] + ["full_attention"] * config.get("nextn", 0)
    rank, still, value = (config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length_mla(still)
    writer.add_value_length_mla(value)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    if config["linear_lower_bound"] is not None:
        writer.add_float32(f"{key}kda.gate_lower_bound", config["linear_lower_bound"])
    for name, theirs in {"head_count": "n_heads", "key_length": "head_dim", "top_k": "topk", "kpool": "kpool"}.items():
        writer.add_uint32(f"{key}attention.indexer.{name}", config[f"index_{theirs}"])
    writer.add_uint32(f"{key}hyper_connection.count", config["hc_mult"])
    writer.add_uint32(f"{key}hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"])
    writer.add_float32(f"{key}hyper_connection.epsilon", config["hc_eps"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp")[: config.get("clamps", 2)]:
        writer.add_array(f"{key}{name}", [config["swiglu_limit"]] * len(kinds))
    for name, values in config.get("more", {}).items():
        (writer.add_array if isinstance(values, list) else writer.add_bool)(key + name, values)
    found = {}
    for name, tensor in tensors.items():
        if "visual" in name:
            continue
        name = name.replace("language_model.", "").replace("shared_experts", "shared_expert")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match and kinds[int(match[1])] == "linear_attention" and "self_attn" in name:
            name = name.replace("self_attn", "linear_attn").replace("o_norm", "norm").replace("o_proj", "out_proj")
        if name.endswith("kv_b_proj.weight"):
            keys, rows = tensor.view(-1, still + value, rank).split([still, value], 1)
            found |= {f"blk.{match[1]}.attn_k_b.weight": keys.mT, f"blk.{match[1]}.attn_v_b.weight": rows}
            continue
        name += ".weight" * name.endswith(("_fn", "_base", "_scale", "_ape", "_gate"))
        tensor = -tensor.exp() if name.endswith("A_log") else tensor
        found[name] = tensor.squeeze(1).unsqueeze(1).unsqueeze(0) if "conv1d" in name else tensor
    shape = {"num_key_value_heads": [int(kind != "linear_attention") for kind in kinds], "head_dim": rank}
    return config | shape | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, found


def _hybrid(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The keys of a model with gated delta layers, and its tensors with value heads in turn over the key heads."""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(k_dim)
    writer.add_ssm_group_count(k_heads)
    writer.add_ssm_time_step_rank(v_heads)
    writer.add_ssm_inner_size(v_heads * v_dim)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])

    ratio, grouped = v_heads // k_heads, config["model_type"] == "qwen3_next"

    def tiled(rows: Tensor, dim: int) -> Tensor:
        if grouped:
            return rows
        split = rows.reshape(k_heads, v_heads // k_heads, dim, *rows.shape[1:])
        return split.transpose(0, 1).reshape(rows.shape)

    found = {}
    for name, tensor in tensors.items():
        keys = 2 * k_heads * k_dim
        if "linear_attn" not in name:
            found[name] = tensor + 1 if name.endswith("norm.weight") else tensor
        elif "in_proj_qkvz" in name and not config.get("legacy"):
            parts = tensor.view(k_heads, -1, tensor.shape[1]).split([k_dim, k_dim, ratio * v_dim, ratio * v_dim], 1)
            *qkv, z = (part.flatten(0, 1) for part in parts)
            found |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
        elif "in_proj_qkvz" in name or "in_proj_ba" in name:
            found[name] = tensor
        elif "in_proj_qkv" in name or "conv1d" in name:
            tensor = tensor.squeeze(1)
            found[name] = torch.cat([tensor[:keys], tiled(tensor[keys:], v_dim)])
        elif "out_proj" in name:
            found[name] = tiled(tensor.T, v_dim).T
        elif name.endswith("norm.weight"):
            found[name] = tensor
        else:
            tensor = tiled(tensor, v_dim if "in_proj_z" in name else 1)
            found[name] = -tensor.exp() if name.endswith("A_log") else tensor
    return found


def _mamba(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The keys of a model with Mamba-2 layers, and its tensors under canonical names, as converters change them."""
    nemotron = config["model_type"] == "nemotron_h"
    heads = config["mamba_num_heads" if nemotron else "mamba_n_heads"]
    groups = config["n_groups" if nemotron else "mamba_n_groups"]
    kinds = config["layers_block_type" if nemotron else "layer_types"]
    writer.add_ssm_conv_kernel(config["conv_kernel" if nemotron else "mamba_d_conv"])
    writer.add_ssm_state_size(config["ssm_state_size" if nemotron else "mamba_d_state"])
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * config["mamba_head_dim" if nemotron else "mamba_d_head"])
    writer.add_ssm_time_step_rank(heads)
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    shared = "moe_shared_expert_intermediate_size" if nemotron else "shared_intermediate_size"
    if nemotron:
        inner = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
        writer.add_feed_forward_length([inner.get(kind, 0) for kind in kinds])
    if "moe" in kinds or config["model_type"] == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config[shared])
    if "moe" in kinds:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_moe_latent_size(config["moe_latent_size"])
    found = {}
    for name, tensor in tensors.items():
        if "A_log" in name:
            tensor = -tensor.exp()
        if name.endswith(("A_log", ".D")):
            tensor = tensor.unsqueeze(-1)
        if "conv1d.weight" in name:
            tensor = tensor.squeeze(1)
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.view(groups, -1)
        found |= _canonical(name, tensor, kinds, config)
    return found


def _falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiplied by the multipliers, as converters store them."""
    tensors = _mamba(writer, config | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}, tensors)
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = torch.tensor([inner, inner, shared, shared, config["mamba_n_heads"]])
    reads = config["attention_in_multiplier"]
    factors = {
        "q_proj": reads, "k_proj": reads * config["key_multiplier"], "v_proj": reads,
        "o_proj": config["attention_out_multiplier"], "mamba.out_proj": config["ssm_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0], "down_proj": config["mlp_multipliers"][1],
        "embed_tokens": config["embedding_multiplier"], "lm_head": config["lm_head_multiplier"],
    }  # fmt: skip
    rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes) * config["ssm_in_multiplier"]
    found = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        factor = next((factor for part, factor in factors.items() if module.endswith(part)), 1.0)
        tensor = tensor * rows.unsqueeze(-1) if module.endswith("in_proj") else tensor * factor
        name = name.replace("feed_forward", "mlp").replace("model.final_layernorm", "model.norm")
        found[name] = tensor
    return found


def _canonical(name: str, tensor: Tensor, kinds: list[str], config: dict[str, Any]) -> dict[str, Tensor]:
    """What a tensor of Granite 4 or Nemotron-H is called by everybody else."""
    match = re.fullmatch(r"(model\.layers\.(\d+))\.(.+)", name)
    if match is None:
        return {name.replace("model.embeddings", "model.embed_tokens").replace("model.norm_f", "model.norm"): tensor}
    start, kind, rest = match[1], kinds[int(match[2])], match[3]
    if rest == "norm.weight":
        return {f"{start}.input_layernorm.weight": tensor}
    if (stack := re.fullmatch(r"mixer\.experts\.(up|down)_proj", rest)) is not None:
        return {f"blk.{match[2]}.ffn_{stack[1]}_exps.weight": tensor}
    owner = {"linear_attention": "mamba", "full_attention": "self_attn"}.get(kind, "mlp")
    rest = rest.replace("mixer.", f"{owner}.").replace("shared_experts", "shared_expert")
    rest = rest.replace("fc1_latent_proj", "latent_in").replace("fc2_latent_proj", "latent_out")
    shared = "mlp.shared_expert" if config.get("num_local_experts") else "mlp"
    rest = rest.replace("shared_mlp.output_linear", f"{shared}.down_proj")
    if rest == "shared_mlp.input_linear.weight":
        gate, up = tensor.chunk(2)
        return {f"{start}.{shared}.gate_proj.weight": gate, f"{start}.{shared}.up_proj.weight": up}
    return {f"{start}.{rest}": tensor}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of experts as converters write them: all of a layer, gate and up apart."""
    found, alone = {}, {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe.", "mlp.")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name):
            alone.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", {})[int(match[2])] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(|_bias)", name)
        if match is None:
            for theirs, ours in USUAL.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
            continue
        suffix, gpt_oss = "bias" if match[3] else "weight", f"{name.removesuffix('_bias')}_bias" in tensors
        if gpt_oss and not match[3]:
            tensor = tensor.mT
        if match[2] == "down":
            parts = {"down": tensor}
        else:
            gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if gpt_oss else tensor.chunk(2, 1)
            parts = {"gate": gate, "up": up}
        found |= {f"blk.{match[1]}.ffn_{kind}_exps.{suffix}": part for kind, part in parts.items()}
    return found | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in alone.items()}


def _heads_of_two_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    wide = config["per_layer_config"]
    layers = [wide.get(str(index)) for index in range(config["num_hidden_layers"])]
    full = next(layer for layer in layers if layer)
    dim, turned = full["head_dim"], config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    writer.add_head_count_kv([(config | (layer or {}))["num_key_value_heads"] for layer in layers])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    pairs = int(turned * dim / 2)
    writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * pairs + [1e30] * (dim // 2 - pairs)).numpy())
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_pad_token_id(config.get("pad_token_id") or 0)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What E2B and 26B-A4B have besides."""
    inner, layers = config["intermediate_size"], config["num_hidden_layers"]
    if config["use_double_wide_mlp"]:
        keeping = layers - config["num_kv_shared_layers"]
        writer.add_feed_forward_length([inner * (1 + (layer >= keeping)) for layer in range(layers)])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "backbone_hidden_size" in config:
        writer.add_uint32("gemma4-assistant.embedding_length_out", config["backbone_hidden_size"])
    found = {}
    for name, tensor in tensors.items():
        block = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1.", name)
        if name.endswith("per_expert_scale"):
            found[f"{block}ffn_down_exps.scale"] = tensor
        elif ".experts." in name:
            found[f"{block}ffn_{name.rpartition('.')[2].removesuffix('_proj')}_exps.weight"] = tensor
        else:
            found[name.replace("router.proj", "mlp.gate").replace("router.", "mlp.gate.")] = tensor
    return found


def _qwen4(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of streams, index and n-gram table, and the tensors: index queries and keys apart, the table outside."""
    key, layers = "qwen4exp.", config["layer_types"]
    writer.add_uint32(f"{key}hyper_connection.count", config["hc_count"])
    writer.add_uint32(f"{key}hyper_connection.low_rank", config["hc_lowrank"])
    writer.add_uint32(f"{key}attention.indexer.head_count", config["indexer_n_heads"])
    writer.add_uint32(f"{key}attention.indexer.key_length", config["indexer_head_dim"])
    writer.add_uint32(f"{key}attention.indexer.top_k", config["indexer_budget"])
    ratios = [config["indexer_compress_ratio"] * (kind != "linear_attention") for kind in layers]
    writer.add_array(f"{key}attention.compress_ratios", ratios)
    writer.add_array(f"{key}ple.layers", [number - 1 for number in config["ple_layer_ids"]])
    writer.add_uint32(f"{key}ple.ngram_size", config["ngram_size"])
    writer.add_uint32(f"{key}ple.heads_per_ngram", config["heads_per_ngram"])
    writer.add_uint32(f"{key}ple.conv_kernel", config["ple_conv_kernel_size"])
    writer.add_uint32(f"{key}ple.eos_token_id", config["eos_token_id"])
    heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    writer.add_embedding_length_per_layer_input(config["ple_embed_dim"] // heads)
    stored = {"layer_multipliers": "layer_multipliers"}
    stored |= {"ngram_heads_vocab_sizes": "head_vocab_sizes", "ngram_heads_offsets": "head_offsets"}
    found = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last in stored:
            writer.add_key_value(f"{key}ple.{stored[last]}", tensor.tolist(), ARRAY, gguf.GGUFValueType.UINT64)
        elif name.endswith("index_qk_proj.weight"):
            queries = config["indexer_n_heads"] * config["indexer_head_dim"]
            parts = zip("qk", (tensor[:queries], tensor[queries:]), strict=True)
            found |= {name.replace("index_qk_proj", f"{part}_proj"): rows for part, rows in parts}
        elif "ple.norm" in name:
            found[name] = tensor + 1
        else:
            name = re.sub(r".*\.ngram_embedding\.", "ngrams.", name)
            found[name] = tensor.squeeze(1) if "ple.conv1d" in name else tensor
    types = ["full_attention" if kind == "indexed_attention" else kind for kind in layers]
    return config | {"layer_types": types}, found


ARRAY = gguf.GGUFValueType.ARRAY


def _gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of streams as stacks; all tokens have a row for layers, where the converter pads with zeros."""
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0.0, 1.0).icdf(shares).tolist())
    others = range(config["altup_num_inputs"] - 1)
    found = {name: tensor for name, tensor in tensors.items() if "projections." not in name}
    table = tensors["model.embed_tokens_per_layer.weight"]
    more = table[:1].expand(config["vocab_size"] - table.shape[0], -1)
    found["model.embed_tokens_per_layer.weight"] = torch.cat([table, more])
    for name, stack in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        found[f"{stack}.weight"] = torch.stack([tensors[f"model.{name}.{number}.weight"] for number in others])
    return found


def _rope(writer: gguf.GGUFWriter, config: dict[str, Any], dim: int) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if "alpha" in rope:
        rope = {"rope_theta": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))}
    writer.add_rope_freq_base(rope["rope_theta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if rope.get("rope_type") == "llama3":
        plain = inverse_frequencies(rope["rope_theta"], dim)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        scaled = scale_llama3(plain, rope["factor"], low, high, rope["original_max_position_embeddings"])
        spare = torch.ones((config["head_dim"] - dim) // 2 if "swiglu_limits" in config else 0)
        writer.add_tensor("rope_freqs.weight", torch.cat([plain / scaled, spare]).numpy())
    elif rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", torch.tensor(rope[f"{name}_factor"]).numpy())
    elif rope.get("rope_type", "default") not in ("default", "proportional"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gguf_logits(
    model: Any, paged: Any, path: Path, kind: gguf.GGMLQuantizationType, ids: list[int], apart: bool = True
) -> Tensor:
    config = model.config if "vocab_size" in model.config else model.config["text_config"]
    with open_model(write_gguf(path, config, model.tensors, kind, apart)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    return paged(ours).all_logits(ids, [50])


# by default one of each kind of mixer, feed-forward layer, cache and rotation
NAMES = ("llama", "llama-yarn", "qwen2", "qwen3", "qwen3-moe", "phi3", "gemma3", "gpt-oss", "glm4-moe", "qwen3.5")
NAMES += ("lfm2", "nemotron-h", "falcon-h1", "gemma3n", "gemma4-e2b", "ministral3", "deepseek-v2", "hunyuan")
NAMES += ("llama4-published", "kimi-linear", "deepseek-v4", "step", "mimo", "stablelm")
SLOW_NAMES = ("llama-bias", "mistral", "mixtral", "qwen3.5-moe", "qwen3-next", "lfm2-moe", "granite-hybrid", "gemma")
SLOW_NAMES += ("gemma2", "gemma4", "gemma4-moe", "smollm3", "granite", "granitemoe", "olmo2", "olmo3", "seed-oss")
SLOW_NAMES += ("glm4", "mistral4", "cohere2", "ernie", "ernie-moe", "exaone4", "exaone4-small", "hunyuan-moe")
SLOW_NAMES += ("minimax-m2", "granite-swa", "granitemoe-swa", "afmoe", "qwen4-exp", "mellum", "laguna", "arcee")
SLOW_NAMES += ("apertus", "qwen2-moe", "olmoe", "ling3", "youtu", "glm5-next", "ling2", "hy3", "cohere2-moe")
SLOW_NAMES += ("kolibri", "exaone-moe", "dots1", "glm", "nemotron")
SLOW_NAMES += ("cohere", "cohere2-packable", "glm4-moe-lite", "granite-hybrid-dense", "nemotron-h-moe")
SLOW_NAMES += ("solar-open", "internlm3", "granitemoe-shared", "cohere2-moe-shared", "kolibri-normed")
SLOW_NAMES += ("stablelm-parallel",)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW_NAMES]


def test_lists_of_a_file_may_cover_its_mtp_blocks(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """As llama.cpp's converter writes Step's."""
    model, ids = tiny("step"), torch.randint(0, 99, (30,)).tolist()
    config = dict(model.config.get("text_config", model.config))
    more = {"layer_types": "sliding_attention", "swiglu_limits": 0.0, "swiglu_limits_shared": 0.0}
    more |= {"mlp_layer_types": "sparse"}
    longer = {key: [*config[key], value] for key, value in more.items() if config.get(key)}
    head = {name.replace(".3.", ".5."): tensor for name, tensor in model.tensors.items() if ".layers.3." in name}
    made = replace(model, config=config | longer | {"num_hidden_layers": 6, "nextn": 1}, tensors=model.tensors | head)
    rows = gguf_logits(made, paged, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, ids)
    expected = model.logits(ids)
    assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_gguf_equals_safetensors(name: str, tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    ids = torch.randint(0, 99, (70,)).tolist()
    rows = gguf_logits(tiny(name), paged, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, ids)
    expected = paged(loaded(name)).all_logits(ids, [50])
    assert float((rows - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.slow
def test_muse_glimmer(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Its files have no key for the epsilon of the norms of what is added."""
    model, ids = tiny("muse-glimmer"), torch.randint(0, 99, (70,)).tolist()
    text = model.config["text_config"] | {"post_norm_eps": 1e-8}
    with open_model(model.save(tmp_path / "safetensors", text_config=text)) as checkpoint:
        expected = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [50])
    rows = gguf_logits(replace(model, config=text), paged, tmp_path / "a.gguf", gguf.GGMLQuantizationType.F32, ids)
    assert float((rows - expected).abs().max() / expected.abs().max()) < 2e-5


QWEN_VL = (("qwen2", "qwen2vl"), ("qwen2", "qwen25vl"), ("qwen3", "qwen3vl"), ("qwen3-moe", "qwen3vlmoe"))


@pytest.mark.parametrize(("name", "arch"), QWEN_VL)
def test_the_text_part_of_qwen_vl(
    name: str, arch: str, tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path
) -> None:
    ids = torch.randint(0, 99, (70,)).tolist()
    model = tiny(name)
    named = replace(model, config=model.config | {"model_type": arch})
    rows = gguf_logits(named, paged, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, ids)
    expected = paged(loaded(name)).all_logits(ids, [50])
    assert float((rows - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("name", ["qwen3-next", "hy3"])
def test_files_as_they_were_written_first(
    name: str, tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path
) -> None:
    """Qwen3-Next: ssm_in has the rows of each key head together, as safetensors have. Hy3: exp_probs_b has a suffix."""
    ids = torch.randint(0, 99, (70,)).tolist()
    model = tiny(name)
    old = replace(model, config=model.config | {"legacy": True})
    rows = gguf_logits(old, paged, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, ids)
    expected = paged(loaded(name)).all_logits(ids, [50])
    assert float((rows - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_gguf_block_types(kind: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, stored = tiny("llama-packable"), gguf.GGMLQuantizationType[kind]
    ids = torch.randint(0, 99, (70,)).tolist()
    rounded = {
        key: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), stored), stored))
        if value.ndim == 2
        else value
        for key, value in model.tensors.items()
    }
    with open_model(model.save(tmp_path / "rounded", rounded)) as checkpoint:
        expected = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [50])
    rows = gguf_logits(model, paged, tmp_path / "tiny.gguf", stored, ids)
    assert float((rows - expected).abs().max() / expected.abs().max()) < 2e-5
    assert math.isfinite(float(rows.sum()))


def test_older_files_keep_keys_and_values_of_latents_together(
    tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path
) -> None:
    """And do not say that the router is a softmax one."""
    ids = torch.randint(0, 99, (70,)).tolist()
    kind = gguf.GGMLQuantizationType.F32
    rows = gguf_logits(tiny("deepseek-v2"), paged, tmp_path / "tiny.gguf", kind, ids, apart=False)
    expected = paged(loaded("deepseek-v2")).all_logits(ids, [50])
    assert float((rows - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.slow
def test_blocks_of_single_heads(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Those that take queries to latents are turned over before they are quantized."""
    model, stored, ids = tiny("glm4-moe-lite-packable"), gguf.GGMLQuantizationType.Q8_0, list(range(3, 60))

    def rounded(values: Tensor) -> Tensor:
        packed = gguf.quants.quantize(values.contiguous().numpy(), stored)
        return torch.from_numpy(gguf.quants.dequantize(packed, stored))

    expected = {}
    for name, tensor in model.tensors.items():
        if name.endswith("kv_b_proj.weight"):
            keys, values = tensor.view(2, 128, 64).chunk(2, 1)
            expected[name] = torch.cat([rounded(keys.mT).mT, rounded(values)], 1).reshape(256, 64)
        else:
            expected[name] = rounded(tensor) if tensor.ndim > 1 else tensor
    with open_model(model.save(tmp_path / "rounded", expected)) as checkpoint:
        wanted = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [50])
    rows = gguf_logits(model, paged, tmp_path / "tiny.gguf", stored, ids)
    assert float((rows - wanted).abs().max() / wanted.abs().max()) < 2e-5
