"""Qwen3.8-Flash-Next beside its arithmetic: names on the hub, the n-gram table, sparse attention, plans, refusals."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localllm.cli.commands.show import _size
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile, ConfigError, LocalLLMError, UnsupportedModel
from localllm.kernels import OpFacts, sparse
from localllm.kernels import token_index as choosing
from localllm.kernels.cpu.build import library
from localllm.kernels.hyper import ngram_rows
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, IndexWeights, Linear, LinearPart, Norm, linears_of
from localllm.kernels.reference import rms_norm, rope
from localllm.kernels.registry import Impl, fits_always
from localllm.kernels.sparse import choose_blocks, index_pool, index_scores, index_write
from localllm.kernels.table import kernel_table
from localllm.kernels.token_index import sparse_attention, token_index
from localllm.kernels.verify.trial import SegmentTrial
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import kv_bytes_per_token
from localllm.models.architectures.sharding import check_span, check_world
from localllm.models.calibration import hessians
from localllm.models.loader import LoadOptions, load_model
from localllm.models.samples import layer_samples, model_shapes
from localllm.plan.memory import activation_bytes, index_bytes
from localllm.plan.planner import Planner

from .test_gguf_models import write_gguf
from .test_predictor import check_answers_stay, own_logits

NAME, TABLE = "qwen4-exp", "model.layers.2.ple.ple_embedding.ngram_embedding"


def prompt(length: int, seed: int = 5) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def logits(folder: Path, paged: Any, ids: list[int], chunks: Sequence[int] = (40,), **options: Any) -> Tensor:
    with open_model(folder) as checkpoint:
        return paged(load_model(checkpoint, LoadOptions(exact=True, **options))).all_logits(ids, list(chunks))


def published(model: Any, folder: Path, **changes: Any) -> Path:
    """The checkpoint as the hub has it: below a wrapper, with a tower, an MTP head and a table in FP8 in four parts."""
    text = {key: value for key, value in model.config.items() if key != "architectures"} | changes
    text["layer_types"] = [name.replace("indexed", "full") for name in text["layer_types"]]
    tensors: dict[str, Any] = dict.fromkeys(model.tensors)
    tensors |= {name.replace("model.", "model.language_model.", 1): value for name, value in model.tensors.items()}
    start = f"{TABLE.replace('model.', 'model.language_model.', 1)}."
    rows = tensors.pop(f"{start}weight")
    parts = (rows / 0.5).to(torch.float8_e4m3fn).chunk(4)
    tensors |= {f"{start}shard_{number}.weight": part for number, part in enumerate(parts)}
    tensors[f"{start}weight_scale"] = torch.tensor([0.5]).bfloat16()
    tensors["mtp.fc_hidden.weight"] = torch.ones(4, 4)
    tensors["model.visual.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 2, 2)
    config = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text}
    return model.save(folder, tensors, **config)


def test_qwen4_exp_as_the_hub_has_it(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny(NAME), prompt(60)
    rows = (model.tensors[f"{TABLE}.weight"] / 0.5).to(torch.float8_e4m3fn).float() * 0.5
    wanted = logits(model.save(tmp_path / "plain", {f"{TABLE}.weight": rows}), paged, ids)
    folder = published(model, tmp_path / "published", mtp_num_hidden_layers=1)
    assert torch.equal(logits(folder, paged, ids), wanted)
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts
        assert "is not supported: the model reads text only" in checkpoint.unread
    assert facts.predictor is None and "the MTP head cannot be used" in facts.predictor_flaw
    table = facts.ngrams
    assert table is not None and (table.rows, table.dim, len(table.shards)) == (240, 6, 4)
    assert table.nbytes == 240 * 6
    numbers = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    derived = {key: value for key, value in model.tensors.items() if key.rpartition(".")[2] not in numbers}
    again = published(replace(model, tensors=derived), tmp_path / "derived")
    assert torch.equal(logits(again, paged, ids), wanted)


def with_head(tiny_of: Callable, model: Any, folder: Path) -> tuple[Any, Path, Callable[[list[int]], Tensor]]:
    """The model with a fifth layer, whose checkpoint has that layer as an MTP head; the head's logits."""
    given = {key: value for key, value in model.config.items() if key not in ("model_type", "architectures")}
    given |= {"num_hidden_layers": 5, "layer_types": [*given["layer_types"], "indexed_attention"]}
    five = tiny_of("qwen4_exp_text", given, 3)
    inner, hidden, draw = five.reference.model, model.config["hidden_size"], torch.Generator().manual_seed(4)
    streams = model.config["hc_count"]
    head = {f"pre_fc_norm_{name}.weight": 0.2 * torch.randn(size, generator=draw)
            for name, size in (("embedding", hidden), ("hidden", streams * hidden))}  # fmt: skip
    head |= {f"fc_{name}.weight": torch.randn(hidden, hidden, generator=draw) * 0.2 for name in ("embedding", "hidden")}
    layer, mixer, of_streams = inner.layers[4], copy.deepcopy(inner.hyper_connection_mixer), []
    with torch.no_grad():
        for part in mixer.parameters():
            part.copy_(torch.randn(part.shape, generator=draw) * 0.2)
    head |= {f"hyper_connection_mixer.{name}": part.detach().clone() for name, part in mixer.named_parameters()}
    del inner.layers[4]
    inner.hyper_connection_mixer.register_forward_pre_hook(lambda _, given: of_streams.append(given[0][0, :-1]))
    tensors = {name.replace("model.layers.4.", "mtp.layers.0."): tensor for name, tensor in five.tensors.items()}
    tensors |= {f"mtp.{name}": tensor for name, tensor in head.items()}

    def run(ids: list[int]) -> Tensor:
        count = len(ids) - 1
        with torch.no_grad():
            inner(torch.tensor([ids]), use_cache=False)
            embedded, before = inner.embed_tokens(torch.tensor(ids[1:])), of_streams.pop()
            norm, eps = torch.nn.functional.rms_norm, model.config["rms_norm_eps"]
            embedded, before = (
                norm(part, part.shape[-1:], 1 + head[f"pre_fc_norm_{name}.weight"], eps)
                for name, part in (("embedding", embedded), ("hidden", before))
            )
            each = before.view(count, streams, hidden) @ head["fc_hidden.weight"].T
            x = (each + (embedded @ head["fc_embedding.weight"].T).unsqueeze(1)).flatten(1)[None]
            turned = inner.rotary_emb(x, torch.arange(count)[None, None])
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            return five.reference.lm_head(mixer(layer(x, position_embeddings=turned, attention_mask=mask)))[0]

    config = {"num_hidden_layers": 4, "layer_types": model.config["layer_types"], "mtp_num_hidden_layers": 1}
    return five, replace(five, config=five.config | config, tensors=tensors).save(folder), run


