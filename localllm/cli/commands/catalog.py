"""Models: Models to download, with fit and speed here"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.cli.frame.options import HardwareFlags
from localllm.cli.plan_view import rate
from localllm.errors import ConfigError, nearest
from localllm.hub import catalog as catalogue
from localllm.plan import fit
from localllm.plan.planner import Planner
from localllm.terminal import counted, gib, params_short, tokens_short


class Entry(NamedTuple):
    """A model of the catalog, as planned for this machine."""

    best: fit.Best
    recommended: bool

    @property
    def fits(self) -> bool:
        return not self.best.reason


@command(
    "localllm catalog",
    "localllm catalog qwen --fits",
    "localllm catalog --gpu 3090",
    "localllm catalog --json | jq -r '.models[] | select(.fits) | .model'",
)
def catalog(
    env: Env,
    name: Annotated[str | None, Argument(metavar="[FAMILY]", help="Only this family: qwen.")] = None,
    family: Annotated[str | None, Option(metavar="NAME", help="The same as FAMILY.")] = None,
    fits: Annotated[bool, Option("--fits", help="Only models that run on this machine.")] = False,
    hardware: HardwareFlags = HardwareFlags(),
) -> int:
    """List every model of the catalog with the file that suits this machine best, its context and its speed.

    FITS is the largest context that fits. ≈ marks an estimate, ✓ a measurement made here. ★ marks the model to start
    with; with FAMILY, the one that the family's name selects in `chat`, `pull` and `plan`.
    """
    from localllm import hub

    if name and family and name.casefold() != family.casefold():
        raise ConfigError(f"{name} and --family {family} contradict each other", f"localllm catalog {name}")
    planner, imagined = hardware.planner(env.config)
    limit = None if imagined else hub.download_limit(env.config)
    entries = [one for one in _entries(_family(name or family), planner, limit) if one.fits or not fits]
    listed = [_json(one) for one in entries]
    if env.console.emit("catalog/1", {"machine": asdict(planner.machine), "models": listed}):
        return 0
    if entries:
        head = ("FAMILY", "MODEL", "PARAMS", "RELEASED", "FILE", "SIZE", "FITS", "DECODE", "PREFILL", "LICENSE", "")
        spare = ("LICENSE", "RELEASED", "FAMILY", "PREFILL", "PARAMS", "")
        env.console.table(head, [_cells(one) for one in entries], right=("PARAMS", "SIZE", "PREFILL"), spare=spare)
    place = "that machine" if imagined else "this machine"
    running = sum(one.fits for one in entries)
    env.console.paragraph(f"{counted(len(entries), 'model')}, {running} run on {place} · speeds in tokens per second")
    if star := next((one for one in entries if one.recommended), None):
        env.console.say(f"Next: localllm plan {star.best.file.name}")
    return 0


def _family(name: str | None) -> str | None:
    known = catalogue.families()
    if name is None or name.casefold() in known:
        return name and name.casefold()
    near = nearest(name, known)
    hint = f"localllm catalog {near}" if near else "`localllm catalog` lists all models"
    raise ConfigError(f"no family {name!r} in the catalog: choose from {', '.join(known)}", hint)


def _entries(family: str | None, planner: Planner, limit: catalogue.DownloadLimit | None) -> Iterator[Entry]:
    """The models in catalog order; `limit` is the download limit that applies to a family's name."""
    plans: fit.Plans = {}
    if family:
        choice = fit.recommended(family, planner, limit, plans)
        wanted = choice.best.name if choice else ""
    else:
        made = fit.advised(planner, limit, plans)
        wanted = made.best.model.name if made else ""
    for name in dict.fromkeys(one.name for one in catalogue.candidates() if family in (None, one.family)):
        yield Entry(fit.best_file(name, planner, plans), name == wanted)


def _cells(one: Entry) -> tuple[str, ...]:
    file, made, reason = one.best
    params = params_short(file.params)
    if file.active_params < file.params:
        params += f", {params_short(file.active_params)} active"
    mark = "✓" if made and made.basis == "measured" else "≈"
    return (
        file.family,
        f"★ {file.name}" if one.recommended else file.name,
        params,
        file.released or "–",
        file.format,
        gib(file.download_bytes),
        f"✓ {tokens_short(made.max_ctx)}" if made and one.fits else "✗",
        f"{mark} {rate(made.decode_tps)}" if made and one.fits else "–",
        f"≈ {rate(made.prefill_tps)}" if made and one.fits and made.prefill_tps else "–",
        file.license or "–",
        reason,
    )


def _json(one: Entry) -> dict[str, Any]:
    file, made, reason = one.best
    row = picked(file, "family title params active_params context architecture gated") | {
        "model": file.name,
        "released": file.released or None,
        "license": file.license or None,
        "drafter": file.drafter or None,
        "file": picked(file, "spec format download_bytes verified"),
        "fits": one.fits,
        "reason": reason or None,
        "recommended": one.recommended,
        "plan": None,
    }
    if made is not None:
        speed = {"decode_tps": round(made.decode_tps, 1), "prefill_tps": round(made.prefill_tps, 1)}
        row["plan"] = picked(made, "device kv ctx max_ctx need_bytes have_bytes basis") | speed
    return row
