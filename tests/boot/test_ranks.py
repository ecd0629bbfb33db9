"""Models that several processes compute: the answers of one, and what happens when a rank ends."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from localllm import LLM, SamplingParams, paths
from localllm.boot import profile
from localllm.boot.boot import Boot
from localllm.config import EngineOptions
from localllm.device.fake import fake_machine
from localllm.device.imagined import imagined
from localllm.errors import ConfigError, DeviceError, OutOfMemory
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import ModelFacts, count_params
from localllm.models.architectures.vision import VisionFacts
from localllm.models.model import Model
from localllm.models.parallel import SleepingRanks, asleep
from localllm.models.sleep import tensors_of
from localllm.plan import speeds
from localllm.plan.memory import MIB
from localllm.plan.plan import Plan
from localllm.plan.planner import Measured, Planner
from localllm.plan.profiles import MemoryProfile, Term, farthest
from localllm.request import Constraint
from localllm.terminal import GIB

EXACT = {"device": "cpu", "ctx": 512, "dtype": "float32", "kv": "f32", "max_parallel": 4}
TINY = EXACT | {"ctx": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a girl who could count all the stars. Every night she went"
    " down to the shore with a lamp and a book, and wrote their names,",
    "def fibonacci(n):",
]


def pids(llm: LLM) -> list[int]:
    lead = llm._model.lead  # type: ignore[attr-defined]
    return [process.pid for process in lead.processes]


def ids_of(answers: Any) -> list[list[int]]:
    return [one.completions[0].token_ids for one in answers]


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> dict[str, Any]:
    """What one process says."""
    with LLM(smollm2_path, **EXACT) as llm:
        children = llm.generate(PROMPTS[0], SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=12))
        return {
            "greedy": ids_of(llm.generate(PROMPTS, GREEDY)),
            "n": [one.token_ids for one in children.completions],
            "score": llm.score(list(range(40, 140))),
        }


@pytest.fixture(scope="class", params=[(2, "tensor"), (3, "tensor"), (3, "layers")], ids=["2", "3", "3-layers"])
def several(smollm2_path: Path, request: pytest.FixtureRequest) -> Any:
    world, split = request.param
    with LLM(smollm2_path, tensor_parallel=world, split=split, debug_invariants=True, **EXACT) as llm:
        yield llm


@pytest.mark.slow
class TestSeveralProcesses:
    """One divided model at a time can be in a process: the last of these ends before other tests begin theirs."""

    def test_several_processes_say_what_one_says(self, several: LLM, alone: dict[str, Any]) -> None:
        import numpy as np

        assert ids_of(several.generate(PROMPTS, GREEDY)) == alone["greedy"]
        again = several.generate(PROMPTS, GREEDY)  # from cached prefixes
        assert ids_of(again) == alone["greedy"]
        assert several.stats().prefix_hit_tokens > 0
        children = several.generate(PROMPTS[0], SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=12))
        assert [one.token_ids for one in children.completions] == alone["n"]
        found = several.score(list(range(40, 140)))
        assert float(np.abs(found - alone["score"]).max() / np.abs(alone["score"]).max()) < 1e-5
        whole = several.plan.ranks
        assert len(whole) == len(pids(several)) + 1
        assert f"{len(whole)} ranks" in several.run_summary

    def test_grammar_abort_and_preemption(self, several: LLM, alone: dict[str, Any]) -> None:
        schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
        constrained = several.generate(
            "JSON of a city:",
            SamplingParams(temperature=0, max_tokens=40),
            constraint=Constraint("json_schema", schema),
        )
        assert set(json.loads(constrained.text)) == {"city"}
        stream = several.generate(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True), stream=True)
        next(iter(stream))
        stream.close()
        several.engine.clear_prefix_cache()
        while several.stats().num_running or several.stats().pages_cached:
            several.engine.clear_prefix_cache()
            time.sleep(0.05)
        (pool,) = several.engine.scheduler.pages.pools
        assert pool.withdraw(pool.num_free - 14)
        before = several.stats().num_preemptions
        long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        answers = several.generate(PROMPTS, long)
        assert several.stats().num_preemptions > before
        assert [ids[:24] for ids in ids_of(answers)] == alone["greedy"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["busy", "idle"])
def test_a_rank_that_dies_ends_the_others_and_the_requests(smollm2_path: Path, when: str) -> None:
    with LLM(smollm2_path, tensor_parallel=2, **EXACT) as llm:
        (pid,) = pids(llm)
        failed: list[Exception] = []
        first = threading.Event()

        def ask() -> None:
            try:
                params = SamplingParams(max_tokens=400, ignore_eos=True)
                for delta in llm.generate("a" * 20, params, stream=True):
                    failed.extend([delta.error] if delta.error is not None else [])
                    first.set()
            except DeviceError as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        if when == "busy":
            asking.start()
            assert first.wait(60)
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if when == "idle":
            while not llm.is_dead:
                assert time.monotonic() < started + 5
                time.sleep(0.02)
            asking.start()
        asking.join(30)
        taken = time.monotonic() - started
        assert not asking.is_alive() and taken < 5, f"{taken:.1f} s"
        assert len(failed) == 1
        if when == "busy":
            assert f"rank 1 of 2 (cpu, process {pid}) was killed by SIGKILL" in str(failed[0])
        assert llm.is_dead and "rank 1 of 2" in llm.why_dead


@pytest.mark.slow
def test_ranks_end_with_rank_0(tiny_path: Path) -> None:
    llm = LLM(tiny_path, tensor_parallel=2, **TINY)
    (pid,) = pids(llm)
    llm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_loading_reads_each_byte_once_per_box(smollm2_path: Path, tmp_path: Path) -> None:
    """Ranks map the file: what one has read from the disk the others find in memory."""
    copy = Path(shutil.copy(smollm2_path.resolve(), tmp_path / "copy.gguf"))
    with copy.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(pid: int) -> int:
        return int(re.findall(r"^read_bytes: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)[0])

    before = read(os.getpid())
    with LLM(copy, tensor_parallel=2, **EXACT) as llm:
        total = read(os.getpid()) - before + sum(map(read, pids(llm)))
    if not total:
        pytest.skip("the file is on no disk")
    assert total < 1.2 * copy.stat().st_size


@pytest.mark.slow
def test_other_files_and_other_versions_are_refused(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.boot import ranks

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "versions", lambda: ["0.0.1", "1.0"])
        with pytest.raises(ConfigError, match="rank 1: this rank runs localllm .*rank 0 runs 0.0.1 with torch 1.0"):
            LLM(tiny_path, tensor_parallel=2, **TINY)
    real = ranks.identity_of
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "identity_of", lambda one: {path: [1, 2, 3] for path in real(one)})
        with pytest.raises(ConfigError, match="rank 1: tiny.gguf changed while the model was loading"):
            LLM(tiny_path, tensor_parallel=2, **TINY)


@pytest.mark.slow
def test_every_rank_measures_what_it_takes(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest shortfall decides: it is named, pages are given up for it, and the next plan counts it on all."""
    done, keep, of_rank = threading.Event(), Boot._keep, Plan.of_rank
    monkeypatch.setattr(Boot, "_keep", lambda self, profile: (keep(self, profile), done.set()))
    with LLM(tiny_path, tensor_parallel=2, **TINY) as llm:
        llm.generate("a", SamplingParams(max_tokens=2))
        assert done.wait(60)
        assert re.search("profiled, rank [01]: ", llm.run_summary)
    monkeypatch.setattr(Plan, "of_rank", lambda self, rank: replace(of_rank(self, rank), work_bytes=40 * MIB))
    done.clear()
    with LLM(tiny_path, tensor_parallel=2, **TINY, prefill_budget=100) as llm:  # another plan: it is measured anew
        llm.generate("a", SamplingParams(max_tokens=2))
        assert done.wait(60)
        assert "the plan did not hold on rank 1: " in llm.run_summary
        assert any("on rank 1" in said and "the next start plans for it" in said for said in llm.boot.warnings)
        before, after = (
            [dict(rank.work_terms).get("learned", 0) for rank in planner.plan(llm.facts).ranks]
            for planner in (replace(llm._planner, measured=Measured()), Planner.here(llm.options))
        )
        assert before == [0, 0] and after[0] == after[1] > 30 * MIB


