"""This machine: Measure prefill, decode and time to first token"""

from __future__ import annotations

import csv
import json
import random
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm.cli.attach import fake_engine
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import one_of, picked
from localllm.cli.frame.options import LoadFlags, Model, numbers, read_text
from localllm.cli.names import choose
from localllm.errors import ConfigError
from localllm.terminal import clean_line, gib

if TYPE_CHECKING:
    from localllm.bench import BenchOptions, BenchResult
    from localllm.llm.llm import LLM

FAILED = 11
FORMS = ("table", "md", "csv", "json", "jsonl")


@command(
    "localllm bench smollm2",
    "localllm bench qwen -p 512 -n 128 -d 0,4k -r 5",
    "localllm bench smollm2 --against llama.cpp",
    "localllm bench smollm2 --against http://127.0.0.1:8080",
    "localllm bench smollm2 --check 60 --json",
)
def bench(
    env: Env,
    model: Model,
    prompt_tokens: Annotated[int, Option("-p", metavar="N", min=1, help="Prompt length in tokens.")] = 512,
    output_tokens: Annotated[int, Option("-n", metavar="N", min=2, help="Tokens to generate.")] = 128,
    depths: Annotated[str, Option("-d", metavar="N,N", help="Tokens already in the context: 0,4k.")] = "0",
    repeat: Annotated[int, Option("-r", metavar="N", min=1, max=100, help="Repetitions.")] = 3,
    warmup: Annotated[int, Option(metavar="N", min=0, max=100, help="Warm-up runs, not counted.")] = 1,
    concurrency: Annotated[
        str | None, Option(metavar="N,N", help="Sequences decoded (or requests sent) at once: 1,4.")
    ] = None,
    against: Annotated[
        str | None,
        Option(
            metavar="llama.cpp|ik_llama.cpp|transformers|URL",
            help="Alternate with another engine and compare.",
        ),
    ] = None,
    peer_python: Annotated[
        Path | None, Option(metavar="PATH", help="Python that has the other engine installed.")
    ] = None,
    key_file: Annotated[Path | None, Option(metavar="PATH", help="File with the API key for --against URL.")] = None,
    trace: Annotated[Path | None, Option(metavar="FILE", help="Write a Chrome trace of one step.")] = None,
    load: LoadFlags = LoadFlags(),
    output: Annotated[str, Option("-o", metavar="table|md|csv|json|jsonl", help="Output format.")] = "table",
    save: Annotated[bool, Option("--save/--no-save", help="Keep the result for the planner.")] = True,
    check: Annotated[float | None, Option(metavar="TPS", help="Exit 11 if decoding is slower than this.")] = None,
) -> int:
    """Measure prefill, decode and time to first token, like llama-bench: medians with standard deviation.

    Against llama.cpp or transformers, both engines run the same tests on the same files, alternating. Against a server,
    both get the same requests (chat: 512 tokens in, 128 out; agent: 256 in, 16 out), 1 to 32 at a time. Prompts are
    random words. Their answers repeat, so speculation stays off unless --speculation or --draft turns it on.
    """
    from localllm import bench as benches
    from localllm.bench.peer import PACKAGES

    if fake_engine():
        raise ConfigError("the scripted engine cannot be measured", "`unset LOCALLLM_ENGINE`")
    one_of("-o", output, FORMS, "localllm bench MODEL -o md")
    if check is not None and not 0 < check < float("inf"):
        raise ConfigError(f"--check must be a number of tokens per second above 0, not {check:g}", "--check 60")
    at_url = against is not None and "://" in against
    if against is not None and not at_url and against not in PACKAGES:
        raise ConfigError(
            f"--against must be a URL or one of {', '.join(PACKAGES)}, not {against!r}", "--against llama.cpp"
        )
    streams = tuple(map(int, numbers(concurrency or ("1,8,16,32" if at_url else "1"), "--concurrency", 1, "1,4")))
    depth_tokens = tuple(map(int, numbers(depths, "-d", 0, "0,4k")))
    options = benches.BenchOptions(prompt_tokens, output_tokens, depth_tokens, repeat, warmup, streams)
    asked = load.settings() | {"engine.max_parallel": max(streams)}
    if load.speculation is None and load.draft is None:
        # answers to random words repeat: with speculation smollm2 shows 400 to 650 tok/s, not 290
        asked["engine.speculation"] = "off"
    config = env.settings(asked)
    if config.engine.packed_store == "auto":  # weights written to disk between two runs would slow the second one down
        config = env.settings(asked | {"engine.packed_store": 0})
    choice = choose(env, config, model)
    from localllm.cli.loading import load_llm, within_models

    config = within_models(env, config, [choice])
    with load_llm(env, choice, config.engine) as llm:
        result = _measure(env, llm, options, against, peer_python, key_file)
        result.command = shlex.join(["localllm", *sys.argv[1:]])
        if save and (result.rows or result.load):
            _save(env, result)
        _print(env, result, "json" if env.console.as_json else output)
        if trace is not None:
            from localllm.bench.trace import write_trace

            write_trace(llm, trace, benches.words(llm, random.Random(0), 16))
            env.console.say(f"wrote one decode step to {clean_line(str(trace))}: open it in ui.perfetto.dev")
    slowest = min((row.tps for row in result.rows if row.test.startswith("tg")), default=0.0)
    if check is not None and slowest < check:
        env.console.say(f"decoding at {slowest:.1f} tok/s is slower than --check {check:g}")
        return FAILED
    return 0


