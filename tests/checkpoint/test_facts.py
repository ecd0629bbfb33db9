"""Facts of the two real models, of published and tiny configs, and of GGUF metadata with each architecture's quirks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny

from localllm.checkpoint import Checkpoint
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.models.architectures import Attention, ModelFacts, RopeFacts, kv_bytes_per_token, open_model
from localllm.models.architectures.facts import count_params, linear_shapes, vector_shapes
from localllm.models.architectures.registry import understand


def facts_of(config: dict[str, Any], **more: Any) -> ModelFacts:
    """Of a model of which only the config is there."""
    return understand(Checkpoint(Path("some/model"), "safetensors", {}, {}, config=config, **more))[0]


def wide(facts: ModelFacts) -> Attention:
    """Of the layers that see everything."""
    return next(layer.mixer for layer in facts.layers if layer.mixer.window is None)


def local(facts: ModelFacts) -> Attention:
    """Of the windowed layers."""
    return next(layer.mixer for layer in facts.layers if layer.mixer.window is not None)


def test_smollm2(smollm2_path: Path) -> None:
    with open_model(smollm2_path) as checkpoint:
        facts = checkpoint.facts
    assert (facts.architecture, facts.source_architecture, facts.num_layers) == ("llama", "llama", 30)
    assert (facts.hidden_size, facts.intermediate_size, facts.vocab_size) == (576, 1536, 49152)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (9, 3, 64)
    assert wide(facts).rope == RopeFacts(100_000.0, 64, interleaved=True, permuted=True)
    assert facts.tied_embeddings and facts.has_chat_template and not facts.layers[0].mixer.qk_norm
    assert (facts.max_context, facts.eos_token_ids, facts.bos_token_id) == (8192, (2,), 1)
    assert (facts.stored_format, facts.license) == ("Q4_1", "apache-2.0")
    assert (facts.num_params, facts.weight_bytes) == (134_515_008, 96_576_768)
    assert facts.windows == (None,) * 30 and facts.norm_offset == 0 and facts.embedding_scale == 1
    assert kv_bytes_per_token(facts.layers, "bf16") == 30 * 2 * 3 * 64 * 2 == 23_040
    assert kv_bytes_per_token(facts.layers, "int8") == 30 * 2 * 3 * (64 + 4)
    assert kv_bytes_per_token(facts.layers[:1], "f32") == 2 * 3 * 64 * 4


def test_gemma_270m(gemma_path: Path) -> None:
    with open_model(gemma_path) as checkpoint:
        facts = checkpoint.facts
    assert (facts.architecture, facts.num_layers, facts.hidden_size) == ("gemma3", 18, 640)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 1, 256)
    assert facts.windows == (512, 512, 512, 512, 512, None) * 3
    assert wide(facts).rope == RopeFacts(1_000_000.0, 256) and local(facts).rope == RopeFacts(10_000.0, 256)
    assert facts.layers[0].mixer.scale == 1 / 16 and facts.embedding_scale == math.sqrt(640)
    assert (
        facts.norm_offset == 0.0
        and facts.layers[0].norms.after_ffn
        and facts.layers[0].mixer.qk_norm
        and facts.layers[0].ffn.act == "gelu_tanh"
    )
    assert (facts.stored_format, facts.has_chat_template, facts.license) == ("Q4_K_M", False, "gemma")
    assert (facts.num_params, facts.bos_token_id, facts.eos_token_ids) == (268_098_176, 2, (1,))


LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def test_llama_3_1_8b() -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001, 128009]}
    facts = facts_of(LLAMA31, generation_config=generation)
    assert wide(facts).rope == RopeFacts(500_000.0, 128, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (facts.max_context, facts.eos_token_ids) == (131072, (128001, 128009))
    assert facts.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert count_params(facts) == 8_030_261_248
    assert linear_shapes(facts.layers[0], facts.hidden_size)["self_attn.k_proj"] == (1024, 4096)
    assert facts.layers[0].mixer.scale == 128**-0.5 and facts.windows == (None,) * 32


def test_llama_2_needs_no_kv_heads_or_theta() -> None:
    config = {key: value for key, value in LLAMA31.items() if key not in ("num_key_value_heads", "rope_theta")}
    facts = facts_of({**config, "rope_scaling": None, "eos_token_id": 2, "sliding_window": 4096})
    assert (facts.num_kv_heads, wide(facts).rope, facts.windows[0]) == (32, RopeFacts(10_000.0, 128), None)


@pytest.mark.parametrize(
    ("stated", "window"), [({"sliding_window": 4096}, 4096), ({"sliding_window": None}, None), ({}, 4096)]
)
def test_mistral_windows(stated: dict[str, Any], window: int | None) -> None:
    config = {**LLAMA31, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_scaling": None}
    facts = facts_of({**config, **stated})
    assert facts.architecture == "llama" and facts.source_architecture == "MistralForCausalLM"
    assert facts.windows == (window,) * 32


def test_qwen2_windows_and_yarn() -> None:
    config = {**LLAMA31, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 30}
    config |= {"sliding_window": 131072, "use_sliding_window": False, "max_position_embeddings": 32768}
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    facts = facts_of(config)
    assert facts.windows == (None,) * 32 and facts.max_context == 131072
    assert wide(facts).rope.scaling == "yarn" and wide(facts).rope.original_context == 32768
    assert wide(facts).rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert facts_of({**config, "use_sliding_window": True}).windows == (None,) * 30 + (131072,) * 2
    types = ["sliding_attention", "full_attention"] * 16
    assert facts_of({**config, "use_sliding_window": True, "layer_types": types}).windows[:2] == (131072, None)


def test_qwen3_has_heads_of_its_own_size() -> None:
    config = {**LLAMA31, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024}
    config |= {"num_attention_heads": 16, "rope_scaling": None, "head_dim": 128}
    facts = facts_of(config)
    assert (
        facts.layers[0].mixer.qk_norm
        and facts.head_dim == 128
        and vector_shapes(facts.layers[0], 1024)["self_attn.q_norm.weight"] == (128,)
    )
    assert linear_shapes(facts.layers[0], facts.hidden_size)["self_attn.o_proj"] == (1024, 2048)


# The published 4B config leaves out most of what equals its class's defaults.
GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_gemma_3_4b() -> None:
    facts = facts_of(GEMMA_4B)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (8, 4, 256)
    assert (facts.vocab_size, facts.max_context, facts.eos_token_ids) == (262208, 131072, (1, 106))
    assert wide(facts).rope == RopeFacts(1_000_000.0, 256, "linear", 8.0)
    assert local(facts).rope == RopeFacts(10_000.0, 256)
    assert facts.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert facts.norm_offset == 1.0 and facts.tied_embeddings and facts.embedding_scale == math.sqrt(2560)
    assert facts.layers[0].mixer.scale == 256**-0.5
    assert count_params(facts) == pytest.approx(3.88e9, rel=0.01)


def test_gemma_3_27b_scales_by_hidden_size() -> None:
    text = {**GEMMA_4B["text_config"], "num_attention_heads": 32, "query_pre_attn_scalar": 168}
    assert wide(facts_of({**GEMMA_4B, "text_config": text})).scale == 168**-0.5


def test_rope_parameters_of_transformers_5() -> None:
    config = {key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")}
    facts = facts_of({**config, "rope_parameters": {**LLAMA31["rope_scaling"], "rope_theta": 5e5}})
    assert wide(facts).rope == wide(facts_of(LLAMA31)).rope
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = {key: value for key, value in GEMMA_4B["text_config"].items() if key != "rope_scaling"}
    gemma = facts_of({**GEMMA_4B, "text_config": {**text, "rope_parameters": nested}})
    assert (wide(gemma).rope, local(gemma).rope) == (wide(facts_of(GEMMA_4B)).rope, local(facts_of(GEMMA_4B)).rope)


def test_rope_variants() -> None:
    partial = facts_of({**LLAMA31, "rope_scaling": None, "partial_rotary_factor": 0.5})
    assert wide(partial).rope.dim == 64
    assert wide(facts_of({**LLAMA31, "rope_scaling": {"type": "dynamic", "factor": 2.0}})).rope.scaling == "none"
    assert wide(facts_of({**LLAMA31, "rope_scaling": {"type": "linear", "factor": 2}})).rope.factor == 2.0
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    stated = wide(facts_of({**LLAMA31, "rope_scaling": {**yarn, "attention_factor": 1.5, "truncate": False}})).rope
    assert stated.attention_factor == 1.5 and not stated.truncate
    equal = wide(facts_of({**LLAMA31, "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}})).rope
    assert equal.attention_factor == 1.0


def test_mistral_small_hides_its_text_model() -> None:
    text = {**LLAMA31, "model_type": "mistral", "rope_scaling": None, "sliding_window": None, "head_dim": 128}
    facts = facts_of(
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    )
    assert facts.architecture == "llama" and facts.windows[0] is None
    with pytest.raises(UnsupportedModel, match="mistral9"):
        facts_of({"model_type": "mistral3", "text_config": {**text, "model_type": "mistral9"}})
    # Ministral 3
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    text |= {"model_type": "ministral3", "rope_parameters": yarn, "max_position_embeddings": 262_144}
    facts = facts_of({"model_type": "mistral3", "text_config": text})
    assert facts.architecture == "mistral3" and facts.max_context == 262_144
    assert wide(facts).temperature == (0.1, 16384) and wide(facts).rope.attention_factor == 1.0


def gguf_facts_of(path: Path, arch: str = "llama", tensors: dict[str, tuple] | None = None, **keys: Any) -> ModelFacts:
    """Facts of the tiny model with metadata changed; `__` stands for a dot, `a__` for the architecture's prefix."""
    values = tiny.tiny_keys(tiny.vocabulary(), arch=arch, layers=2)
    for key, value in keys.items():
        values[key.replace("a__", f"{arch}.", 1).replace("__", ".")] = value
    stored = {**tiny.tiny_tensors(len(tiny.vocabulary()), "F32"), **(tensors or {})}
    path.write_bytes(tiny.assemble({k: v for k, v in values.items() if v is not None}, stored))
    with open_model(path) as checkpoint:
        return checkpoint.facts


