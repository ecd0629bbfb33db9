"""Plans against what their worst steps take: the steps, the arithmetic, interruption, and what is remembered."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.boot.memory_meter import Peak
from localllm.boot.profile import CpuProfiler, Neighbours, WarmAgain, WorstSteps, warm_up
from localllm.config import EngineOptions
from localllm.device import rss_anon_bytes
from localllm.device.fake import MACHINES
from localllm.engine.pages import Pages
from localllm.engine.runner import Runner
from localllm.kernels import segments
from localllm.kernels.embedding import Embedding
from localllm.kernels.experts import tile_size
from localllm.kernels.layer_weights import AttentionWeights, HeadWeights, Linear, LinearPart, MlpWeights, Norm
from localllm.kernels.rope import RopeTable
from localllm.models.architectures import Attention, Dense, Experts, LayerFacts, ModelFacts, RopeFacts
from localllm.models.kv_cache import KVCache, cache_groups
from localllm.models.model import DecoderLayer, Model
from localllm.plan.memory import activation_bytes
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.plan.profiles import MemoryProfile, MemoryProfiles, Term

MIB = 1 << 20


def model_facts(inner: int = 768, **changes: Any) -> ModelFacts:
    facts = ModelFacts(
        architecture="qwen3",
        source_architecture="Qwen3ForCausalLM",
        name="tiny",
        hidden_size=256,
        vocab_size=1000,
        max_context=2048,
        rms_norm_eps=1e-6,
        layers=(LayerFacts(Attention(4, 2, 64, RopeFacts(1e4, 64), qk_norm=True), Dense(inner)),) * 4,
        stored_format="bf16",
        num_params=4_000_000,
        weight_bytes=8_000_000,
    )
    return replace(facts, **changes)


class Noting:
    """A model that notes its batches."""

    num_kinds, weight_bytes = 1, 0

    def __init__(self) -> None:
        self.batches: list[tuple[Any, int | None]] = []

    def forward(self, batch: Any, cache: Any, num_layers: int | None = None) -> Tensor:
        self.batches.append((batch, num_layers))
        return torch.zeros(len(batch.logits_indices), 8)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], 1000)

    def step(self, batch: Any, cache: Any, finds_best: bool = False) -> tuple[Tensor, Tensor, None]:
        hidden = self.forward(batch, cache)
        return hidden, self.logits(hidden), None


def planned(**options: Any) -> Plan:
    return Planner(MACHINES["cpu"], EngineOptions(ctx=1000, prefill_budget=100)).having(**options).plan(model_facts())


def test_the_worst_steps_are_the_deepest() -> None:
    made, model = planned(max_parallel=3), Noting()
    cache = KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv)
    pages = list(range(7, made.num_pages[0]))  # 0 to 6 belong to somebody
    worst = WorstSteps(Runner(model, cache, 1000), made, [pages], 2)
    worst.prefill()
    worst.decode(3)
    worst.check_guesses(3)
    (chunk, layers), (step, _), (guessed, _) = model.batches
    assert (guessed.query_lens, guessed.seq_lens) == ((33, 1, 1), (999, 999, 999))
    assert len(guessed.logits_indices) == 35
    assert layers == 2
    assert (chunk.query_lens, chunk.seq_lens) == ((100,), (999,))
    assert chunk.positions.tolist() == list(range(899, 999))
    assert (step.query_lens, step.seq_lens) == ((1, 1, 1), (999, 999, 999))
    for batch in (chunk, step, guessed):
        slots = batch.groups[0].slot_mapping.tolist()
        assert len(set(slots)) == len(slots) and min(slots) >= 7 * 16
        assert int(batch.groups[0].block_table.min()) >= 7


def test_a_profile_adds_up() -> None:
    good = MemoryProfile((Term("weights", 100 * MIB, 100 * MIB), Term("work", 50 * MIB, 53 * MIB)), "cuda", 1.0)
    assert good.held and good.excess_bytes == 3 * MIB
    assert good.total.error == pytest.approx(0.02) and str(good).startswith("profiled: ")
    bad = MemoryProfile((Term("work", 100 * MIB, 120 * MIB),), "cpu", 1.0)
    assert not bad.held and bad.excess_bytes == 20 * MIB
    assert str(bad) == "the plan did not hold: 0.12 GiB, 20.0 % above the 0.10 planned"
    cautious = MemoryProfile((Term("work", 100 * MIB, 50 * MIB),), "cpu", 1.0)
    assert cautious.held and cautious.excess_bytes == 0 and cautious.total.error == -0.5
    failed = MemoryProfile((Term("work", 100 * MIB, 0),), "cuda", 1.0, "out of memory in the steps for logits")
    assert not failed.held and failed.excess_bytes == 10 * MIB


def cpu_profiler(made: Plan, found: list[MemoryProfile]) -> tuple[CpuProfiler, Pages]:
    cache = KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv)
    pages = Pages(made.num_pages, [None], made.page_size)
    runner = Runner(Noting(), cache, 1000)
    return CpuProfiler(runner, pages, made, rss_anon_bytes(), 0, Neighbours.changes, (0, 0), found.append), pages


def test_a_cpu_profiler_fills_the_pages_and_gives_them_back() -> None:
    made = planned(ctx=2048, max_parallel=64)
    assert made.kv_bytes > 100 * MIB
    found: list[MemoryProfile] = []
    job, _ = cpu_profiler(made, found)
    before = rss_anon_bytes()
    with Peak() as peak:
        assert job(lambda: False)
    assert peak.highest - before > 0.95 * made.kv_bytes
    assert rss_anon_bytes() - before < 0.1 * made.kv_bytes
    (profile,) = found
    terms = {term.name: term for term in profile.terms}
    assert terms["kv"].error == 0.0
    assert terms["work"].measured_bytes < 20 * MIB


def test_somebody_who_asks_stops_the_profile_and_it_begins_anew() -> None:
    found: list[MemoryProfile] = []
    job, pages = cpu_profiler(planned(), found)
    calls: Iterator[bool] = iter([False, False, True])
    assert not job(lambda: next(calls)) and not found
    assert pages.pools[0].num_free == pages.pools[0].num_pages
    assert job(lambda: False) and len(found) == 1


def test_beside_another_model_nothing_is_said_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another model takes or gives back would count as this one's: before, or while it is measured."""
    for comes_within in (False, True):
        found: list[MemoryProfile | None] = []
        job, pages = cpu_profiler(planned(), found)  # type: ignore[arg-type]

        def must_stop(comes: bool = comes_within) -> bool:
            Neighbours.changes += comes
            return False

        Neighbours.changes += not comes_within
        assert job(must_stop) and found == [None]
        assert pages.pools[0].num_free == pages.pools[0].num_pages


