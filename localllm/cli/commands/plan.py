"""This machine: What fits here: memory, context, expected speed"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.cli.frame.options import (
    Draft,
    Experts,
    HardwareFlags,
    Kv,
    Mmproj,
    Split,
    TensorParallel,
    model_argument,
    numbers,
)
from localllm.cli.names import local, opened
from localllm.cli.plan_view import FIRST_TOKEN_AT, Row, Sheet, Subject, option_line, show
from localllm.config import UserConfig
from localllm.errors import ConfigError, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.terminal import gib, rate

if TYPE_CHECKING:
    from localllm.hub.catalog import Candidate, DownloadLimit
    from localllm.plan import fit
    from localllm.plan.planner import Planner

RANK = "device weight_bytes kv_bytes work_bytes margin_bytes have_bytes span"


@command(
    "localllm plan",
    "localllm plan qwen",
    "localllm plan smollm2 --ctx 8k,32k --json",
    "localllm plan llama --gpu 'RTX 5090' --kv fp8",
    "localllm plan qwen --vram 48G --bw 864 -v",
    "localllm plan llama --gpu '2x 3090'",
)
def plan(
    env: Env,
    models: Annotated[
        list[str] | None,
        model_argument("[MODEL...]", "Models or families (qwen); by default those on this machine."),
    ] = None,
    ctx: Annotated[str | None, Option(metavar="N,N", help="Context windows to plan for: 8k,32k, max, auto.")] = None,
    quant: Annotated[str | None, Option(metavar="Q", help="Only files in this format: Q4_K_M, fp8.")] = None,
    kv: Kv = None,
    draft: Draft = None,
    mmproj: Mmproj = None,
    experts: Experts = None,
    tensor_parallel: TensorParallel = None,
    split: Split = None,
    batch: Annotated[
        int | None, Option(metavar="N", min=1, max=1024, help="Requests computed at the same time.")
    ] = None,
    hardware: HardwareFlags = HardwareFlags(),
    target_tps: Annotated[float, Option(metavar="N", min=0, help="Give ★ only to models at least this fast.")] = 0.0,
    every: Annotated[bool, Option("--all", help="Every file of a model, not just the best one.")] = False,
) -> int:
    """Say what fits: memory, context and expected speed. Exits 5 when a named model does not fit, 12 when this version
    cannot run it.

    ≈ marks an estimate: bandwidth times an efficiency, divided by the bytes read per token. ✓ marks a speed measured on
    this machine, in use or by `localllm bench`, which also corrects the estimates for other models. -v prints the
    formulas with their numbers.
    """
    from localllm import hub
    from localllm.plan import fit

    config = env.settings(
        {"engine.kv": kv, "engine.draft": draft, "engine.experts": experts, "engine.max_parallel": batch}
        | {"engine.tensor_parallel": tensor_parallel, "engine.split": split, "engine.mmproj": mmproj}
    )
    windows = numbers("8k,32k" if ctx is None else ctx, "--ctx", 16, "8k,32k", ("auto", "max"))
    planner, imagined = hardware.planner(config)
    if models:
        planner = fit.with_draft(planner)
    limit = None if imagined else hub.download_limit(config)
    with ExitStack() as stack:
        subjects = [
            s for s in _subjects(env, config, models, planner, limit, stack) if not quant or _has_format(s, quant)
        ]
        if quant and not subjects:
            raise ConfigError(f"none of these models is stored as {quant}", "drop --quant to see the formats there are")
        rows = tuple(_row(s, window, planner) for s in subjects for window in windows)
        options = _options(subjects, planner)
        advised = _advised(options, models, planner, limit, target_tps)
    star = _star(advised, options, rows if ctx else (), planner)
    shown = subjects if every or quant else _best_files(subjects, options, advised)
    hints = _hints(env, models, advised, options, limit, hardware.gpu if hardware.vram is None else None)
    words = (*hints, *_splits(shown if models else (), planner))
    given = {"--config": env.options.config, "--device": env.options.device, "--kv": kv, "--draft": draft}
    given |= {"--mmproj": mmproj, "--experts": experts, "--tensor-parallel": tensor_parallel, "--split": split}
    flags = {option: str(value) for option, value in given.items() if value is not None}
    command = _next(star, flags, batch) if star is not None else ""
    sheet = Sheet(planner, rows, windows, star, imagined, target_tps, tuple(shown), words, command)
    listed = [_json(row, star is not None and row.subject is star.subject, flags) for row in rows]
    if not env.console.emit("plan/1", {"machine": asdict(planner.machine), "rows": listed}):
        show(env, sheet)
    if any(all(s.needs for s in subjects if s.asked == name) for name in models or ()):
        return UnsupportedModel.exit_code
    return 5 if any(not any(r.fits for r in rows if r.subject.asked == name) for name in models or ()) else 0


def _subjects(
    env: Env,
    config: UserConfig,
    names: list[str] | None,
    planner: Planner,
    limit: DownloadLimit | None,
    stack: ExitStack,
) -> Iterator[Subject]:
    """The models that the names refer to; without names, the local ones, then the best of each family not held here."""
    from localllm import hub
    from localllm.hub import catalog
    from localllm.plan import fit

    paths = {model.name.casefold(): model.path for model in hub.list_local() if model.supported}
    if not names:
        here = [model for model in hub.list_local() if model.supported and model.facts]
        for model in here:
            assert model.facts is not None
            entry = fit.entry_of(model)
            yield Subject(
                model.name, model.name, model.format, model.facts, True, base=not model.chat, path=model.path,
                entry=entry,
            )  # fmt: skip
        held = {model.name.casefold() for model in here}
        plans: fit.Plans = {}
        made = fit.advised(planner, limit, plans)
        wanted = [one.model for one in (made.best, made.fast, made.largest) if one and not one.local] if made else []
        choices = [fit.recommended(family, planner, limit, plans) for family in catalog.families()]
        listed = dict.fromkeys([*(choice.best for choice in choices if choice), *wanted])
        yield from _candidates([one for one in listed if one.spec.casefold() not in held], "", {})
        return
    for name in names:
        target = config.aliases.get(name, name)
        if catalog.members(target):
            yield from _candidates(fit.runnable(target, planner), name, paths)
            continue
        resolved = local(env, config, name, ModelNotFound)
        checkpoint = stack.enter_context(opened(resolved, config.engine.mmproj))
        found = checkpoint.facts
        shown = checkpoint.path.name if resolved.kind == "path" else resolved.name
        size = (found.architecture, found.num_params, found.weight_bytes, found.max_context)
        yield Subject(
            resolved.name, shown, found.stored_format, found, True, base=not found.has_chat_template, asked=name,
            path=checkpoint.path, entry=catalog.candidate_of(resolved.name, *size),
        )  # fmt: skip


def _candidates(members: Iterable[Candidate], asked: str, held: Mapping[str, Path]) -> Iterator[Subject]:
    from localllm.plan import fit

    for candidate in members:
        facts = fit.facts_of(candidate)
        if facts is not None:
            path = held.get(candidate.spec.casefold())
            size = candidate.download_bytes if path is None else 0
            yield Subject(
                candidate.spec, candidate.name, candidate.format, facts, path is not None, size, asked=asked,
                path=path, entry=candidate, needs=candidate.needs,
            )  # fmt: skip


def _has_format(subject: Subject, quant: str) -> bool:
    wanted = quant.casefold()
    kinds = {"int4": ("awq", "gptq", "int4", "q4"), "w4a16": ("awq", "gptq", "int4")}.get(wanted, (wanted,))
    return any(kind in subject.quant.casefold() for kind in kinds)


def _row(subject: Subject, window: int | str, planner: Planner) -> Row:
    from localllm.plan import fit

    if subject.gpu_only and fit.device_kind(planner) == "cpu":
        return Row(subject, window, None, fit.GPU_ONLY)
    try:
        planner = planner.having(ctx=window)
        if subject.path is not None:
            planner = fit.with_drafter_beside(planner, subject.facts, subject.path)
        made = planner.plan_within(subject.facts, subject.path or "")
    except LocalLLMError as error:
        return Row(subject, window, None, error.message, error.fixes)
    if made.fits:
        return Row(subject, window, made)
    refusal = made.error(subject.name)
    return Row(subject, window, made, refusal.message, refusal.fixes)


def _options(subjects: Iterable[Subject], planner: Planner) -> dict[Subject, fit.Option]:
    """Plan each subject with the options it would be started with."""
    from localllm.plan import fit

    found = {}
    for subject in subjects:
        made = _row(subject, "auto", planner).plan
        if made is not None and subject.entry is not None:
            found[subject] = fit.option_of(subject.entry, made, planner, subject.local)
    return found


def _advised(
    options: Mapping[Subject, fit.Option],
    names: list[str] | None,
    planner: Planner,
    limit: DownloadLimit | None,
    target_tps: float,
) -> dict[str, Subject]:
    """Pick what to take (`best`) by the rule of `chat` and `pull`, and alternatives (`fast`, `largest`)."""
    from localllm.hub import catalog
    from localllm.plan import fit

    most = limit.num_bytes if limit else float("inf")
    families, asked = catalog.families(), [name.casefold() for name in names or ()]
    usable = {
        one: subject
        for subject, one in options.items()
        if not (subject.base or subject.needs)
        and (names or subject.local or (subject.entry and subject.entry.family in fit.GENERAL))
        and (subject.download_bytes <= most or not any(name in families for name in asked))
        and one.plan.pace >= target_tps
    }
    made = fit.pick(usable, planner)
    if made is None:
        return {}
    return {name: usable[one] for name, one in made._asdict().items() if one is not None}


def _star(
    advised: Mapping[str, Subject], options: Mapping[Subject, fit.Option], rows: tuple[Row, ...], planner: Planner
) -> Row | None:
    """The recommended row: at a requested window, else with the options it would be started with."""
    best = advised.get("best")
    if best is None:
        return None
    asked = [row for row in rows if row.subject is best and row.fits]
    return asked[-1] if asked else _row(best, "auto", planner)


def _next(star: Row, flags: Mapping[str, str], batch: int | None) -> str:
    """The command that starts the recommended model as it was planned."""
    ctx = {"--ctx": str(star.plan.ctx)} if star.plan is not None and star.wished != "auto" else {}
    typed = shlex.quote(star.subject.name)
    if batch is not None:
        return _with_flags(f"localllm serve {typed}", {**ctx, **flags, "--parallel": str(batch)})
    return _with_flags(f"localllm chat {typed}", {**ctx, **flags})


def _with_flags(command: str, flags: Mapping[str, str]) -> str:
    """Add the flags that the command does not set itself; what only splits a model over GPUs not to one for the CPU."""
    words = shlex.split(command)
    kept = {option: value for option, value in flags.items() if option not in words}
    if words[-2:] == ["--device", "cpu"]:
        kept = {option: value for option, value in kept.items() if option not in ("--tensor-parallel", "--split")}
    return " ".join([command, *(f"{option} {shlex.quote(value)}" for option, value in kept.items())])


def _best_files(
    subjects: Iterable[Subject], options: Mapping[Subject, fit.Option], advised: Mapping[str, Subject]
) -> list[Subject]:
    """One file per model: the advised ones first, then local ones, then by size; every local file is kept."""
    best: dict[str, Subject] = {}
    value = lambda s: (options[s].plan.fits, options[s].worth) if s in options else (False, -math.inf)  # noqa: E731
    for subject in subjects:
        key = subject.name if subject.local else subject.shown
        if key not in best or value(subject) > value(best[key]):
            best[key] = subject
    first = list(dict.fromkeys(advised.values()))
    order = lambda s: (not s.local, not value(s)[0], -s.facts.num_params)  # noqa: E731
    rest = sorted((s for s in best.values() if s not in first), key=order)
    return [*first, *(subject for subject in rest if subject.shown not in {s.shown for s in first})]


def _hints(
    env: Env,
    names: list[str] | None,
    advised: Mapping[str, Subject],
    options: Mapping[Subject, fit.Option],
    limit: DownloadLimit | None,
    gpu: str | None,
) -> Iterator[str]:
    """Yield alternatives: a faster and a larger model, one over the limit, newer models, other memory sizes."""
    from localllm.device.imagined import other_sizes
    from localllm.hub import catalog

    fast, largest = advised.get("fast"), advised.get("largest")
    if fast and fast is not largest:
        yield f"fastest good model: {option_line(fast, options[fast].plan)}"
    if largest:
        word = "fastest good model, and the largest that fits" if fast is largest else "largest that fits"
        yield f"{word}: {option_line(largest, options[largest].plan)}"
    best = advised.get("best")
    for name in names or ():
        members = catalog.members(env.config.aliases.get(name, name))
        over = [s for s in options if limit and s.asked == name and s.download_bytes > limit.num_bytes]
        over = [s for s in over if options[s].plan.fits and name.casefold() in catalog.families()]
        if over and best and options[missed := max(over, key=lambda s: options[s].worth)].worth > options[best].worth:
            yield f"{missed.shown} {missed.quant} is left out: its download exceeds the limit of {limit}"
        when = best.entry.released if best and best.entry else ""
        ranked = sorted(members, key=lambda c: (c.released, c.strength), reverse=True)
        newer = {c.name: c.title for c in ranked if c.needs and c.released > when}
        if newer and best and best.entry:
            yield f"{best.entry.title} dates from {when}; newer, for other engines: {', '.join([*newer.values()][:4])}"
        if newer:
            name, title = next(iter(newer.items()))
            yield f"this version cannot run {title}; how to start it elsewhere: localllm doctor --for llama.cpp {name}"
    if sizes := other_sizes(gpu):
        listed = ", ".join(f"--vram {size:g}G" for size in sizes)
        yield f"this GPU also comes with other memory sizes: {listed}"


def _splits(subjects: Sequence[Subject], planner: Planner) -> Iterator[str]:
    """Yield what the first model needs on all GPUs together, for each way to split it."""
    from localllm.plan.placement import unusable

    machine, options = planner.machine, planner.options
    count = min(8, sum(not unusable(machine, gpu) for gpu in machine.gpus))
    if not subjects or count < 2 or options.tensor_parallel != 1 or options.device == "cpu":
        return
    subject = subjects[0]
    for split in ("tensor", "layers"):
        asked = f"--tensor-parallel {count} --split {split}"
        try:
            made = planner.having(device="cuda", tensor_parallel=count, split=split).plan(
                subject.facts, subject.path or ""
            )
        except LocalLLMError as error:
            yield f"{subject.shown} {asked}: {error.message}"
            continue
        sizes = " + ".join(f"{gib(rank.need_bytes, 1)} of {gib(rank.have_bytes, 1)}" for rank in made.ranks)
        window = f"context {made.ctx:,}, ≈ {rate(made.decode_tps)} tok/s" if made.fits else "does not fit"
        assumed = "; link assumed" if made.link_assumed else ""
        yield f"{subject.shown} {subject.quant} {asked}: {window}; {sizes}{assumed}"


def _json(row: Row, star: bool, flags: Mapping[str, str]) -> dict[str, Any]:
    from localllm.plan.quality import measured

    subject, made = row.subject, row.plan
    base = picked(subject, "quant local download_bytes") | {"model": subject.name, "recommended": star}
    base |= {"fits": row.fits, "needs": subject.needs or None, "reason": row.reason or None}
    base["alternatives"] = [
        {"cmd": _with_flags(command, flags) if command.startswith("localllm chat ") else command, "note": note}
        for command, note in row.fixes
    ]
    if made is None:
        return base | {"ctx": row.wished, "reasons": []}
    pool = made.kv_bytes - made.sequence_bytes if row.fits else 0  # memory left over holds pages for more requests
    return base | {
        **picked(made, "device ctx kv have_bytes max_ctx"),
        "need_bytes": made.least_bytes if row.fits else made.need_bytes,
        "least_bytes": made.least_bytes,
        "host": picked(made, "host_experts host_bytes host_read_bytes stream_rows") if made.host_experts else None,
        "ranks": [picked(rank, RANK) for rank in made.ranks] or None,
        "pool_bytes": pool,
        "batch": made.max_parallel,
        "parts": made.parts() | {"kv": made.kv_bytes - pool},
        "terms": made.terms() | {"kv": made.kv_bytes - pool},
        "converted": made.quant or None,
        "decode_tps": {
            "value": round(made.decode_tps, 1),
            "at_full_ctx": round(made.decode_tps_full, 1),
            "basis": made.basis,
            "eta": round(made.eta, 3),
        },
        "prefill_tps": round(made.prefill_tps, 1),
        "first_token_s": round(made.first_token_s(min(made.ctx, FIRST_TOKEN_AT)), 2),
        "quality": measured(subject.path, made.kv, row.weights) if subject.path else None,
        "limit": "memory",
        "reasons": list(made.reasons),
    }
