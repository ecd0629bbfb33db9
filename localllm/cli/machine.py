"""`localllm bench`: how fast this machine is."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.config.kinds import parse_tokens
from localllm.errors import ConfigError
from localllm.terminal import clean_line, gib

from . import params
from .command import Env, command
from .names import choose
from .session import fake_engine, llm_options

if TYPE_CHECKING:
    from localllm.bench import BenchResult

FAILED = 11


# --- bench -----------------------------------------------------------------------------------------------------------


@command(
    "localllm bench smollm2",
    "localllm bench qwen -p 512 -n 128 -d 0,4k -r 5",
    "localllm bench smollm2 --check 60 --json",
)
def bench(
    env: Env,
    model: params.Model,
    prompt_tokens: Annotated[int, typer.Option("-p", metavar="N", min=1, help="Prompt length to read.")] = 512,
    output_tokens: Annotated[int, typer.Option("-n", metavar="N", min=2, help="Tokens to generate.")] = 128,
    depths: Annotated[str, typer.Option("-d", metavar="N,N", help="Context already there: 0,4k.")] = "0",
    repeat: Annotated[int, typer.Option("-r", metavar="N", min=1, max=100, help="Repetitions.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, max=100, help="Runs not counted.")] = 1,
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Sequences decoded together: 1,4.")] = "1",
    ctx: params.Ctx = None,
    kv: params.Kv = None,
    dtype: params.Dtype = None,
    threads: params.Threads = None,
    output: Annotated[str, typer.Option("-o", metavar="table|md|csv|json|jsonl", help="Form of the result.")] = "table",
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the result for the planner.")] = True,
    check: Annotated[float | None, typer.Option(metavar="TPS", help="Exit 11 when decoding is slower.")] = None,
) -> int:
    """Measure prefill, decode and time to first token, as llama-bench does: medians with standard deviation."""
    from localllm import bench as benches

    if fake_engine():
        raise ConfigError("the scripted engine cannot be measured", "`unset LOCALLLM_ENGINE`")
    if output not in ("table", "md", "csv", "json", "jsonl"):
        raise ConfigError(f"-o is {output!r}, it can be table, md, csv, json or jsonl", "localllm bench MODEL -o md")
    options = benches.BenchOptions(
        prompt_tokens, output_tokens, _numbers(depths, "-d"), repeat, warmup, _numbers(concurrency, "--concurrency", 1)
    )
    values = {"ctx": ctx, "kv": kv, "dtype": dtype, "threads": threads}
    config = env.settings(params.engine_flags(values) | {"engine.max_parallel": max(options.concurrency)})
    choice = choose(env, config, model)
    from .loading import load_llm

    llm = load_llm(env, choice, llm_options(env, config, ctx))
    with llm:
        result = benches.run_bench(llm, options, lambda test: env.console.say(f"measuring {test}"))
    result.command = f"localllm bench {choice.name} -p {prompt_tokens} -n {output_tokens} -d {depths} -r {repeat}"
    if save:
        env.console.say(f"saved to {benches.save(result)}")
    _print_bench(env, result, "json" if env.console.as_json else output)
    slowest = min((row.tps for row in result.rows if row.test.startswith("tg")), default=0.0)
    if check is not None and slowest < check:
        env.console.say(f"decoding at {slowest:.1f} tok/s is slower than --check {check:g}")
        return FAILED
    return 0


def _numbers(text: str, option: str, least: int = 0) -> tuple[int, ...]:
    try:
        numbers = tuple(int(parse_tokens(part)) for part in text.split(",") if part)
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        raise ConfigError(
            f"{option} is {text!r}: expected numbers such as {max(least, 1)},4", f"{option} {max(least, 1)}"
        )
    return numbers


def _print_bench(env: Env, result: BenchResult, form: str) -> None:
    console = env.console
    name = Path(result.model).name
    if form == "json":
        console.write_json(result.to_json())
        return
    if form == "jsonl":
        for row in result.rows:
            console.raw(json.dumps({"model": name, **asdict(row)}) + "\n")
        return
    columns = ("model", "test", "tok/s", "TTFT")
    cells = [
        (
            name,
            row.test,
            f"{row.tps:,.1f} ± {row.spread:.1f}",
            f"{row.ttft_ms:,.0f} ms" if row.ttft_ms is not None else "",
        )
        for row in result.rows
    ]
    if form == "csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("model", "test", "tps", "spread", "ttft_ms"))
        writer.writerows((name, row.test, row.tps, row.spread, row.ttft_ms) for row in result.rows)
        console.raw(out.getvalue())
        return
    if form == "md":
        console.line("| " + " | ".join(columns) + " |")
        console.line("|---|---|---:|---:|")
        for cell in cells:
            console.line("| " + " | ".join(clean_line(part) for part in cell) + " |")
    else:
        console.table(columns, cells, right=("tok/s", "TTFT"))
    versions = " · ".join(f"{key} {value}" for key, value in result.versions.items() if value != "absent")
    memory = f"weights {gib(result.weight_bytes)} · anonymous memory {gib(result.rss_anon_bytes)}"
    console.line(f"{clean_line(result.truth_line)}")
    console.line(f"{memory} · loaded in {result.load_s:.2f} s")
    console.line(f"{versions} · {result.date} · {clean_line(result.command)}")