def test_a_profile_that_fails_is_repeated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else in the process took just then is not the plan's fault."""
    found: list[MemoryProfile] = []
    job, _ = cpu_profiler(planned(), found)
    takes = iter([900 * MIB, 800 * MIB])
    real = CpuProfiler._profile
    monkeypatch.setattr(CpuProfiler, "_profile", lambda self, peak, *rest: real(self, peak + next(takes), *rest))
    assert not job(lambda: False) and not found
    assert job(lambda: False)
    assert not found[0].held and found[0].excess_bytes < 850 * MIB


def test_pages_in_use_are_left_alone() -> None:
    found: list[MemoryProfile] = []
    made = planned(max_parallel=2)
    job, pages = cpu_profiler(made, found)
    mine = [pages.pools[0].take() for _ in range(5)]
    cache = job._cache
    for layer in range(4):
        cache.layers[layer].k[mine] = 7.0
    assert job(lambda: False)
    for layer in range(4):
        assert bool((cache.layers[layer].k[mine] == 7.0).all())
        assert not bool(cache.layers[layer].k[5:].any())


def test_no_profile_where_others_took_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import localllm.boot.profile as module

    found: list[MemoryProfile] = []
    job, _ = cpu_profiler(planned(), found)
    monkeypatch.setattr(module, "memory_limits", lambda: SimpleNamespace(ram_available_bytes=MIB))
    assert job(lambda: False) and not found


