"""Rows of the model picker: what is on this machine, then what the catalogue could fetch, each with fit and speed.

Reads file headers and asks the planner; no torch. Takes up to a second: call it off the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from localllm import calibrate, catalog, fit, hub
from localllm.device import MachineFacts, machine
from localllm.errors import LocalLLMError
from localllm.plan import Plan, PlanOptions, plan
from localllm.request import ModelChoice


def model_choices(
    ctx: int | None = None, options: PlanOptions | None = None, facts: MachineFacts | None = None
) -> list[ModelChoice]:
    """All rows. `ctx` asks for a window, up to each model's own; None leaves it to the plan."""
    here = facts or machine()
    wished = options or PlanOptions()
    benches = calibrate.load(here)
    local = [_local(model, here, wished, benches, ctx) for model in hub.list_local()]
    local.sort(key=lambda row: (not row.supported, -row.last_used, row.name.casefold()))
    return [*local, *_fetchable(local, here, wished, benches, ctx)]


def _local(
    model: hub.LocalModel, here: MachineFacts, wished: PlanOptions, benches: calibrate.Benches, ctx: int | None
) -> ModelChoice:
    row = ModelChoice(
        name=model.name,
        format=model.format,
        size_bytes=model.size_bytes,
        local=True,
        supported=model.supported and not model.broken,
        reason=model.reason,
        max_ctx=model.max_context,
        fits=False,
        params=model.params,
        licence=model.licence,
        chat=model.chat,
        last_used=model.last_used or 0.0,
        path=str(model.path),
    )
    if model.facts is None or not row.supported:
        return row
    try:
        made = plan(model.facts, here, _with_window(wished, ctx, model.facts.max_context), benches)
    except LocalLLMError as error:
        return replace(row, reason=error.message)
    return replace(_planned(row, made), note="" if model.chat else "base model: completes text")


def _fetchable(
    local: list[ModelChoice], here: MachineFacts, wished: PlanOptions, benches: calibrate.Benches, ctx: int | None
) -> Iterator[ModelChoice]:
    """The catalogue's models that this version runs and that are not here; of each the file `pull` would take."""
    free = catalog.memory_of(here).free_bytes
    names = {_plain(row.name) for row in local}
    for starter in catalog.starters().values():
        if _plain(starter.name) not in names and starter.chat:
            yield ModelChoice(
                starter.name, starter.format, starter.size, local=False, supported=True, fits=True,
                licence=starter.licence, have_bytes=free, note=starter.title,
            )  # fmt: skip
    by_name: dict[str, list[catalog.Candidate]] = {}
    for candidate in catalog.candidates():
        if not candidate.needs:
            by_name.setdefault(candidate.name, []).append(candidate)
    plans: fit.Plans = {}
    for name, files in by_name.items():
        if any(_plain(name) in one for one in names):
            continue
        choice = fit.recommended(name, here, wished, benches, made_before=plans)
        best = choice.best if choice else min(files, key=lambda file: file.download_bytes)
        row = ModelChoice(
            name, best.format, best.download_bytes, local=False, supported=True, max_ctx=best.context, fits=False,
            params=best.params, active_params=best.active_params, licence=best.licence, have_bytes=free,
            note="asks for its licence first" if best.gated else best.title,
        )  # fmt: skip
        how = _with_window(wished, ctx, best.context)
        if choice is None and fit.device_kind(here, wished) == "cuda":
            how = replace(how, device="cuda")  # what it would need there: the CPU is not what the name would choose
        made = fit.plan_of(best, here, how, benches)
        yield row if made is None else _planned(row, made)


def _with_window(wished: PlanOptions, ctx: int | None, most: int) -> PlanOptions:
    return replace(wished, ctx="auto" if ctx is None else min(ctx, most))


def _planned(row: ModelChoice, made: Plan) -> ModelChoice:
    return replace(
        row,
        fits=made.fits,
        tps=made.decode_tps if made.fits else 0.0,
        basis=made.basis,
        ctx=made.ctx,
        max_ctx=min(made.max_ctx or row.max_ctx, row.max_ctx),
        need_bytes=made.need_bytes,
        have_bytes=made.have_bytes,
        parts=tuple(made.parts().items()),
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.casefold().rsplit("/", 1)[-1])
