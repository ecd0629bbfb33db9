"""The CPU engine against llama.cpp and ik_llama.cpp: the README's tables and three plots, from alternating runs.

    python benchmarks/cpu.py --peer-python PATH --ik-python PATH --json FILE     measure the missing rows
    python benchmarks/cpu.py --only sizes ...                                    random weights in real shapes
    python benchmarks/cpu.py --only alone --shapes qwen3-30b-a3b-Q4_K_M ...      one engine loaded at a time
    python benchmarks/cpu.py --render --json FILE                                only write tables and plots

All engines get two threads (or --threads) and the same file; every figure is the median of alternating runs. A run is
repeated if other processes took more than --calm cores meanwhile. Results are saved to the JSON file as they come: an
interrupted run can continue, and --repeat adds runs to rows that have fewer. Targets: decode >= 2.2 (smollm2) and 1.6
(gemma3-270m) times llama.cpp's, prefill >= 3.5 and 2.2 times, 8 streams >= 2.5 times one stream, and the first token of
`localllm run` after at most 2.5 s.

The memory speed of a shared host may change within a minute, so the read bandwidth is measured before and after each
decoding run. If the two differ by more than --steady, the run is repeated, unless it is a peer's after a long prompt.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import synthetic
from basics import first_byte_s
from gguf import GGUFReader
from plot import line_chart

from localllm import LLM
from localllm.bench.peer import Peer
from localllm.bench.results import OtherWork, versions
from localllm.bench.throughput import Engine, OurEngine, words
from localllm.device.cpu import read_bandwidth
from localllm.hub import catalog
from localllm.hub.starter import starter_path
from localllm.models.architectures.facts import kv_bytes_per_token

ROOT = Path(__file__).resolve().parents[1]
OURS, PEERS = "localllm", ("llama.cpp", "ik_llama.cpp")
BEGIN, END = "<!-- table by benchmarks/cpu.py -->", "<!-- end of the table -->"
BEGIN_ALL, END_ALL = "<!-- all shapes by benchmarks/cpu.py -->", "<!-- end of all shapes -->"
MODELS = {"smollm2": "135M, Q4_1", "gemma3-270m": "Q4_K_M"}
LINES = {"smollm2": {"pp512": 3.5, "tg128": 2.2}, "gemma3-270m": {"pp512": 2.2, "tg128": 1.6}}
SIZES = (("qwen3-1.7b", "Q4_K_M"), ("qwen3-4b", "Q4_K_M"), ("qwen3-1.7b", "Q4_0"), ("qwen3-1.7b", "Q8_0"))
SIZES += (("qwen3-0.6b", "Q4_K_M"), ("llama-1b", "Q4_K_M"))
LARGE = (("qwen3-8b", "Q4_K_M"),)
TODAY = (("qwen3.5-4b", "Q4_K_M"), ("qwen3-30b-a3b", "Q4_K_M"), ("gpt-oss-20b", "MXFP4"))
DELTA = (("ling3-tiny", "Q4_K_M"), ("kimi-linear-48b-a3b", "Q4_K_M"), ("qwen3.8-flash-next", "Q4_K_M"))
DELTA += (("north-mini-30b-a3b", "Q4_K_M"), ("mimo-v2.5", "Q4_K_M"), ("glm5.3-flash", "Q4_K_M"))
DELTA += (("deepseek-v4-flash", "Q4_K_M"), ("nanbeige4.2-3b", "Q4_K_M"))
DELTA += (("granite4-h-micro", "Q4_K_M"), ("falcon-h1-0.5b", "Q4_K_M"))
SHAPES, README_SHAPES = (*SIZES, *LARGE, *TODAY, *DELTA), (*SIZES[:2], *TODAY)
SIZE_CTX, DEPTH = 2048, 4096
FAR = ((DEPTH, "int8"), (8192, "auto"))  # for the first two shapes
SIZE_TESTS = {
    "pp256": "prefill 256",
    "pp256 int8": "prefill 256, `--activations int8`",
    "pp1024": "prefill 1,024",
    f"pp{DEPTH}": f"prefill {DEPTH:,}",
    "tg64": "decode",
    f"tg32 @{DEPTH}": f"decode at {DEPTH:,} tokens",
    f"tg32 @{DEPTH} int8": f"decode at {DEPTH:,} tokens, `--kv int8`",
    "tg32 @8192": "decode at 8,192 tokens",
    "tg32 x8": "eight streams",
    "tg32 x8 int8": "eight streams, `--activations int8`",
    "alone pp256": "prefill 256, one engine loaded at a time",
    "alone tg64": "decode, one engine loaded at a time",
}
README_TESTS = ("pp256", "tg64", f"tg32 @{DEPTH}", "alone pp256", "alone tg64")
STREAMS_LINE, HOG_LINE = 2.5, 0.4
DEPTHS = (0, 512, 1024, 2048, 4096, 7936)
LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
STREAMS = (1, 2, 4, 8, 16)
GROWTH_TOKENS = 32
CTX = 8192
RETRIES = 60
STEADY_TRIES = 4
ALIKE = 0.1  # read bandwidths this close belong to the same state of the memory


class Bench:
    """The options of a run, and the results measured so far with their file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file: Path = options.json
        self.kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        words = ["PATH" if word.startswith("/") else word for word in sys.argv]
        self.kept |= {"schema": "localllm.cpu/1", "versions": versions(), "command": " ".join(["python", *words])}
        self.kept.setdefault("rows", {})

    def save(self) -> None:
        """Write all results so far."""
        self.kept["date"] = datetime.date.today().isoformat()
        self.file.write_text(json.dumps(self.kept, indent=1) + "\n")

    def turns(self, usual: int) -> int:
        """Number of runs per row."""
        return int(self.options.repeat or usual)

    def row(
        self, name: str, runs: Sequence[tuple[str, Callable[[int], float]]], repeat: int, reads: bool = False
    ) -> None:
        """Alternate the (engine, run) pairs, skipping known runs and tests not selected; values are rates or seconds.

        With `reads`, each run is stored with the memory read bandwidth (GB/s) before and after it.
        """
        if self.options.tests and not name.endswith(tuple(f" {test}" for test in self.options.tests)):
            return
        for number in range(repeat):
            for engine, run in runs:
                done: list[dict[str, float]] = self.kept["rows"].setdefault(name, {}).setdefault(engine, [])
                if len(done) > number:
                    continue
                steady_tries = STEADY_TRIES if reads and (engine == OURS or "@" not in name) else 0
                done.append(self.calm(partial(run, number), reads, steady_tries))
                self.save()
        shown = {engine: f"{median(found):,.1f}" for engine, found in self.kept["rows"][name].items()}
        print(name, shown, flush=True)

    def calm(self, run: Callable[[], float], reads: bool = False, steady_tries: int = 0) -> dict[str, float]:
        """Repeat until a run is undisturbed, and return it or else the least disturbed one. With `reads`, measure the
        read bandwidth before and after; the first `steady_tries` runs must also agree in it.
        """
        best: tuple[float, dict[str, float]] | None = None
        for number in range(RETRIES):
            wait_for_calm(self.options.calm)
            before = read_memory(self) if reads else 1.0
            with OtherWork() as others:
                value = run()
            after = read_memory(self) if reads else 1.0
            found = {"value": round(value, 4), "other_cores": round(others.cores, 3)}
            found |= {"read_before": round(before, 2), "read_after": round(after, 2)} if reads else {}
            disturbed = others.cores / self.options.calm
            if number < steady_tries:
                disturbed = max(disturbed, abs(after / before - 1) / self.options.steady)
            if best is None or disturbed < best[0]:
                best = disturbed, found
            if best[0] <= 1:
                break
        assert best is not None
        return best[1]


