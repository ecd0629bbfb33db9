"""Models: Models on this machine"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import iso, one_of, picked
from localllm.errors import LocalLLMError
from localllm.paths import existing, home_short
from localllm.plan.quality import note as quality_note
from localllm.plan.quality import saved as saved_quality
from localllm.terminal import clean_line, counted, gib, params_short, rate, tokens_short

if TYPE_CHECKING:
    from localllm.hub import LocalModel
    from localllm.plan.plan import Plan
    from localllm.plan.planner import Planner

SORTS: dict[str, Callable[[LocalModel], Any]] = {
    "name": lambda m: m.name.casefold(),
    "size": lambda m: -m.size_bytes,
    "params": lambda m: -m.params,
    "used": lambda m: -(m.last_used or 0),
}


@command("localllm ls", "localllm ls --all", "localllm ls --json | jq -r '.models[].id'")
def ls(
    env: Env,
    everything: Annotated[bool, Option("--all", help="Include damaged and unsupported models.")] = False,
    sort: Annotated[str, Option(metavar="name|size|params|used", help="Sort order.")] = "name",
) -> int:
    """List the models on this machine, whether they fit, and how fast they should run.

    CTX is the model's own limit, FITS the largest context that fits.
    """
    from localllm import hub
    from localllm.checkpoint.packed_file import stored_packs
    from localllm.plan.planner import Planner

    one_of("--sort", sort, tuple(SORTS), "localllm ls --sort size")
    found = sorted(hub.list_local(), key=SORTS[sort])
    shown = [m for m in found if everything or m.supported]
    planner = Planner.here(env.config.engine)
    planned = [(model, *_plan(model, planner)) for model in shown]
    console = env.console
    rows = [_ls_row(*one) for one in planned]
    packed = sum(one.num_bytes for one in stored_packs())
    facts = {"cache": str(hub.cache.hub_dir()), "free_bytes": _free(), "packed_bytes": packed}
    if console.emit("ls/1", facts | {"models": rows}):
        return 0
    total = sum({m.path: m.size_bytes for m in shown}.values())  # two of Ollama's names may share a file
    place = clean_line(home_short(hub.cache.hub_dir()))
    console.paragraph(f"{counted(len(shown), 'model')} · {gib(total)} · {gib(_free())} free for downloads in {place}")
    if shown:
        columns = ("NAME", "PARAMS", "FORMAT", "SIZE", "CTX", "FITS", "SPEED", "USED", "")
        cells = [_cells(*one) for one in planned]
        console.table(columns, cells, right=columns[1:2] + columns[3:5], spare=("USED", "", "PARAMS", "CTX", "FORMAT"))
    hidden = len(found) - len(shown)
    if hidden:
        console.say(f"{hidden} more cannot run: localllm ls --all")
    if packed:
        console.say(f"{gib(packed)} of repacked weights are kept for faster starts on the CPU: localllm rm --packed")
    if not found:
        console.say("Next: localllm pull smollm2")
    return 0


def _plan(model: LocalModel, planner: Planner) -> tuple[Plan | None, str]:
    """Return (the plan, the reason why there is none)."""
    if model.facts is None or not model.supported:
        return None, model.reason
    try:
        return planner.plan_within(model.facts, model.path), model.reason
    except LocalLLMError as error:
        return None, error.message


def _cells(model: LocalModel, made: Plan | None, reason: str) -> tuple[str, ...]:
    from localllm import hub

    if made is None:
        return (model.name, "", model.format, gib(model.size_bytes), "", "✗", "–", _ago(model.last_used), reason)
    mark = "✓" if made.basis == "measured" else "≈"
    note = hub.PLACES[model.source] if model.source != "hub" else ""
    if (model.path / hub.local_model.QUANTIZED).is_file():
        note = "quantized here"
    kind = model.facts.kind if model.facts is not None else ""
    quality = quality_note(model.path, made.kv)
    return (
        model.name,
        params_short(model.params),
        model.format,
        gib(model.size_bytes),
        tokens_short(model.max_context),
        f"✓ {tokens_short(made.max_ctx)}" if made.fits else "✗",
        f"{mark} {rate(made.decode_tps)} tok/s" if made.fits else "–",
        _ago(model.last_used),
        " · ".join(part for part in (", ".join(filter(None, (kind, note))), quality) if part),
    )


def _ls_row(model: LocalModel, made: Plan | None, reason: str) -> dict[str, Any]:
    return picked(model, "params size_bytes chat supported broken source") | {
        "id": model.name,
        "revision": model.revision or None,
        "format": "safetensors" if model.path.is_dir() or model.path.suffix == ".safetensors" else "gguf",
        "dtype": model.format or None,
        "architecture": model.architecture or None,
        "max_ctx": model.max_context,
        "reason": reason or None,
        "fits": {"ok": made.fits, "max_ctx": made.max_ctx} if made else {"ok": False, "max_ctx": 0},
        "speed": {"tps": round(made.decode_tps, 1), "basis": made.basis} if made else None,
        "quality": next(iter(saved_quality(model.path)), None),
        "last_used": iso(model.last_used),
        "path": str(model.path),
    }


def _free() -> int:
    from localllm import hub

    try:
        return shutil.disk_usage(existing(hub.cache.hub_dir())).free
    except OSError:
        return 0


def _ago(when: float | None) -> str:
    if when is None:
        return "–"
    days = int((time.time() - when) // 86400)
    return "today" if days < 1 else f"{days} d"
