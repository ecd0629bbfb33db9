"""Persistent results about kernels on one device: self-test verdicts and tuned tile sizes.

`Records` is a small JSON file whose name contains a hash of everything the results depend on (kernel sources, device,
driver, versions); a change to any of them starts a new file. If a file cannot be read or written, the work is repeated
at the next start; this is never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..cpu.build import library
from ..triton.cards import AMD

FOLDER = Path(__file__).parents[1]
SOURCES = (".py", ".c", ".h")


@cache
def source_hash() -> str:
    """Hash of all kernel source files."""
    digest = hashlib.sha256()
    for file in sorted(p for p in FOLDER.rglob("*") if p.suffix in SOURCES):
        digest.update(str(file.relative_to(FOLDER)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def capability_of(device: torch.device) -> int:
    """Compute capability of a GPU, e.g. 90 or 120; for AMD GPUs the architecture number, e.g. 942."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return int(properties.major * 10 + properties.minor)
    number = properties.gcnArchName.partition(":")[0].removeprefix("gfx")
    return int(number) if number.isdigit() and int(number) >= AMD else AMD


def identity(device: str | torch.device, driver: str = "") -> dict[str, str]:
    """Return everything that results on `device` depend on. `driver` is the GPU driver version, if known."""
    device = torch.device(device)
    known = {"sources": source_hash(), "torch": torch.__version__}
    if device.type == "cpu":
        loaded = library()
        return known | {"device": f"{_cpu_name()} {loaded.isa}", "library": str(loaded.path or loaded.reason)}
    try:
        from triton import __version__ as triton
    except ImportError:  # no Triton for this system
        triton = ""
    properties = torch.cuda.get_device_properties(device)
    return known | {
        "device": f"{properties.name} sm_{properties.major}{properties.minor}",
        "driver": driver,
        "cuda": torch.version.cuda or "",
        "triton": triton,
        "ptxas": assembler_key(),
    }


def assembler_key() -> str:
    """Paths, sizes and mtimes of the ptxas binaries that environment variables select instead of Triton's own."""
    named = [os.environ.get(name, "") for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")]
    return " ".join(f"{path} {_stamp(Path(path))}" for path in named if path)


def _stamp(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError:
        return "gone"
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


class Records:
    """Results by key, each a JSON object.

    kind      prefix of the file name: selftest, tuning
    identity  everything the results depend on
    folder    None: keep results in memory only
    """

    def __init__(self, kind: str, identity: Mapping[str, str], folder: Path | None = None) -> None:
        self.identity = dict(identity)
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{kind}-{digest}.json"
        self._found: dict[str, dict[str, Any]] = {}
        self._changed = False
        if self.path is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
                entries = json.loads(self.path.read_text())["entries"]
                self._found = {str(key): dict(value) for key, value in entries.items()}

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the result for `key`, or None."""
        return self._found.get(key)

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a result; `save` writes it to disk."""
        self._found[key] = dict(value)
        self._changed = True

    def items(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Return all results."""
        return tuple(self._found.items())

    def save(self) -> None:
        """Write the file atomically if anything changed."""
        if self.path is None or not self._changed:
            return
        text = json.dumps({"identity": self.identity, "entries": self._found}, indent=1, sort_keys=True)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, self.path)
        except OSError:
            return  # full or read-only folder: the next start repeats the work
        self._changed = False
