"""Models: Remove a model or left-over parts of downloads"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.options import model_argument
from localllm.errors import ConfigError
from localllm.terminal import clean, clean_line, counted, gib

if TYPE_CHECKING:
    from localllm.hub import Removal


@command(
    "localllm rm smollm2",
    "localllm rm org/repo:Q4_K_M -y",
    "localllm rm --partial",
    "localllm rm --kv-store",
    "localllm rm --packed",
)
def rm(
    env: Env,
    models: Annotated[list[str] | None, model_argument("MODEL...", "Names as shown by `ls`.")] = None,
    dry_run: Annotated[bool, Option("-n", "--dry-run", help="Show what would be removed.")] = False,
    partial: Annotated[bool, Option("--partial", help="Remove the remains of interrupted downloads.")] = False,
    kv_store: Annotated[bool, Option("--kv-store", help="Remove conversation pages kept on disk.")] = False,
    packed: Annotated[bool, Option("--packed", help="Remove repacked weights kept on disk.")] = False,
    quantized_only: Annotated[
        bool, Option("--quantized-only", help="Only what `quantize` made from these models, not the models.")
    ] = False,
) -> int:
    """Remove models, remains of downloads, or data kept on disk. Lists what else uses the files, and asks first.

    Removing a model also removes its repacked weights.
    """
    from localllm import hub

    console = env.console
    flags = {"--partial": partial, "--kv-store": kv_store, "--packed": packed}
    if models and (flag := next((name for name, given in flags.items() if given), "")):
        raise ConfigError(f"model names and {flag} cannot be combined", f"localllm rm {flag}")
    if sum(flags.values()) + bool(models) != 1:
        raise ConfigError("rm takes names, --partial, --kv-store or --packed", "`localllm rm NAME`, or --partial")

    def remove(dry_run: bool) -> list[hub.Removal]:
        if partial:
            return [hub.remove_partials(dry_run=dry_run)]
        if kv_store:
            return [_kept_pages(dry_run)]
        if packed:
            return [_packed_weights(dry_run)]
        each = [bound(hub.remove, name, derived_only=quantized_only) for name in models or ()]
        sources = [path for one in each for path in one(dry_run=True).paths]
        return [_packed_weights(dry_run, sources), *(one(dry_run=dry_run) for one in each)]

    planned = remove(dry_run=True)
    total = sum(item.num_bytes for item in planned)
    paths = [path for item in planned for path in item.paths]
    names = [name for item in planned for name in item.names]
    for name in names:
        console.say(f"{clean_line(name)}")
    for note in dict.fromkeys(item.note for item in planned if item.note):
        console.say(f"note: {clean(note)}")
    console.say(f"{counted(len(paths), 'file')}, {gib(total)}")
    if paths and not dry_run and not console.confirm("Remove?", default=False):
        raise ConfigError("nothing was removed", "answer y, or pass -y")
    done = planned
    if paths and not dry_run:
        done = remove(dry_run=False)
        gone = {path for item in done for path in item.paths}
        if packed and (left := [path for path in paths if path not in gone and path.suffix != ".part"]):
            raise ConfigError(
                f"{counted(len(left), 'file')} could not be removed, such as {clean_line(str(left[0]))}",
                f"make {clean_line(str(left[0].parent))} writable",
            )
        console.say(f"removed {gib(sum(item.num_bytes for item in done))}")
    fields = {
        "removed": bool(paths) and not dry_run,
        "models": names,
        "bytes": sum(item.num_bytes for item in done),
        "paths": [str(path) for item in done for path in item.paths],
    }
    console.emit("rm/1", fields)
    return 0


def _packed_weights(dry_run: bool, models: Sequence[Path] | None = None) -> Removal:
    """Remove the files of `engine.packed_store` made from these models, or all of them."""
    from localllm.checkpoint.packed_file import of_models, remove, stored_packs
    from localllm.hub import Removal

    found = stored_packs() if models is None else of_models(models)
    gone = [one for one in found if dry_run or remove(one.path)]
    return Removal((), tuple(one.path for one in gone), sum(one.num_bytes for one in gone), done=not dry_run)


def _kept_pages(dry_run: bool) -> Removal:
    """Remove the files of `engine.kv_store`, for all models."""
    from localllm.engine.page_files import clear_stored, stored_files
    from localllm.hub import Removal

    files = stored_files()
    if not dry_run:
        clear_stored()
    paths = tuple(Path(file.path) for file in files)
    return Removal((), paths, sum(file.num_bytes for file in files), done=not dry_run)