def wait_for_calm(most: float, longest_s: float = 20.0) -> None:
    """Wait until other processes take no more than `most` cores, for up to `longest_s`."""
    until = time.monotonic() + longest_s
    while time.monotonic() < until:
        with OtherWork() as others:
            time.sleep(0.3)
        if others.cores <= most:
            return


def median(found: Sequence[dict[str, float]]) -> float:
    """Median of the values."""
    return statistics.median(entry["value"] for entry in found)


def main() -> int:
    """Measure, then write the tables and the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/cpu.json")
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--ik-python", help="interpreter that has ik-llama-cpp-python")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/localllm-shapes"), help="folder for files with random weights"
    )
    parser.add_argument("--large", action="store_true", help="sizes: also 8B, mixtures of experts and a hybrid")
    parser.add_argument("--shapes", nargs="*", help="sizes: only these, such as qwen3-1.7b-Q4_K_M")
    parser.add_argument("--ours", action="store_true", help="run only our engine, up to --repeat")
    parser.add_argument("--tests", nargs="*", help="only these rows, such as pp256")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, help="runs per row; default: 7 for real files, 3 or 1 for others")
    parser.add_argument("--calm", type=float, default=0.15, metavar="CORES", help="most that other processes may use")
    parser.add_argument("--steady", type=float, default=0.1, metavar="SHARE", help="most that bandwidth may change")
    parser.add_argument("--only", nargs="*", default=("compare", "sizes", "start", "hog", "growth"))
    parser.add_argument("--render", action="store_true", help="only write the tables and plots")
    options = parser.parse_args()
    named = zip(PEERS, (options.peer_python, options.ik_python), strict=True)  # the peers to run; None: with our Python
    options.pythons = {name: python for name, python in named if (python or name == "llama.cpp") and not options.ours}
    bench = Bench(options)
    if not options.render:
        steps = {"compare": compare, "sizes": sizes, "alone": alone, "start": start, "hog": hogged, "growth": growth}
        for name in options.only:
            steps[name](bench)
    render(bench.kept)
    return 0


def start_peer(bench: Bench, name: str, path: Path, streams: int, ctx: int, kv: str = "") -> Peer:
    """Start another engine with the same file and threads."""
    python, threads = bench.options.pythons[name], bench.options.threads
    peer = Peer(name, path, threads=threads, ctx=ctx, streams=streams, kv=kv, python=python)
    bench.kept.setdefault("peers", {})[name] = peer.versions
    return peer


@contextmanager
def engines(
    bench: Bench, model: str, streams: int, ctx: int = CTX, peers: Sequence[str] = PEERS, **settings: str
) -> Iterator[tuple[LLM, list[tuple[str, Engine]]]]:
    """Load our engine with these settings and its peers on one file; `kv` "int8" also applies to them."""
    threads = bench.options.threads
    with ExitStack() as stack:
        # no speculation: the peers have none here, and small models repeat themselves after random words
        ours = {"ctx": ctx, "threads": threads, "max_parallel": max(STREAMS), "device": "cpu", "speculation": "off"}
        ours |= {"packed_store": 0}  # write no weights between runs
        ours |= settings
        llm = stack.enter_context(LLM(model, **ours))
        named: list[tuple[str, Engine]] = [(OURS, OurEngine(llm))]
        for name in peers:
            if name in bench.options.pythons:
                peer = start_peer(bench, name, llm.path, streams, ctx, settings.get("kv", ""))
                named.append((name, stack.enter_context(closing(peer))))
        bench.kept["cpu"] = llm.machine.cpu.name
        bench.kept["truth_line"] = llm.run_summary
        for _, engine in named:
            warm(engine, words(llm, random.Random(0), 64))
        yield llm, named


def usable(named: Sequence[tuple[str, Engine]], streams: int) -> list[tuple[str, Engine]]:
    """Drop ik_llama.cpp 0.1.5 for several streams: it aborts if sequences in one cache differ in length."""
    return [pair for pair in named if streams == 1 or pair[0] != "ik_llama.cpp"]


def warm(engine: Engine, ids: Sequence[int]) -> None:
    """Run every kind of work once."""
    engine.prefill([], ids)
    engine.decode([ids[:8]], 16)


def compare(bench: Bench) -> None:
    """Measure prefill, decode and streams of both real models on all engines."""
    for model in MODELS:
        with engines(bench, model, 8, 1024) as (llm, named):

            def prefill(engine: Engine, number: int, llm: LLM = llm) -> float:
                return engine.prefill([], words(llm, random.Random(number), 512))[0]

            def decode(engine: Engine, number: int, streams: int, tokens: int, llm: LLM = llm) -> float:
                rng = random.Random(number)
                return engine.decode([words(llm, rng, 8) for _ in range(streams)], tokens)

            bench.row(f"{model} pp512", [(n, lambda i, e=e: prefill(e, i)) for n, e in named], bench.turns(7))
            for test, streams, tokens in (("tg128", 1, 128), ("tg64 x8", 8, 64)):
                runs = [(n, lambda i, e=e, s=streams, t=tokens: decode(e, i, s, t)) for n, e in usable(named, streams)]
                bench.row(f"{model} {test}", runs, bench.turns(7))


def file_of(bench: Bench, shape: str, form: str) -> Path:
    """Path of a file with random weights, which is written if missing."""
    path: Path = bench.options.folder / f"{shape}-{form}.gguf"
    if not path.exists():
        print("writing", path, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        vocabulary = starter_path(catalog.starters()["smollm2"])
        synthetic.write_model(part, form, 0, synthetic.REAL[shape], vocabulary).rename(path)
    return path


def bytes_of(llm: LLM, path: Path) -> int:
    """Bytes of weights read per token."""
    active = llm.facts.weight_bytes * llm.facts.active_share
    if not llm.facts.tied_embeddings:  # a token reads one row of the embedding
        active -= next(int(t.n_bytes) for t in GGUFReader(path).tensors if t.name == "token_embd.weight")
    return round(active)


def bytes_at(llm: LLM, path: Path, tokens: int) -> int:
    """Bytes read per token at a context of `tokens`."""
    return bytes_of(llm, path) + tokens * kv_bytes_per_token(llm.facts.keeping_layers, llm.plan.kv)


def read_memory(bench: Bench) -> float:
    """Current memory read bandwidth in GB/s; bypasses the cache of `read_bandwidth`."""
    return read_bandwidth.__wrapped__(bench.options.threads, 64 << 20) / 1e9


def alone(bench: Bench) -> None:
    """Measure mixtures with one engine loaded at a time, in alternation; decoding rows include the read bandwidth."""
    repeat, each = bench.turns(9), 3
    turns = -(-repeat // each)
    shapes = [
        pair for pair in (*TODAY[1:], *DELTA) if not bench.options.shapes or "-".join(pair) in bench.options.shapes
    ]
    for shape, form in shapes:
        name, path = f"{shape}-{form} alone", file_of(bench, shape, form)
        prompts: list[list[int]] = []
        for turn in range(turns):
            with engines(bench, str(path), 1, SIZE_CTX, peers=()) as (llm, named):
                bench.kept.setdefault("bytes", {})[f"{shape}-{form}"] = bytes_of(llm, path)
                prompts = prompts or [words(llm, random.Random(number), 256) for number in range(turns * each)]
                alone_turn(bench, name, *named[0], prompts, min(repeat, (turn + 1) * each))
            for peer in bench.options.pythons:
                with closing(start_peer(bench, peer, path, 1, SIZE_CTX)) as engine:
                    warm(engine, prompts[0][:64])
                    alone_turn(bench, name, peer, engine, prompts, min(repeat, (turn + 1) * each))


def alone_turn(
    bench: Bench, name: str, who: str, engine: Engine, prompts: Sequence[Sequence[int]], repeat: int
) -> None:
    """Run one engine until each row has `repeat` runs."""
    bench.row(f"{name} pp256", [(who, lambda i: engine.prefill([], prompts[i])[0])], repeat)
    bench.row(f"{name} tg64", [(who, lambda i: engine.decode([prompts[i][:8]], 64))], repeat, reads=True)


def sizes(bench: Bench) -> None:
    """Measure random weights in popular shapes; decoding rows include the read bandwidth."""
    repeat = bench.turns(3)
    for shape, form in SHAPES:
        name = f"{shape}-{form}"
        wanted = name in bench.options.shapes if bench.options.shapes else (shape, form) in SIZES
        if not (wanted or (bench.options.large and (shape, form) not in SIZES)):
            continue
        path = file_of(bench, shape, form)

        def prefill(engine: Engine, number: int, count: int, llm: LLM) -> float:
            return engine.prefill([], words(llm, random.Random(number), count))[0]

        def decode(engine: Engine, number: int, streams: int, depth: int, tokens: int, llm: LLM) -> float:
            rng = random.Random(number)
            return engine.decode([words(llm, rng, depth) for _ in range(streams)], tokens)

        with engines(bench, str(path), 8, SIZE_CTX) as (llm, named):
            bench.kept.setdefault("bytes", {})[name] = bytes_of(llm, path)
            for count in (256, 1024):
                runs = [(n, partial(prefill, e, count=count, llm=llm)) for n, e in named]
                bench.row(f"{name} pp{count}", runs, repeat)
            for test, streams, tokens in (("tg64", 1, 64), ("tg32 x8", 8, 32)):
                them = usable(named, streams)
                runs = [(n, partial(decode, e, streams=streams, depth=8, tokens=tokens, llm=llm)) for n, e in them]
                bench.row(f"{name} {test}", runs, repeat, reads=True)
        with engines(bench, str(path), 8, SIZE_CTX, activations="int8") as (llm, named):
            runs = [(n, partial(prefill, e, count=256, llm=llm)) for n, e in named]
            bench.row(f"{name} pp256 int8", runs, repeat)
            runs = [(n, partial(decode, e, streams=8, depth=8, tokens=32, llm=llm)) for n, e in named[:2]]
            bench.row(f"{name} tg32 x8 int8", runs, repeat)
        if (shape, form) in (*TODAY, *DELTA):
            continue
        for depth, kv in ((DEPTH, "auto"), *(FAR if (shape, form) in SIZES[:2] else ())):
            with engines(bench, str(path), 1, depth + 64, kv=kv) as (llm, named):
                if (depth, kv) == (DEPTH, "auto"):
                    runs = [(n, partial(prefill, e, count=depth, llm=llm)) for n, e in named]
                    bench.row(f"{name} pp{depth}", runs, bench.turns(1))
                row = " ".join([name, "tg32", f"@{depth}", *([kv] * (kv != "auto"))])
                bench.kept["bytes"][row] = bytes_at(llm, path, depth + 16)
                runs = [(n, partial(decode, e, streams=1, depth=depth, tokens=32, llm=llm)) for n, e in named]
                bench.row(row, runs, bench.turns(1), reads=True)


def start(bench: Bench) -> None:
    """Measure seconds from the command to the first byte of its answer, with a warm page cache."""
    command = [str(Path(sys.executable).with_name("localllm")), "run", "smollm2", "--max-tokens", "4", "hi"]
    first_byte_s(command)
    bench.row("smollm2 first token s", [("localllm", lambda _: first_byte_s(command))], bench.turns(7))


def hogged(bench: Bench) -> None:
    """Measure decoding with and without another process that keeps one core busy."""
    with engines(bench, "smollm2", 1) as (llm, named):

        def quiet(engine: Engine, number: int) -> float:
            return engine.decode([words(llm, random.Random(number), 8)], 64)

        runs = [(name, lambda i, e=engine: quiet(e, i)) for name, engine in named]
        bench.row("smollm2 tg64", runs, bench.turns(7))
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            time.sleep(0.5)
            bench.row("smollm2 tg64 beside a busy process", runs, bench.turns(7))
        finally:
            busy.kill()
            busy.wait()


def growth(bench: Bench) -> None:
    """Measure decode by context, prefill by prompt length, throughput by streams."""
    repeat = bench.turns(3)
    with engines(bench, "smollm2", max(STREAMS), 512) as (llm, named):

        def decode(engine: Engine, number: int, depth: int, streams: int) -> float:
            rng = random.Random(number)
            return engine.decode([words(llm, rng, max(depth, 8)) for _ in range(streams)], GROWTH_TOKENS)

        def prefill(engine: Engine, number: int, length: int) -> float:
            return engine.prefill([], words(llm, random.Random(number), length))[0]

        for streams in STREAMS:
            runs = [(n, lambda i, e=e, s=streams: decode(e, i, 0, s)) for n, e in usable(named, streams)]
            bench.row(f"growth streams {streams}", runs, repeat)
    with engines(bench, "smollm2", 1) as (llm, named):
        for depth in DEPTHS:
            bench.row(
                f"growth depth {depth}", [(n, lambda i, e=e, d=depth: decode(e, i, d, 1)) for n, e in named], repeat
            )
        for length in LENGTHS:
            bench.row(
                f"growth prompt {length}", [(n, lambda i, e=e, t=length: prefill(e, i, t)) for n, e in named], repeat
            )


# --- tables and plots ------------------------------------------------------------------------------------------------


def replace_table(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the table between two markers of a page."""
    before, rest = page.read_text().split(begin)
    page.write_text(before + begin + "\n" + text + end + rest.split(end)[1])