def test_a_gpu_profile_compares_term_by_term_and_survives_a_card_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a meter in the allocator's place: which steps run, and what follows from what they took."""
    import localllm.boot.profile as module

    made = Planner(MACHINES["rtx4090"], EngineOptions(ctx=1000, prefill_budget=100)).plan(model_facts())
    took = dict(made.work_terms)
    model = Noting()
    cache = KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv)
    runner = Runner(model, cache, 1000)
    held = {"weights": made.weight_bytes, "kv": made.kv_bytes, "tables": took["tables"]}
    held["graphs"] = took["graphs"] - len({*made.graph_buckets, *made.guess_buckets}) * module.GRAPH_BYTES
    order = iter(["activations", "logits", "none", "none", "none"])

    def peak(device: torch.device, call: Any) -> int:
        call()
        return took.get(next(order), 0)

    monkeypatch.setattr(module, "gpu_peak", peak)
    profile = module.profile_gpu(runner, made, held)
    assert profile.held and all(abs(term.error) < 0.05 for term in profile.terms if term.planned_bytes)
    sizes = [(len(batch.query_lens), batch.seq_lens[0], layers) for batch, layers in model.batches]
    every = 1 << 30
    assert sizes == [(1, 999, every), (4, 999, every), (1, 999, None), (2, 999, None), (4, 999, None)]

    def full(device: torch.device, call: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(module, "gpu_peak", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    profile = module.profile_gpu(runner, made, held)
    assert not profile.held and "worst-case step of activations" in str(profile)
    assert profile.excess_bytes > 0.09 * profile.total.planned_bytes


@pytest.mark.parametrize(("kv", "lengths"), [("bf16", [999]), ("fp8", [2, 999])])
def test_warming_up_launches_every_class_of_rows_once_and_what_graphs_do_not_hold(kv: str, lengths: list[int]) -> None:
    options = EngineOptions(ctx=1000, prefill_budget=100, max_parallel=20, kv=kv)
    made = Planner(MACHINES["rtx4090"], options).plan(model_facts())
    for captured, decoded in (((), [1, 2, 3, 4, 5, 16]), ((1, 2, 4, 8), [16]), ((1, 2, 4, 8, 16, 20), [])):
        model = Noting()
        cache = KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv)
        runner = Runner(model, cache, 1000)
        runner.graphs = SimpleNamespace(captured=captured, bucket=lambda parts: None) if captured else None
        warm_up(runner, made, model_facts())
        assert [batch.query_lens for batch, _ in model.batches] == [
            *((count,) for count in (1, 2, 3, 4, 5, 16, 23, 50, 70, 100)),
            *[(100, 1)] * len(lengths),
            *((1,) * count for count in decoded),
        ]
        assert [batch.seq_lens[1] for batch, _ in model.batches if batch.query_lens == (100, 1)] == lengths


def test_warming_up_takes_a_prompt_for_each_size_of_tiles_of_a_mixture() -> None:
    """30B-A3B in 2,048 tokens: its kernels for 129 to 256 tokens were compiled in the first such request."""
    experts = Experts(128, 8, 768)
    layers = tuple(replace(layer, ffn=experts) for layer in model_facts().layers)
    facts, model = replace(model_facts(), layers=layers), Noting()
    made = Planner(MACHINES["rtx4090"], EngineOptions(ctx=2048, prefill_budget=2000)).plan(model_facts())
    runner = Runner(model, KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv), 1000)
    warm_up(runner, made, facts)
    counts = [sum(batch.query_lens) for batch, _ in model.batches]
    sizes = {tile_size(8 * count, 128) for count in range(1, made.prefill_budget + 1)}
    assert {tile_size(8 * count, 128) for count in counts} == sizes == {0, 8, 16, 32, 64}
    assert {129, 257, 513} < {*counts}


