"""LoRA adapters in PEFT's format against their merged weights, against PEFT itself, and against what is no adapter."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm.checkpoint.adapter_file import open_adapter
from localllm.errors import BadModelFile, ModelNotFound
from localllm.kernels.adapters import AdapterRows, Additions, LowRank
from localllm.models.adapters import Adapters
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model

RANK, ALPHA = 4, 12
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
DENSE = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def make_adapter(
    folder: Path,
    weights: Mapping[str, Tensor],
    modules: Sequence[str] = (*ATTENTION, *DENSE),
    seed: int = 3,
    changed: Mapping[str, Tensor | None] | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """Write an adapter of the modules with these ends; the weights of the base with it merged in."""
    torch.manual_seed(seed)
    tensors, merged = {}, {}
    scale = ALPHA / (math.sqrt(RANK) if config.get("use_rslora") else RANK)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)):
            continue
        down = torch.randn(RANK, weight.shape[1]) * weight.shape[1] ** -0.5
        up = torch.randn(weight.shape[0], RANK) * 0.2
        start = f"base_model.model.{module}."
        tensors |= {f"{start}lora_A.weight": down, f"{start}lora_B.weight": up}
        merged[name] = weight + scale * up @ down
        if config.get("use_dora"):
            length = weight.norm(dim=1) * (1 + 0.3 * torch.randn(weight.shape[0]))
            tensors[f"{start}lora_magnitude_vector"] = length
            merged[name] *= (length / merged[name].norm(dim=1))[:, None]
    write_adapter(folder, tensors | dict(changed or {}), **config)
    return merged


def write_adapter(folder: Path, tensors: Mapping[str, Tensor | None], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "tiny"} | config
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


class Placed:
    """A model with adapters in places, driven over pages: `step` takes the place of every sequence."""

    def __init__(self, paged: Any, model: Any, folders: Sequence[Path]) -> None:
        self.driver, self.model = paged(model), model
        held = model.hold_adapters(torch.device("cpu"), exact=True)
        for place, folder in enumerate(folders):
            held.put(place, held.read(open_adapter(folder)))

    def step(self, new: dict[int, Sequence[int]], places: dict[int, int], wanted: list[int] | None = None) -> Tensor:
        batch = self.driver.batch(new)
        rows = np.repeat([places[key] for key in new], batch.query_lens).astype(np.int32)
        picked = list(range(len(rows))) if wanted is None else wanted
        batch = dataclasses.replace(batch, places=(rows, rows[picked]), logits_indices=torch.tensor(picked))
        with torch.inference_mode():
            return self.model.logits(self.model.forward(batch, self.driver.cache))


def merged_logits(tiny: Any, paged: Any, folder: Path, merged: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    with open_model(tiny.save(folder, dict(merged))) as checkpoint:
        return paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [len(ids)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["plain", "rs", "dora"])
def test_an_adapter_gives_what_its_merged_weights_give(
    kind: dict, tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path
) -> None:
    base, ids = tiny("llama-bias"), prompt(24)
    merged = make_adapter(tmp_path / "one", base.tensors, **kind)
    expected = merged_logits(base, paged, tmp_path / "merged", merged, ids)
    ours = Placed(paged, loaded("llama-bias"), [tmp_path / "one"]).step({0: ids}, {0: 0})
    assert relative_error(ours, expected) < 2e-5
    assert relative_error(paged(loaded("llama-bias")).all_logits(ids, [24]), expected) > 1e-2


@pytest.mark.parametrize("whole", [True, False], ids=["c", "torch"])
def test_each_row_goes_through_its_own_adapter(
    whole: bool, tiny: Callable, paged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And comes out as it does alone, to the bit; rows without one as without any."""
    if not whole:
        monkeypatch.setattr("localllm.models.adapters.additions", lambda *_: Additions)
    base = tiny("llama-bias")
    with open_model(base.save(tmp_path / "base")) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    make_adapter(tmp_path / "one", base.tensors, ATTENTION[1:3], seed=1)
    make_adapter(tmp_path / "two", base.tensors, seed=2, use_dora=True)
    one, two, none = prompt(290, 1), prompt(7, 2), prompt(9, 3)
    alone = []
    for ids, place in ((one, 0), (two, 1)):
        alone.append(Placed(paged, model, [tmp_path / "one", tmp_path / "two"]).step({0: ids}, {0: place}))
    placed = Placed(paged, model, [tmp_path / "one", tmp_path / "two"])
    together = placed.step({0: one[:280], 1: none, 2: two[:6]}, {0: 0, 1: -1, 2: 1})
    assert torch.equal(together[:280], alone[0][:280])
    assert torch.equal(together[280:289], paged(model).all_logits(none, [9]))
    assert torch.equal(together[289:], alone[1][:6])
    decoded = placed.step({0: one[280:281], 2: two[6:]}, {0: 0, 2: 1})
    assert torch.equal(decoded, torch.cat([alone[0][280:281], alone[1][6:]]))
    wanted = placed.step({0: one[281:], 3: none}, {0: 0, 3: -1}, wanted=[8, 17])
    assert torch.equal(wanted, torch.cat([alone[0][289:], paged(model).all_logits(none, [9])[-1:]]))