def floats(*shape: int) -> tuple[list[int], str, bytes]:
    """A tensor of ones with torch's shape."""
    return list(reversed(shape)), "F32", np.ones(shape, "<f4").tobytes()


def test_gguf_llama3_scaling_is_a_tensor(tmp_path: Path) -> None:
    scaling = {"a__rope__scaling__type": (tiny.STRING, "linear"), "a__rope__scaling__factor": (tiny.F32, 8.0)}
    facts = gguf_facts_of(tmp_path / "a.gguf", tensors={"rope_freqs.weight": floats(8)}, **scaling)
    assert wide(facts).rope == RopeFacts(
        10_000.0, 16, "factors", interleaved=True, permuted=True, factors_tensor="rope_freqs.weight"
    )
    with pytest.raises(BadModelFile, match=r"rope_freqs.weight: has shape \[9\], expected \[8\]"):
        gguf_facts_of(tmp_path / "b.gguf", tensors={"rope_freqs.weight": floats(9)})


def test_gguf_linear_and_yarn(tmp_path: Path) -> None:
    linear = {"a__rope__scaling__type": (tiny.STRING, "linear"), "a__rope__scaling__factor": (tiny.F32, 4.0)}
    facts = gguf_facts_of(tmp_path / "a.gguf", **linear)
    assert wide(facts).rope.factor == 4.0
    untyped = gguf_facts_of(tmp_path / "d.gguf", a__rope__scaling__factor=(tiny.F32, 4.0))
    assert wide(untyped).rope == wide(facts).rope, "linear is what llama.cpp takes it for"
    old = gguf_facts_of(tmp_path / "b.gguf", a__rope__scale_linear=(tiny.F32, 2.0))
    assert (wide(old).rope.scaling, wide(old).rope.factor) == ("linear", 2.0)
    yarn = {**linear, "a__rope__scaling__type": (tiny.STRING, "yarn")}
    yarn["a__rope__scaling__original_context_length"] = (tiny.U32, 256)
    facts = gguf_facts_of(tmp_path / "c.gguf", **yarn)
    assert (wide(facts).rope.scaling, wide(facts).rope.original_context, facts.max_context) == ("yarn", 256, 1024)
    assert wide(facts).rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(("layers", "scaling", "factor"), [(6, "none", 1.0), (34, "linear", 8.0)])