@pytest.mark.parametrize("compiles", [False, True])
def test_kernels_of_other_tiles_are_launched_in_idle_moments_over_free_pages(compiles: bool) -> None:
    made, model = planned(max_parallel=2), Noting()
    pages = Pages(made.num_pages, [None], made.page_size)
    taken = [pages.pools[0].take() for _ in range(3)]
    cache = KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv)
    noted: list[int] = []  # batches when something was recorded

    def recorded(call: Callable[[], object]) -> Callable[[], None]:
        call()
        return lambda: noted.append(len(model.batches))

    job = WarmAgain(Runner(model, cache, 1000), pages, made, model_facts(), recorded if compiles else None)
    assert not job(lambda: True) and not model.batches, "somebody asks"
    answers = iter([False] * 2 + [True] * 100)
    assert not job(lambda: next(answers)) and model.batches and not job.is_done
    assert job(lambda: False) and job.is_done and job(lambda: False)
    counts = [batch.query_lens for batch, _ in model.batches]
    assert (1,) in counts and (100, 1) in counts and counts[-1] == (1, 1)
    assert len(counts) == len(noted) * 2 if compiles else not noted
    tables = [batch.groups[0].block_table for batch, _ in model.batches]
    assert not {*taken} & {page for table in tables for page in table.flatten().tolist()}


def test_a_kernel_that_fails_in_an_idle_moment_ends_the_job() -> None:
    made = planned(max_parallel=2)
    cache = KVCache(cache_groups(model_facts()), made.num_pages, made.page_size, made.kv)

    def recorded(call: Callable[[], object]) -> Callable[[], None]:
        raise OSError("no compiler")

    pages = Pages(made.num_pages, [None], made.page_size)
    job = WarmAgain(Runner(Noting(), cache, 1000), pages, made, model_facts(), recorded)
    with pytest.raises(OSError):
        job(lambda: False)
    assert job.is_done, "the next tiles that are chosen begin another"


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_what_was_missing_is_remembered_for_the_model_and_the_device(tmp_path: Path) -> None:
    file, machine, made = tmp_path / "profiles.json", MACHINES["rtx4090"], planned()
    facts = model_facts()
    assert MemoryProfiles(file).known(facts, machine, made) is None
    five, seven = (MemoryProfile((Term("work", 10, 10 + over),), "cpu", 1.0) for over in (5, 7))
    MemoryProfiles(file).keep(facts, machine, made, five)
    MemoryProfiles(file).keep(facts, machine, replace(made, ctx=512), seven)
    again = MemoryProfiles(file)
    assert again.excess_bytes(facts, machine, "cpu") == 12
    assert again.excess_bytes(facts, machine, "cuda:0") == 0
    assert again.excess_bytes(replace(facts, weight_bytes=1), machine, "cpu") == 0
    assert again.known(facts, machine, made) == five
    assert again.known(facts, machine, replace(made, kv="f32")) is None
    assert again.known(facts, replace(machine, torch_version="3.0"), made) is None
    for damage in ("", "[]", '{"entries": {"x": 1}}'):
        file.write_text(damage)
        assert MemoryProfiles(file).excess_bytes(facts, machine, "cpu") == 0


