"""Rows of the model picker: what is on this machine, then what the catalogue could fetch, each with fit and speed.

Reads file headers and asks the planner; no torch. Takes up to a second: call it off the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from localllm import catalog, hub
from localllm.device import MachineFacts, machine
from localllm.errors import LocalLLMError
from localllm.plan import PlanOptions, plan
from localllm.request import ModelChoice


def model_choices(
    ctx: int | None = None, options: PlanOptions | None = None, facts: MachineFacts | None = None
) -> list[ModelChoice]:
    """All rows. `ctx` asks for a window, up to each model's own; None leaves it to the plan."""
    here = facts or machine()
    wished = options or PlanOptions()
    local = [_local(model, here, wished, ctx) for model in hub.list_local()]
    local.sort(key=lambda row: (not row.supported, -row.last_used, row.name.casefold()))
    return [*local, *_fetchable(local, here, ctx)]


def _local(model: hub.LocalModel, here: MachineFacts, wished: PlanOptions, ctx: int | None) -> ModelChoice:
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
    from dataclasses import replace

    window: int | str = "auto" if ctx is None else min(ctx, model.facts.max_context)
    try:
        made = plan(model.facts, here, replace(wished, ctx=window))
    except LocalLLMError as error:
        return replace(row, reason=error.message)
    return replace(
        row,
        fits=made.fits,
        tps=made.decode_tps,
        basis=made.basis,
        ctx=made.ctx,
        max_ctx=min(made.max_ctx or model.max_context, model.max_context),
        need_bytes=made.need_bytes,
        have_bytes=made.have_bytes,
        parts=tuple(made.parts().items()),
        note="" if model.chat else "base model: completes text",
    )


def _fetchable(local: list[ModelChoice], here: MachineFacts, ctx: int | None) -> Iterator[ModelChoice]:
    """The catalogue's models that this version runs and that are not here; of each the first file that fits."""
    memory = catalog.memory_of(here)
    verdict = catalog.default_fits(memory)
    names = {_plain(row.name) for row in local}
    for starter in catalog.starters().values():
        if _plain(starter.name) not in names and starter.chat:
            yield ModelChoice(
                starter.name, starter.format, starter.size, local=False, supported=True, fits=True,
                licence=starter.licence, have_bytes=memory.free_bytes, note=starter.title,
            )  # fmt: skip
    by_name: dict[str, list[catalog.Candidate]] = {}
    for candidate in catalog.candidates():
        if not candidate.needs:
            by_name.setdefault(candidate.name, []).append(candidate)
    for name, files in by_name.items():
        if any(_plain(name) in one for one in names):
            continue
        best = next((one for one in files if verdict(one)[0]), files[-1])
        fits, tps = verdict(best)
        need = best.need_bytes(ctx or catalog.DEFAULT_CONTEXT)
        yield ModelChoice(
            name, best.format, best.download_bytes, local=False, supported=True, max_ctx=best.context,
            fits=fits and need <= memory.free_bytes, tps=tps if fits else 0.0,
            ctx=min(best.context, ctx or catalog.DEFAULT_CONTEXT), params=best.params,
            active_params=best.active_params, licence=best.licence, need_bytes=need, have_bytes=memory.free_bytes,
            note="asks for its licence first" if best.gated else best.title,
        )  # fmt: skip


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.casefold().rsplit("/", 1)[-1])