def test_a_gemma3_that_ollama_converted(tmp_path: Path, layers: int, scaling: str, factor: float) -> None:
    """It leaves out what all models of that size share, and keeps the vision tower in the same file."""
    tensors = tiny.tiny_tensors(len(tiny.vocabulary()), "F32", layers=layers)
    for layer in range(layers):
        norms = {"attn_q_norm": 16, "attn_k_norm": 16, "post_attention_norm": 64, "post_ffw_norm": 64}
        tensors |= {f"blk.{layer}.{name}.weight": floats(size) for name, size in norms.items()}
    tensors |= {"v.blk.0.attn_q.weight": floats(8, 8), "mm.input_projection.weight": floats(64, 8)}
    left_out = {"a__attention__layer_norm_rms_epsilon": None, "a__rope__freq_base": None}
    sizes = {"a__block_count": (tiny.U32, layers), "a__attention__sliding_window": (tiny.U32, 64)}
    facts = gguf_facts_of(tmp_path / "a.gguf", "gemma3", tensors, **sizes, **left_out)
    assert facts.rms_norm_eps == 1e-6 and facts.num_layers == layers
    local, rope = facts.layers[0].mixer.rope, facts.layers[5].mixer.rope
    assert (local.theta, local.scaling) == (10_000.0, "none")
    assert (rope.theta, rope.scaling, rope.factor) == (1_000_000.0, scaling, factor)
    older = {"a__rope__global__freq_base": (tiny.F32, 500_000.0), "a__rope__local__freq_base": (tiny.F32, 20_000.0)}
    facts = gguf_facts_of(tmp_path / "b.gguf", "gemma3", tensors, **sizes, **left_out, **older)
    assert [facts.layers[layer].mixer.rope.theta for layer in (0, 5)] == [20_000.0, 500_000.0]