# --- the arithmetic of activations, against what is alive while kernels that only allocate run ---------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that exist, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._seen:
                storage = tensor.untyped_storage()
                if not getattr(storage, "_cdata", 0) or storage._cdata in self._seen:
                    continue
                self._seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def allocating_model(facts: ModelFacts) -> Model:
    """A model whose kernels allocate what Triton's launchers allocate, their outputs, and compute nothing."""
    bf16 = torch.bfloat16

    class Product:
        name = "empty"
        rounds = 0.0

        @staticmethod
        def run(x: Tensor, prepared: int, bias: Tensor | None) -> Tensor:
            return torch.empty(x.shape[0], prepared, dtype=bf16)

    def linear(n: int) -> Linear:
        return Linear((LinearPart(Product, n, None, (n, 0)),))  # type: ignore[arg-type]

    def norm(x: Tensor, *rest: Any) -> Tensor:
        return torch.empty(x.shape, dtype=bf16)

    def gated(x: Tensor) -> Tensor:
        return torch.empty(x.shape[0], x.shape[1] // 2, dtype=bf16)

    heads, kv, dim, hidden = facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.hidden_size
    one = Norm(torch.ones(1), 1e-6)
    attention = AttentionWeights(
        one, linear((heads + 2 * kv) * dim), linear(hidden), heads, kv, dim, 1.0, q_norm=one, k_norm=one
    )
    mlp = MlpWeights(one, linear(2 * facts.intermediate_size), linear(hidden), "silu")
    from functools import partial

    parts = {
        "attn_in": partial(segments.attn_in, norm, lambda x, *rest: norm(x), lambda *rest: None),
        "attention": partial(segments.attention, lambda q, *rest: norm(q)),
        "attn_out": partial(segments.attn_out, norm),
        "latent_attention": segments.latent_attention,
        "compressed_attention": segments.compressed_attention,
        "gated_delta": segments.gated_delta,
        "short_conv": segments.short_conv,
        "mamba": segments.mamba,
        "token_index": segments.token_index,
        "mlp": partial(segments.mlp, norm, gated, gated),
        "experts": segments.experts,
        "layer_input": segments.layer_input,
        "streams_in": segments.streams_in,
        "streams_out": segments.streams_out,
        "hyper_in": segments.hyper_in,
        "hyper_out": segments.hyper_out,
        "ngrams": segments.ngrams,
    }
    head, decoder = partial(segments.head, norm), partial(segments.decoder, *parts.values())
    table = segments.KernelTable(
        **parts, head=head, decoder=decoder, step=partial(segments.step, decoder, head), ops=()
    )
    layers = [DecoderLayer(attention, mlp)] * facts.num_layers
    embedding = Embedding(lambda ids: torch.empty(len(ids), hidden), 1.0, bf16, 0)
    rope = RopeTable(torch.ones(facts.ropes[0].dim // 2))
    rope.reserve(2048)
    return Model(facts, cache_groups(facts), embedding, layers, HeadWeights(one, linear(1000)), [rope], table)


@pytest.mark.parametrize("inner", [768, pytest.param(100, marks=pytest.mark.slow)])
def test_the_plan_counts_what_is_alive_in_the_worst_moment(inner: int) -> None:
    """within 3 %: a wide feed-forward layer has its worst moment there, a narrow one in attention"""
    facts, rows = model_facts(inner), 512
    model, live = allocating_model(facts), LiveBytes()
    cache = KVCache(cache_groups(facts), [200], 16, "bf16")
    runner = Runner(model, cache, 1000)
    made = planned(ctx=2048, prefill_budget=rows)
    with live:
        WorstSteps(runner, made, [range(200)]).prefill()
    small = rows * 3 * 8 + 4 * 1000 * 4  # ids, positions and slots; the logits of the last row
    assert live.most == pytest.approx(activation_bytes(facts, rows, 2) + small, rel=0.03)


# --- with a real model -----------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, time
from localllm import LLM, SamplingParams
from localllm.plan.profiles import MemoryProfiles
with LLM(sys.argv[1], ctx=int(sys.argv[2])) as llm:
    llm.generate("Hello", SamplingParams(temperature=0, max_tokens=2))
    ends = time.monotonic() + 60
    while "profile pending" in llm.run_summary and time.monotonic() < ends:
        time.sleep(0.02)
    profile = MemoryProfiles().known(llm.facts, llm.machine, llm.plan)
    told = {"held": profile.held, "error": profile.total.error, "seconds": profile.seconds}
    print(json.dumps([told, llm.run_summary, llm.state().warnings]))
"""


@pytest.mark.parametrize(
    ("model", "ctx"), [("smollm2_path", 1024), pytest.param("gemma_path", 8192, marks=pytest.mark.slow)]
)
def test_the_plan_of_a_real_model_is_right_within_a_tenth(
    model: str, ctx: int, request: pytest.FixtureRequest, empty_home: Path
) -> None:
    """In a process of its own, after the first answer; kept for the next start."""
    path = request.getfixturevalue(model)
    command = [sys.executable, "-P", "-c", SCRIPT, str(path), str(ctx)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    profile, line, warnings = json.loads(run.stdout.splitlines()[-1])
    assert profile["held"] and abs(profile["error"]) < 0.10, profile
    assert profile["seconds"] < 100
    assert "profiled: " in line and warnings == []
