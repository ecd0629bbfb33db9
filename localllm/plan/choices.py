"""Rows of the model picker: models on this machine, then models to download, each with fit and speed.

Reads file headers and runs the planner, without torch. It can take a second, so call it off the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from localllm import hub
from localllm.errors import LocalLLMError
from localllm.hub import catalog
from localllm.interface import ModelChoice
from localllm.plan import fit
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.plan.quality import note as quality_note

# Suffixes of a plain name that describe the storage format only.
_STORED = re.compile(r"(it|instruct|gguf|awq|fp8|nvfp4|mxfp4|bf16|f16|f32|int4|int8|i?q[0-9](k|[0-9])*(xxs|[xsml])*)*")


def model_choices(planner: Planner) -> list[ModelChoice]:
    """All rows. A requested context is clamped to each model's maximum."""
    models = hub.list_local()
    values = {m.name: one.worth for m in models if m.chat and (one := fit.local_option(m, planner)) and one.plan.fits}
    local = [_local(model, planner) for model in models]
    local.sort(key=lambda row: (not row.supported, -row.last_used, -values.get(row.name, -99), row.name.casefold()))
    plans: fit.Plans = {}
    best = fit.advised(planner, hub.download_limit(), plans)
    wanted = best.best.model.name if best else ""
    fetchable = list(_fetchable(local, planner, plans))
    forms = _forms(planner)
    rows = [_with_quants(row, local, forms) for row in [*local, *fetchable]]
    return [replace(row, recommended=True) if row.name == wanted else row for row in rows]


def _local(model: hub.LocalModel, planner: Planner) -> ModelChoice:
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
        license=model.license,
        chat=model.chat,
        last_used=model.last_used or 0.0,
        path=str(model.path),
    )
    if model.facts is None or not row.supported:
        return row
    try:
        made = planner.plan_within(model.facts, model.path)
    except LocalLLMError as error:
        return replace(row, reason=error.message)
    place = f"in {hub.PLACES[model.source]}" if model.is_foreign else ""
    kind = "base model: completes text" if model.facts.kind == "base model" else model.facts.kind
    note = " · ".join(part for part in (place, kind) if part)
    return replace(_planned(row, made), note=note, quality=quality_note(model.path, made.kv))


def _fetchable(local: list[ModelChoice], planner: Planner, plans: fit.Plans) -> Iterator[ModelChoice]:
    """Supported catalog models that are not on this machine, each with the file `pull` would choose."""
    free = catalog.memory_of(planner.machine).free_bytes
    names = {_plain(row.name) for row in local}
    for starter in catalog.starters().values():
        if _plain(starter.name) not in names and starter.chat:
            yield ModelChoice(
                starter.name, starter.format, starter.size, local=False, supported=True, fits=True,
                license=starter.license, have_bytes=free, note=starter.title,
            )  # fmt: skip
    for name in dict.fromkeys(candidate.name for candidate in catalog.candidates() if not candidate.needs):
        if any(_plain(name) in one for one in names):
            continue
        best = fit.best_file(name, planner, plans)
        yield replace(_row(best.file, best.plan, planner), name=name, reason="")


def _forms(planner: Planner) -> dict[str, list[ModelChoice]]:
    """Every supported file of the catalog, grouped by the plain name of its model."""
    forms: dict[str, list[ModelChoice]] = {}
    for one in catalog.candidates():
        if not one.needs:
            forms.setdefault(_plain(one.name), []).append(_row(one, fit.plan_of(one, planner), planner))
    return forms


def _row(one: catalog.Candidate, made: Plan | None, planner: Planner) -> ModelChoice:
    """The row for one file of the catalog."""
    row = ModelChoice(
        one.spec, one.format, one.download_bytes, local=False, supported=True, max_ctx=one.context, fits=False,
        params=one.params, active_params=one.active_params, license=one.license,
        have_bytes=catalog.memory_of(planner.machine).free_bytes,
        note="gated: accept its license first" if one.gated else one.title,
        reason=fit.GPU_ONLY if made is None and one.device == "gpu" else "",
    )  # fmt: skip
    return row if made is None else _planned(row, made)


def _with_quants(row: ModelChoice, local: list[ModelChoice], forms: dict[str, list[ModelChoice]]) -> ModelChoice:
    """Add the model's other formats to its row: local ones, and ones available for download."""
    model = _model_of(row, forms)
    if not model:
        return row
    here = [one for one in local if one.name != row.name and one.supported and _model_of(one, forms) == model]
    there = {one.format.casefold() for one in (row, *here)}
    size = lambda one: one.size_bytes  # noqa: E731
    away = sorted((one for one in forms[model] if one.format.casefold() not in there), key=size, reverse=True)
    smallest = {one.format: one for one in away}  # sorted by falling size, so the smallest file of a format wins
    return replace(row, quants=tuple(sorted([*here, *smallest.values()], key=size)))


def _model_of(row: ModelChoice, forms: dict[str, list[ModelChoice]]) -> str:
    """The catalog model that a row belongs to, or "": its name is the model's plus nothing but a storage format."""
    plain = _plain(row.name)
    return next((name for name in forms if plain.startswith(name) and _STORED.fullmatch(plain, len(name))), "")


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