def test_few_rows_are_changed_where_their_tiles_are_computed(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """By whatever thread, before or after the first product is there: bits are those of many rows."""
    from localllm.kernels.cpu import build

    base, ids = tiny("llama-packable"), prompt(64)  # every module begins at a whole tile
    make_adapter(tmp_path / "one", base.tensors, seed=1)
    make_adapter(tmp_path / "two", base.tensors, seed=2, use_dora=True)
    with open_model(base.save(tmp_path / "base")) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    placed = Placed(paged, model, [tmp_path / "one", tmp_path / "two"])
    expected = [placed.step({place: ids}, {place: place}) for place in (0, 1)]
    assert not torch.equal(*expected)
    try:
        for key, threads in enumerate((1, 2, 3, 8), 1):
            build.lib().ll_threads(threads)
            keys = {2 * key: 0, 2 * key + 1: 1}
            for first, end in ((0, 16), *((at, at + 1) for at in range(16, 40)), (40, 42), (42, 46), (46, 64)):
                found = placed.step(dict.fromkeys(keys, ids[first:end]), keys)
                assert torch.equal(found, torch.cat([rows[first:end] for rows in expected])), (threads, first)
    finally:
        build.lib().ll_threads(build.usable_cores())


def test_where_weights_have_few_bits_updates_take_a_byte(tmp_path: Path) -> None:
    """And are computed as those of float32, but for the rounding of their own numbers."""
    from localllm.kernels.cpu.adapters import CpuAdditions

    generator = torch.Generator().manual_seed(1)
    rows, shape = AdapterRows(), (70, 90)
    pieces = [
        LowRank(torch.randn(rank, 90, generator=generator), torch.randn(n, rank, generator=generator), first)
        for rank, n, first in ((4, 33, 0), (21, 37, 33))
    ]
    rows.set(np.array([0, 0, 0, 0, -1, 0], dtype=np.int32))
    x, y = torch.randn(6, 90, generator=generator), torch.randn(6, 70, generator=generator)
    added, errors, sizes = [], [], []
    reference = Additions(rows, shape, None)
    exact, half, coarse = (
        CpuAdditions(rows, shape, None, exact=exact, coarse=coarse)
        for exact, coarse in ((True, True), (False, False), (False, True))
    )
    for one in (reference, exact, half, coarse):
        one.put(0, pieces, one.room(1 << 20))
        added.append(one.add(x, y.clone()) - y)
        errors.append(float((added[-1] - added[0]).norm() / added[0].norm()))
        sizes.append(one.nbytes)
    assert not added[3][4].any() and added[3][5].any()
    assert errors[1] < 1e-6 < errors[2] < 4e-3 and 2e-3 < errors[3] < 1.2e-2
    assert sizes[3] < 0.7 * sizes[2] < 0.4 * sizes[1]


def test_rows_of_gguf_files_are_in_their_own_order(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    import gguf

    from tests.models.test_gguf_models import write_gguf

    base, ids = tiny("llama"), prompt(20)
    merged = make_adapter(tmp_path / "one", base.tensors)
    path = write_gguf(tmp_path / "base.gguf", base.config, base.tensors, gguf.GGMLQuantizationType.F32)
    with open_model(path) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True))
    ours = Placed(paged, model, [tmp_path / "one"]).step({0: ids}, {0: 0})
    assert relative_error(ours, merged_logits(base, paged, tmp_path / "merged", merged, ids)) < 2e-5


