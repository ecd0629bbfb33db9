"""What a new user notices on this machine: start, first token, decode, prefill, prefix sharing, memory.

    python benchmarks/basics.py [MODEL] [--json FILE] [--repeat 5]

Every row is the median of interleaved repetitions, with its target. Run it on an otherwise idle machine. The last line
of stdout is one JSON document, which `--json` also writes to a file (benchmarks/results/ by convention).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from localllm import LLM, SamplingParams
from localllm.bench import BenchOptions, run_bench
from localllm.device.memory import rss_anon_bytes

LOCALLLM = [str(Path(sys.executable).with_name("localllm"))]
MODEL = "smollm2"


def seconds_to_first_token(model: str) -> float:
    """Time from the command to the first byte of its answer, with a warm page cache."""
    return first_byte_s([*LOCALLLM, "run", model, "--temp", "0", "--max-tokens", "8", "What is the capital of France?"])


def first_byte_s(command: list[str]) -> float:
    """Seconds from the start of a command to its first byte of output; waits for its end."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.monotonic() - started
        process.stdout.read()
    return elapsed


def seconds_of(command: list[str]) -> float:
    """Run a command and return its wall time."""
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def throughput(llm: LLM, streams: int, tokens: int = 64) -> float:
    """Output tokens per second of `streams` equal concurrent requests, including their prefill."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.monotonic()
    llm.generate([[100 + i, 200, 300, 400] for i in range(streams)], params)
    return streams * tokens / (time.monotonic() - started)


def shared_prefix_ratio(llm: LLM, tokens: int = 1000) -> float:
    """TTFT of a second request relative to the first, if they share a prefix of `tokens`."""
    llm.engine.clear_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prefix = [(7 * i) % 5000 + 300 for i in range(tokens)]
    first = llm.generate([*prefix, 11, 12, 13, 14], params).timing.ttft_s
    second = llm.generate([*prefix, 21, 22, 23, 24], params).timing.ttft_s
    return second / first


def restored_ratio(model: str, tokens: int = 4096) -> float:
    """TTFT of a prompt whose pages an earlier process stored on disk, relative to its prefill."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt = [(7 * i) % 5000 + 300 for i in range(tokens)]
    seconds = []
    place = "localllm.engine.page_files.store_dir"  # keep out of the user's own store
    with tempfile.TemporaryDirectory() as folder, mock.patch(place, lambda: Path(folder)):
        for _ in range(2):
            with LLM(model, ctx=tokens + 64, kv_store=1 << 30) as llm:
                llm.generate([1, 2, 3, 4], params)
                seconds.append(llm.generate(prompt, params).timing.ttft_s)
    return seconds[1] / seconds[0]


def memory_after_chat(llm: LLM, tokens: int = 1000) -> dict[str, float]:
    """Anonymous memory after a chat of `tokens`, and the limit: weights + used KV pages + 400 MB."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=tokens, ignore_eos=True)
    llm.generate("Once upon a time", params)
    state = llm.state()
    used = (state.pages_total - state.pages_free) / state.pages_total * state.kv_bytes
    allowed = state.weight_bytes + used + 400e6
    return {"rss_anon_mb": rss_anon_bytes() / 1e6, "allowed_mb": allowed / 1e6, "weights_mb": state.weight_bytes / 1e6}


class PeakMemory:
    """Highest RssAnon of this process while the block runs, sampled every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = rss_anon_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, rss_anon_bytes())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def rows(model: str, repeat: int) -> list[dict[str, Any]]:
    """Measure and print all rows."""
    found: list[dict[str, Any]] = []

    def row(name: str, values: list[float], line: str, holds: bool, unit: str) -> None:
        value = statistics.median(values)
        found.append({"name": name, "median": value, "unit": unit, "runs": values, "line": line, "holds": holds})
        print(f"{name:34} {value:9.2f} {unit:6} target {line:10} {'ok' if holds else 'MISSED'}", flush=True)

    helps = [seconds_of([*LOCALLLM, "--help"]) for _ in range(repeat)]
    row("localllm --help", helps, "<= 0.3", statistics.median(helps) <= 0.3, "s")
    seconds_to_first_token(model)
    firsts = [seconds_to_first_token(model) for _ in range(repeat)]
    row("run: command to first token", firsts, "<= 3", statistics.median(firsts) <= 3, "s")
    import localllm.engine.engine  # noqa: F401 - the imports are not part of loading

    with PeakMemory() as memory_while_loading:
        llm = LLM(model, ctx=4096, max_parallel=8, speculation="off")  # answers to random words repeat
    with llm:
        added = (memory_while_loading.peak - memory_while_loading.start) / 1e6
        allowed = llm.state().weight_bytes / 1e6 + 300
        row("RssAnon added while loading", [added], f"<= {allowed:.0f}", added <= allowed, "MB")
        row("load after imports", [llm.load_s], "<= 1", llm.load_s <= 1, "s")
        memory = memory_after_chat(llm)
        inside = memory["rss_anon_mb"] <= memory["allowed_mb"]
        row("RssAnon after 1,000 tokens", [memory["rss_anon_mb"]], f"<= {memory['allowed_mb']:.0f}", inside, "MB")
        result = run_bench(llm, BenchOptions(repeat=repeat, depths=(0, 1024)))
        lines = {"pp512": 450.0, "tg128": 60.0}
        for one in result.rows:
            least = lines.get(one.test)
            row(one.test, list(one.runs), f">= {least:g}" if least else "-", least is None or one.tps >= least, "tok/s")
        singles, eights = [], []
        for _ in range(repeat):
            singles.append(throughput(llm, 1))
            eights.append(throughput(llm, 8))
        row("1 request", singles, "-", True, "tok/s")
        more = statistics.median(eights) > statistics.median(singles)
        row("8 requests together", eights, "> 1 alone", more, "tok/s")
        ratios = [shared_prefix_ratio(llm) for _ in range(repeat)]
        row("TTFT with a shared prefix of 1,000", ratios, "<= 0.15", statistics.median(ratios) <= 0.15, "x")
        print(llm.run_summary)
    ratios = [restored_ratio(model) for _ in range(repeat)]
    row("TTFT of 4,096 tokens after a restart", ratios, "<= 0.10", statistics.median(ratios) <= 0.1, "x")
    return found


def main() -> None:
    """Parse the options, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    found = rows(options.model, options.repeat)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    document = {
        "schema": "localllm.basics/1",
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/basics.py {options.model} --repeat {options.repeat}",
        "cpu": cpu,
        "versions": {n: metadata.version(n) for n in ("localllm", "torch", "numpy")}
        | {"python": platform.python_version()},
        "rows": found,
    }
    text = json.dumps(document)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
