"""DeepSeek V4 beside its arithmetic: names and formats on the hub, entries in pages, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from localllm.boot.boot import kernel_words
from localllm.device.fake import MACHINES
from localllm.errors import LocalLLMError
from localllm.kernels import OpFacts
from localllm.kernels.compressed import _mean
from localllm.kernels.kv_pages import CompressedPages
from localllm.kernels.table import kernel_table
from localllm.kernels.verify.trial import SegmentTrial
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import entry_views, kept_bytes, kv_bytes_per_token, layer_views
from localllm.models.architectures.mixers import CompressedAttention, Entries
from localllm.models.loader import LoadOptions, load_model
from localllm.models.samples import layer_samples, model_shapes
from localllm.plan.planner import Planner
from localllm.quant.encode import Target, encode
from localllm.request import Request, SamplingParams

from .test_decode_graphs import answers, engine_of
from .test_gguf_models import write_gguf
from .test_predictor import Checked, check_answers_stay, own_logits
from .test_qwen4_exp import held_and_planned, logits, prompt, relative_error

NAME = "deepseek-v4"


def published(model: Any) -> dict[str, Tensor]:
    """The tensors by their names on the hub; transformers saves some under others."""
    found = {}
    for name, tensor in model.tensors.items():
        name = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
        found["embed.weight" if name == "embed_tokens.weight" else name] = tensor
    return found


def as_on_the_hub(model: Any, folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Its configuration: numbers of tokens for each layer, and the usual keys of rotations."""
    stated = {key: model.config[key] for key in model.config if key not in ("layer_types", "mlp_layer_types")}
    ropes = stated.pop("rope_parameters")
    stated |= {"rope_theta": ropes["main"]["rope_theta"], "compress_rope_theta": ropes["compress"]["rope_theta"]}
    stated |= {"rope_scaling": {k: v for k, v in ropes["compress"].items() if k in ("factor", "rope_type")}}
    stated["rope_scaling"]["original_max_position_embeddings"] = 64
    stated |= {"num_hash_layers": 2, "num_nextn_predict_layers": 1, "qk_rope_head_dim": 10, "compress_rates": None}
    stated |= {"compress_ratios": [0, 4, 128, 4, 128, 0], "partial_rotary_factor": None, "sliding_window": 128}
    tensors = {"mtp.0.attn.wq_a.weight": torch.ones(2, 2)} | (tensors or published(model))
    changed = replace(model, config=stated | config, tensors=tensors)
    return changed.save(folder)


def wide(tiny_of: Callable, model: Any) -> Any:
    """A model with the ratios of the hub's files, whose entries take 128 tokens."""
    given = {key: value for key, value in model.config.items() if key not in ("model_type", "architectures")}
    given |= {"compress_rates": None, "sliding_window": 128}
    return tiny_of("deepseek_v4", given, 3)


