"""Tests of one engine, of two in turns, and of requests together; a trace; the model is the starter model."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from typer.testing import CliRunner

from localllm import LLM, SamplingParams
from localllm.bench import BenchOptions, BenchRow, PeerResult, run_bench, save, words
from localllm.bench.endpoint import Sample
from localllm.bench.load import LoadRow, Shape, measure
from localllm.bench.results import OtherWork
from localllm.bench.throughput import OurEngine
from localllm.bench.trace import write_trace
from localllm.errors import ConfigError, LocalLLMError


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, ctx=512, max_parallel=2) as loaded:
        yield loaded


class Scripted:
    """A peer that keeps what it was asked."""

    def __init__(self) -> None:
        self.prefills: list[tuple[list[int], list[int]]] = []
        self.decodes: list[tuple[list[list[int]], int]] = []

    def prefill(self, context: Sequence[int], ids: Sequence[int]) -> tuple[float, float | None]:
        self.prefills.append((list(context), list(ids)))
        return 100.0 * len(self.prefills), 0.25

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        self.decodes.append(([list(ids) for ids in prompts], count))
        return 50.0

    def result(self, rows: Sequence[BenchRow]) -> PeerResult:
        return PeerResult("scripted", tuple(rows), 1 << 20, {"scripted": "1"})


def test_a_row_is_a_median_with_its_spread() -> None:
    row = BenchRow.of("pp8", [1.0, 9.0, 2.0], [0.5, None, 0.3])
    assert (row.tps, row.runs, row.ttft_ms) == (2.0, (1.0, 9.0, 2.0), 400.0)
    assert row.spread == pytest.approx(4.3589, abs=1e-3)
    assert BenchRow.of("tg8", [3.0]).spread == 0.0


def test_streams_are_counted_from_their_first_tokens() -> None:
    """As a peer's are: reading the prompts is no part of it, which took a sixth of the time of eight streams."""
    rates = iter([30.0, 20.0])

    def submit(ids: list[int], params: SamplingParams) -> SimpleNamespace:
        done = SimpleNamespace(timing=SimpleNamespace(decode_tps=next(rates)))
        return SimpleNamespace(answer=lambda: done)

    assert OurEngine(cast(LLM, SimpleNamespace(submit=submit))).decode([[1] * 8, [2] * 8], 4) == 50.0


@pytest.mark.slow
def test_a_peer_runs_the_same_tests_in_turns(llm: LLM) -> None:
    peer = Scripted()
    told: list[str] = []
    options = BenchOptions(24, 4, depths=(0, 40), repeat=2, warmup=1, concurrency=(1, 2))
    result = run_bench(llm, options, told.append, peer)
    names = ["pp24", "tg4", "pp24 @ d40", "tg4 @ d40", "tg4 x2"]
    assert told == names and [row.test for row in result.rows] == names
    assert result.peer is not None and [row.test for row in result.peer.rows] == names
    assert all(len(row.runs) == 2 and row.tps > 0 for row in result.rows)
    assert result.rows[0].ttft_ms is not None and result.rows[1].ttft_ms is None
    assert result.ratio("tg4") == result.rows[1].tps / 50.0 and result.ratio("pp9") is None
    shapes = [(len(context), len(ids)) for context, ids in peer.prefills]
    assert shapes == [(0, 32), (0, 24), (0, 24), (40, 24), (40, 24)]
    assert [len(prompts) for prompts, _ in peer.decodes] == [1, 1, 1, 1, 1, 2, 2]
    assert result.to_json()["peer"]["rows"][0]["runs"] == (200.0, 300.0)
    kept = json.loads(save(result).read_text())
    assert kept["schema"] == "localllm.bench/1" and kept["rows"][0]["test"] == "pp24"
    assert result.rss_anon_bytes > 50 << 20 < result.peak_rss_bytes


@pytest.mark.slow
def test_a_test_that_does_not_fit_says_what_would(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="512") as caught:
        run_bench(llm, BenchOptions(prompt_tokens=500, output_tokens=20))
    assert "--ctx 521" in caught.value.hint
    with pytest.raises(ConfigError, match="100,020") as caught:
        run_bench(llm, BenchOptions(prompt_tokens=100_000, output_tokens=20))
    assert caught.value.hint == "measure fewer tokens with -p, -n or -d: --ctx cannot exceed 8,192 here"