@pytest.mark.slow
def test_its_mtp_head_predicts_as_transformers_modules_do(
    tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path
) -> None:
    """From the model's residual streams, in chunks; the model's own logits stay the same."""
    five, folder, run = with_head(tiny_of, tiny(NAME), tmp_path)
    ids = prompt(71)
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts
        assert facts.predictor_flaw == "" and facts.predictor_bytes > 0 and facts.head_width == 3 * 44
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    assert relative_error(own_logits(ours, paged, ids, [33, 1, 36]), run(ids)) < 1e-5
    assert torch.equal(paged(ours).all_logits(ids, [33]), logits(folder, paged, ids, chunks=[33]))
    with torch.no_grad():
        wanted = five.reference(torch.tensor([ids]), use_cache=False).logits[0]
    assert relative_error(paged(ours).all_logits(ids, [33]), wanted) < 1e-4


@pytest.mark.slow
def test_guesses_of_its_head_change_no_answer(tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    """Sampled and greedy, eager and with replayed steps; the states of n-grams and recurrent layers go back as well."""
    with open_model(with_head(tiny_of, tiny(NAME), tmp_path)[1]) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    check_answers_stay(ours)


def test_a_discarded_model_with_its_head_leaves_no_cycle(
    tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path
) -> None:
    """The weights that reduce streams are in no layer, and kernels cache with them what they derive, too."""
    with open_model(with_head(tiny_of, tiny(NAME), tmp_path)[1]) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    own_logits(ours, paged, prompt(20), [19])
    paged(ours).all_logits(prompt(20), [20])
    assert ours.predictor is not None
    finals = ours._final, ours.predictor.final
    parts = [part for one in finals for linear in linears_of(one) for part in linear.parts]
    assert any(part.prepared.layer for part in parts)
    ours.forget_layers()
    assert not any(part.prepared.layer for part in parts)


@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_NL"])
def test_rows_of_a_quantized_table(kind: str, tiny_of: Callable, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Rows of 32 values, as a block type needs them; the same rows in float32 give the same answers."""
    model, ids, stored = tiny(NAME), prompt(40), gguf.GGMLQuantizationType[kind]
    wide = {"ple_embed_dim": 128}
    table = torch.randn(240, 32, generator=torch.Generator().manual_seed(1))
    if kind == "Q8_0":
        data = gguf.quants.quantize(table.numpy(), stored)
    else:
        data = np.random.default_rng(0).integers(0, 256, (240, 18), dtype=np.uint8)
        data[:, :2] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
    rows = torch.from_numpy(gguf.quants.dequantize(data, stored))
    start = "model.layers.2.ple."
    more = {f"{start}{name}_proj.weight": torch.randn(n, 128) * 0.1 for name, n in (("key", 132), ("value", 44))}
    config = model.config | wide
    plain = replace(model, config=config, tensors=model.tensors | more | {f"{TABLE}.weight": rows})
    path = write_gguf(tmp_path / "plain.gguf", config, plain.tensors, gguf.GGMLQuantizationType.F32)
    wanted = logits(path, paged, ids)
    packed = tmp_path / "packed.gguf"
    _with_table(path, packed, data, stored)
    assert torch.equal(logits(packed, paged, ids), wanted)


def _with_table(
    source: Path, target: Path, data: np.ndarray | None, kind: gguf.GGMLQuantizationType | None = None, **numbers: Any
) -> None:
    """A copy of a file with another n-gram table, or with other numbers; None leaves one out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen4exp")
    for field in reader.fields.values():
        if field.name.removeprefix("qwen4exp.") in numbers:
            value = numbers[field.name.removeprefix("qwen4exp.")]
            if value is None:
                continue
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            add(field.name, value)
        elif not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        own = data is not None and tensor.name == "per_layer_token_embd.weight"
        writer.add_tensor(tensor.name, data if own else tensor.data, raw_dtype=kind if own else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"ple.layers": 2}, r"ple\.layers: must list layer numbers"),
        ({"ple.layers": None}, r"ple\.layers: is missing, and the file has blk\.2\.ple_key"),
        ({"attention.compress_ratios": None}, r"compress_ratios: is missing, and the file has blk\.\d\.indexer"),
        ({"ple.layers": [2.5]}, r"ple\.layers: must list layer numbers"),
        ({"ple.layers": [1]}, "layer 1 has n-gram embeddings, but it is not a gated delta layer"),
        ({"attention.compress_ratios": [0, 4, 0, 2]}, "blocks of different sizes is not supported"),
        ({"ple.layer_multipliers": [1, 2]}, "must hold 3 integers"),
    ],
)
def test_numbers_of_a_gguf_file_that_contradict_are_named(
    numbers: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    model = tiny(NAME)
    path = write_gguf(tmp_path / "plain.gguf", model.config, model.tensors, gguf.GGMLQuantizationType.F32)
    _with_table(path, tmp_path / "changed.gguf", None, **numbers)
    with open_model(tmp_path / "changed.gguf") as checkpoint:
        with pytest.raises(LocalLLMError, match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


def test_a_table_that_was_cut_off_meanwhile_is_an_error(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    folder = tiny(NAME).save(tmp_path)
    with open_model(folder) as checkpoint:
        info = checkpoint.tensors[f"{TABLE}.weight"]
        model = load_model(checkpoint, LoadOptions(exact=True))
    os.truncate(folder / "model.safetensors", info.offset)
    with pytest.raises(BadModelFile, match=r"ends before row \d+ of the n-gram table") as caught:
        paged(model).all_logits(prompt(20), [20])
    assert "pull" in caught.value.hint


def test_a_table_in_parts_keeps_each_file_open_once_and_is_no_part_of_the_progress(
    tiny: Callable, paged: Any, tmp_path: Path
) -> None:
    folder, calls = published(tiny(NAME), tmp_path), []

    def opened() -> int:
        targets = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return sum(target.exists() and target.samefile(folder / "model.safetensors") for target in targets)

    before = opened()
    with open_model(folder) as checkpoint:
        options = LoadOptions(exact=True, progress=lambda *now: calls.append(now))
        model = load_model(checkpoint, options)
        assert calls[-1][1] == checkpoint.nbytes - 240 * 6
    assert opened() == before + 1
    del model
    assert opened() == before


def test_n_grams_end_where_a_text_ends() -> None:
    """Hashes of pairs and triples, by hand; a second step continues the first."""
    multipliers, sizes, offsets = torch.tensor([3, 5, 7]), torch.tensor([11, 13]), torch.tensor([0, 11])
    end, ids = 9, [4, 6, 9, 2, 8, 1]

    def row(token: int, one: int, two: int) -> list[int]:
        pair = token * 3 ^ one * 5
        return [pair % 11, (pair ^ two * 7) % 13 + 11]

    before = [(9, 9), (4, 9), (6, 4), (9, 9), (2, 9), (8, 2)]  # what precedes the first token, or an end, counts as end
    wanted = torch.tensor([row(token, *pair) for token, pair in zip(ids, before, strict=True)])
    for cut in range(1, 6):
        last, slot = torch.zeros(3, 2), torch.tensor([1])
        args = multipliers, sizes, offsets, end
        first = ngram_rows(torch.tensor(ids[:cut]), last, slot, torch.tensor([0, cut]), *args)
        second = ngram_rows(torch.tensor(ids[cut:]), last, slot, torch.tensor([0, 6 - cut]), *args)
        assert torch.equal(torch.cat([first, second]), wanted)
        assert last.tolist() == [[0, 0], [9, 2], [0, 0]]


def best(scores: Tensor, positions: Tensor, index: IndexWeights) -> tuple[Tensor, Tensor]:
    """What queries see, with one block per page and one KV head."""
    table = torch.arange(scores.shape[1] + 1).int().expand(len(positions), -1)
    return choose_blocks(scores, table, positions.int() + 1, index.ratio, index.top, 1, 1)


def test_of_equal_scores_the_first_blocks_are_seen() -> None:
    index = IndexWeights(Linear(()), *[Norm(torch.ones(2), 0.0)] * 2, 1, 2, ratio=4, top=3, back=torch.zeros(2, 1))
    keys = torch.tensor([[0.0, 0], [0, 0], [1, 0], [0, 0], [2, 0], [0, 0]])
    q = torch.tensor([[[1.0, 0]], [[1.0, 0]], [[-1.0, 0]], [[1.0, 0]]])
    chosen, tokens = best(index_scores(q, keys), torch.tensor([23, 25, 25, 9]), index)
    assert chosen.tolist() == [[0, 2, 4, -1], [0, 2, 4, 6], [0, 1, 2, 6], [0, 1, 2, -1]]
    assert tokens.tolist() == [12, 14, 14, 10]


def test_what_a_query_sees_depends_on_no_other_query_and_no_later_block() -> None:
    """Every key is there twice, the second time with other last bits, on which the last choice depends."""
    index = IndexWeights(Linear(()), *[Norm(torch.ones(2), 0.0)] * 2, 4, 128, ratio=4, top=201, back=torch.zeros(2, 1))
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(700, 128, generator=generator)
    keys = torch.cat([keys, torch.nextafter(keys, torch.randn(700, 128, generator=generator))])
    q = torch.randn(300, 4, 128, generator=generator)
    positions = torch.arange(4 * 1400 - 300, 4 * 1400)
    whole, _ = best(index_scores(q, keys), positions, index)
    for row in range(0, 300, 7):
        blocks = (int(positions[row]) + 1) // 4
        alone, _ = best(index_scores(q[row : row + 1], keys[:blocks]), positions[row : row + 1], index)
        assert torch.equal(alone[0], whole[row])


def test_scores_that_are_no_numbers_choose_blocks_that_exist() -> None:
    """Page -1 would be read where a kernel counts on the tokens."""
    index = IndexWeights(Linear(()), *[Norm(torch.ones(2), 0.0)] * 2, 1, 2, ratio=4, top=3, back=torch.zeros(2, 1))
    keys = torch.tensor([[0.0, 0], [float("nan"), 0], [1, 0], [float("inf"), 0], [2, 0], [0, 0]])
    scores = index_scores(torch.tensor([[[1.0, 0]], [[float("nan"), 0]]]), keys)
    chosen, tokens = best(scores, torch.tensor([23, 23]), index)
    assert chosen.tolist() == [[2, 3, 4, -1], [0, 1, 2, -1]]
    assert tokens.tolist() == [12, 12]


def test_block_keys_are_stored_without_reading_a_gpu_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as on the host, in steps that begin and end inside of blocks of two sequences; other blocks stay."""
    index = IndexWeights(Linear(()), *[Norm(torch.ones(8), 1e-6)] * 2, 1, 8, ratio=4, top=3, back=torch.randn(2, 2))
    empty, draw = torch.zeros(1), torch.Generator().manual_seed(1)
    stored = torch.full((3, 16, 8), torch.nan), torch.full((3, 4, 8), torch.nan)
    found, wanted = (KVPages(empty, empty, None, None, *(part.clone() for part in stored)) for _ in range(2))
    steps = ([0, 1, 2], [3], [4, 5, 6, 7, 8, 33], [9, 34], [10, 35, 36, 37, 38, 39, 40], [11, 12, 13, 14, 15, 41])
    for step in steps:
        keys, cos, sin = (torch.randn(len(step), size, generator=draw) for size in (8, 2, 2))
        for pages, on_host in ((found, False), (wanted, True)):
            monkeypatch.setattr(sparse, "reads_back", lambda x, on_host=on_host: on_host)
            index_write(keys, index.k_norm, pages, torch.tensor(step), cos, sin, index.back)
    for ours, theirs in zip(found[4:], wanted[4:], strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert wanted.block_keys is not None
    known = [number for number, key in enumerate(wanted.block_keys.flatten(0, 1)) if key.isfinite().all()]
    assert known == [0, 1, 2, 3, 9]


def indexed(index: IndexWeights) -> AttentionWeights:
    """A layer with this index."""
    return AttentionWeights(
        None, Linear(()), Linear(()), num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, index=index
    )


def test_short_sequences_are_indexed_without_reading_a_gpu_back() -> None:
    """Tensors without data cannot be read; a block table of one page more means that lengths must be."""
    with torch.device("meta"):
        impl = Impl("linear", "", fits_always, lambda x, *_: x.new_empty(x.shape[0], 24))
        linear = Linear((LinearPart(impl, None, None, (24, 5)),))
        index = IndexWeights(linear, *[Norm(torch.ones(8), 1e-6)] * 2, 2, 8, ratio=4, top=11, back=torch.ones(2, 2))
        pages = KVPages(*[torch.empty(4, 1, 16, 8)] * 2, None, None, torch.empty(4, 16, 8), torch.empty(4, 4, 8))
        angles, slots, bounds = torch.empty(6, 2), torch.empty(6, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        ops = rms_norm, rope, index_write, index_pool, index_scores, choose_blocks
        given = *ops, torch.empty(6, 5), indexed(index), pages
        for columns in (2, 3):
            view = angles, angles, torch.empty(2, columns, dtype=torch.int32), slots
            with pytest.raises(NotImplementedError) if columns == 3 else nullcontext():
                assert token_index(*given, view, bounds, bounds[1:]) is None


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
    index = next(mixer.index for mixer in model.facts.attention)
    assert index is not None
    for number in range(34):
        tokens = {sequence: [(7 * number + sequence) % 99] for sequence in prompts}
        wanted = host.step(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(sparse, "reads_back", lambda x: False)
            patch.setattr(choosing, "SCORE_BYTES", 1 if number % 2 else choosing.SCORE_BYTES)
            found = device.step(tokens)
        assert all(torch.equal(found[sequence], wanted[sequence]) for sequence in prompts), number
    assert 3 + 1 <= index.reach < len(host.tokens[0])


def test_decode_steps_run_where_nothing_can_be_read(loaded: Callable) -> None:
    """Tensors without data, in the index and in what gathers for attention."""
    with torch.device("meta"):
        impl = Impl("linear", "", fits_always, lambda x, *_: x.new_empty(x.shape[0], 24))
        linear = Linear((LinearPart(impl, None, None, (24, 5)),))
        index = IndexWeights(linear, *[Norm(torch.ones(8), 1e-6)] * 2, 2, 8, ratio=4, top=11, back=torch.ones(2, 2))
        pages = KVPages(*[torch.empty(4, 2, 16, 8)] * 2, None, None, torch.empty(4, 16, 8), torch.empty(4, 4, 8))
        angles, slots, bounds = torch.empty(2, 2), torch.empty(2, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        view = angles, angles, torch.empty(2, 9, dtype=torch.int32), slots

        def scores(q: Tensor, keys: Tensor, table: Tensor, shares: None) -> Tensor:
            assert keys.shape == (4, 4, 8) and table.shape == (2, 9)
            return torch.empty(2, 36)

        ops = rms_norm, rope, index_write, index_pool, scores, choose_blocks
        chosen = token_index(*ops, torch.empty(2, 5), indexed(index), pages, view, bounds, bounds[1:])
        assert chosen is not None and chosen.rows is None and chosen.short is None
        assert chosen.block_table.shape == (2 * 2, 11 + 1) and chosen.lens.shape == (2 * 2,)

        def attention(q: Tensor, weights: AttentionWeights, pages: KVPages, *where: Tensor) -> Tensor:
            assert q.shape == (4, 3, 8) and weights.num_kv_heads == 1 and pages.k.shape == (4 * 2 * 4, 1, 4, 8)
            return torch.empty(4, 3 * 8)

        attended = replace(
            next(layer.mixer for layer in loaded(NAME).layers if isinstance(layer.mixer, AttentionWeights)),
            num_heads=6, num_kv_heads=2, head_dim=8, index=index,
        )  # fmt: skip
        where = pages, view[2], bounds, bounds[1:]
        assert sparse_attention(attention, torch.empty(2, 6, 8), attended, *where, chosen).shape == (2, 48)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bf16", "fp16", "int8", "fp8"])
def test_other_kv_formats_stay_close(kv: str, loaded: Callable, paged: Any) -> None:
    """Short sequences, so that rounded index keys cannot choose other blocks; a long one runs and differs little."""
    model, ids = loaded(NAME), prompt(14)
    exact = paged(model).all_logits(ids, [9])
    found = paged(model, kv=kv).all_logits(ids, [9])
    assert 0 < relative_error(found, exact) < 0.15
    assert bool(paged(model, kv=kv).all_logits(prompt(60), [33]).isfinite().all())


def test_pages_hold_index_keys_of_tokens_and_blocks(loaded: Callable, paged: Any) -> None:
    driver = paged(loaded(NAME))
    driver.all_logits(prompt(30), [30])
    pages = driver.cache.layers[1]
    assert isinstance(pages, KVPages) and pages.index_keys is not None and pages.block_keys is not None
    assert pages.index_keys.shape[1:] == (16, 12) and pages.block_keys.shape[1:] == (4, 12)
    first, second = driver.tables[0][0][:2]
    assert bool(pages.index_keys[first].any(-1).all()) and bool(pages.block_keys[first].any(-1).all())
    assert pages.block_keys[second].any(-1).tolist() == [True, True, True, False]  # 14 tokens
    facts = loaded(NAME).facts
    plain = sum(2 * 2 * 24 * 2 for _ in range(2))
    assert kv_bytes_per_token(facts.layers, "bf16") == plain + 2 * 2 * 15
    assert driver.cache.page_bytes(0) == 16 * kv_bytes_per_token(facts.layers, "f32")


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
def test_c_segments_return_a_blocks_output_alone(loaded: Callable) -> None:
    model = loaded(NAME)
    facts = OpFacts(kv_format="f32", num_heads=4, num_kv_heads=2, head_dim=24, gated=True)
    table = kernel_table(facts)
    names = dict(table.ops)
    shapes = model_shapes(model.facts, facts)
    views = [-1, 0, -1, 0]
    samples = layer_samples(model.layers, views)
    trial = SegmentTrial(shapes, samples, model.embedding, model.head, lambda _, at: model._ropes[0].rows(at, 64))
    for name in ("attn_in", "attention", "attn_out", "gated_delta", "experts", "decoder", "step"):
        assert names[name] == "c" or names[name] != "composed"
        assert trial.error(name, table) == ""


def test_a_part_of_the_layers_gives_one_vector_per_token(loaded: Callable, paged: Any) -> None:
    model = loaded(NAME)
    driver = paged(model)
    with torch.inference_mode():
        hidden = model.forward(driver.batch({0: prompt(9)}), driver.cache, num_layers=2)
        assert hidden.shape == (9, 44) and model.logits(hidden).shape == (9, 99)


def test_the_plan_knows_what_stays_in_the_file(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny(NAME).save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.ngrams is not None
    assert _size(facts, 3 << 30).endswith("3.0 GiB, of which 5.6 KiB are an n-gram table that stays in the file")
    beside = facts.ngrams.rows * facts.ngrams.dim + 3 + 2 * 4  # the table and the numbers of its hash
    assert facts.num_params == sum(tensor.numel() for tensor in tiny(NAME).tensors.values()) - beside
    on_cpu, on_gpu = (Planner(MACHINES[name]).plan(facts) for name in ("cpu", "rtx4090"))
    assert on_cpu.fits and on_gpu.fits and on_gpu.graph_buckets == (1, 2, 4)
    conv = 3 * 44 * 2 * 3 + 2
    delta = 96 * 3 + 4 * 14 * 10
    assert facts.state_bytes == 4 * (2 * delta + conv)
    assert on_gpu.num_slots >= EngineOptions().max_parallel


class Made(TorchDispatchMode):
    """Counts the bytes of the storages that were made while it is active, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in (one.untyped_storage() for one in tree_leaves(out) if isinstance(one, Tensor)):
            if storage._cdata not in self._known | given:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def held_and_planned(driver: Any, ctx: int, rows: int = 512) -> tuple[int, int]:
    """Bytes held by the step of a sequence that has `ctx` tokens after it, and those that the plan counts."""
    facts = driver.model.facts
    while len(driver.tokens.get(0, ())) < ctx - rows:
        driver.step({0: prompt(512)})
    batch, made = driver.batch({0: prompt(rows)}), Made()
    with made, torch.inference_mode():
        driver.model.forward(batch, driver.cache)
    return made.most, activation_bytes(facts, rows, 4) + index_bytes(facts, rows, ctx)


@pytest.mark.slow
def test_no_step_needs_more_memory_than_planned(tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """A short text, whose worst moment is the convolution of the n-grams, and a long one, which chooses blocks."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "hc_count": 4, "ple_embed_dim": 64}
    sizes |= {"indexer_n_heads": 4, "indexer_head_dim": 32, "indexer_budget": 512, "max_position_embeddings": 4096}
    config = {key: value for key, value in tiny(NAME).config.items() if key != "model_type"}
    with open_model(tiny_of("qwen4_exp_text", config | sizes).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    driver = paged(model, num_pages=192)
    for ctx, least in ((512, 0.7), (3072, 0.2)):
        held, planned = held_and_planned(driver, ctx)
        assert least * planned < held < planned


def test_ranks_cannot_divide_it_and_no_hint_says_so(loaded: Callable) -> None:
    facts = loaded(NAME).facts
    with pytest.raises(ConfigError, match="hyper-connections") as caught:
        check_world(facts, 2)
    assert caught.value.hint == "use one GPU"
    with pytest.raises(ConfigError, match="several residual streams") as caught:
        check_span(facts, (0, 2))
    assert caught.value.hint == "use one GPU"


def test_it_cannot_be_calibrated(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny(NAME).save(tmp_path)) as checkpoint:
        with pytest.raises(UnsupportedModel, match="cannot be calibrated") as caught:
            next(hessians(checkpoint, [[1, 2, 3]]))
        assert "--calib none" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hc_count": 1}, "hc_count: must be 2 to 16, not 1"),
        ({"hc_lowrank": 8}, r"input_mix_weight_down\.weight: the weight has shape \[9, 132\]"),
        ({"output_gate_type": "relu"}, "output_gate_type: is 'relu'"),
        ({"indexer_compress_ratio": 3}, "blocks of 3 tokens do not fit in pages of 16"),
        ({"indexer_budget": 10}, "indexer_budget: is 10, not a multiple of 4 tokens"),
        ({"indexer_head_dim": 4}, "rotates 6 elements, and an index key has 4"),
        ({"indexer_kv_heads": 2}, "several index keys per token"),
        ({"indexer_n_heads": None}, "indexer_n_heads: is missing"),
        ({"ple_layer_ids": [2]}, "layer 1 has n-gram embeddings, but it is not a gated delta layer"),
        ({"ple_layer_ids": [1, 3]}, "n-gram embeddings in 2 layers"),
        ({"ple_layer_ids": [0]}, "layer -1 has n-gram embeddings"),
        ({"ple_embed_dim": 26}, "ple_embed_dim: is 26, not a multiple of 4 heads"),
        ({"ple_embed_dim": 28}, r"shape \[240, 6\], expected rows of 7 elements"),
        ({"eos_token_id": None}, "eos_token_id: is missing; n-grams end there"),
        ({"ple_conv_kernel_size": 4}, r"ple\.conv1d\.weight: has shape \[132, 1, 3\], expected"),
        ({"vocab_size": 98}, r"embed_tokens\.weight"),
    ],
)
def test_numbers_that_contradict_are_named(changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny(NAME).save(tmp_path, **changes)) as checkpoint:
        with pytest.raises(LocalLLMError, match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weight", None, "the n-gram table is missing"),
        ("weight", torch.ones(200, 6), "the n-gram heads need 240 rows, and the table has 200"),
        ("weight", torch.ones(240, 6, dtype=torch.int8), "stored as I8, which is not supported"),
        ("weight", torch.ones(240, 6).to(torch.float8_e4m3fn), "the scale of the n-gram table is missing"),
        ("shard_1.weight", torch.ones(240, 6), "a part of the n-gram table is missing, or there twice"),
        ("shard_0.weight", torch.ones(240, 6), "a part of the n-gram table is missing, or there twice"),
        ("layer_multipliers", torch.tensor([1, 2**62, 3]), "a multiplier of the n-gram hash is out of range"),
        ("layer_multipliers", torch.ones(2, dtype=torch.int64), r"is I64 of shape \[2\], expected 3 numbers as I64"),
        ("ngram_heads_offsets", torch.tensor([-1, 53, 112, 173]), "has no rows, or begins before the first"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(
    name: str, value: Any, words: str, tiny: Callable, tmp_path: Path
) -> None:
    full = f"{TABLE}.{name}" if name.endswith("weight") else f"{TABLE.removesuffix('.ngram_embedding')}.{name}"
    with open_model(tiny(NAME).save(tmp_path, {full: value})) as checkpoint:
        with pytest.raises(LocalLLMError, match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


@pytest.mark.parametrize(
    ("scale", "words"),
    [(torch.ones(4), r"has shape \[4\], expected one scale"), (torch.tensor(float("nan")), "n-gram table is nan")],
)
def test_a_scale_that_cannot_be_read_is_named(scale: Tensor, words: str, tiny: Callable, tmp_path: Path) -> None:
    rows = tiny(NAME).tensors[f"{TABLE}.weight"].to(torch.float8_e4m3fn)
    with open_model(tiny(NAME).save(tmp_path, {f"{TABLE}.weight": rows, f"{TABLE}.weight_scale": scale})) as checkpoint:
        with pytest.raises(BadModelFile, match=words) as caught:
            load_model(checkpoint, LoadOptions(exact=True))
        assert caught.value.hint


def test_a_table_of_another_layer_is_not_read(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny(NAME), prompt(40)
    other = {f"{TABLE.replace('layers.2', 'layers.0')}.weight": torch.ones(240, 6)}
    wanted = logits(model.save(tmp_path / "plain"), paged, ids)
    assert torch.equal(logits(model.save(tmp_path / "both", other), paged, ids), wanted)


def test_primes_are_not_sought_for_more_rows_than_the_table_has(tiny: Callable, tmp_path: Path) -> None:
    """They took hours for a number that a damaged file may have."""
    names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    start = TABLE.removesuffix(".ngram_embedding")
    gone = dict.fromkeys(f"{start}.{name}" for name in names)
    words = "ngram_vocab_size_base: is 1,099,511,627,776, and 4 heads have 240 rows"
    folder = tiny(NAME).save(tmp_path, gone, ngram_vocab_size_base=2**40)
    with open_model(folder) as checkpoint, pytest.raises(BadModelFile, match=words):
        _ = checkpoint.facts