def refusal(folder: Path, model: Any = None) -> str:
    with pytest.raises((BadModelFile, ModelNotFound)) as found:
        file = open_adapter(folder)
        model.hold_adapters(torch.device("cpu"), exact=True).read(file)
    assert found.value.hint
    return f"{type(found.value).__name__}: {found.value.message}"


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"modules_to_save": ["embed_tokens", "lm_head"]}, "modules_to_save: whole modules are replaced"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices: the vocabulary is changed"),
    "kind": ({"peft_type": "IA3"}, "peft_type: is IA3; only LORA is supported"),
    "bias": ({"bias": "all"}, "bias: is all: biases are changed"),
    "base": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights: is pissa_niter_16"),
    "stacks": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: parameters other than"),
    "unknown": ({"use_newer_math": True}, "use_newer_math: is True, which this version does not support"),
    "expression": ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern: (a+)+b is a regular expression"),
    "rank": ({"r": 5}, "its rank must be 5"),
    "rank-pattern": ({"rank_pattern": {"q_proj": 8}}, "its rank must be 8"),
    "dora": ({"use_dora": True}, "the magnitudes contradict it"),
    "huge": ({"r": 1 << 40}, "r: must be 1 to 4,096, not 1,099,511,627,776"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_more_than_linear_updates_is_refused_by_name(name: str, tiny: Callable, tmp_path: Path) -> None:
    config, message = CONFIGS[name]
    make_adapter(tmp_path / "one", tiny("llama").tensors, ATTENTION)
    write = tmp_path / "one" / "adapter_config.json"
    write.write_text(json.dumps(json.loads(write.read_text()) | config))
    assert message in refusal(tmp_path / "one")


def test_tensors_of_another_base_are_named(tiny: Callable, loaded: Callable, tmp_path: Path) -> None:
    make_adapter(tmp_path / "other", tiny("qwen3").tensors, base_model_name_or_path="org/other")
    said = refusal(tmp_path / "other", loaded("llama-bias"))
    assert "layers.0.self_attn." in said or "layers.0.mlp." in said
    assert "this model needs" in said and "it was made for org/other" in said
    start, rows = "base_model.model.", torch.zeros(RANK, 42)
    for module, message in {
        "model.layers.77.self_attn.q_proj": "no such linear module",
        "lm_head": "the adapter changes the vocabulary",
        "vision_tower.layers.0.self_attn.q_proj": "no such linear module",
    }.items():
        tensors = {f"{start}{module}.lora_A.weight": rows, f"{start}{module}.lora_B.weight": rows.T.contiguous()}
        assert message in refusal(write_adapter(tmp_path / "named", tensors), loaded("llama"))
    embedding = {f"{start}model.embed_tokens.lora_embedding_A": rows}
    assert "changes the vocabulary" in refusal(write_adapter(tmp_path / "words", embedding))


def test_damaged_adapters_are_refused(tiny: Callable, loaded: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    make_adapter(folder, tiny("llama").tensors, ATTENTION)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, stated = weights.read_bytes(), config.read_text()
    file = open_adapter(folder)
    for size in (0, 9, 200, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert "BadModelFile" in refusal(folder)
    held = loaded("llama").hold_adapters(torch.device("cpu"), exact=True)
    with pytest.raises(BadModelFile, match="was truncated"):  # since it was opened
        held.read(file)
    name = next(iter(open_tensors(whole)))
    not_finite = open_tensors(whole) | {name: torch.full_like(open_tensors(whole)[name], float("nan"))}
    save_file(not_finite, weights)
    assert "not finite" in refusal(folder, loaded("llama"))
    lonely = {key: value for key, value in open_tensors(whole).items() if key != name}
    save_file(lonely, weights)
    assert "is missing" in refusal(folder)
    weights.write_bytes(whole)
    for text in ("", "[]", "{", '{"r": "four"}', '{"r": NaN}', "{" * 70_000):
        config.write_text(text)
        assert "BadModelFile" in refusal(folder)
    config.write_text(stated)
    weights.rename(folder / "adapter_model.bin")
    assert "pickle" in refusal(folder)
    assert "holds no adapter" in refusal(tmp_path / "nowhere")


def open_tensors(data: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(data)


def test_fused_segments_of_cards_decline_products_with_additions() -> None:
    """The launch of a whole segment would leave them out."""
    pytest.importorskip("triton")
    from localllm.kernels.layer_weights import Linear, LinearPart
    from localllm.kernels.registry import Impl, fits_always
    from localllm.kernels.triton import segments

    part = LinearPart(Impl("linear", "triton", fits_always, lambda *_: None), None, None, (4, 4))
    plain = Linear((part,))
    adapted = Linear((part,), additions=Additions(AdapterRows(), (4, 4), None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "fusable", lambda *_: True)
        assert segments.only_part(plain, torch.zeros(1, 4)) is part
        assert segments.only_part(adapted, torch.zeros(1, 4)) is None


TARGETS = (
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "qwen3.5",
    "olmo2",
    "olmo-hybrid",
    "glm4",
    "smollm3",
    "lfm2",
    "lfm3",
    "falcon-h1",
    "kimi-linear",
    "ling3",
    "qwen4-exp",
    "glm5-next",
)
# experts, up projections of latents, hyper-connections, index and n-grams take no adapters
OF_MIXERS = dict.fromkeys(("kimi-linear", "ling3"), r".*\.self_attn\.(?!kv_)[\w.]+_proj")
OF_MIXERS["falcon-h1"] = r".*\.(?!out_proj)\w+_proj"  # peft refuses out_proj of Mamba
OF_MIXERS["glm5-next"] = r".*language_model.*\.self_attn\.(?!kv_|indexer)[\w.]+_proj"
OF_MIXERS["qwen4-exp"] = r".*\.(self_attn\.[qkvo]_proj|linear_attn\.(in|out)_proj\w*)"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "kind", [{}, {"use_rslora": True, "alpha_pattern": {"q_proj": 3}}, {"use_dora": True}], ids=["plain", "rs", "dora"]
)
def test_logits_match_peft(kind: dict, name: str, tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import copy

    base, ids = tiny(name), prompt(80)
    torch.manual_seed(5)
    settings = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=OF_MIXERS.get(name, "all-linear"),
        rank_pattern={"o_proj": 3},
        task_type="CAUSAL_LM",
        **kind,
    )
    theirs = peft.get_peft_model(copy.deepcopy(base.reference), settings).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif "magnitude" in key:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    theirs.save_pretrained(tmp_path / "peft")
    ours = Placed(paged, loaded(name), [tmp_path / "peft"]).step({0: ids}, {0: 0})
    assert relative_error(ours, expected) < 1e-4
    assert relative_error(paged(loaded(name)).all_logits(ids, [80]), expected) > 1e-3


def test_an_adapter_is_read_on_the_gpu_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA runs products of the model, and the threads that read adapters begin on the first GPU."""
    entered: list[torch.device] = []

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        entered.append(one)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cuda:1", "cpu"):
        adapters = Adapters.__new__(Adapters)
        adapters._device = torch.device(name)
        adapters.read(SimpleNamespace(updates=()))  # type: ignore[arg-type]
    assert entered == [torch.device("cuda:1")]