def _measure(
    env: Env, llm: LLM, options: BenchOptions, against: str | None, python: Path | None, key_file: Path | None
) -> BenchResult:
    from localllm import bench as benches

    def tell(test: str) -> None:
        env.console.say(f"measuring {test}")

    if against is None:
        return benches.run_bench(llm, options, tell)
    if "://" in against:
        from localllm.bench.endpoint import Endpoint
        from localllm.bench.load import run_load

        key = read_text(key_file, "--key-file").strip() if key_file is not None else None
        with closing(Endpoint(against, key=key)) as endpoint:
            return run_load(llm, endpoint, options, tell)
    from localllm.bench.peer import Peer

    needed = max(options.depths) + options.prompt_tokens + options.output_tokens + 1
    limits: dict[str, Any] = {"threads": llm.plan.threads, "ctx": needed, "streams": max(options.concurrency)}
    interpreter = None if python is None else str(python)
    with closing(Peer(against, llm.path, **limits, python=interpreter)) as peer:
        return benches.run_bench(llm, options, tell, peer)


def _save(env: Env, result: BenchResult) -> None:
    """Keep the result; where that fails, it is still printed."""
    from localllm import bench as benches

    try:
        env.console.say(f"saved to {benches.save(result)}")
    except OSError as error:
        env.console.warn(f"the result could not be saved: {error.strerror or error}")


def _print(env: Env, result: BenchResult, form: str) -> None:
    console = env.console
    if form == "json":
        console.write_json(result.to_json())
        return
    records = result.load or [_record(result, index) for index in range(len(result.rows))]
    if form == "jsonl":
        for row in result.load or map(asdict, result.rows):
            console.raw(json.dumps({"model": Path(result.model).name, **row}) + "\n")
        return
    if form == "csv":
        writer = csv.DictWriter(console.stdout, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return
    columns, rows = _load_cells(records) if result.load else _test_cells(result, records)
    right = columns[3 if result.load else 2 :]
    if form == "md":
        marks = ["---:" if name in right else "---" for name in columns]
        for cells in (columns, None, *rows):
            line = f"|{'|'.join(marks)}|" if cells is None else f"| {' | '.join(map(clean_line, cells))} |"
            console.line(line)
    else:
        console.table(columns, rows, right=right)
    for line in _notes(result):
        console.line(clean_line(line))


def _record(result: BenchResult, index: int) -> dict[str, Any]:
    """Make one test a row of a CSV file."""
    row, peer = result.rows[index], result.peer
    record = {"model": Path(result.model).name} | picked(row, "test tps spread ttft_ms")
    if peer is not None:
        record["peer"] = peer.name
        record |= {f"peer_{name}": value for name, value in picked(peer.rows[index], "tps spread ttft_ms").items()}
    return record


def _test_cells(result: BenchResult, records: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    columns = ("model", "test", "tok/s", "TTFT")
    rows = [[r["model"], r["test"], _rate(r), _ms(r["ttft_ms"])] for r in records]
    if result.peer is None:
        return columns, rows
    for r, row in zip(records, rows, strict=True):
        ratio = result.ratio(r["test"])
        row += [_rate(r, "peer_"), _ms(r["peer_ttft_ms"]), f"{ratio:.2f}" if ratio else ""]
    return (*columns, f"{result.peer.name} tok/s", "its TTFT", "ratio"), rows


def _load_cells(records: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    return ("engine", "shape", "at once", "tok/s", "TTFT", "TPOT", "failed"), [
        [r["engine"], r["shape"], str(r["concurrency"]), _rate(r), _ms(r["ttft_ms"]), f"{r['tpot_ms']:,.1f} ms"]
        + [str(r["failed"])]
        for r in records
    ]


def _rate(record: dict[str, Any], whose: str = "") -> str:
    return f"{record[f'{whose}tps']:,.1f} ± {record[f'{whose}spread']:.1f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} ms"


def _notes(result: BenchResult) -> Sequence[str]:
    versions = " · ".join(f"{key} {value}" for key, value in result.versions.items() if value != "absent")
    memory = f"weights {gib(result.weight_bytes)} · anonymous memory {gib(result.rss_anon_bytes)}"
    lines = [
        result.truth_line,
        f"{memory} · peak {gib(result.peak_rss_bytes)} · loaded in {result.load_s:.2f} s",
        f"{versions} · {result.date} · {result.command}",
    ]
    if result.peer is not None:
        theirs = " · ".join(f"{key} {value}" for key, value in result.peer.versions.items())
        peak = f"peak {gib(result.peer.peak_rss_bytes)}" if result.peer.peak_rss_bytes else "peak unknown"
        lines.insert(2, " · ".join(part for part in (f"{result.peer.name}: {peak}", theirs) if part))
    return lines