def render(kept: dict[str, Any]) -> None:
    """Write the tables of README (real shapes) and docs/speed.md (real files, all shapes), and docs/cpu-*.svg."""
    rows = kept["rows"]
    if "bytes" in kept:
        replace_table(ROOT / "README.md", sizes_table(kept, README_TESTS, README_SHAPES))
        replace_table(ROOT / "docs/speed.md", sizes_table(kept, tuple(SIZE_TESTS), SHAPES), BEGIN_ALL, END_ALL)
    if f"{next(iter(MODELS))} tg128" in rows:
        replace_table(ROOT / "docs/speed.md", table(kept))
    charts = (
        ("depth", "Decode by context", "tokens of context", "tokens per second", False),
        ("prompt", "Prefill by prompt length", "tokens of prompt", "tokens per second", True),
        ("streams", "Throughput by streams", "sequences decoded together", "tokens per second, all together", True),
    )
    for kind, title, x_label, y_label, log_x in charts:
        prefix = f"growth {kind} "
        series: dict[str, list[tuple[float, float]]] = {}
        for name, found in rows.items():
            for engine, runs in found.items() if name.startswith(prefix) else ():
                series.setdefault(engine, []).append((float(name.removeprefix(prefix)), median(runs)))
        if series:
            chart = line_chart(title, x_label, f"{y_label} (smollm2 Q4_1, 2 threads)", series, log_x=log_x)
            (ROOT / f"docs/cpu-{kind}.svg").write_text(chart)
    print(table(kept), sizes_table(kept, tuple(SIZE_TESTS), SHAPES), sep="\n")


