"""config.json: what it may leave out, and whether the head is the embedding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.checkpoint import Checkpoint
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import ModelFacts
from localllm.models.architectures.registry import ARCHITECTURES, understand
from localllm.models.loader import LoadOptions, load_model

TYPES = {model_type: defaults for one in ARCHITECTURES for model_type, defaults in one.hf_types.items()}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
# where the defaults of transformers are no model
STATED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_attention_heads": 64},
    "glm4v_moe_text": {"num_attention_heads": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"] * 2},
}
# which transformers does not have
OTHERS = ("dflash", "eagle3", "bailing_moe", "bailing_moe_v2", "mimo_v2", "k2_horizon", "nanbeige", "spark2_5")
OTHERS += ("minicpm",)
RENAMED = {"exaone4_5_text": "exaone4"}  # as first published -> what transformers calls it today
IDS = list(range(3, 60))


def facts_of(config: dict[str, Any]) -> ModelFacts:
    return understand(Checkpoint(Path("model"), "safetensors", {}, {}, config=config))[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", [one for one in TYPES if one not in OTHERS])
def test_what_is_left_out_is_what_transformers_takes(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    stated = STATED.get(model_type, {})
    whole = json.loads(CONFIG_MAPPING[RENAMED.get(model_type, model_type)](**stated).to_json_string(use_diff=False))
    whole["model_type"] = model_type
    for key in ("bos_token_id", "eos_token_id", "num_nextn_predict_layers"):
        whole.pop(key, None)
    sizes = {key: whole[key] for key in SIZES if key in whole and key not in TYPES[model_type]}
    assert facts_of({"model_type": model_type} | sizes | stated) == facts_of(whole | stated)


def test_scaling_of_ministral_is_read_under_either_key(tiny: Callable, loaded: Callable, tmp_path: Path) -> None:
    model = tiny("ministral3")
    scaling = dict(model.config["rope_parameters"])
    older = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "rope_parameters": None}
    with open_model(model.save(tmp_path, **older)) as checkpoint:
        assert checkpoint.facts.layers == loaded("ministral3").facts.layers


def test_attn_factor_multiplies_what_yarn_makes_of_the_factor() -> None:
    """As DeepSeek-R1-0528-Qwen3-8B states it, the one cancels the other; transformers does not read it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = {"model_type": "qwen3", "max_position_embeddings": 131_072, "rope_theta": 1_000_000}
    for factor, expected in ((0.8782488562869419, 1.0), (None, 1.1386294361119891)):
        stated = scaling | ({} if factor is None else {"attn_factor": factor})
        rope = facts_of(config | {"rope_scaling": stated}).layers[0].mixer.rope
        assert rope.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "is_causal": False},
        {"model_type": "lfm2", "architectures": ["Lfm2BidirectionalModel"]},
    ],
)
def test_models_made_bidirectional_by_code_of_their_own_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        facts_of(config)


def test_gelu_of_the_first_gemma_is_the_one_with_tanh() -> None:
    facts = facts_of({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None})
    assert facts == facts_of({"model_type": "gemma"}) and facts.layers[0].ffn.act == "gelu_tanh"


@pytest.mark.parametrize("tied", [True, False])
def test_kv_heads_of_gemma_4_unified_are_their_own_where_keys_are_values(tied: bool, tiny: Callable) -> None:
    config = tiny("gemma4").config | {"model_type": "gemma4_unified_text", "attention_k_eq_v": tied}
    config |= {"per_layer_config": None, "num_global_key_value_heads": 1, "global_head_dim": 28}
    assert facts_of(config).layers[1].mixer.num_kv_heads == (1 if tied else 2)


@pytest.mark.parametrize(
    ("top", "text", "head", "expected"),
    [
        (True, False, "none", True),
        (False, True, "none", True),
        (None, None, "none", True),
        (None, False, "none", None),
        (False, False, "none", None),
        (False, True, "other", False),
        (None, True, "other", False),
        (True, True, "other", False),
        (True, True, "end", False),
        (True, True, "half", False),
        (True, False, "same", True),
        (None, None, "same", True),
        (False, True, "same", False),
    ],
)
def test_tensors_decide_whether_a_head_is_tied(
    top: bool | None, text: bool | None, head: str, expected: bool | None, tiny: Callable, tmp_path: Path
) -> None:
    """A wrapper of Gemma 3, whose text part is tied where nobody says anything. `expected` None: refused."""
    model = tiny("gemma3")
    table = model.tensors["model.embed_tokens.weight"]
    last = torch.cat([table[:-1], table[-1:] + 1])
    heads = {"none": None, "same": table.clone(), "other": -table, "end": last, "half": table.half()}
    inner = model.config | {"tie_word_embeddings": text}
    config = {"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": top}
    with open_model(model.save(tmp_path, {"lm_head.weight": heads[head]}, **config)) as checkpoint:
        if expected is None:
            with pytest.raises(BadModelFile, match=r"lm_head\.weight: the weight is missing"):
                _ = checkpoint.facts
        else:
            assert checkpoint.facts.tied_embeddings is expected