@pytest.mark.slow
def test_ranks_with_cards_measure_every_worst_step(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on cards, of which this machine has none: rank 0 says that it takes nothing."""
    monkeypatch.setattr(profile, "gpu_peak", lambda device, call: call() or 0)
    terms = (("activations", MIB), ("logits", MIB), ("tables", 0), ("graphs", 0))
    with LLM(tiny_path, tensor_parallel=2, **TINY) as llm, torch.inference_mode():
        ranks = tuple(replace(one, work_terms=terms) for one in llm.plan.ranks)
        plan = replace(llm.plan, work_terms=terms, ranks=ranks)
        found = profile.profile_gpu(llm.engine.runner, plan, {"weights": 0, "kv": 0})
        assert found.rank == 1 and not found.held
        measured = {term.name: term.measured_bytes for term in found.terms}
        assert measured["kv"] == llm.engine.runner.cache.nbytes
        assert min(measured["activations"], measured["logits"]) > 50 * MIB  # on the CPU, all of the process


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_sleep_and_wake_together(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of it afterwards: weights sleep on cards alone, and C keeps addresses that waking changes."""
    with LLM(tiny_path, tensor_parallel=2, **TINY) as llm:
        llm.generate("Once", GREEDY)
        held = weakref.ref(llm.engine)
        llm.sleep()
        gc.collect()
        assert held() is None
        weights = list(tensors_of(llm._model.embedding.rows))
        before = [tensor.clone() for tensor in weights]
        sleeping = asleep(llm._model, None)
        assert not any(tensor.untyped_storage().nbytes() for tensor in weights)
        assert isinstance(sleeping, SleepingRanks)
        with monkeypatch.context() as patch:
            lead = llm._model.lead  # type: ignore[attr-defined]
            patch.setattr(type(lead), "ask", lambda self, message: [{"failed": "CUDA out of memory"}])
            with pytest.raises(OutOfMemory, match="rank 1 has no room for its weights: CUDA out of memory"):
                sleeping.wake()
        sleeping.wake()
        assert weights and all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


@pytest.mark.slow
def test_memory_that_runs_out_before_ranks_compute_makes_steps_smaller(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_FAULT", "step:1:oom")
    prompt = [1 + number % 50 for number in range(100)]
    with LLM(tiny_path, tensor_parallel=2, **TINY) as llm:
        assert llm.generate(prompt, GREEDY).completions[0].token_ids
        assert "prompts in chunks of 50" in llm.engine.pressure.note and not llm.is_dead


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_runs_out_while_ranks_compute_ends_them(
    smollm2_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may wait for another one inside a sum: the step cannot be repeated."""
    with LLM(smollm2_path, tensor_parallel=2, split="tensor", **EXACT) as llm:
        (pid,) = pids(llm)
        llm.generate("a", SamplingParams(max_tokens=1))
        if rank:
            used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            used += 2 << 20  # for what a thread keeps of its own: without it the process aborts
            resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
        else:
            monkeypatch.setattr(Model, "forward", Mock(side_effect=MemoryError))
        started = time.monotonic()
        with pytest.raises(DeviceError, match=f"rank {rank}: out of memory in a step") as found:
            llm.generate([5 + number % 40 for number in range(480)], SamplingParams(max_tokens=4))
        assert "smaller --ctx" in str(found.value.hint) and time.monotonic() - started < 10
        assert llm.is_dead and f"rank {rank}: out of memory" in llm.why_dead


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_what_ranks_cannot_do_is_refused_by_name(tiny_path: Path) -> None:
    with open_model(tiny_path) as checkpoint:
        facts = checkpoint.facts
    planner = Planner(fake_machine("cpu"), EngineOptions(device="cpu", tensor_parallel=2))
    made = planner.plan(facts)
    assert [rank.device for rank in made.ranks] == ["cpu", "cpu"] and made.fits
    assert sum(rank.weight_bytes for rank in made.ranks) < 1.2 * facts.weight_bytes
    with pytest.raises(ConfigError, match="4 heads that share 2"):
        planner.having(tensor_parallel=3).plan(facts)
    with pytest.raises(ConfigError, match="tensor_parallel and kv_store"):
        planner.having(kv_store=1 << 30).plan(facts)
    with pytest.raises(ConfigError, match="2 layers, fewer than the 3 ranks"):
        planner.having(tensor_parallel=3, split="layers").plan(facts)
    with pytest.raises(DeviceError, match="this machine has 1 usable GPU"):
        Planner(fake_machine("rtx4090"), EngineOptions(tensor_parallel=2)).plan(facts)


def test_ranks_may_have_layers_of_one_kind_each(tiny_path: Path) -> None:
    with open_model(tiny_path) as checkpoint:
        facts = checkpoint.facts
    full, other = facts.layers
    windowed = replace(other, mixer=replace(facts.attention[1], window=100))
    planner = Planner(fake_machine("cpu"), EngineOptions(device="cpu", tensor_parallel=2, split="layers"))
    for layers in ((full, windowed), (windowed, full)):
        made = planner.plan(replace(facts, layers=layers))
        assert made.fits and len(made.num_pages) == 2 and [rank.span for rank in made.ranks] == [(0, 1), (1, 2)]


@pytest.fixture(scope="module")
def large(tiny_path: Path) -> ModelFacts:
    """70B."""
    with open_model(tiny_path) as checkpoint:
        tiny = checkpoint.facts
    layer = replace(tiny.layers[0], mixer=replace(tiny.attention[0], num_heads=64, num_kv_heads=8, head_dim=128))
    layer = replace(layer, ffn=replace(layer.ffn, inner=28672))
    facts = replace(tiny, hidden_size=8192, vocab_size=128256, max_context=32768, layers=(layer,) * 80)
    return replace(facts, num_params=count_params(facts), weight_bytes=36 * GIB, stored_format="Q4_K_M")


def test_cards_share_a_model_that_one_has_no_room_for(large: ModelFacts) -> None:
    facts = large
    one = fake_machine("rtx4090")
    pair = replace(one, gpus=(one.gpus[0], replace(one.gpus[0], index=1, free_bytes=20 * GIB)))
    assert not Planner(one, EngineOptions(device="cuda")).plan(facts).fits
    made = Planner(pair, EngineOptions(device="cuda", tensor_parallel="auto")).plan(facts)
    assert made.fits and [rank.device for rank in made.ranks] == ["cuda:0", "cuda:1"]
    assert made.split == "tensor" and not made.graph_buckets
    assert abs(made.ranks[0].weight_bytes - 18 * GIB) < GIB
    assert all(rank.need_bytes <= rank.have_bytes for rank in made.ranks)
    halves = Planner(pair, EngineOptions(device="cuda", tensor_parallel=2, split="layers")).plan(facts)
    (first, end), (start, last) = (rank.span for rank in halves.ranks)
    assert (first, end, last) == (0, start, 80)
    assert halves.ranks[0].weight_bytes > halves.ranks[1].weight_bytes  # its card has more room
    assert halves.decode_tps < made.decode_tps  # they take turns


@pytest.mark.parametrize("split", ["tensor", "layers"])
def test_only_rank_0_holds_the_vision_tower(large: ModelFacts, split: str) -> None:
    pair = imagined(fake_machine("cpu"), gpu="2x 4090")
    planner = Planner(pair, EngineOptions(device="cuda", tensor_parallel=2, split=split))
    tower = VisionFacts(27, 1152, 4304, 16, 896, 14, 1e-6, 256, 1, 2, 3, nbytes=2 * GIB)
    blind, made = (planner.plan(replace(large, vision=vision)) for vision in (None, tower))
    weights, before = ([rank.weight_bytes for rank in plan.ranks] for plan in (made, blind))
    assert sum(weights) == pytest.approx(sum(before) + 2 * GIB, rel=1e-3)
    if split == "tensor":
        assert weights == [before[0] + 2 * GIB, before[1]]
    else:
        assert made.ranks[0].span[1] < blind.ranks[0].span[1], "fewer layers beside the tower"
    assert ["image" in dict(rank.work_terms) for rank in made.ranks] == [True, False]


def test_cards_that_take_turns_read_what_one_would(tiny_path: Path) -> None:
    """An embedding of its own is not read for a token, and lies on one card only."""
    with open_model(tiny_path) as checkpoint:
        tiny = checkpoint.facts
    layer = replace(tiny.layers[0], mixer=replace(tiny.attention[0], num_heads=32, num_kv_heads=8, head_dim=128))
    layer = replace(layer, ffn=replace(layer.ffn, inner=12288))
    facts = replace(tiny, hidden_size=4096, vocab_size=151936, tied_embeddings=False, layers=(layer,) * 36)
    facts = replace(facts, num_params=count_params(facts), weight_bytes=6 * GIB, stored_format="awq")
    one, pair = imagined(fake_machine("cpu"), gpu="3090"), imagined(fake_machine("cpu"), gpu="2x 3090")
    alone = Planner(one, EngineOptions(device="cuda")).plan(facts).pace
    for split, least, most in (("layers", 0.95, 1.02), ("tensor", 1.05, 2.0)):
        made = Planner(pair, EngineOptions(device="cuda", tensor_parallel=2, split=split)).plan(facts)
        assert least * alone < made.pace < most * alone, split


def test_the_link_decides_what_ranks_have(empty_home: Path, large: ModelFacts) -> None:
    pair = imagined(fake_machine("cpu"), gpu="2x 3090")
    options = EngineOptions(device="cuda", tensor_parallel=2)

    def split() -> tuple[str, str]:
        made = Planner.here(options, pair).plan(large)
        return made.split, next(reason for reason in made.reasons if reason.startswith("link: "))

    assert split()[0] == "tensor" and "assumed" in split()[1]
    assert Planner.here(options, pair).plan(large).link_assumed
    name = speeds.link_name(pair, pair.gpus)
    speeds.remember_link(name, speeds.Link(5e-3, 1e8))
    assert split() == ("layers", "link: 5000 µs per all-reduce, 0.1 GB/s for large ones, measured")
    made = Planner.here(replace(options, split="tensor"), pair).plan(large)
    assert made.split == "tensor" and not made.link_assumed and made.decode_tps < 1 / (2 * large.num_layers * 5e-3)
    speeds.remember_link("another", speeds.Link(1e-6, 1e9))
    speeds.remember_link(name, speeds.Link(1e-5, 1e10))
    assert split()[0] == "tensor" and len(speeds.load(pair).links) == 2
    for damaged in ('{"links": {"a": [1]}}', '{"links": 3}', '{"links": {"a": [-1, 1]}}', "["):
        (paths.data_dir() / "links.json").write_text(damaged)
        assert speeds.load(pair).links == ()


def test_heads_that_do_not_divide_leave_the_layers(large: ModelFacts) -> None:
    trio = imagined(fake_machine("cpu"), gpu="3x 3090")
    layer = replace(large.layers[0], mixer=replace(large.attention[0], num_kv_heads=2))
    facts = replace(large, layers=(layer,) * 80)
    made = Planner(trio, EngineOptions(device="cuda", tensor_parallel=3)).plan(facts)
    assert made.split == "layers" and any("heads" in reason for reason in made.reasons)


def test_the_rank_farthest_above_its_plan_decides() -> None:
    def of(rank: int, planned: int, taken: int) -> MemoryProfile:
        return MemoryProfile((Term("work", planned * MIB, taken * MIB),), "cuda", 1.0, rank=rank)

    assert farthest([of(0, 100, 90), of(1, 100, 95)]).rank == 1
    assert farthest([of(0, 1000, 1020), of(1, 100, 110), of(2, 100, 115)]).rank == 2  # 2 % is within what holds
    assert str(of(2, 100, 115)).startswith("the plan did not hold on rank 2: ")
    assert str(of(0, 100, 90)).startswith("profiled, rank 0: ")


def test_cards_that_are_not_here_can_be_several() -> None:
    pair = imagined(fake_machine("rtx4090"), gpu="2x 3090")
    assert [gpu.name for gpu in pair.gpus] == ["NVIDIA RTX 3090"] * 2
    assert len(imagined(fake_machine("cpu"), gpu="3090 24GB").gpus) == 1
    with pytest.raises(ConfigError, match="unknown GPU"):
        imagined(fake_machine("cpu"), gpu="9x 3090")


@pytest.mark.slow
def test_ranks_end_when_rank_0_is_killed(tiny_path: Path) -> None:
    code = (
        "import sys, time; from localllm import LLM; llm = LLM(sys.argv[1], device='cpu', ctx=256, tensor_parallel=2);"
        " print(llm._model.lead.processes[0].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tiny_path)], stdout=subprocess.PIPE, text=True) as lead:
        assert lead.stdout is not None
        pid = int(lead.stdout.readline())
        lead.kill()
    ends = time.monotonic() + 5
    with pytest.raises((ProcessLookupError, FileNotFoundError)):
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < ends
            time.sleep(0.02)
        raise ProcessLookupError
