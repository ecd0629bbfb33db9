"""GLM-5.3 Flash beside its arithmetic: names on the hub and in GGUF, sparse latent attention, memory, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from localllm.device.fake import MACHINES
from localllm.errors import ConfigError, LocalLLMError
from localllm.kernels import OpFacts, sparse
from localllm.kernels import token_index as choosing
from localllm.kernels.cpu.build import library
from localllm.kernels.hyper import hyper_in, hyper_out
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import MixedWeights
from localllm.kernels.reference import rms_norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.sparse import index_pool
from localllm.kernels.table import kernel_table
from localllm.kernels.verify.trial import SegmentTrial
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import kv_bytes_per_token
from localllm.models.architectures.layers import Dense, Experts
from localllm.models.architectures.mixers import KimiDelta, LatentAttention
from localllm.models.architectures.sharding import check_world
from localllm.models.loader import LoadOptions, load_model
from localllm.models.samples import layer_samples, model_shapes
from localllm.plan.planner import Planner

from .test_gguf_models import write_gguf
from .test_predictor import check_answers_stay, loaded_head, own_logits
from .test_qwen4_exp import held_and_planned, logits, prompt, relative_error

SOME_FORMATS = [
    ("bf16", 0.02),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("fp16", 0.004), ("int8", 0.05))),
]
SOME_FORMATS += [("fp8", 0.2)]
NAME, REACH = "glm5-next", 11  # of the tiny model: two blocks of four tokens and the rest


def published(model: Any, folder: Path, **changes: Any) -> Path:
    """The checkpoint with the configuration of the hub."""
    text = {key: value for key, value in model.config["text_config"].items() if "linear_" not in key}
    kinds = [kind.replace("indexed", "deepseek_sparse") for kind in text.pop("layer_types")]
    names = {"num_heads": "num_heads", "head_dim": "head_dim", "short_conv_kernel_size": "conv_kernel_dim"}
    values = {theirs: model.config["text_config"][f"linear_{ours}"] for theirs, ours in names.items()}
    text |= {"linear_attn_config": values | {"gate_lower_bound": -5.0}, "layer_types": kinds, "mhc": True}
    text |= {"first_k_dense_replace": text.pop("mlp_layer_types").count("dense"), "mla_use_nope": True}
    text |= {"indexer_types": ["full"] * len(kinds), "index_kpool_compress": True}
    return model.save(folder, text_config=text | changes)


@pytest.mark.slow
def test_as_the_hub_has_it(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny(NAME), prompt(60)
    folder = published(model, tmp_path / "published")
    assert torch.equal(logits(folder, paged, ids), logits(model.save(tmp_path / "plain"), paged, ids))
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts
        assert "is not supported: the model reads text only" in checkpoint.unread
    kinds = [type(layer.mixer) for layer in facts.layers]
    assert kinds == [KimiDelta, LatentAttention, KimiDelta, KimiDelta, LatentAttention]
    assert [type(layer.ffn) for layer in facts.layers] == [Dense] + [Experts] * 4


def with_head(model: Any) -> tuple[Any, Callable[[Tensor, Tensor], Tensor]]:
    """The model with an MTP head in its checkpoint, and its pass: (embeddings, normed hidden states) -> normed states.

    A layer of sparse attention and experts with one residual stream, made of transformers' modules.
    """
    from transformers.models.glm5_next import modeling_glm5_next as theirs

    config = model.reference.config.text_config
    norms = {name: theirs.Glm5NextTextRMSNorm(45, eps=1e-5) for name in ("enorm", "hnorm", "shared_head.norm")}
    norms |= {
        name: theirs.Glm5NextTextRMSNorm(45, eps=1e-5) for name in ("input_layernorm", "post_attention_layernorm")
    }
    parts = norms | {"self_attn": theirs.Glm5NextTextAttention(config, 4), "mlp": theirs.Glm5NextTextMoE(config)}
    parts["eh_proj"] = torch.nn.Linear(90, 45, bias=False)
    draw, tensors = torch.Generator().manual_seed(4), {}
    for name, part in parts.items():
        part.eval()
        for key, value in part.state_dict().items():
            noise = torch.randn(value.shape, generator=draw)
            one = "norm" in f"{name}.{key}" and not key.endswith("bias")
            value.copy_(1 + 0.2 * noise if one else noise * max(value.shape[-1:], default=1) ** -0.5)
            tensors[f"model.language_model.layers.5.{name}.{key}"] = value.clone()

    def run(embedded: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([parts["enorm"](embedded), parts["hnorm"](hidden)], -1)
        x = parts["eh_proj"](both)[None]
        seen = torch.ones(1, x.shape[1], dtype=torch.bool)
        x = x + parts["self_attn"](parts["input_layernorm"](x), attention_mask=seen)[0]
        return parts["shared_head.norm"](x + parts["mlp"](parts["post_attention_layernorm"](x)))[0]

    text = model.config["text_config"] | {"num_nextn_predict_layers": 1}
    changed = replace(model, config=model.config | {"text_config": text}, tensors=model.tensors | tensors)
    return changed, run


@pytest.mark.slow
def test_its_mtp_head_predicts_as_transformers_modules_do(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """From normed means of the streams, over more tokens than a query sees, in chunks; its files state it or not."""
    model, run = with_head(tiny(NAME))
    ids = prompt(71)
    with torch.no_grad():
        inner = model.reference.model.language_model
        hidden = inner(torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
        wanted = model.reference.lm_head(run(inner.embed_tokens(torch.tensor(ids[1:])), hidden))
    found = own_logits(loaded_head(model, tmp_path / "stated"), paged, ids, [33, 1, 36])
    assert relative_error(found, wanted) < 1e-4
    path = write_gguf(
        tmp_path / "tiny.gguf", model.config["text_config"] | {"nextn": 1, "num_hidden_layers": 6}, model.tensors,
        gguf.GGMLQuantizationType.F32,
    )  # fmt: skip
    with open_model(path) as checkpoint:
        assert checkpoint.facts.predictor is not None and checkpoint.facts.num_layers == 5
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    assert relative_error(own_logits(ours, paged, ids, [70]), wanted) < 1e-4


@pytest.mark.slow
def test_guesses_of_its_head_change_no_answer(tiny: Callable, tmp_path: Path) -> None:
    """Sampled and greedy, of prompts shorter and longer than what a query sees, eager and with replayed steps."""
    ours = loaded_head(with_head(tiny(NAME))[0], tmp_path)
    check_answers_stay(ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("indexer_compressor_ape", "indexer_compressor_gate"), ("hc_attn_fn", "hc_ffn_base")]
)
def test_gguf_files_of_other_converters(names: tuple[str, ...], tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Tensors without `.weight`, index tensors under other names, and keys of an earlier port: no number of pooled
    tokens and no bound of decays.
    """
    model, ids = tiny(NAME), prompt(40)
    path = write_gguf(
        tmp_path / "plain.gguf", model.config["text_config"], model.tensors, gguf.GGMLQuantizationType.F32
    )
    wanted = logits(path, paged, ids)
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(tmp_path / "other.gguf", "glm5next")
    for field in reader.fields.values():
        left_out = ("architecture", "indexer.kpool", "kda.gate_lower_bound")
        if not field.name.startswith("GGUF.") and not field.name.endswith(left_out):
            inner = field.types[1] if len(field.types) > 1 else None
            key = field.name.replace("glm5-next.", "glm5next.")
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        name = tensor.name
        if names[0].startswith("indexer"):
            name = re.sub(r"indexer_compressor_(ape|gate)", r"indexer.kpool_\1", name)
        elif any(f".{one}." in name for one in names):
            name = name.removesuffix(".weight")
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert torch.equal(logits(tmp_path / "other.gguf", paged, ids), wanted)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention.indexer.types": [True, True, True, True, False]}, "share an index"),
        ({"attention.indexer.kpool_select_tail": False}, "without attention.indexer.kpool_select_tail"),
    ],
)
def test_gguf_files_with_what_is_missing_are_refused(
    more: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    model = tiny(NAME)
    config = model.config["text_config"] | {"more": more}
    path = write_gguf(tmp_path / "tiny.gguf", config, model.tensors, gguf.GGMLQuantizationType.F32)
    with open_model(path) as checkpoint, pytest.raises(LocalLLMError, match=words):
        _ = checkpoint.facts


@pytest.mark.slow
def test_decays_without_a_bound(tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """Also where GGUF leaves the bound out, and the limit of shared experts that is that of routed ones."""
    config = tiny(NAME).config
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    vision = {key: value for key, value in config["vision_config"].items() if key != "model_type"}
    given = {"text_config": text | {"linear_lower_bound": None}, "vision_config": vision}
    model, ids = tiny_of("glm5_next", given), prompt(40)
    wanted = model.logits(ids)
    assert relative_error(logits(model.save(tmp_path / "plain"), paged, ids), wanted) < 1e-4
    stated = published(model, tmp_path / "published", linear_lower_bound=None)
    with open_model(stated) as checkpoint:  # an object for these layers: there -5 takes the place of null
        assert checkpoint.facts.layers[0].mixer.floor == -5.0
    changed = model.config["text_config"] | {"linear_attn_config": {}}
    with open_model(model.save(tmp_path / "empty", text_config=changed)) as checkpoint:
        assert checkpoint.facts.layers[0].mixer.floor == -5.0
    text = model.config["text_config"] | {"clamps": 1}
    path = write_gguf(tmp_path / "tiny.gguf", text, model.tensors, gguf.GGMLQuantizationType.F32)
    assert relative_error(logits(path, paged, ids), wanted) < 1e-4


@pytest.mark.slow
def test_experts_under_the_other_key(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny(NAME), prompt(20)
    text = dict(model.config["text_config"])
    text["num_local_experts"] = text.pop("n_routed_experts")
    folder = replace(model, config=model.config | {"text_config": text}).save(tmp_path)
    assert relative_error(logits(folder, paged, ids), model.logits(ids)) < 1e-4


@pytest.mark.slow
def test_decode_steps_choose_without_reading_a_gpu_back(
    loaded: Callable, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as on the host: short, long and growing sequences beside each other, whatever pieces are scored."""
    model = loaded(NAME)
    prompts = {0: prompt(3, 1), 1: prompt(60, 2), 2: prompt(14, 3)}
    host, device = paged(model), paged(model)
    for driver in (host, device):
        for sequence, ids in prompts.items():
            driver.step({sequence: ids})
    assert model.facts.layers[1].mixer.index.reach == REACH
    for number in range(34):
        tokens = {sequence: [(7 * number + sequence) % 99] for sequence in prompts}
        wanted = host.step(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(sparse, "reads_back", lambda x: False)
            patch.setattr(choosing, "SCORE_BYTES", 1 if number % 2 else choosing.SCORE_BYTES)
            found = device.step(tokens)
        for sequence in prompts:  # a short sequence is sparse on a GPU: other pages, the same tokens
            assert relative_error(found[sequence], wanted[sequence]) < 1e-5, (number, sequence)
    assert len(host.tokens[0]) > REACH


def test_pools_are_stored_without_reading_a_gpu_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as on the host, in steps that begin and end inside of blocks of two sequences; other blocks stay."""
    empty, draw = torch.zeros(1), torch.Generator().manual_seed(1)
    places = torch.randn(4, 8, generator=draw)
    stored = torch.full((3, 16, 16), torch.nan), torch.full((3, 4, 8), torch.nan)
    found, wanted = (KVPages(empty, empty, None, None, *(part.clone() for part in stored)) for _ in range(2))
    steps = ([0, 1, 2], [3], [4, 5, 6, 7, 8, 33], [9, 34], [10, 35, 36, 37, 38, 39, 40], [11, 12, 13, 14, 15, 41])
    for step in steps:
        keys = torch.randn(len(step), 16, generator=draw)
        for pages, on_host in ((found, False), (wanted, True)):
            monkeypatch.setattr(sparse, "reads_back", lambda x, on_host=on_host: on_host)
            index_pool(keys, places, pages, torch.tensor(step))
    for ours, theirs in zip(found[4:], wanted[4:], strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert wanted.block_keys is not None and wanted.index_keys is not None
    known = [number for number, key in enumerate(wanted.block_keys.flatten(0, 1)) if key.isfinite().all()]
    assert known == [0, 1, 2, 3, 9]
    key, logit = wanted.index_keys.flatten(0, 1)[:4].chunk(2, -1)
    torch.testing.assert_close(wanted.block_keys[0, 0], ((logit + places).softmax(0) * key).sum(0))


@pytest.mark.parametrize(("kv", "most"), SOME_FORMATS)
def test_other_kv_formats_stay_close(kv: str, most: float, loaded: Callable, paged: Any) -> None:
    """Short sequences, so that rounded index keys cannot choose other blocks; a long one runs."""
    model, ids = loaded(NAME), prompt(REACH, 0)
    exact = paged(model).all_logits(ids, [9])
    found = paged(model, kv=kv).all_logits(ids, [9])
    assert 0 < relative_error(found, exact) < most
    assert bool(paged(model, kv=kv).all_logits(prompt(60), [33]).isfinite().all())


def test_pages_hold_latents_alone_and_index_keys(loaded: Callable, paged: Any) -> None:
    driver = paged(loaded(NAME))
    driver.all_logits(prompt(30), [30])
    pages = driver.cache.layers[1]
    assert isinstance(pages, KVPages) and pages.index_keys is not None and pages.block_keys is not None
    assert pages.k.shape[1:] == (1, 16, 34) and pages.v.shape[1:] == (1, 16, 0)
    assert pages.index_keys.shape[1:] == (16, 40) and pages.block_keys.shape[1:] == (4, 20)
    second = driver.tables[0][0][1]
    assert pages.block_keys[second].any(-1).tolist() == [True, True, True, False]  # 14 tokens
    facts = loaded(NAME).facts
    assert kv_bytes_per_token(facts.layers, "bf16") == 2 * 2 * (34 + 40 + 5)
    assert driver.cache.page_bytes(0) == 16 * kv_bytes_per_token(facts.layers, "f32")


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
def test_c_segments_agree_with_their_references(loaded: Callable) -> None:
    model = loaded(NAME)
    facts = OpFacts(kv_format="f32", num_heads=4, num_kv_heads=1, head_dim=34)
    table = kernel_table(facts)
    names, shapes, views = dict(table.ops), model_shapes(model.facts, facts), [-1, 0, -1, -1, 0]
    samples = layer_samples(model.layers, views)
    trial = SegmentTrial(shapes, samples, model.embedding, model.head, lambda _, at: model._ropes[0].rows(at, 64))
    for name in ("latent_attention", "gated_delta", "mlp", "experts", "hyper_in", "hyper_out", "decoder"):
        assert names[name] == "c"
        assert trial.error(name, table) == ""


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
@pytest.mark.parametrize(("hidden", "count"), [(45, 4), (64, 2), (700, 16), (33, 17)])
def test_streams_are_mixed_in_c(hidden: int, count: int) -> None:
    """As in PyTorch, which takes over for more than 16 streams; a token's result does not depend on the others."""
    draw, rows = torch.Generator().manual_seed(2), (2 + count) * count
    fn = torch.randn(rows, count * hidden, generator=draw) * (count * hidden) ** -0.5
    base, scale = torch.randn(rows, generator=draw), torch.tensor([0.9, 1.3, 2.0])
    weights = MixedWeights(count, fn, base, scale, rounds=20, eps=1e-6, norm_eps=1e-5)
    x, output = (torch.randn(7, size, generator=draw) for size in (count * hidden, hidden))
    table = kernel_table(OpFacts())
    mixed, gains = table.hyper_in(x, weights)
    for found, wanted in zip((mixed, gains), REFERENCES["hyper_in"](x, weights), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    streams = table.hyper_out(x.clone(), output, gains)
    torch.testing.assert_close(streams, hyper_out(x.clone(), output, gains), rtol=1e-5, atol=1e-5)
    for first, end in ((0, 1), (1, 3), (2, 7)) if count <= 16 else ():
        alone, own = table.hyper_in(x[first:end].clone(), weights)
        assert torch.equal(alone, mixed[first:end]) and torch.equal(own, gains[first:end])
    assert table.hyper_in(x[:0], weights)[0].shape == (0, hidden)


def test_a_matrix_of_streams_keeps_their_sum() -> None:
    """Its rows and columns sum to 1, so that without a block's output the streams keep their sum."""
    draw = torch.Generator().manual_seed(3)
    fn, base = torch.randn(24, 4 * 20, generator=draw), torch.randn(24, generator=draw)
    weights = MixedWeights(4, fn / 90, base, torch.ones(3), rounds=50, eps=1e-9, norm_eps=1e-5)
    x = torch.randn(5, 80, generator=draw)
    _, gains = hyper_in(rms_norm, x, weights)
    after = hyper_out(x.clone(), torch.zeros(5, 20), gains)
    torch.testing.assert_close(after.view(5, 4, 20).sum(1), x.view(5, 4, 20).sum(1), rtol=1e-4, atol=1e-4)


def test_the_plan_counts_its_parameters_and_steps(tiny: Callable, tmp_path: Path) -> None:
    model = tiny(NAME)
    with open_model(model.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.num_params == sum(
        tensor.numel()
        for name, tensor in model.tensors.items()
        if "visual" not in name and not name.endswith("correction_bias")
    ) + sum(7 for layer in facts.layers if isinstance(layer.ffn, Experts))
    on_cpu, on_gpu = (Planner(MACHINES[name]).plan(facts) for name in ("cpu", "rtx4090"))
    assert on_cpu.fits and on_gpu.fits and on_gpu.graph_buckets == (1, 2, 4)


@pytest.mark.slow
def test_no_step_needs_more_memory_than_planned(tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "index_topk": 512, "index_head_dim": 32, "max_position_embeddings": 4096}
    config = tiny(NAME).config
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"} | sizes
    vision = {key: value for key, value in config["vision_config"].items() if key != "model_type"}
    with open_model(tiny_of("glm5_next", {"text_config": text, "vision_config": vision}).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    driver = paged(model, num_pages=192)
    for ctx in (512, 3072):
        held, planned = held_and_planned(driver, ctx)
        assert 0.15 * planned < held < planned


def test_ranks_cannot_divide_it_and_the_hint_says_so(loaded: Callable) -> None:
    with pytest.raises(ConfigError, match="hyper-connections") as caught:
        check_world(loaded(NAME).facts, 2)
    assert caught.value.hint == "use one GPU"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hc_mult": 1}, "hc_mult: must be 2 to 16, not 1"),
        ({"hc_mult": 3}, r"hc_attn_fn\.weight: the weight has shape \[24, 180\], expected \[15, 135\]"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters: must be 1 to"),
        ({"index_kpool": 3}, "blocks of 3 tokens do not fit in pages of 16"),
        ({"index_topk": 10}, "index_topk: is 10, not a multiple of 4 tokens"),
        ({"index_kpool_compress": False}, "without index_kpool_compress"),
        pytest.param(
            *({"index_kpool_always_select_tail": False}, "without index_kpool_always_select_tail"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"indexer_types": ["full", "full", "full", "full", "shared"]}, "layers that share an index"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"indexer_types": None, "index_topk_pattern": "FFFFS"}, "layers that share an index"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 4}, "layers that share an index"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"indexer_types": ["full"] * 4}, "indexer_types: must name each of 5 layers full or shared"),
            marks=pytest.mark.slow,
        ),
        pytest.param(*({"hidden_act": "gelu_pytorch_tanh"}, "with hidden_act gelu_tanh"), marks=pytest.mark.slow),
        pytest.param(*({"qk_rope_head_dim": 10}, "with RoPE"), marks=pytest.mark.slow),
        pytest.param(*({"mhc": False}, "without mhc"), marks=pytest.mark.slow),
        pytest.param(
            *({"layer_types": ["sliding_attention"] * 5}, "layers of type sliding_attention"), marks=pytest.mark.slow
        ),
        pytest.param(*({"swiglu_limit": -1.0}, "swiglu_limit: must be"), marks=pytest.mark.slow),
        pytest.param(*({"vocab_size": 98}, r"embed_tokens\.weight"), marks=pytest.mark.slow),
    ],
)
def test_numbers_that_contradict_are_named(changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path) -> None:
    model = tiny(NAME)
    folder = model.save(tmp_path, text_config=model.config["text_config"] | changes)
    with open_model(folder) as checkpoint:
        with pytest.raises(LocalLLMError, match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


def test_short_and_long_sequences_beside_each_other(loaded: Callable, paged: Any) -> None:
    """Prompts of which only one is longer than what a query sees: each as it is alone."""
    model = loaded(NAME)
    prompts = {0: prompt(7, 1), 1: prompt(40, 2), 2: prompt(3, 3)}
    together = paged(model).step(prompts)
    for key, ids in prompts.items():
        alone: Tensor = paged(model).step({key: ids})[key]
        assert torch.equal(together[key], alone), key
    assert replace(model.facts, name="").hyper is not None
