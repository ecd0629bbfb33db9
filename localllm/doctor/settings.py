"""Checks of the user's settings, the chat database and localllm's folders."""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from pathlib import Path

from localllm import paths
from localllm.config import load_config, settings_file
from localllm.errors import ConfigError
from localllm.interface import Check
from localllm.paths import existing, home_short
from localllm.terminal import counted, gib

from .finding import SOFTWARE, Checks, Survey, fail, ok, skip, warn

CHECKS = Checks(SOFTWARE)

# a larger database is opened but not scanned, which would take too long for a quick check
CHECKED_BYTES = 64 << 20
NO_ROOM = 16 << 20  # free bytes below which the disk of our folders counts as full


@CHECKS.add("config.valid")
def config_valid(survey: Survey) -> Check:
    """Settings file and environment: are they readable, with a valid value for every key?"""
    try:
        config = load_config(path=survey.settings)
    except ConfigError as error:
        return fail(error.message, fix=error.hint.strip("`"))
    if config.broken:
        return fail(config.broken, "the defaults are in effect until it is fixed", "localllm config edit")
    if wrong := [warning for warning in config.warnings if warning not in config.unknown]:
        return warn(wrong[0], "; ".join(wrong[1:]), "localllm config edit", warnings=wrong)
    if not config.origins:
        return ok(f"defaults; {home_short(survey.settings or settings_file())} can override them")
    return ok(counted(len(config.origins), "setting"), keys=sorted(config.origins))


@CHECKS.add("config.unknown_keys")
def config_warnings(survey: Survey) -> Check:
    """Unknown keys and unknown variables."""
    try:
        config = load_config(path=survey.settings)
    except ConfigError:
        return skip("the settings cannot be read")
    if names := list(config.unknown):
        return warn(names[0], "; ".join(names[1:]), "localllm config edit", warnings=names)
    return skip("the settings cannot be read") if config.broken else ok("none")


@CHECKS.add("db.ok")
def database(survey: Survey) -> Check:
    """Database of saved chats: is it readable? Nothing is written."""
    place = paths.data_dir() / "chats.db"
    if not place.exists():
        return _full(place) or skip("no chats saved yet")
    try:
        with sqlite3.connect(f"{place.resolve().as_uri()}?mode=ro", uri=True, timeout=1) as opened:
            small = place.stat().st_size <= CHECKED_BYTES
            told = opened.execute("PRAGMA quick_check(1)" if small else "PRAGMA schema_version").fetchone()[0]
        opened.close()
    except (sqlite3.Error, OSError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return fail(f"{home_short(place)}: {error}", "", f"mv {place} {place}.broken")
        fix = f"chmod u+rwX {shlex.quote(str(place))} {shlex.quote(str(place.parent))}"
        locked = "locked" in str(error)
        return fail(f"{home_short(place)}: {error}", "", "close the program that uses it" if locked else fix)
    if small and told != "ok":
        return fail(f"{home_short(place)} is damaged: {told}", "", f"mv {place} {place}.broken")
    if full := _full(place):
        return full
    return ok(home_short(place), bytes=place.stat().st_size)


def _full(place: Path) -> Check | None:
    """The finding that the disk of a file or folder of ours has no room for more; None when it has."""
    free = shutil.disk_usage(existing(place)).free
    if free >= NO_ROOM:
        return None
    title = f"{home_short(place)} cannot grow: its disk has {gib(free)} free, so nothing more can be saved"
    return fail(title, fix="localllm rm --partial", path=str(place), free_bytes=free)


@CHECKS.add("folders")
def folders(survey: Survey) -> Check:
    """Our own folders (data, cache, state with the log): are they writable, on a disk with room?"""
    for place in (paths.data_dir(), paths.cache_dir(), paths.state_dir()):
        parent = existing(place)
        if not os.access(parent, os.W_OK | os.X_OK):
            title = f"{home_short(parent)} is not writable"
            return fail(title, fix="export LOCALLLM_HOME=~/localllm", path=str(parent))
        if full := _full(place):
            return full
    return ok(f"{home_short(paths.data_dir())} and the cache and state folders are writable")
