"""LoRA adapters behind the Python API: loaded with the model and hot, many at once, within eight places."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from localllm import LLM, SamplingParams
from localllm.checkpoint.adapter_file import MOST_RESIDENT, open_adapter
from localllm.config import EngineOptions
from localllm.errors import BadModelFile, ConfigError, InvalidRequest, ModelNotFound, OutOfMemory
from localllm.kernels.adapters import MOST_ADAPTERS
from localllm.models.architectures import open_model
from localllm.request import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "the sea and the hills beyond it, where nobody had been for years"


@pytest.fixture(scope="module")
def adapter(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """seed -> the folder of an adapter of the tiny model."""
    import tiny_models

    home = tmp_path_factory.mktemp("adapters")
    return cache(lambda seed: tiny_models.tiny_adapter(home / str(seed), tiny_path, seed))


@pytest.fixture(scope="module")
def phases() -> list[str]:
    """Names of the phases that loading reported."""
    return []


@pytest.fixture(scope="module")
def llm(tiny_path: Path, adapter: Callable[[int], Path], phases: list[str]) -> Iterator[LLM]:
    both = {"one": adapter(1), "two": adapter(2)}
    tell = lambda phase: phases.append(phase.name)  # noqa: E731
    with LLM(tiny_path, max_parallel=16, debug_invariants=True, adapters=both, on_progress=tell) as llm:
        yield llm


def ids_of(llm: LLM, name: str = "", prompt: str = PROMPT) -> list[int]:
    return llm.generate(prompt, GREEDY, adapter=name).completions[0].token_ids


def resident(llm: LLM) -> list[str]:
    """Names of those that have a place, the last used last."""
    return [adapter.name for adapter in llm.adapters._places.values()]


def test_requests_of_one_batch_go_through_their_own_adapters(llm: LLM, tiny_path: Path) -> None:
    with LLM(tiny_path) as plain:
        base = ids_of(plain)
    one, two = ids_of(llm, "one"), ids_of(llm, "two")
    assert len({tuple(ids) for ids in (base, one, two)}) == 3
    turns = [llm.begin_completion(PROMPT, GREEDY, adapter=name) for name in ("one", "", "two", "one", "")]
    assert [turn.answer().completions[0].token_ids for turn in turns] == [one, base, two, one, base]
    assert "adapters one, two" in llm.run_summary
    both = llm.generate(PROMPT, SamplingParams(n=2, temperature=0, max_tokens=6, ignore_eos=True), adapter="one")
    assert [c.token_ids for c in both.completions] == [one, one]


def test_a_prefix_is_shared_within_an_adapter_only(llm: LLM) -> None:
    prompt = "down by the river " + PROMPT
    cached = [llm.generate(prompt, GREEDY, adapter=name).usage.cached_tokens for name in ("one", "two", "", "one")]
    assert cached[:3] == [0, 0, 0] and cached[3] > 0
    llm.unload_adapter("two")
    llm.load_adapter("two", llm.options.adapter_paths["one"])  # what a name means may change
    llm.load_adapter("three", llm.options.adapter_paths["two"])
    assert ids_of(llm, "two", prompt) == ids_of(llm, "one", prompt) != ids_of(llm, "three", prompt)
    llm.unload_adapter("three")
    llm.unload_adapter("two")
    llm.load_adapter("two", llm.options.adapter_paths["two"])
    assert ids_of(llm, "two", prompt) != ids_of(llm, "one", prompt)


def test_more_adapters_than_places_take_turns(llm: LLM, adapter: Callable[[int], Path]) -> None:
    assert MOST_ADAPTERS == MOST_RESIDENT
    names = [f"n{seed}" for seed in range(10, 22)]
    for seed, name in enumerate(names, 10):
        llm.load_adapter(name, adapter(seed))
    turns = [llm.begin_completion(PROMPT, GREEDY, adapter=name) for name in (*names, *names)]
    found = [turn.answer().completions[0].token_ids for turn in turns]
    assert found[:12] == found[12:] and len({tuple(ids) for ids in found}) == 12
    assert found[:12] == [ids_of(llm, name) for name in names]
    assert resident(llm) == names[-MOST_ADAPTERS:]  # the last used
    for name in names:
        llm.unload_adapter(name)
    ids_of(llm, "one")
    assert set(resident(llm)) <= {"one", "two"}


def test_an_adapter_after_loading_is_no_phase_of_it(
    llm: LLM, adapter: Callable[[int], Path], phases: list[str]
) -> None:
    """Every phase ends in ready: a display would wait for it."""
    llm.load_adapter("late", adapter(4))
    llm.unload_adapter("late")
    with pytest.raises(ModelNotFound):
        llm.load_adapter("late", adapter(4).parent)
    assert phases[-3:] == ["adapter", "adapter", "ready"]


def test_what_cannot_be_is_refused_and_ends_nothing_else(llm: LLM, adapter: Callable[[int], Path]) -> None:
    with pytest.raises(ModelNotFound, match="adapter 'three' is not loaded; loaded adapters: one, two"):
        ids_of(llm, "three")
    with pytest.raises(InvalidRequest, match="'one' is already loaded"):
        llm.load_adapter("one", adapter(1))
    with pytest.raises(InvalidRequest, match="is not a valid adapter name"):
        llm.load_adapter("a\nb", adapter(1))
    with pytest.raises(ModelNotFound, match="holds no adapter"):
        llm.load_adapter("three", adapter(1).parent)
    with pytest.raises(ModelNotFound, match="adapter 'three' is not loaded"):
        llm.unload_adapter("three")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.adapters, "_free", lambda: 100)
        with pytest.raises(OutOfMemory, match="100 are free"):
            llm.load_adapter("three", adapter(3))
    with pytest.raises(ConfigError, match="NAME=PATH entries"):
        EngineOptions(adapters=("a=x", "a=y"))
    assert EngineOptions(adapters="/home/me/pirate,b=/x").adapter_paths == {"pirate": "/home/me/pirate", "b": "/x"}


def test_files_that_vanish_end_their_own_requests(llm: LLM, adapter: Callable[[int], Path], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(adapter(5), gone)
    llm.load_adapter("gone", gone)
    assert ids_of(llm, "gone")
    llm.adapters.clear()
    (gone / "adapter_model.safetensors").write_bytes(b"cut")
    failing = llm.begin_completion(PROMPT, GREEDY, adapter="gone")
    fine = llm.begin_completion(PROMPT, GREEDY, adapter="one")
    assert fine.answer().completions[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(BadModelFile):
        failing.answer()
    shutil.copy(adapter(6) / "adapter_model.safetensors", gone)
    with pytest.raises(BadModelFile, match="have changed since"):
        ids_of(llm, "gone")
    llm.unload_adapter("gone")


def test_an_adapter_outlives_sleep_and_its_name_the_request(llm: LLM) -> None:
    one = ids_of(llm, "one")
    llm.sleep()
    llm.wake()
    assert ids_of(llm, "one") == one
    turn = llm.begin_completion(PROMPT, GREEDY, adapter="two")
    llm.unload_adapter("two")
    assert len(turn.answer().completions[0].token_ids) == 6
    llm.load_adapter("two", llm.options.adapter_paths["two"])


def test_the_plan_counts_what_is_in_memory_at_once(tiny_path: Path, adapter: Callable[[int], Path]) -> None:
    from localllm.plan.planner import Planner

    with open_model(tiny_path) as checkpoint:
        facts = checkpoint.facts
    each = open_adapter(adapter(1)).nbytes
    for count in (0, 1, 9):
        options = EngineOptions(adapters={f"a{n}": str(adapter(1)) for n in range(count)})
        made = Planner.here(options).plan(facts)
        assert made.terms().get("adapters", 0) == each * min(count, MOST_RESIDENT)


@pytest.mark.slow
def test_a_thousand_adapters(llm: LLM, adapter: Callable[[int], Path]) -> None:
    names = [f"m{number}" for number in range(1000)]
    for number, name in enumerate(names):
        llm.load_adapter(name, adapter(30 + number % 10))
    assert "996 more" in llm.run_summary or "998 more" in llm.run_summary
    turns = [llm.begin_completion(PROMPT, GREEDY, adapter=name) for name in names[::4]]
    found = [tuple(turn.answer().completions[0].token_ids) for turn in turns]
    assert len(set(found)) == 5 and all(found[i] == found[i % 5] for i in range(len(found)))
    assert len(resident(llm)) == MOST_ADAPTERS
    for name in names:
        llm.unload_adapter(name)