def test_a_head_of_its_own_is_used_whatever_the_file_says(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model = tiny("qwen3")
    with open_model(model.save(tmp_path, tie_word_embeddings=True)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    reference = model.logits(IDS)
    assert float((paged(ours).all_logits(IDS, [40]) - reference).abs().max() / reference.abs().max()) < 1e-4


def test_patterns_of_windows_are_letters_or_a_number() -> None:
    config = {"model_type": "exaone4", "num_hidden_layers": 8, "max_position_embeddings": 64, "sliding_window": 16}
    expected = [16, 16, 16, None] * 2
    for pattern in ("LLLG", 4, None):
        layers = facts_of(config | {"sliding_window_pattern": pattern, "layer_types": None}).layers
        assert [layer.mixer.window for layer in layers] == expected
        assert [layer.mixer.rope.scaling == "off" for layer in layers] == [window is None for window in expected]
    with pytest.raises(BadModelFile, match="sliding_window_pattern"):
        facts_of(config | {"sliding_window_pattern": "LLXG"})


def test_hunyuan_as_it_is_published(tiny: Callable, tmp_path: Path) -> None:
    """A number for every layer, and the base that alpha stretches in `rope_scaling`."""
    model = tiny("hunyuan-moe")
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    lists = {"moe_topk": [3] * 3, "num_shared_expert": [1] * 3, "moe_intermediate_size": [26] * 3}
    published = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling} | lists
    with (
        open_model(model.save(tmp_path / "plain")) as plain,
        open_model(model.save(tmp_path / "published", **published)) as found,
    ):
        (rope,) = found.facts.ropes
        assert rope.theta == pytest.approx(10000.0 * 1000.0 ** (14 / 12)) and rope.scaling == "none"
        assert [layer.ffn for layer in found.facts.layers] == [layer.ffn for layer in plain.facts.layers]
    for changes, words in (
        ({"moe_topk": [3, 3, 2]}, "moe_topk"),
        ({"rope_scaling": scaling | {"alpha": 0}}, "rope_scaling.alpha: is 0"),
        ({"use_cla": True}, "use_cla"),
    ):
        with pytest.raises((BadModelFile, UnsupportedModel), match=words):
            _ = open_model(model.save(tmp_path / "bad", **published | changes)).facts


def test_llama4_as_it_is_published() -> None:
    """Empty lists stand for the usual, a number for true, and nothing lies between the two factors of its rotation."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling["original_max_position_embeddings"] = 8192
    config = {"model_type": "llama4_text", "num_hidden_layers": 8, "no_rope_layers": [], "attn_temperature_tuning": 4}
    layers = facts_of(config | {"rope_scaling": scaling}).layers
    mixers = [layer.mixer for layer in layers]
    assert [mixer.window for mixer in mixers] == [8192, 8192, 8192, None] * 2
    assert [mixer.chunked and mixer.late_norms and mixer.rope.scaling == "llama3" for mixer in mixers[:3]] == [True] * 3
    still = mixers[3]
    assert (still.temperature, still.temperature_offset, still.rope.scaling) == ((0.1, 8192), 1, "off")
    assert not still.qk_norm and not still.chunked
    assert facts_of(config | {"attention_chunk_size": None}).windows == (None,) * 8
    sparse = facts_of(config | {"moe_layers": None, "interleave_moe_layer_step": 2}).layers
    assert [hasattr(layer.ffn, "top_k") for layer in sparse] == [False, True] * 4
    with pytest.raises(BadModelFile, match="no_rope_layers"):
        facts_of(config | {"no_rope_layers": [1, 0]})


LAGUNA = {"model_type": "laguna", "num_hidden_layers": 4, "gating": "per-element", "max_position_embeddings": 131_072}
STEP = {  # as published, with entries for two MTP heads
    "model_type": "step3p5", "num_hidden_layers": 5, "num_attention_groups": 8, "moe_num_experts": 288, "moe_top_k": 8,
    "sliding_window": 512, "share_expert_dim": 1280, "moe_router_scaling_factor": 3.0, "num_nextn_predict_layers": 2,
    "moe_layers_enum": "3,4", "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
    "layer_types": [f"{kind}_attention" for kind in ("full", *["sliding"] * 3, "full", "sliding", "sliding")],
    "rope_theta": [5e6, *[1e4] * 3, 5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0],
    "swiglu_limits": [None, 0.0, 0.0, 0.0, 7.0, 0.0, 0.0], "swiglu_limits_shared": [0.0] * 4 + [16.0, 0.0, 0.0],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131_072, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
}  # fmt: skip


def test_lists_of_step_also_cover_mtp_heads() -> None:
    facts = facts_of(STEP)
    first, windowed, *_, last = facts.layers
    assert facts.windows == (None, 512, 512, 512, None) and facts.extra_layers == 2
    assert (first.mixer.num_heads, windowed.mixer.num_heads, first.mixer.num_kv_heads) == (64, 96, 8)
    assert (first.mixer.rope.scaling, first.mixer.rope.dim, first.mixer.rope.theta) == ("llama3", 64, 5e6)
    assert (windowed.mixer.rope.scaling, windowed.mixer.rope.dim, windowed.mixer.rope.theta) == ("none", 128, 1e4)
    assert [hasattr(layer.ffn, "top_k") for layer in facts.layers] == [False, False, False, True, True]
    assert (last.ffn.limit, last.ffn.shared_limit, last.ffn.scale) == (7.0, 16.0, 3.0)
    assert facts.layers[3].ffn.limit is None and facts.layers[3].ffn.shared_inner == 1280
    for changes, words in (
        ({"attention_other_setting": {"num_attention_groups": 4}}, "with other KV heads in windowed layers"),
        ({"use_head_wise_attn_gate": False}, "without gates"),
        ({"swiglu_limits_shared": [1.0] * 7}, "with limits in dense layers"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            facts_of(STEP | changes)
    for changes, words in (
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum: must list layer numbers"),
        ({"attention_other_setting": {"num_attention_heads": 90}}, "90 attention heads cannot share 8 KV heads"),
        ({"swiglu_limits": [-1.0]}, "swiglu_limits: must list a limit"),
    ):
        with pytest.raises(BadModelFile, match=words):
            facts_of(STEP | changes)


def test_what_else_files_of_step_may_say() -> None:
    """One base for all layers, no kinds of layers, and the query heads of each layer as transformers saves them."""
    plain = {key: value for key, value in STEP.items() if key not in ("rope_theta", "partial_rotary_factors")}
    ropes = [layer.mixer.rope for layer in facts_of(plain | {"rope_theta": 5e5}).layers[:2]]
    assert [(rope.theta, rope.dim, rope.scaling) for rope in ropes] == [(5e5, 128, "llama3"), (5e5, 128, "none")]
    alike = {key: value for key, value in STEP.items() if key not in ("layer_types", "rope_scaling")}
    facts = facts_of(alike | {"rope_theta": 5e5, "partial_rotary_factors": [0.5] * 7})
    assert set(facts.windows) == {None} and {layer.mixer.rope.dim for layer in facts.layers} == {64}
    heads = {"per_layer_config": {"1": {"num_attention_heads": 16}, "4": {"num_attention_heads": 8, "head_dim": 128}}}
    assert [layer.mixer.num_heads for layer in facts_of(STEP | heads).layers] == [64, 16, 64, 64, 8]
    with pytest.raises(UnsupportedModel, match="with another head_dim in some layers"):
        facts_of(STEP | {"per_layer_config": {"1": {"head_dim": 64}}})
    assert facts_of(STEP | {"moe_layers_enum": "3, 4,"}) == facts_of(STEP)


def test_other_names_and_defaults_of_mixtures() -> None:
    hy3 = {"model_type": "hy_v3", "num_hidden_layers": 2}
    assert facts_of(hy3 | {"num_local_experts": 7, "num_experts_per_tok": 2}).layers[1].ffn.num_experts == 7
    assert facts_of(hy3).layers[1].ffn.num_experts == 192
    with pytest.raises(BadModelFile, match="num_shared_experts: must be 1 to"):
        facts_of(hy3 | {"num_shared_experts": 0})
    for kind in ("dots1", "exaone_moe"):
        wide = {"model_type": kind, "num_hidden_layers": 2, "num_attention_heads": 64, "n_shared_experts": 1}
        wide |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
        assert facts_of(wide).layers[0].mixer.num_kv_heads == 32
    assert facts_of(wide | {"model_type": "dots1", "num_key_value_heads": None}).layers[0].mixer.num_kv_heads == 64


NORTH = {  # as published
    "model_type": "cohere2_moe", "num_hidden_layers": 9, "hidden_size": 2048, "intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "prefix_dense_intermediate_size": 3072, "num_experts": 128,
    "num_experts_per_tok": 8, "num_shared_experts": 0, "first_k_dense_replace": 1, "expert_selection_fn": "sigmoid",
    "rope_theta": 50_000, "max_position_embeddings": 500_000, "norm_topk_prob": False, "tie_word_embeddings": None,
    "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5,
}  # fmt: skip


def test_norms_and_shared_experts_of_north_and_command_a_plus() -> None:
    facts = facts_of(NORTH)
    first, second, *_ = facts.layers
    assert facts.rms_norm_eps == 1e-6 and not first.norms.centred and facts.tied_embeddings
    assert facts.windows == (None, 4096, 4096, 4096) * 2 + (None,)
    assert [layer.mixer.rope.scaling for layer in facts.layers] == ["none"] * 4 + ["off", *["none"] * 3, "off"]
    assert first.ffn.inner == 3072 and (second.ffn.router, second.ffn.renormalise) == ("sigmoid", False)
    assert second.ffn.scale == 1.0 and not second.ffn.shared_inner
    plus = NORTH | {"rms_norm_eps": None, "num_shared_experts": 4, "first_k_dense_replace": 0, "norm_topk_prob": True}
    facts = facts_of(plus)
    assert facts.rms_norm_eps == 1e-5 and facts.layers[0].norms.centred
    experts = facts.layers[0].ffn
    assert (experts.shared_inner, experts.scale, experts.shared_scale) == (4 * 768, 0.5, 0.5)
    summed = facts_of(plus | {"shared_expert_combination_strategy": "sum"}).layers[0].ffn
    assert (summed.scale, summed.shared_scale) == (1.0, 1.0)
    with pytest.raises(BadModelFile, match="shared_expert_combination_strategy: is 'max'; average and sum"):
        facts_of(plus | {"shared_expert_combination_strategy": "max"})
    with pytest.raises(BadModelFile, match="expert_selection_fn: is 'relu'"):
        facts_of(NORTH | {"expert_selection_fn": "relu"})
    with pytest.raises(UnsupportedModel, match="with use_qk_norm"):
        facts_of(NORTH | {"use_qk_norm": True})


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "attention_factor": 1.0}


def test_laguna_m_states_no_window_as_0() -> None:
    nested = {"full_attention": YARN | {"rope_theta": 500_000.0, "partial_rotary_factor": 1.0}}
    facts = facts_of(LAGUNA | {"sliding_window": 0, "rope_parameters": nested})
    assert facts.windows == (None,) * 4 and facts == facts_of(LAGUNA | {"rope_parameters": nested})
    with pytest.raises(BadModelFile, match="sliding_window: is 0, but layer_types names windowed layers"):
        facts_of(LAGUNA | {"sliding_window": 0, "layer_types": ["full_attention", "sliding_attention"] * 2})


def test_rope_stated_in_the_old_layout_takes_precedence_over_defaults_of_the_type() -> None:
    """Conversions of Laguna M.1 state it beside the rest of the configuration; half of a head is the default."""
    old = {"rope_theta": 400_000.0, "partial_rotary_factor": 1.0, "rope_scaling": YARN}
    nested = {"full_attention": YARN | {"rope_theta": 400_000.0, "partial_rotary_factor": 1.0}}
    facts = facts_of(LAGUNA | old)
    rope = facts.layers[0].mixer.rope
    assert (rope.dim, rope.theta, rope.scaling, rope.attention_factor) == (128, 400_000.0, "yarn", 1.0)
    assert facts == facts_of(LAGUNA | {"rope_parameters": nested}) and facts.max_context == 131_072
    assert facts_of(LAGUNA | {"rope_scaling": YARN}).layers[0].mixer.rope.dim == 64


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "granite_swa", "layer_rope_theta": [0, 1e4]}, "must list 24 layers"),
        ({"model_type": "granite_swa", "layer_rope_theta": [0.5] * 24}, "0 or numbers from 1"),
        ({"model_type": "mellum", "mlp_layer_types": ["dense", "wide"] * 14}, "layers of type wide"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "with clip_qkv"),
        ({"model_type": "iquestcoder", "clip_qkv": 8.0}, "with clip_qkv"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "relu2 is supported"),
        ({"model_type": "apertus", "hidden_act": "silu"}, "xielu is supported"),
        ({"model_type": "apertus", "post_norm": True}, "norms in other places is not supported"),
        ({"model_type": "apertus", "qk_norm": False}, "norms in other places is not supported"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "with use_sliding_window"),
    ],
    ids=str,
)
def test_values_that_cannot_be_computed_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=words):
        facts_of(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BailingMoeForCausalLM"]}, "Ling 1.5 and older"),
        ({"architectures": ["BailingMoeV2ForCausalLM"], "score_function": "softmax"}, "score_function softmax"),
    ],
)
def test_other_ling_models_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        facts_of({"model_type": "bailing_moe"} | config)


def test_flint_rotates_whole_heads_and_needs_its_window() -> None:
    config = {"model_type": "flint", "num_hidden_layers": 5, "num_attention_heads": 32, "partial_rotary_factor": 0.5}
    assert {layer.mixer.rope.dim for layer in facts_of(config).layers} == {128}
    with pytest.raises(BadModelFile, match="sliding_window: is 0 or null"):
        facts_of(config | {"sliding_window": None})