def test_gguf_more_mtp_layers_than_layers(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="nextn_predict_layers: is 3, but the file has only 2 layers"):
        gguf_facts_of(tmp_path / "a.gguf", a__block_count=(tiny.U32, 2), a__nextn_predict_layers=(tiny.U32, 3))


def test_gguf_head_counts_per_layer_may_be_equal(tmp_path: Path) -> None:
    same = (tiny.ARRAY, tiny.array(tiny.U32, [2, 2]))
    assert gguf_facts_of(tmp_path / "a.gguf", a__attention__head_count_kv=same).num_kv_heads == 2


def test_gguf_tied_head_ids_and_sampling(tmp_path: Path) -> None:
    values = tiny.tiny_keys(tiny.vocabulary())
    values |= {
        "tokenizer.ggml.eot_token_id": (tiny.U32, 0),
        "tokenizer.ggml.eom_token_id": (tiny.U32, 2),
        "tokenizer.ggml.padding_token_id": (tiny.U32, 2**32 - 1),
        "general.sampling.temp": (tiny.F32, 0.5),
        "general.sampling.top_k": (tiny.I32, 20),
        "general.file_type": (tiny.U32, 7),
    }
    tensors = tiny.tiny_tensors(len(tiny.vocabulary()), "F32")
    del tensors["output.weight"]
    path = tmp_path / "a.gguf"
    path.write_bytes(tiny.assemble(values, tensors))
    facts = open_model(path).facts
    assert facts.tied_embeddings and facts.eos_token_ids == (2, 0)
    assert facts.sampling_defaults == {"temperature": 0.5, "top_k": 20}
    assert facts.stored_format == "F32", "the label Q8_0 is not borne out by any tensor"
    odd = (tiny.ARRAY, tiny.array(tiny.STRING, ["Q8_0"]))
    assert gguf_facts_of(tmp_path / "b.gguf", general__file_type=odd).stored_format == "F32"


