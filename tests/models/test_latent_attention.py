"""Latent attention beside its arithmetic: what is kept, 8-bit pages, how keys and values of latents are stored,
company in an engine, refusals.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.device.fake import MACHINES
from localllm.engine.engine import Engine
from localllm.engine.runner import Runner
from localllm.engine.scheduler import SchedulerLimits
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.kernels import reference
from localllm.kernels.cpu import segments as cpu
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import LatentWeights, Linear, LinearPart, Norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.verify.selftest import SelfTest
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import kv_bytes_per_token
from localllm.models.architectures.mixers import EXPANDED, LatentAttention, RopeFacts
from localllm.models.calibration import hessians
from localllm.models.kv_cache import KVCache
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.planner import Planner
from localllm.request import Request, SamplingParams

NAME = "glm4-moe-lite"  # 5 heads, latents of 34 elements, 10 that turn, 3 layers


def logits(folder: Path, paged: Any, ids: list[int]) -> Tensor:
    with open_model(folder) as checkpoint:
        return paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [20])


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("kv", "size"), [("f32", 4), ("bf16", 2), ("fp8", 1), ("int8", 1)])
def test_one_latent_a_token_is_kept_and_planned(kv: str, size: int, loaded: Callable) -> None:
    model = loaded(NAME)
    scales = 8 if size == 1 else 0
    assert kv_bytes_per_token(model.facts.layers, kv) == 3 * ((34 + 10) * size + scales)
    cache = KVCache(model.groups, [5], 16, kv)
    assert cache.nbytes == 5 * 16 * kv_bytes_per_token(model.facts.layers, kv)
    assert [group.layers for group in model.groups] == [(0, 1, 2)]


@pytest.mark.parametrize("machine", ["cpu", "rtx4090"])
def test_the_plan_counts_latents_and_what_pytorch_gathers(machine: str, loaded: Callable) -> None:
    facts = loaded(NAME).facts
    made = Planner(MACHINES[machine]).plan(facts)
    assert made.kv_bytes == sum(made.num_pages) * made.page_size * 3 * 44 * 2
    assert facts.gathers and "gathered" not in dict(made.work_terms)
    bare = Planner(replace(MACHINES[machine], compiler="")).plan(facts)
    assert ("gathered" in dict(bare.work_terms)) == (machine == "cpu")


@pytest.mark.parametrize(("kv", "allowed"), [("bf16", 0.01), ("fp8", 0.06), ("int8", 0.02)])
def test_other_pages_stay_close(kv: str, allowed: float, loaded: Callable, paged: Any) -> None:
    rank, turned, count = 34, 10, 130
    latents, keys = torch.randn(count, 1, rank), torch.randn(count, 1, turned)
    q, block_table = torch.randn(3, 5, rank + turned), torch.arange(9).int().unsqueeze(0)
    lens = torch.tensor([0, 3]).int(), torch.tensor([count]).int()
    found = []
    for form in ("f32", kv):
        pages = KVPages.empty(form, 9, 1, 16, rank, turned)
        reference.kv_write(latents, keys, pages, torch.arange(count))
        found.append(reference.latent_attention(q, pages, block_table, *lens, 0.2))
    scores = torch.einsum("qhd,kd->hqk", q, torch.cat([latents, keys], -1)[:, 0]) * 0.2
    scores = scores + torch.full((3, count), -torch.inf).triu(count - 2)
    expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), latents[:, 0])
    assert difference(found[0], expected) < 1e-5
    assert 1e-6 < difference(found[1], found[0]) < allowed
    ids = list(range(3, 63))
    whole, parts = (paged(loaded(NAME), kv=kv).all_logits(ids, chunks) for chunks in ([40], [7, 30]))
    assert torch.equal(whole, parts)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kv", ["bf16", "int8", *(pytest.param(kv, marks=SLOW) for kv in ("f32", "fp16", "fp8"))])
def test_c_gives_what_single_ops_give_and_a_prompt_the_bits_of_its_tokens(kv: str, loaded: Callable) -> None:
    """Two sequences: one whose tokens lie on both sides of what goes through a layer at once, one behind others."""
    model = loaded(NAME)
    weights, lens, new = model.layers[0].mixer, (150, 40), (150, 7)
    draw = torch.Generator().manual_seed(3)
    pages = KVPages.empty(kv, 13, 1, 16, 34, 10)
    old = torch.arange(16 * 12 - 1)
    reference.kv_write(*(torch.randn(191, 1, n, generator=draw) for n in (34, 10)), pages, old)
    tables = [torch.arange(10), torch.tensor([12, 11, 10, *[-1] * 7])]
    at = [torch.arange(length - count, length) for length, count in zip(lens, new, strict=True)]
    slots = [table[where // 16] * 16 + where % 16 for table, where in zip(tables, at, strict=True)]
    x = torch.randn(sum(new), 45, generator=draw)

    def attended(run: Any, rows: slice, sequences: list[int], ends: list[int], kept: KVPages) -> Tensor:
        positions, where = torch.cat(at)[rows], torch.cat(slots)[rows]
        starts = torch.tensor(
            [0, *[rows.stop - rows.start] * (len(sequences) == 1), *[150, 157] * (len(sequences) > 1)]
        )
        angles = positions[:, None] * 0.1 ** torch.arange(5.0)
        view = angles.cos(), angles.sin(), torch.stack([tables[i] for i in sequences]).int(), where
        return run(x[rows].clone(), weights, kept, view, starts.int(), torch.tensor(ends).int())

    def ours(*given: Any) -> Tensor:
        return cpu.latent_attention(lambda *_: pytest.fail("composed"), *given)

    kept = [KVPages(*(None if part is None else part.clone() for part in pages)) for _ in range(3)]
    whole = attended(ours, slice(0, 157), [0, 1], list(lens), kept[0])
    wanted = attended(REFERENCES["latent_attention"], slice(0, 157), [0, 1], list(lens), kept[1])
    assert difference(whole, wanted) < {"f32": 2e-4, "bf16": 4e-3, "fp16": 1e-3, "int8": 1e-2, "fp8": 2e-2}[kv]
    parts = [slice(0, 5), slice(5, 120), *(slice(t, t + 1) for t in range(120, 150))]
    assert torch.equal(torch.cat([attended(ours, part, [0], [part.stop], kept[2]) for part in parts]), whole[:150])
    assert torch.equal(attended(ours, slice(150, 157), [1], [40], kept[2]), whole[150:])
    assert torch.equal(kept[2].k, kept[0].k) and torch.equal(kept[2].v, kept[0].v)


def test_no_fused_kernel_takes_its_layers(loaded: Callable) -> None:
    model = loaded(NAME)
    pages = KVCache(model.groups, [2]).layers
    assert cpu._decoder_plan(model._calls, pages) is None
    assert cpu.decoder(lambda *_: "", torch.ones(1, 45), model._calls, pages, (), None, None) == ""


class Counting(TorchDispatchMode):
    """Notes what PyTorch starts: what is no view, and no allocation."""

    FREE = (
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "_local_scalar_dense",
        "detach",
        "alias",
        "_unsafe_view",
    )

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view and op.__name__.split(".")[0] not in self.FREE:
            self.started.append(op.__name__)
        return op(*args, **(kwargs or {}))


def product(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Linear:
    """One kernel."""
    impl = SimpleNamespace(run=lambda x, weight, bias: torch.mm(x, weight), name="")
    return Linear((LinearPart(impl, torch.ones(columns, rows, dtype=dtype), None, (rows, columns)),))


@pytest.mark.parametrize(("heads", "ctx"), [(8, 100), (20, 4000), (64, 100)])
def test_the_plan_counts_what_pytorch_starts(heads: int, ctx: int) -> None:
    """One token behind others."""
    rank, turned, still, width, hidden = 32, 8, 12, 16, 48
    norm = Norm(torch.ones(hidden), 1e-6)
    weights = LatentWeights(
        norm, product(24 + rank + turned, hidden), product(heads * (still + turned), 24), Norm(torch.ones(24), 1e-6),
        Norm(torch.ones(rank), 1e-6), (product(rank, still),) * heads, (product(width, rank),) * heads,
        product(hidden, heads * width), rank, turned, 0.2, True,
    )  # fmt: skip
    pages = KVPages.empty("bf16", ctx // 16 + 1, 1, 16, rank, turned)
    table, at = torch.arange(ctx // 16 + 1).int().unsqueeze(0), torch.tensor([ctx - 1])
    view = torch.ones(1, turned // 2), torch.zeros(1, turned // 2), table, at
    with torch.no_grad(), Counting() as counted:
        lens = torch.tensor([0, 1]).int(), torch.tensor([ctx]).int()
        REFERENCES["latent_attention"](torch.ones(1, hidden), weights, pages, view, *lens)
    facts = LatentAttention(heads, rank, still, width, RopeFacts(1e4, turned), 0.2, query_rank=24)
    assert facts.launches(ctx) == pytest.approx(len(counted.started), rel=0.25), Counter(counted.started)


@pytest.mark.slow
def test_its_other_kernels_are_tried(tiny: Callable, tmp_path: Path) -> None:
    test = SelfTest()
    with open_model(tiny(NAME).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(kv_format="bf16", selftest=test))
    assert test.failures == [] and test.num_run > 8
    assert {"kv_b", "q_b", "experts"} <= set(model.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "cohere2"])
def test_answers_do_not_depend_on_company_or_preemption(name: str, loaded: Callable) -> None:
    model, rng = loaded(name), random.Random(5)
    pages = [20] * len(model.groups)
    shared = [rng.randrange(99) for _ in range(50)]
    prompts = [shared[:cut] + [rng.randrange(99) for _ in range(more)] for cut in (0, 33, 50) for more in (1, 9)]
    params = SamplingParams(temperature=0, max_tokens=9)

    def answers(prompts: list[list[int]], preempt_every: int = 0) -> list[list[int]]:
        limits = SchedulerLimits(3, 24, preempt_every=preempt_every)
        runner = Runner(model, KVCache(model.groups, pages, 16, "f32"), model.facts.vocab_size)
        engine = Engine(runner, pages, 120, limits, check_invariants=True)
        streams = [engine.submit(Request(prompt, params)) for prompt in prompts]
        while not engine.is_idle:
            engine.run_once()
        assert not preempt_every or engine.stats().num_preemptions > 0
        return [[token for event in stream for token in event.token_ids] for stream in streams]

    alone = [answers([prompt])[0] for prompt in prompts]
    assert answers(prompts) == alone and answers(prompts, preempt_every=3) == alone


def quantized(model: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """What makes keys and values of latents in FP8, and the values that it stands for, rounded to bfloat16."""
    packed: dict[str, Tensor | None] = {}
    plain = {}
    for name, tensor in model.tensors.items():
        if name.endswith(f"{EXPANDED}.weight"):
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            packed |= {name: codes, f"{name}_scale": scale}
            plain[name] = (codes.float() * scale).bfloat16()
    return packed, plain


def test_a_quantized_one_becomes_bfloat16_and_is_counted(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny(NAME), list(range(3, 40))
    packed, plain = quantized(model)
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    folder = model.save(tmp_path / "packed", packed, **config)
    with open_model(folder) as checkpoint:
        assert checkpoint.facts.decoded_bytes == 3 * (5 * (14 + 18) * 34 - 4)
    with open_model(model.save(tmp_path / "plain", plain)) as checkpoint:
        assert checkpoint.facts.decoded_bytes == 0
    expected = logits(tmp_path / "plain", paged, ids)
    assert difference(logits(folder, paged, ids), expected) < 1e-6


def test_heads_are_quantized_while_loading_where_that_is_wanted(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny(f"{NAME}-packable").save(tmp_path)) as checkpoint:
        mixer = load_model(checkpoint, LoadOptions(weights="int8")).layers[0].mixer
    assert [linear.parts[0].shape for linear in (*mixer.k_up, *mixer.v_up)] == [(64, 64)] * 4
    assert all(linear.nbytes < 2 * 64 * 64 for linear in (*mixer.k_up, *mixer.v_up))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (NAME, {"kv_lora_rank": 1}, "kv_lora_rank: must be 2 to 1,048,576, not 1"),
        (NAME, {"kv_lora_rank": 35}, r"expected \[45, 45\]"),
        (NAME, {"v_head_dim": 17}, "kv_b_proj.*expected"),
        (NAME, {"qk_rope_head_dim": 9}, "qk_rope_head_dim: is 9, with 9 elements rotated"),
        (NAME, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}, "with 4 elements rotated"),
        (NAME, {"mlp_layer_types": ["dense", "sparse"]}, "must list 3 layers"),
        (NAME, {"mlp_layer_types": ["dense", "sparse", "moth"]}, "layers of type moth"),
        (NAME, {"scoring_func": "softmax"}, "router of type noaux_tc over softmax"),
        (NAME, {"use_bidirectional_attention": True}, "bidirectional"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "router of type noaux_tc over softmax"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq other than 1"),
        ("deepseek-v2", {"q_lora_rank": 22}, "q_a_proj.*is missing"),
        ("deepseek-v2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": "x"}}, "mscale"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    folder = tiny(name).save(tmp_path, **changes)
    with pytest.raises((BadModelFile, UnsupportedModel), match=words) as caught:
        _ = open_model(folder).facts
    assert caught.value.hint


def test_it_is_not_calibrated(tiny: Callable, tmp_path: Path) -> None:
    model = tiny(NAME)
    dense = {
        name.replace("layers.0", f"layers.{layer}"): tensor.clone()
        for name, tensor in model.tensors.items()
        for layer in (1, 2)
        if name.startswith("model.layers.0.mlp.")
    }
    folder = model.save(tmp_path, dense, mlp_layer_types=["dense"] * 3)
    with pytest.raises(UnsupportedModel, match="latent attention"):
        list(hessians(open_model(folder), [[1, 2, 3]]))


def test_scales_grow_with_the_stretched_positions(loaded: Callable) -> None:
    mixer = loaded("deepseek-v2").facts.layers[0].mixer
    assert mixer.scale == pytest.approx((0.1 * 0.707 * math.log(4) + 1) ** 2 / math.sqrt(24))
    assert mixer.rope.attention_factor == 1.0 and mixer.rope.interleaved