@pytest.mark.slow
def test_a_trace_names_the_parts_of_one_step(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    write_trace(llm, file, words(llm, Random(0), 16))
    events = json.loads(file.read_text())["traceEvents"]
    count = {name: sum(event["name"] == name for event in events) for name in ("step", "decoder", "mlp", "head")}
    assert count == {"step": 1, "decoder": 1, "mlp": 30, "head": 1}
    step = next(event for event in events if event["name"] == "step")
    assert all(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1 for e in events)
    again = llm.submit(words(llm, Random(0), 4), SamplingParams(max_tokens=2))
    assert len(again.answer().completions) == 1  # everything is as it was
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(llm, tmp_path / "no" / "step.json", [1])


def test_requests_together_are_counted_by_engine_shape_and_number() -> None:
    asked: list[tuple[str, str]] = []
    numbers = iter(range(1000))

    def engine(name: str, fails_at: str) -> Callable[[str, int], Sample]:
        def ask(prompt: str, count: int) -> Sample:
            asked.append((name, prompt))
            if prompt == fails_at:
                raise LocalLLMError("no", "")
            return Sample(0.1, 0.1 + 0.05 * (count - 1), 7, count)

        return ask

    def run(fails_at: str, streams: Sequence[int]) -> list[LoadRow]:
        engines = {"a": engine("a", ""), "b": engine("b", fails_at)}
        shapes = (Shape("chat", 8, 5), Shape("agent", 4, 2))
        return measure(engines, lambda shape: f"{shape.name} {next(numbers)}", streams, shapes, 2)

    rows = run("chat 4", (1, 4))
    keys = [(shape, n, name) for shape in ("chat", "agent") for n in (1, 4) for name in "ab"]
    assert [(row.shape, row.concurrency, row.engine) for row in rows] == keys
    assert [row.requests for row in rows[:4]] == [2, 2, 8, 7] and [row.failed for row in rows[:4]] == [0, 0, 0, 1]
    assert all(row.ttft_ms == 100 and row.tpot_ms == pytest.approx(50) and row.prompt_tokens == 7 for row in rows)
    prompts = {name: [prompt for asker, prompt in asked if asker == name] for name in "ab"}
    assert len(set(prompts["a"])) == len(prompts["a"]) == 20 and sorted(prompts["a"]) == sorted(prompts["b"])
    with pytest.raises(LocalLLMError, match="no"):
        run(f"chat {20}", (1,))


def test_what_others_do_is_seen() -> None:
    with OtherWork() as others:
        sum(range(1000))
    assert others.cores >= 0


def test_a_child_that_runs_is_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys
    import time

    from localllm.bench import results

    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        monkeypatch.setattr(results, "_busy_cpu_s", lambda: before + psutil.Process(child.pid).cpu_times().user)
        before = 100.0
        with OtherWork() as others:  # nobody but the child is busy
            time.sleep(0.3)
        assert others.cores < 0.2
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("words", "told"), [((), None), (("--speculation", "ngram"), "speculation ngram")])
def test_tokens_are_guessed_only_where_a_flag_asks(
    smollm2_path: Path, words: tuple[str, ...], told: str | None
) -> None:
    from localllm.cli.frame import logs
    from localllm.cli.frame.program import app

    small = ["-p", "8", "-n", "4", "-r", "1", "--warmup", "0", "--ctx", "256", "--no-save", "--json"]
    try:
        result = CliRunner().invoke(app, ["bench", str(smollm2_path), *small, *words])
    finally:
        logs.stop()
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)["truth_line"]
    assert told in summary if told else "speculation" not in summary


@pytest.mark.slow
def test_a_result_that_cannot_be_saved_is_printed(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.frame import logs
    from localllm.cli.frame.program import app

    def full(path: Path, content: str, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("localllm.paths.replace_file", full)
    small = ["-p", "8", "-n", "4", "-r", "1", "--warmup", "0", "--ctx", "256", "--json"]
    try:
        result = CliRunner().invoke(app, ["bench", str(smollm2_path), *small])
    finally:
        logs.stop()
    assert result.exit_code == 0, result.output
    assert [row["test"] for row in json.loads(result.stdout)["rows"]] == ["pp8", "tg4"]
    assert "the result could not be saved: No space left on device" in result.stderr