@pytest.mark.slow
def test_as_the_hub_has_it(tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """300 tokens: two entries of 128 tokens, and more entries of four than a query sees."""
    model, ids = wide(tiny_of, tiny(NAME)), prompt(300)
    folder = as_on_the_hub(model, tmp_path)
    assert relative_error(logits(folder, paged, ids), model.logits(ids)) < 1e-4
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts
        assert checkpoint.unread == "" and facts.predictor_flaw.startswith("the MTP head cannot be used: ")
        stored = sum(info.nbytes for name, info in checkpoint.tensors.items() if not name.startswith("mtp."))
    assert facts.weight_bytes == stored and facts.extra_layers == 1
    assert [layer.mixer.ratio for layer in facts.layers] == [0, 4, 128, 4, 128]
    assert [bool(layer.ffn.hashed) for layer in facts.layers] == [True, True, False, False, False]


def with_head(tiny_of: Callable, model: Any, folder: Path) -> tuple[Any, Path, Callable[[list[int]], Tensor]]:
    """The model with a sixth layer, whose checkpoint has that layer as an MTP head; the head's logits."""
    given = {key: value for key, value in model.config.items() if key not in ("model_type", "architectures")}
    given |= {"compress_rates": None, "sliding_window": 128, "num_hidden_layers": 6}
    given |= {"layer_types": [*given["layer_types"], "sliding_attention"]}
    six = tiny_of("deepseek_v4", given | {"mlp_layer_types": [*given["mlp_layer_types"], "moe"]}, 3)
    draw, inner, hidden = torch.Generator().manual_seed(4), six.reference.model, model.config["hidden_size"]
    head = {f"{name}.weight": 1 + 0.2 * torch.randn(hidden, generator=draw) for name in ("enorm", "hnorm", "norm")}
    head |= {f"{name}.weight": torch.randn(hidden, hidden, generator=draw) * 0.2 for name in ("e_proj", "h_proj")}
    head |= {"hc_head_fn": torch.randn(4, 4 * hidden, generator=draw) * 0.1, "hc_head_scale": torch.tensor([0.7])}
    head |= {"hc_head_base": torch.randn(4, generator=draw)}
    tensors = {name.replace("layers.5.", "mtp.0."): tensor for name, tensor in published(six).items()}
    tensors |= {f"mtp.0.{name}": tensor for name, tensor in head.items()}
    layer, of_streams = inner.layers[5], []
    del inner.layers[5]
    inner.hc_head.register_forward_pre_hook(lambda _, given: of_streams.append(given[0][0, :-1]))

    def run(ids: list[int]) -> Tensor:
        count = len(ids) - 1
        with torch.no_grad():
            inner(torch.tensor([ids]), use_cache=False)
            embedded, positions = inner.embed_tokens(torch.tensor(ids[1:])), torch.arange(count)[None]
            norm, eps = torch.nn.functional.rms_norm, model.config["rms_norm_eps"]
            embedded, streams = (
                norm(part, (hidden,), head[f"{name}.weight"], eps) @ head[f"{name[0]}_proj.weight"].T
                for name, part in (("enorm", embedded), ("hnorm", of_streams.pop()))
            )
            x = (streams + embedded.unsqueeze(1))[None]
            turned = {"main": inner.rotary_emb(x, position_ids=positions, layer_type="main")}
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            x = layer(x, position_embeddings=turned, position_ids=positions, attention_mask=mask)
            kept = {name: part.data for name, part in inner.hc_head.named_parameters()}
            for name, part in inner.hc_head.named_parameters():
                part.data = head[f"hc_head_{name.removeprefix('hc_')}"]
            x = inner.hc_head.forward(x)
            for name, part in inner.hc_head.named_parameters():
                part.data = kept[name]
            return six.reference.lm_head(norm(x, (hidden,), head["norm.weight"], eps))[0]

    return six, as_on_the_hub(six, folder, tensors, num_hidden_layers=5), run


@pytest.mark.slow
def test_its_mtp_head_predicts_as_transformers_modules_do(
    tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path
) -> None:
    """From the model's residual streams, in chunks; the model's own logits stay the same."""
    six, folder, run = with_head(tiny_of, tiny(NAME), tmp_path)
    ids = prompt(71)
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts
        assert facts.predictor_flaw == "" and facts.predictor_bytes > 0 and facts.head_width == 4 * 45
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    own = ours.predictor
    assert own is not None and own.final is not None and own.final.final is not None
    rest = sum(t.nbytes for t in own.final.final)  # the other weights of `final` are those of the layer's last block
    assert own.nbytes == replace(own, final=None).nbytes + rest
    assert relative_error(own_logits(ours, paged, ids, [33, 1, 36]), run(ids)) < 1e-5
    assert relative_error(paged(ours).all_logits(ids, [33]), logits(folder, paged, ids)) < 1e-6
    with torch.no_grad():
        wanted = six.reference(torch.tensor([ids]), use_cache=False).logits[0]
    assert relative_error(paged(ours).all_logits(ids, [33]), wanted) < 1e-4


@pytest.mark.slow
def test_guesses_of_its_head_change_no_answer(tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    """Sampled and greedy, eager and with replayed steps."""
    with open_model(with_head(tiny_of, tiny(NAME), tmp_path)[1]) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    check_answers_stay(ours)


@pytest.mark.slow
def test_its_head_reads_no_page_that_left_the_window(
    tiny: Callable, tiny_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs a token behind the model: the first token of its window may be on a page that is gone."""
    monkeypatch.setattr(f"{engine_of.__module__}.CONTEXT", 240)
    with open_model(with_head(tiny_of, tiny(NAME), tmp_path)[1]) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    asked = [Request([5] * 130, SamplingParams(temperature=0, max_tokens=60))]
    expected, tables, whole = answers(engine_of(ours), asked), [], ours.table.decoder

    def decoder(x: Tensor, calls: Any, kept: Any, views: Any, *given: Any, **more: Any) -> Tensor:
        if ours.predictor is not None and calls is ours.predictor.calls:
            tables.append(views[0][2])
        return whole(x, calls, kept, views, *given, **more)

    ours.table = replace(ours.table, decoder=decoder)
    engine = engine_of(ours)
    checked = Checked(engine, 3)
    assert answers(engine, asked) == expected and checked.seen
    assert len(tables) > 20 and min(int(table.min()) for table in tables) >= 0


def test_a_head_with_entries_is_not_used(tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    folder = as_on_the_hub(wide(tiny_of, tiny(NAME)), tmp_path, compress_ratios=[0, 4, 128, 4, 128, 4])
    with open_model(folder) as checkpoint:
        flaw = checkpoint.facts.predictor_flaw
    assert flaw == "the MTP head has compressed entries, or attention that no layer has, which is not supported"


def test_its_fp8_and_fp4_weights_are_read(tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """Scales under `.scale`, FP4 codes as I8: as if the decoded values were stored."""
    values = {key: value for key, value in tiny(NAME).config.items() if key not in ("model_type", "architectures")}
    model = tiny_of("deepseek_v4", values | {"moe_intermediate_size": 32, "hidden_size": 64})
    plain, coded = published(model), published(model)
    for name, tensor in published(model).items():
        start = name.removesuffix("weight")
        if ".experts." in name:
            found = encode(tensor, Target("mxfp4"))
            assert found.scales is not None
            codes = found.qweight.view(torch.int8)
            coded |= {name: codes, f"{start}scale": found.scales.view(torch.float8_e8m0fnu)}
            low, high = found.qweight & 15, found.qweight >> 4
            table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            each = torch.stack([low, high], -1).flatten(1).long()
            sizes = torch.exp2(found.scales.float() - 127).repeat_interleave(32, 1)
            plain[name] = table[each & 7] * torch.where(each > 7, -1.0, 1.0) * sizes
        elif name.endswith(("wq_b.weight", "wo_a.weight", "wkv.weight")) and "compressor" not in name:
            scale = torch.full((-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)), 0.25)
            codes = (tensor / 0.25).to(torch.float8_e4m3fn)
            coded |= {name: codes, f"{start}scale": scale.to(torch.float8_e8m0fnu)}
            plain[name] = codes.float() * 0.25
    ids, config = prompt(40), {"compress_rates": model.config["compress_rates"], "compress_ratios": None}
    config |= {"layer_types": model.config["layer_types"], "sliding_window": 37}
    wanted = logits(as_on_the_hub(model, tmp_path / "plain", plain, **config), paged, ids)
    folder = as_on_the_hub(model, tmp_path / "coded", coded, **config)
    with open_model(folder) as checkpoint:
        labels = {stored.label for stored in checkpoint.formats.values()}
        assert {"mxfp4", "fp8"} < labels and checkpoint.facts.decoded_bytes > 0
    assert relative_error(logits(folder, paged, ids), wanted) < 0.02  # the down projections round their parts


def test_pages_hold_values_alone_and_what_entries_need(loaded: Callable, paged: Any) -> None:
    driver = paged(loaded(NAME))
    driver.all_logits(prompt(70), [33])
    facts, layers = loaded(NAME).facts, driver.cache.layers
    assert not isinstance(layers[0], CompressedPages)
    for number, (rows, width, places) in {1: (184, 46, 4), 2: (52, 26, 1)}.items():
        pages = layers[number]
        assert isinstance(pages, CompressedPages)
        window, entries = pages
        assert window.k.shape[1:] == (1, 16, 26) and window.v.shape[3] == 0 and window.block_keys.shape[2] == 0
        assert window.index_keys.shape[1:] == (16, rows) and entries.k.shape[3] == entries.index_keys.shape[2] == 0
        assert entries.block_keys.shape[1:] == (places, width)
    groups = [group.layers for group in driver.model.groups]
    assert groups == [(5, 7), (6, 8), (0,), (1, 3), (2, 4)]
    tables = dict(zip(groups, driver.tables[0], strict=True))
    filled = layers[2].entries.block_keys[torch.tensor(tables[6, 8]), 0].any(-1).tolist()
    assert filled == [False, True, False, True, False]  # entries of 32 tokens, in the pages of their last ones
    per_token = kv_bytes_per_token((*facts.layers, *facts.entries.values()), "f32")
    assert 0.98 * 16 * per_token < sum(driver.cache.page_bytes(index) for index in range(5)) <= 16 * per_token
    assert kept_bytes(facts, "bf16")[0] == 2 * 2 * (12 + 2)
    views, _ = layer_views(facts)
    assert [views[view][0] for view in entry_views(facts).values()] == [0, 1, 0, 1]


def test_a_mean_weighs_tokens_by_channel() -> None:
    draw = torch.Generator().manual_seed(1)
    values, logits_ = (torch.randn(3, 8, 5, generator=draw) for _ in range(2))
    logits_[0, :4] = float("-inf")
    values[0, :4] = torch.nan  # of tokens before the text
    wanted = (logits_.softmax(1) * values.nan_to_num()).sum(1)
    torch.testing.assert_close(_mean(values, logits_), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "most"), [("bf16", 0.03), ("fp16", 0.004), ("int8", 0.05), ("fp8", 0.2)])
def test_other_kv_formats_stay_close(kv: str, most: float, loaded: Callable, paged: Any) -> None:
    """Short sequences, so that rounded index keys cannot choose other entries; a long one runs."""
    model, ids = loaded(NAME), prompt(27, 0)
    exact = paged(model).all_logits(ids, [9])
    assert 0 < relative_error(paged(model, kv=kv).all_logits(ids, [9]), exact) < most
    assert bool(paged(model, kv=kv).all_logits(prompt(90), [33]).isfinite().all())


def test_fused_segments_agree_on_its_layers(loaded: Callable) -> None:
    model = loaded(NAME)
    facts = OpFacts(kv_format="f32", num_heads=6, num_kv_heads=1, head_dim=26)
    table, shapes = kernel_table(facts), model_shapes(model.facts, facts)
    _, views = layer_views(model.facts)
    samples = layer_samples(model.layers, views)
    trial = SegmentTrial(shapes, samples, model.embedding, model.head, lambda _, at: model._ropes[0].rows(at, 64))
    for name in ("experts", "hyper_in", "hyper_out", "compressed_attention", "decoder", "step"):
        assert trial.error(name, table) == ""


def test_the_plan_counts_its_parameters_and_pages(tiny: Callable, tmp_path: Path) -> None:
    model = tiny(NAME)
    with open_model(model.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    tables = sum(tensor.numel() for name, tensor in model.tensors.items() if name.endswith("tid2eid"))
    assert facts.num_params + tables == sum(tensor.numel() for tensor in model.tensors.values())
    assert [type(layer.mixer) for layer in facts.keeping_layers[5:]] == [Entries] * 4
    on_cpu, on_gpu, on_old = (Planner(MACHINES[name]).plan(facts) for name in ("cpu", "rtx4090", "rtx2070"))
    assert on_cpu.fits and on_gpu.fits and on_old.fits
    assert on_gpu.graph_buckets and on_old.graph_buckets == ()  # there PyTorch runs the attention, and reads lengths


def test_no_step_needs_more_memory_than_planned(tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    values = {key: value for key, value in tiny(NAME).config.items() if key not in ("model_type", "architectures")}
    values |= {"hidden_size": 128, "max_position_embeddings": 4096, "index_topk": 64}
    with open_model(tiny_of("deepseek_v4", values).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True, disabled=frozenset({"compressed_attention:c"})))
    driver = paged(model, num_pages=192)
    for ctx in (512, 2560):
        held, planned = held_and_planned(driver, ctx)
        assert 0.1 * planned < held < planned


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring_func": "sigmoid"}, "with silu and a router of type sigmoid"),
        ({"norm_topk_prob": False}, "with another norm_topk_prob than true"),
        ({"n_shared_experts": 2}, "with more than one shared expert"),
        ({"layer_types": None, "compress_ratios": [[4]] * 5}, "must list 0, 4 or 128 for each of 5 layers"),
        ({"o_groups": 4}, "6 heads cannot be split evenly into 4 groups"),
        ({"num_key_value_heads": 2}, "with 2 KV heads"),
        pytest.param(
            *({"layer_types": ["full_attention"] * 5}, "layers of type full_attention"), marks=pytest.mark.slow
        ),
        pytest.param(
            *(
                {"layer_types": None, "compress_ratios": [0, 4, 5, 4, 128]},
                "must list 0, 4 or 128 for each of 5 layers",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"compress_rates": {"compressed_sparse_attention": 3}}, "entries of 3 tokens do not fit in pages of 16"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"compress_rates": {"heavily_compressed_attention": 64}}, "is 37, fewer than the tokens of an entry, 64"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"index_head_dim": 8}, "attention rotates 10 elements, and an index key has 8"), marks=pytest.mark.slow
        ),
        pytest.param(*({"hc_mult": 1}, "hc_mult: must be 2 to 16, not 1"), marks=pytest.mark.slow),
        pytest.param(
            *({"num_experts_per_tok": 2}, r"holds I64 \[99, 3\]; 2 experts for 99 tokens are expected"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"mlp_layer_types": ["moe"] * 5}, r"gate\.e_score_correction_bias: the tensor is missing"),
            marks=pytest.mark.slow,
        ),
        pytest.param(*({"engram_layer_ids": [2]}, "DeepSeek V4.1 is not supported"), marks=pytest.mark.slow),
    ],
)
def test_numbers_that_contradict_are_named(changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path) -> None:
    folder = tiny(NAME).save(tmp_path, **changes)
    with open_model(folder) as checkpoint:
        with pytest.raises(LocalLLMError, match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


@pytest.mark.parametrize("ratios", [[0.5, 4.0, 32.0, 4.0, 32.0], [float("nan")] * 5, [0, 4], [4, 4, 4, 4, -1]])
def test_gguf_ratios_that_are_not_tokens_are_named(ratios: list[float], tiny: Callable, tmp_path: Path) -> None:
    model = tiny(NAME)
    path = write_gguf(
        tmp_path / "tiny.gguf", model.config | {"ratios": ratios}, model.tensors, gguf.GGMLQuantizationType.F32
    )
    with (
        open_model(path) as checkpoint,
        pytest.raises(LocalLLMError, match="must hold a number of tokens for 5 layers"),
    ):
        _ = checkpoint.facts


def test_experts_that_do_not_exist_are_named(tiny: Callable, tmp_path: Path) -> None:
    model, name = tiny(NAME), "model.layers.0.ffn.gate.tid2eid"
    table = model.tensors[name].clone()
    table[5, 1] = 7
    with (
        open_model(model.save(tmp_path, {name: table})) as checkpoint,
        pytest.raises(LocalLLMError, match="holds numbers that are not from 0 to 6"),
    ):
        load_model(checkpoint, LoadOptions(exact=True))


def test_layers_without_entries_have_one_cache(loaded: Callable) -> None:
    facts = loaded(NAME).facts
    assert "attention c" in kernel_words(loaded(NAME).kernels)  # as the run summary says
    assert all(isinstance(layer.mixer, CompressedAttention) for layer in facts.layers)
    assert list(facts.entries) == [1, 2, 3, 4] and facts.composed
