"""The user's settings."""

from __future__ import annotations

from collections.abc import Mapping

from localllm.config import load_config, settings_file
from localllm.device import MachineFacts
from localllm.errors import ConfigError
from localllm.request import Check

from .finding import SOFTWARE, CheckFunction, found


def config_valid(machine: MachineFacts) -> Check:
    """Whether the file and the environment can be read."""
    try:
        config = load_config()
    except ConfigError as error:
        return found("config.valid", SOFTWARE, "fail", error.message, fix="localllm config edit")
    if not config.origins:
        return found("config.valid", SOFTWARE, "ok", f"defaults; {settings_file()} may change them")
    return found("config.valid", SOFTWARE, "ok", f"{len(config.origins)} settings", keys=sorted(config.origins))


def config_warnings(machine: MachineFacts) -> Check:
    """Unknown keys, wrong values, unknown variables."""
    try:
        warnings = load_config().warnings
    except ConfigError:
        return found("config.unknown_keys", SOFTWARE, "skip", "the settings cannot be read")
    if warnings:
        more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
        title = warnings[0] + more
        return found(
            "config.unknown_keys", SOFTWARE, "warn", title, fix="localllm config edit", warnings=list(warnings)
        )
    return found("config.unknown_keys", SOFTWARE, "ok", "none")


CHECKS: Mapping[str, CheckFunction] = {"config.valid": config_valid, "config.unknown_keys": config_warnings}