def sizes_table(kept: dict[str, Any], tests: Sequence[str], shapes: Sequence[tuple[str, str]]) -> str:
    """Markdown table of real shapes: tokens per second of the three engines, our multiples, numbers of runs."""
    rows, lines = kept["rows"], ["| tok/s | localllm | llama.cpp | ik_llama.cpp | runs |", "| --- |" + 4 * " ---: |"]
    for shape, form in shapes:
        for test in tests:
            row = rows.get(f"{shape}-{form} {test}", {})
            if not {OURS, "llama.cpp"} <= row.keys():
                continue
            ours = f"{median(row[OURS]):,.1f}"
            name = f"{shape}-{form} {test}" if "@" in test else f"{shape}-{form}"
            if test.endswith("tg64") or ("@" in test and name in kept["bytes"]):
                shares = [rate * kept["bytes"][name] / 1e9 / plain for rate, plain in with_reading(row, OURS)]
                ours += f" ({statistics.median(shares):.2f})"
            cells = [f"{shape} {form}: {SIZE_TESTS[test]}", ours, *peer_cells(row, 1), runs_of(row)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_reading(row: dict[str, list[dict[str, float]]], engine: str) -> list[tuple[float, float]]:
    """(tokens per second, read bandwidth in GB/s) of an engine's runs that have both; older rows use separate lists."""
    apart = row.get(f"read GB/s {engine}") or row.get("read GB/s") or []
    pairs = []
    for run, read in zip_longest(row[engine], apart[: len(row[engine])]):
        if "read_before" in run:
            pairs.append((run["value"], (run["read_before"] + run["read_after"]) / 2))
        elif read is not None:
            pairs.append((run["value"], read["value"]))
    return pairs


def multiple(row: dict[str, list[dict[str, float]]], peer: str) -> float:
    """Our speed over a peer's: median over pairs of runs with alike read bandwidth, else the ratio of medians."""
    ours, theirs = with_reading(row, OURS), with_reading(row, peer)
    pairs = [a / b for a, near in ours for b, read in theirs if abs(near / read - 1) < ALIKE]
    return statistics.median(pairs) if pairs else median(row[OURS]) / median(row[peer])


def runs_of(row: dict[str, list[dict[str, float]]]) -> str:
    """Number of runs behind a row: ours, and the peers' if they have fewer."""
    ours, others = len(row[OURS]), min(len(row[name]) for name in PEERS if name in row)
    return str(ours) if ours == others else f"{ours}; {others}"


def peer_cells(row: dict[str, list[dict[str, float]]], digits: int = 0) -> list[str]:
    """One cell per peer: its tokens per second, and our multiple."""
    return [f"{median(row[peer]):,.{digits}f} ({multiple(row, peer):.2f} ×)" if peer in row else "" for peer in PEERS]


def table(kept: dict[str, Any]) -> str:
    """Markdown table of the real files: all engines, our multiples, and the targets relative to llama.cpp."""
    rows = kept["rows"]
    lines = ["| | localllm | llama.cpp | ik_llama.cpp | target |", "| --- | ---: | ---: | ---: | --- |"]
    names = {"pp512": "prefill, 512 tokens", "tg128": "decode, 128 tokens", "tg64 x8": "eight streams together"}
    for model, form in MODELS.items():
        one = 0.0  # one stream: the row before that of several
        for test, shown in names.items():
            row = rows.get(f"{model} {test}", {})
            least = LINES[model].get(test)
            if "llama.cpp" not in row or not (least or one):
                continue
            ours = median(row[OURS])
            line = f"≥ {least:.1f} ×" if least else f"≥ {STREAMS_LINE} × one stream: {ours / one:.2f} ×"
            one = ours
            lines.append(f"| {model} ({form}): {shown} | {ours:,.0f} tok/s | {' | '.join(peer_cells(row))} | {line} |")
    hogged, quiet = rows.get("smollm2 tg64 beside a busy process"), rows.get("smollm2 tg64")
    if hogged and quiet:
        ours, alone = median(hogged[OURS]), median(quiet[OURS])
        line = f"≥ {HOG_LINE} × the {alone:,.0f} tok/s without it: {ours / alone:.2f} ×"
        cells = f"{ours:,.0f} tok/s | {' | '.join(peer_cells(hogged))} | {line}"
        lines.append(f"| smollm2: decode, another process busy on one of the cores | {cells} |")
    first = rows.get("smollm2 first token s")
    if first:
        lines.append(f"| smollm2: command to first token | {median(first['localllm']):.1f} s | | | ≤ 2.5 s |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
