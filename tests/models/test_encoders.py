"""Models in which every token sees the whole text: hidden states against transformers, alone and beside others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.checkpoint import Checkpoint
from localllm.models.architectures import open_model, registry
from localllm.models.architectures.facts import linear_shapes, vector_shapes
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model

COMMON = {"vocab_size": 99, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 1}
SMALL = {"hidden_size": 40, "intermediate_size": 52, "max_position_embeddings": 320, "type_vocab_size": 2}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# name -> (model_type, configuration)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddinggemma": (
        "gemma3_text",
        {"hidden_size": 44, "intermediate_size": 70, "num_key_value_heads": 1, "head_dim": 20, "sliding_window": 23}
        | {"query_pre_attn_scalar": 24, "use_bidirectional_attention": True, "max_position_embeddings": 512}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": PLAIN | {"rope_theta": 1e6}, "sliding_attention": PLAIN}},
    ),
    "bert": ("bert", SMALL | {"hidden_act": "gelu"}),
    "xlm-roberta": ("xlm-roberta", SMALL | {"hidden_act": "gelu", "type_vocab_size": 1}),
    "nomic": ("nomic_bert", SMALL | {"rope_parameters": PLAIN | {"rope_theta": 1000.0}}),
    "modernbert": (
        "modernbert",
        SMALL | {"local_attention": 46, "norm_eps": 1e-4, "num_hidden_layers": 4, "bos_token_id": 2, "eos_token_id": 3},
    ),
    "embeddinggemma-2": (
        "embedding_gemma2_text",
        {"hidden_size": 44, "intermediate_size": 70, "num_key_value_heads": 2, "head_dim": 20, "sliding_window": 11}
        | {"global_head_dim": 28, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 12}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "embedding_dim": 26}
        | {"max_position_embeddings": 512}
        | {"rope_parameters": {"full_attention": PLAIN | {"rope_theta": 1e6}, "sliding_attention": PLAIN}},
    ),
}
PART = PLAIN | {"partial_rotary_factor": 0.25}  # transformers rotates whole heads if the type is "default"
ENCODERS["embeddinggemma-2 in part"] = (
    "embedding_gemma2_text",
    ENCODERS["embeddinggemma-2"][1]
    | {"rope_parameters": {"full_attention": PART | {"rope_type": "proportional"}, "sliding_attention": PART}},
)
POOLED = ("gemma3_text", "modernbert", "embedding_gemma2_text")  # transformers' classes have no pooling layer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """name of ENCODERS -> (transformers' model, its folder), made once."""
    from transformers import AutoConfig, AutoModel

    made: dict[str, tuple[Any, Path]] = {}

    def make(name: str) -> tuple[Any, Path]:
        if name not in made:
            model_type, values = ENCODERS[name]
            config = AutoConfig.for_model(model_type, **COMMON | values)
            torch.manual_seed(sum(map(ord, name)))
            given = {} if model_type in POOLED else {"add_pooling_layer": False}
            model = AutoModel.from_config(config, attn_implementation="eager", **given).float().eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "norm" in key.lower():
                        middle = float(not (key.endswith("bias") or model_type == "gemma3_text"))
                        parameter.copy_(middle + 0.2 * torch.randn_like(parameter))
                    else:
                        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
                for key, buffer in model.named_buffers():
                    if key.endswith("layer_scalar"):
                        buffer.fill_(1.2)
            folder = tmp_path_factory.mktemp(name)
            described = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
            (folder / "config.json").write_text(json.dumps(described))
            save_file(
                {key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors"
            )
            made[name] = model, folder
        return made[name]

    return make


@pytest.fixture(scope="module")
def ours(encoder: Callable) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in made:
            with open_model(encoder(name)[1]) as checkpoint:
                made[name] = load_model(checkpoint, LoadOptions(exact=True))
        return made[name]

    return load


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def states(driver: Any, texts: dict[int, list[int]]) -> dict[int, Tensor]:
    """The normed hidden states of every token."""
    batch = driver.batch(texts)
    with torch.inference_mode():
        rows = driver.model.normed(driver.model.forward(batch, driver.cache))
    return dict(zip(texts, rows.split(list(batch.query_lens)), strict=True))


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_match_transformers(name: str, encoder: Callable, ours: Callable, paged: Any) -> None:
    model = ours(name)
    assert model.facts.pooling == "mean" and not model.facts.causal
    for length in (1, 40, 300):
        ids = prompt(length)
        with torch.no_grad():
            wanted = encoder(name)[0](torch.tensor([ids])).last_hidden_state[0]
        found = states(paged(model), {0: ids})[0]
        if "gemma-2" in name:  # transformers projects every token, which equals a projection of the mean
            found = model.projected(found)
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4, length
        mean = wanted.mean(0)
        assert float((found.mean(0) - mean).abs().max() / mean.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_a_text_does_not_depend_on_its_neighbours(name: str, ours: Callable, paged: Any) -> None:
    model, texts = ours(name), {0: prompt(70), 1: prompt(1, 1), 2: prompt(150, 2)}
    together = states(paged(model), texts)
    for key, ids in texts.items():
        assert torch.equal(states(paged(model, page_size=32), {0: ids})[0], together[key])


def write_gguf(folder: Path, path: Path) -> Path:
    """A folder of `encoder` as llama.cpp's converter writes it: other names, fused rows for Nomic, positions cut."""
    stored = load_file(folder / "model.safetensors")
    with open_model(folder) as source:
        facts, names, config = source.facts, source.names, source.config
    arch = {"gemma3": "gemma-embedding", "xlm-roberta": "bert", "modernbert": "modern-bert"}.get(
        facts.architecture, facts.architecture
    )
    family = next(one for one in registry.ARCHITECTURES if arch in one.gguf_types)
    called = family.names(Checkpoint(path, "gguf", {}, {}))
    writer = gguf.GGUFWriter(path, arch)
    first = facts.layers[0]
    writer.add_block_count(facts.num_layers)
    writer.add_context_length(facts.max_context)
    writer.add_embedding_length(facts.hidden_size)
    writer.add_feed_forward_length(first.ffn.inner)
    writer.add_head_count(facts.num_heads)
    writer.add_head_count_kv(facts.num_kv_heads)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    if arch != "gemma-embedding":
        writer.add_rope_freq_base(facts.ropes[0].theta)
    if arch == "gemma-embedding":
        writer.add_rope_freq_base(1e6)
        writer.add_key_length(facts.head_dim)
        writer.add_value_length(facts.head_dim)
        writer.add_layer_norm_rms_eps(facts.rms_norm_eps)
        writer.add_float32(f"{arch}.attention.scale", first.mixer.scale)
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_tensor("dense_2.weight", torch.ones(30, facts.hidden_size).numpy())
        writer.add_tensor("dense_3.weight", torch.ones(10, 30).numpy())
    else:
        writer.add_layer_norm_eps(facts.rms_norm_eps)
    if arch == "modern-bert":
        writer.add_sliding_window(config["local_attention"])
    modules = ["model.embed_tokens.weight"] + ["model.norm.weight"] * facts.final_norm
    if facts.entry is not None:
        modules += ["model.embedding_norm.weight"] + ["model.embedding_norm.bias"] * first.norms.bias
        modules += ["model.token_type_embeddings.weight"] * bool(facts.entry.token_types)
        modules += ["model.position_embeddings.weight"] * bool(facts.entry.positions)
    for index, layer in enumerate(facts.layers):
        inner = [f"{name}.weight" for name in linear_shapes(layer, facts.hidden_size)]
        modules += [f"model.layers.{index}.{name}" for name in (*inner, *vector_shapes(layer, facts.hidden_size))]
    tensors = {}
    for full in modules:
        module, _, end = full.rpartition(".")
        tensor = stored[f"{names.source(module)}.{end}"]
        if module == "model.position_embeddings" and facts.entry is not None:
            tensor = tensor[facts.entry.offset :]
        if facts.norm_offset and tensor.ndim == 1:
            tensor = tensor + facts.norm_offset
        name = f"{called.source(module)}.{end}"
        if arch == "nomic-bert" and ".self_attn." in module and not module.endswith("o_proj"):
            name = f"{called.source(module.rpartition('.')[0] + '.qkv_proj')}.{end}"
            tensor = torch.cat([tensors[name], tensor]) if name in tensors else tensor
        tensors[name] = tensor
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(facts.vocab_size)])
    writer.add_token_scores([-float(i) for i in range(facts.vocab_size)])
    writer.add_token_types([1] * facts.vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", [name for name in ENCODERS if "gemma-2" not in name])  # no converter knows it
def test_gguf_gives_the_same_states(name: str, encoder: Callable, ours: Callable, paged: Any, tmp_path: Path) -> None:
    with open_model(write_gguf(encoder(name)[1], tmp_path / "model.gguf")) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    assert model.facts.pooling == "cls" and model.facts.windows == ours(name).facts.windows
    ids = prompt(60)
    wanted, found = (states(paged(one), {0: ids})[0] for one in (ours(name), model))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    if name == "embeddinggemma":
        assert model.facts.embedding_size == 10
        vector = model.projected(found[0])
        assert torch.allclose(vector, (found[0].sum() * 30).expand(10), rtol=1e-4)


def test_the_published_names_of_nomic_are_read(encoder: Callable, ours: Callable, paged: Any, tmp_path: Path) -> None:
    folder = encoder("nomic")[1]
    config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    keys = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    keys |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
    written = {key: config[name] for key, name in keys.items()} | {"vocab_size": 99, "rotary_emb_base": 1000}
    written |= {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "layer_norm_epsilon": 1e-12}
    written |= {"activation_function": "swiglu", "rotary_emb_fraction": 1.0, "prenorm": False}
    (tmp_path / "config.json").write_text(json.dumps(written))
    renamed = {"self_attn.o_proj": "attn.out_proj", "up_proj": "fc11", "gate_proj": "fc12", "down_proj": "fc2"}
    renamed |= {"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "embeddings.LayerNorm": "emb_ln"}
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        name = f"encoder.{name}" if name.startswith("layers.") else name
        if ".self_attn." not in name:
            tensors[name] = tensor
    for layer in range(3):
        parts = [stored[f"layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        tensors[f"encoder.layers.{layer}.attn.Wqkv.weight"] = torch.cat(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_model(tmp_path) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    ids = prompt(40)
    assert torch.equal(states(paged(model), {0: ids})[0], states(paged(ours("nomic")), {0: ids})[0])


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_part_of_embeddinggemma_2_runs_alone(
    prefix: str, encoder: Callable, ours: Callable, paged: Any, tmp_path: Path
) -> None:
    folder = encoder("embeddinggemma-2")[1]
    text, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for key in ("per_layer_config", "rope_parameters", "layer_types"):  # a file may leave out what equals the defaults
        text.pop(key)
    text |= {"global_head_dim": 28, "sliding_window_pattern": 2, "partial_rotary_factor": 0.5}
    described = {"model_type": "embedding_gemma2", "architectures": ["EmbeddingGemma2Model"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(described | {"vision_config": {"hidden_size": 8}}))
    tower = {"vision_tower.x.weight": torch.ones(2, 2), "embed_audio.embedding_projection.weight": torch.ones(2, 2)}
    save_file({prefix + name: tensor for name, tensor in stored.items()} | tower, tmp_path / "model.safetensors")
    with open_model(tmp_path) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    assert (model.facts.pooling, model.facts.embedding_size, model.facts.vision) == ("mean", 26, None)
    ids = prompt(40)
    assert torch.equal(states(paged(model), {0: ids})[0], states(paged(ours("embeddinggemma-2")), {0: ids})[0])
