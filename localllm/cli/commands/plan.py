"""This machine: What fits here: memory, context, expected speed"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.cli.frame.options import Kv, model_argument, numbers
from localllm.cli.names import local, opened
from localllm.cli.plan_view import Row, Sheet, Subject, show
from localllm.config import UserConfig
from localllm.config.kinds import parse_bytes
from localllm.errors import ConfigError, LocalLLMError

if TYPE_CHECKING:
    from localllm.hub.catalog import DownloadLimit
    from localllm.plan.planner import Planner


@command(
    "localllm plan",
    "localllm plan qwen",
    "localllm plan smollm2 --ctx 8k,32k --json",
    "localllm plan llama --gpu 'RTX 5090' --kv fp8",
    "localllm plan qwen --vram 48G --bw 864 -v",
)
def plan(
    env: Env,
    models: Annotated[
        list[str] | None,
        model_argument("[MODEL...]", "Models, or families such as qwen; what is here without a name."),
    ] = None,
    ctx: Annotated[str | None, Option(metavar="N,N", help="Context windows to weigh: 8k,32k, max, auto.")] = None,
    quant: Annotated[str | None, Option(metavar="Q", help="Only files stored so: Q4_K_M, fp8.")] = None,
    kv: Kv = None,
    batch: Annotated[int | None, Option(metavar="N", min=1, max=1024, help="Requests computed side by side.")] = None,
    gpu: Annotated[str | None, Option(metavar="NAME", help="A card that is not here: 4090, h100.")] = None,
    vram: Annotated[str | None, Option(metavar="SIZE", help="A card with so much memory: 24G.")] = None,
    bw: Annotated[float | None, Option(metavar="GB/S", min=1, help="Its memory bandwidth: 1008.")] = None,
    ram: Annotated[str | None, Option(metavar="SIZE", help="As much RAM as this: 64G.")] = None,
    target_tps: Annotated[float, Option(metavar="N", min=0, help="★ is not given below this pace.")] = 0.0,
) -> int:
    """Say what fits: memory, context and expected speed. Exit 5 when a model that was named does not fit.

    ≈ is an estimate: bandwidth times an efficiency, divided by the bytes read per token. ✓ was measured on this machine
    by `localllm bench`, which also corrects the estimates of other models. -v prints the formulas with their numbers.
    """
    from localllm import hub
    from localllm.device import machine
    from localllm.device.imagined import imagined
    from localllm.plan.placement import chosen_device
    from localllm.plan.planner import Planner

    config = env.settings({"engine.kv": kv, "engine.max_parallel": batch})
    windows = numbers("8k,32k" if ctx is None else ctx, "--ctx", 16, "8k,32k", ("auto", "max"))
    real = machine()
    facts = imagined(
        real,
        gpu=gpu,
        vram_bytes=_size(vram, "--vram"),
        bandwidth=bw * 1e9 if bw else None,
        ram_bytes=_size(ram, "--ram"),
    )
    planner = Planner.here(config.engine, facts)
    if config.engine.device == "auto":  # no falling back to the CPU row by row: a table has one device
        planner = planner.having(device=chosen_device(facts, "auto").device)
    limit = hub.download_limit(config, disk=facts is real)
    with ExitStack() as stack:
        subjects = [s for s in _subjects(env, config, models, planner, limit, stack) if not quant or _same(s, quant)]
        if quant and not subjects:
            raise ConfigError(f"nothing here is stored as {quant}", "leave --quant out to see what there is")
        rows = tuple(_row(s, window, planner) for s in subjects for window in windows)
        best = _star(rows, planner, limit, target_tps)
        star = best and (best if ctx else _row(best.subject, "auto", planner))
    sheet = Sheet(planner, rows, windows, star, facts is not real, target_tps)
    listed = [_json(row, star is not None and row.subject is star.subject) for row in rows]
    if not env.console.emit("plan/1", {"machine": asdict(facts), "rows": listed}):
        show(env, sheet)
    return 5 if any(not any(r.fits for r in rows if r.subject.asked == name) for name in models or ()) else 0


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        size = int(parse_bytes(text))
    except ValueError:
        size = 0
    if size < 1 << 28:
        raise ConfigError(f"{option} is {text!r}: expected a size such as 24G", f"localllm plan {option} 24G")
    return size


def _subjects(
    env: Env, config: UserConfig, names: list[str] | None, planner: Planner, limit: DownloadLimit, stack: ExitStack
) -> Iterator[Subject]:
    """What the names stand for; without one, what is on this machine, then the best of each family that is not."""
    from localllm import hub
    from localllm.hub import catalog
    from localllm.plan import fit

    if not names:
        here = [model for model in hub.list_local() if model.supported and model.facts]
        for model in here:
            assert model.facts is not None
            yield Subject(model.name, model.name, model.format, model.facts, True, base=not model.chat, path=model.path)
        held = {model.name.casefold() for model in here}
        for family in catalog.families():
            choice = fit.recommended(family, planner, limit)
            if choice and choice.best.spec.casefold() not in held:
                yield from _candidates([choice.best], "")
        return
    for name in names:
        target = config.aliases.get(name, name)
        if catalog.members(target):
            paths = {model.name.casefold(): model.path for model in hub.list_local() if model.supported}
            members = catalog.members(target)
            on_gpu = fit.device_kind(planner) == "cuda"
            runs = [c for c in members if not c.needs and (on_gpu or c.device != "gpu")]
            if not runs:
                fits = fit.judge(planner, 2048)
                free = catalog.memory_of(planner.machine).label
                catalog.choose(target, fits, free_label=free)  # says why, and what instead
            yield from _candidates(runs, name, paths)
            continue
        resolved = local(env, config, name)
        checkpoint = stack.enter_context(opened(resolved))
        found = checkpoint.facts
        shown = checkpoint.path.name if resolved.kind == "path" else resolved.name
        yield Subject(
            resolved.name, shown, found.stored_format, found, True, base=not found.has_chat_template, asked=name,
            path=checkpoint.path,
        )  # fmt: skip


def _candidates(members: Any, asked: str, held: Mapping[str, Path] | None = None) -> Iterator[Subject]:
    from localllm.plan import fit

    for candidate in members:
        facts = fit.facts_of(candidate)
        if facts is not None:
            path = (held or {}).get(candidate.spec.casefold())
            size = candidate.download_bytes if path is None else 0
            yield Subject(
                candidate.spec, candidate.name, candidate.format, facts, path is not None, size, asked=asked, path=path
            )


def _same(subject: Subject, quant: str) -> bool:
    wanted = quant.casefold()
    kinds = {"int4": ("awq", "gptq", "int4", "q4"), "w4a16": ("awq", "gptq", "int4")}.get(wanted, (wanted,))
    return any(kind in subject.quant.casefold() for kind in kinds)


def _row(subject: Subject, window: int | str, planner: Planner) -> Row:
    try:
        made = planner.having(ctx=window).plan_within(subject.facts, subject.path or "")
    except LocalLLMError as error:
        return Row(subject, window, None, error.message, error.fixes)
    if made.fits:
        return Row(subject, window, made)
    refusal = made.error(subject.name)
    return Row(subject, window, made, refusal.message, refusal.fixes)


def _star(rows: tuple[Row, ...], planner: Planner, limit: DownloadLimit, target_tps: float) -> Row | None:
    """The row to take: the rule that `chat` and `pull` follow, among the rows shown."""
    from localllm.plan import fit

    kind = fit.device_kind(planner)
    pace = target_tps or fit.COMFORTABLE_TPS[kind]
    rank = fit.preference(planner)
    usable = [row for row in rows if row.plan and row.fits and not row.subject.base]
    fast = [row for row in usable if row.plan and row.plan.decode_tps >= pace]
    if not fast and not target_tps:
        fast = [row for row in usable if row.plan and row.plan.decode_tps >= pace / 2]
    fetchable = [row for row in fast if row.subject.local or row.subject.download_bytes <= limit.num_bytes] or fast

    def worth(row: Row) -> tuple[int, int, int, int]:
        assert row.plan is not None
        roomy = min(row.plan.max_ctx, fit.FLOORS[kind][0], row.subject.facts.max_context)
        return roomy, row.subject.facts.num_params, -rank(_as_candidate(row.subject)), row.plan.ctx

    return max(fetchable, key=worth, default=None)


def _as_candidate(subject: Subject) -> Any:
    """Enough of a catalogue entry to rank its kind of weights."""
    from localllm.hub import catalog

    made = catalog.candidate_of(subject.name, "", subject.facts.num_params, subject.facts.weight_bytes, 1)
    gguf = subject.quant.upper().startswith(("Q", "IQ", "BF16", "F16", "F32"))
    return replace(made, format=subject.quant, quant=subject.quant if gguf else "")


def _json(row: Row, star: bool) -> dict[str, Any]:
    from localllm.plan.quality import measured

    subject, made = row.subject, row.plan
    base = picked(subject, "quant local download_bytes") | {"model": subject.name, "recommended": star}
    base |= {"fits": row.fits, "reason": row.reason or None}
    base["alternatives"] = [{"cmd": command, "note": note} for command, note in row.fixes]
    if made is None:
        return base | {"ctx": row.wished, "reasons": []}
    return base | {
        **picked(made, "device ctx kv need_bytes least_bytes have_bytes max_ctx"),
        "batch": made.max_parallel,
        "parts": made.parts(),
        "terms": made.terms(),
        "converted": made.quant or None,
        "decode_tps": {
            "value": round(made.decode_tps, 1),
            "at_full_ctx": round(made.decode_tps_full, 1),
            "basis": made.basis,
            "eta": round(made.eta, 3),
        },
        "quality": measured(subject.path, made.kv, row.weights) if subject.path else None,
        "limit": "memory",
        "reasons": list(made.reasons),
    }
