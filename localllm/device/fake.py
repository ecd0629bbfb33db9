"""Invented machines (machines.toml) for tests and golden pages: LOCALLLM_TESTING=1 LOCALLLM_FAKE_HW=rtx4090."""

from __future__ import annotations

from typing import Any

from localllm.errors import ConfigError
from localllm.paths import toml_beside
from localllm.terminal import GIB

from .facts import CpuFacts, DiskFacts, GpuFacts, GpuLink, GpuProcess, HostFacts, MachineFacts

_BYTES = {"mib": 1 << 20, "gib": GIB}
_PARTS = {"gpus": GpuFacts, "gpu_links": GpuLink, "processes": GpuProcess, "disk": DiskFacts}
_DATA = toml_beside(__file__, "machines.toml")
PROFILES: list[str] = _DATA["profiles"]


def _value(kind: type[Any], table: dict[str, Any]) -> Any:
    """Build a value of `facts.py` from its table; lists become tuples, nested tables the values they describe."""
    given = {}
    for key, value in table.items():
        name, _, unit = key.rpartition("_")
        if unit in _BYTES:
            key, value = f"{name}_bytes", int(value * _BYTES[unit])
        elif unit == "gbs":
            key, value = name, value * 1e9
        part = _PARTS.get(key)
        if isinstance(value, list):
            value = tuple(_value(part, one) if part else one for one in value)
        given[key] = _value(part, value) if part and isinstance(value, dict) else value
    return kind(**given)


def _machine(own: dict[str, Any]) -> MachineFacts:
    default = _DATA["default"]
    table = default["machine"] | (default["with_gpu"] if "gpus" in own else {}) | own
    table.pop("host", None)
    cpu = _DATA["cpu"][table["cpu"]]
    cards = [default["gpu"] | card | {"index": i, "uuid": f"GPU-{i:08d}"} for i, card in enumerate(own.get("gpus", ()))]
    cpu = _value(CpuFacts, cpu | {"flags": _DATA["flags"][cpu["flags"]]})
    found: MachineFacts = _value(MachineFacts, table | {"cpu": cpu, "gpus": cards})
    return found


MACHINES = {name: _machine(own) for name, own in _DATA["machine"].items()}
MACHINES |= {short: MACHINES[name] for short, name in _DATA["aliases"].items()}


def fake_machine(name: str) -> MachineFacts:
    """An invented machine by name; ConfigError for an unknown name."""
    if name not in MACHINES:
        raise ConfigError(f"LOCALLLM_FAKE_HW={name} is not a known machine", f"use one of: {', '.join(MACHINES)}")
    return MACHINES[name]


def fake_host(name: str) -> HostFacts:
    """The host facts of an invented machine."""
    default, own = _DATA["default"]["host"], _DATA["machine"].get(name, {}).get("host", {})
    packages = default["packages"] | own.get("packages", {}) | {"torch": fake_machine(name).torch_version}
    found: HostFacts = _value(HostFacts, default | own | {"packages": packages})
    return found
