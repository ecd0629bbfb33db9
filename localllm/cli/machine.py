"""`localllm doctor`, `plan`, `bench`: what this machine is, what fits on it, how fast it is."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.config.kinds import parse_tokens
from localllm.errors import ConfigError, LocalLLMError
from localllm.terminal import clean_line, gib, tokens_short

from . import params
from .command import Env, command
from .names import choose, opened, resolve
from .session import fake_engine, llm_options

if TYPE_CHECKING:
    from localllm.bench import BenchResult
    from localllm.device import MachineFacts
    from localllm.plan import Plan

FAILED = 11
_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("–", "dim")}


@command("localllm doctor", "localllm doctor --json", "localllm doctor --only gpu,ram")
def doctor(
    env: Env,
    only: Annotated[str | None, typer.Option(metavar="ID,...", help="Only these checks, or groups of them.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the checks.")] = False,
) -> int:
    """Check hardware, software and settings; every finding comes with the command that cures it.

    Exit 0 also with warnings, 11 with a failure. Takes under two seconds and loads no torch.
    """
    from localllm import doctor as checks

    console = env.console
    if listing:
        for name in checks.CHECKS:
            console.line(name)
        return 0
    survey = checks.Survey()
    found = checks.run_checks([name for name in (only or "").split(",") if name], survey)
    if console.as_json:
        console.write_json(checks.report(found, survey.machine))
    else:
        width = max((len(check.id) for check in found), default=0)
        group = ""
        for check in found:
            if check.group != group:
                group = check.group
                console.line(console.style(group.capitalize(), "bold"))
            mark, color = _MARKS[check.status]
            detail = f"   {clean_line(check.detail)}" if check.detail else ""
            console.line(f"  {console.style(mark, color)} {check.id.ljust(width)}  {clean_line(check.title)}{detail}")
            if check.fix:
                console.line(f"    {' ' * width}  {console.style('fix:', 'dim')} {clean_line(check.fix)}")
        console.line(checks.verdict(found))
    counts = checks.summary(found)
    return FAILED if counts["fail"] or (strict and counts["warn"]) else 0


@command("localllm plan", "localllm plan smollm2 --ctx 8k,32k", "localllm plan qwen --json")
def plan(
    env: Env,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL...]", help="Local models; all of them without a name.", autocompletion=params.complete_model
        ),
    ] = None,
    ctx: Annotated[str | None, typer.Option("--ctx", metavar="N,N", help="Context windows to weigh: 8k,32k.")] = None,
    kv: params.Kv = None,
) -> int:
    """Say what fits here: memory, context and expected speed. Exit 5 when a model that was named does not fit."""
    from localllm import hub
    from localllm.device import machine

    config = env.settings({"engine.kv": kv})
    facts = machine()
    windows = _windows(ctx)
    names = list(models or [])
    rows: list[dict[str, Any]] = []
    local = names or [m.name for m in hub.list_local() if m.supported]
    for name in local:
        resolved = resolve(env, config, name)
        if resolved.path is None:
            raise ConfigError(
                f"{clean_line(resolved.name)} is not on this machine", f"localllm pull {clean_line(name)}"
            )
        with opened(resolved) as checkpoint:
            rows += _plan_rows(resolved.name, checkpoint.facts, facts, windows, config.engine)
    console = env.console
    if console.as_json:
        console.emit("plan/1", {"machine": asdict(facts), "rows": rows})
    else:
        console.say(_machine_line(facts))
        columns = ("MODEL", "FORMAT", "CTX", "WEIGHTS", "KV", "WORK", "NEED", "FREE", "MAX CTX", "SPEED", "")
        console.table(columns, [_plan_cells(row) for row in rows], right=columns[2:9])
        if not rows:
            console.say("no models here yet: localllm pull smollm2")
        for reason in dict.fromkeys(line for row in rows for line in row["reasons"]) if console.verbose else ():
            console.say(f"  {clean_line(reason)}")
    return 5 if names and any(not row["fits"] for row in rows) else 0


def _windows(text: str | None) -> list[int | str]:
    if text is None:
        return ["auto"]
    try:
        return [part if part in ("auto", "max") else int(parse_tokens(part)) for part in text.split(",") if part]
    except ValueError:
        raise ConfigError(f"--ctx is {text!r}: expected numbers of tokens such as 8k,32k", "--ctx 8k,32k") from None


def _plan_rows(
    name: str, model: Any, machine: MachineFacts, windows: list[int | str], engine: Any
) -> list[dict[str, Any]]:
    from localllm.plan import PlanOptions
    from localllm.plan import plan as make_plan

    rows = []
    for window in windows:
        options = PlanOptions(
            device=engine.device, dtype=engine.dtype, kv=engine.kv, ctx=window, max_parallel=engine.max_parallel
        )
        try:
            rows.append(_plan_row(name, model.stored_format, make_plan(model, machine, options)))
        except LocalLLMError as error:
            rows.append(
                {
                    "model": name,
                    "quant": model.stored_format,
                    "ctx": window,
                    "fits": False,
                    "reason": error.message,
                    "reasons": [],
                }
            )
    return rows


def _plan_row(name: str, stored: str, made: Plan) -> dict[str, Any]:
    return {
        "model": name,
        "quant": stored,
        "device": made.device,
        "ctx": made.ctx,
        "kv": made.kv,
        "batch": made.max_parallel,
        "need_bytes": made.need_bytes,
        "have_bytes": made.have_bytes,
        "parts": made.parts(),
        "fits": made.fits,
        "max_ctx": made.max_ctx,
        "decode_tps": {
            "value": round(made.decode_tps, 1),
            "at_full_ctx": round(made.decode_tps_full, 1),
            "basis": made.basis,
        },
        "reason": None if made.fits else made.error(name).message,
        "reasons": list(made.reasons),
    }


def _plan_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "need_bytes" not in row:
        return (row["model"], row["quant"], str(row["ctx"]), "", "", "", "", "", "", "–", f"✗ {row['reason']}")
    parts, speed = row["parts"], row["decode_tps"]
    mark = "✓" if speed["basis"] == "measured" else "≈"
    return (
        row["model"],
        row["quant"],
        tokens_short(row["ctx"]),
        gib(parts["weights"]),
        gib(parts["kv"]),
        gib(parts["work"] + parts["margin"]),
        gib(row["need_bytes"]),
        gib(row["have_bytes"]),
        tokens_short(row["max_ctx"]),
        f"{mark} {speed['value']:.0f} → {speed['at_full_ctx']:.0f} t/s",
        "✓ fits" if row["fits"] else f"✗ {gib(row['need_bytes'] - row['have_bytes'])} short",
    )


def _machine_line(facts: MachineFacts) -> str:
    gpus = [f"{gpu.name}, {gib(gpu.free_bytes)} free" for gpu in facts.gpus] or ["no GPU"]
    cpu = f"{facts.cpu.name}, {facts.cpu.cores_usable} cores"
    return clean_line(
        f"{' · '.join(gpus)} · {cpu} · {gib(facts.ram_available_bytes)} of {gib(facts.ram_total_bytes)} RAM free"
    )


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
