"""`doctor --kernels`: the kernel chosen for every op and shape class, and the resources it needs.

For a GPU, present or not, kernels are compiled ahead of time in child processes; shared memory, registers, spills and
matrix instructions are read from the binaries. For the CPU, rows show the chosen implementation and why earlier ones
were passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from localllm.device import MachineFacts
from localllm.errors import ConfigError
from localllm.plan.placement import chosen_device

PARTS = 6  # parts in which a GPU's table is compiled, for progress reports
FORMS = ("dense", "int4g", "int8", "fp4g16", "fp4g32", "fp8", "fp8mx", "gguf Q5_0", "gguf Q4_K", "gguf Q6_K")


def wanted_capability(text: str | None, machine: MachineFacts) -> int:
    """Parse a target: 90 for "sm_90", "90" or "9.0", 942 for "gfx942", 0 for "cpu"; None is the device used here.

    Raises ConfigError for a target without kernels.
    """
    from localllm.kernels.triton.cards import CLASSES, name_of

    if text is None:
        card = chosen_device(machine, "auto")[1] or next(iter(machine.gpus), None)
        return card.capability if card is not None else 0
    if text == "cpu":
        return 0
    found = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text)
    value = int(found[1] + found[2]) if found else next((c for c in CLASSES if name_of(c) == text), 0)
    if value not in CLASSES:
        known = ", ".join(map(name_of, CLASSES))
        raise ConfigError(f"--kernels must be one of cpu, {known}, not {text!r}", "localllm doctor --kernels sm_90")
    return value


def rows_of(capability: int, tell: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """The rows for a target; `tell` is called with (parts done, all parts). Raises ConfigError without Triton."""
    if capability == 0:
        return list(cpu_rows())
    try:
        from localllm.kernels.triton import aot
    except ImportError as error:
        raise ConfigError(f"GPU kernels cannot be compiled: {error}", "pip install triton") from error
    rows: list[dict[str, Any]] = []
    for part in range(PARTS):
        tell(part, PARTS)
        rows += [dict(row) for row in aot.table([capability], part=(part, PARTS), workers=1)]
    tell(PARTS, PARTS)
    return sorted(rows, key=lambda row: (row["op"], row["impl"]))


def cpu_rows() -> Iterator[dict[str, Any]]:
    """The rows for this CPU."""
    from localllm.kernels import LinearFacts, OpFacts, choose
    from localllm.kernels.registry import OPS, SEGMENTS, Choice
    from localllm.kernels.table import implementations

    def row(op: str, choice: Choice, reasons: bool = True) -> dict[str, Any]:
        why = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over) if reasons else ""
        empty = {"shared_bytes": 0, "registers": 0, "spill_bytes": 0, "mma": ""}
        return {"op": op, "capability": 0, "impl": choice.impl.name, "reason": why, **empty}

    facts = OpFacts(kv_format="bf16", num_heads=32, num_kv_heads=8, head_dim=128)
    for op in OPS:
        yield row(op, choose(implementations(op), facts))
    for segment in SEGMENTS:
        yield row(segment, choose(implementations(segment), facts), reasons=False)
    for form in FORMS:
        name, _, block = form.partition(" ")
        group = {"int4g": 128, "fp4g16": 16}.get(name, 32)
        yield row(f"linear {form}", choose(implementations("linear"), LinearFacts(name, (4096, 4096), group, block)))