def test_gguf_qwen(tmp_path: Path) -> None:
    biases = {f"blk.{layer}.attn_{n}.bias": floats(64 if n == "q" else 32) for layer in (0, 1) for n in "qkv"}
    facts = gguf_facts_of(tmp_path / "a.gguf", "qwen2", biases)
    assert facts.layers[0].mixer.qkv_bias and not wide(facts).rope.interleaved and not facts.layers[0].mixer.o_bias
    norms = {f"blk.{layer}.attn_{n}_norm.weight": floats(16) for layer in (0, 1) for n in "qk"}
    assert wide(gguf_facts_of(tmp_path / "b.gguf", "qwen3", norms)).qk_norm
    del biases["blk.1.attn_k.bias"]
    with pytest.raises(BadModelFile, match=r"blk.1.attn_k.bias: the tensor is missing"):
        gguf_facts_of(tmp_path / "c.gguf", "qwen2", biases)
    assert not gguf_facts_of(tmp_path / "d.gguf", "qwen2").layers[0].mixer.qkv_bias, "as stored"


def gemma_tensors() -> dict[str, tuple]:
    names = ("post_attention_norm", "post_ffw_norm")
    tensors = {f"blk.{layer}.{n}.weight": floats(64) for layer in (0, 1) for n in names}
    return tensors | {f"blk.{layer}.attn_{n}_norm.weight": floats(16) for layer in (0, 1) for n in "qk"}


def test_gguf_gemma(tmp_path: Path) -> None:
    window = (tiny.U32, 32)
    facts = gguf_facts_of(tmp_path / "a.gguf", "gemma3", gemma_tensors(), a__attention__sliding_window=window)
    assert facts.windows == (32, 32) and local(facts).rope == RopeFacts(10_000.0, 16)
    assert facts.layers[0].norms.after_ffn
    assert facts.layers[0].mixer.scale == 0.25 and facts.embedding_scale == 8.0
    plain = gguf_facts_of(tmp_path / "b.gguf", "gemma3", gemma_tensors())
    assert plain.windows == (None, None) and len(plain.ropes) == 1
    pattern = (tiny.ARRAY, tiny.array(tiny.BOOL, [True, False]))
    mixed = gguf_facts_of(
        tmp_path / "c.gguf",
        "gemma3",
        gemma_tensors(),
        a__attention__sliding_window=window,
        a__attention__sliding_window_pattern=pattern,
        a__rope__freq_base_swa=(tiny.F32, 5000.0),
    )
    assert mixed.windows == (32, None) and local(mixed).rope == RopeFacts(5000.0, 16)


def test_a_template_that_is_null_is_none(tmp_path: Path) -> None:
    folder = tiny.tiny_safetensors(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert not open_model(folder).facts.has_chat_template
    (folder / "chat_template.jinja").write_text("x")
    assert open_model(folder).facts.has_chat_template


def test_a_head_that_differs_is_not_tied_whatever_the_file_says(tmp_path: Path) -> None:
    assert not open_model(tiny.tiny_safetensors(tmp_path / "m", tie_word_embeddings=True)).facts.tied_embeddings


@pytest.mark.slow
def test_tiny_models_that_transformers_saved(tmp_path: Path) -> None:
    import transformers as t

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 110, "max_position_embeddings": 256}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = {**sizes, "head_dim": 32, "sliding_window": 16}
    models = [
        t.LlamaForCausalLM(t.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)),
        t.MistralForCausalLM(t.MistralConfig(**sizes, sliding_window=32, head_dim=24)),
        t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, use_sliding_window=True, max_window_layers=1, sliding_window=16)),
        t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=32, rope_parameters=yarn)),
        t.Gemma3ForCausalLM(t.Gemma3TextConfig(**text)),
        t.Gemma3ForConditionalGeneration(t.Gemma3Config(text_config=text, vision_config=vision)),
    ]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
        config = model.config.get_text_config()
        with open_model(tmp_path / str(number)) as checkpoint:
            facts = checkpoint.facts
        language = model.model.language_model if hasattr(model.model, "language_model") else model
        assert facts.num_params == sum(p.numel() for p in language.parameters())
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 7
        window = config.sliding_window if hasattr(config, "sliding_window") else None
        assert facts.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
        assert json.loads(json.dumps(facts.num_layers)) == 7
