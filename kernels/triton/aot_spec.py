"""What is compiled ahead of time: `KernelSpec` says how one kernel is launched, `compile_spec` builds it for a card
that need not be there and reads shared memory, registers, spills and matrix instructions from the result.

`aot.all_specs` lists them. This file imports Triton only inside `compile_spec`, which belongs into a process without
TRITON_INTERPRET (`aot.py` starts it).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from .cards import CLASSES

HINT = ":16"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel as its launcher would start it.

    op           the op it implements: linear, rms_norm, paged_attention_decode, ...
    impl         name of the implementation, as in the run summary
    shape_class  what distinguishes this launch: form, rows, head_dim, KV format, ...
    launch       a `launch.Launch`; None where there is a reason why this card has no such kernel
    decode       runs in every decoding step: no spills or local memory allowed from sm_80 on
    expect_mma   what `mma` of the row must contain, empty for anything
    """

    op: str
    impl: str
    shape_class: str
    launch: Any = None
    decode: bool = False
    expect_mma: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        """op and shape class, as the table shows them."""
        return f"{self.op} {self.shape_class}"


class KernelRow(TypedDict):
    """A row of `localllm.kernels/1`."""

    op: str
    capability: int
    impl: str
    reason: str  # empty, or why there is no such kernel
    shared_bytes: int
    registers: int
    spill_bytes: int
    mma: str  # the matrix instructions it uses, as in the PTX; empty for none


def compile_spec(spec: KernelSpec, capability: int) -> KernelRow:
    """Build `spec` for compute capability `capability` (as 90): what it needs, or the reason why it cannot be built."""
    row = KernelRow(
        op=spec.label, capability=capability, impl=spec.impl, reason=spec.reason,
        shared_bytes=0, registers=0, spill_bytes=0, mma="",
    )  # fmt: skip
    if spec.reason:
        return row
    try:
        compiled = build(spec, capability)
    except Exception as error:  # whatever the compiler raises is the reason
        row["reason"] = f"does not compile: {_last_line(error)}"
        return row
    if spec.launch.subnormals and re.search(r"\b(?:fma|mul|add|sub)(?:\.rn)?\.ftz\.f32", compiled.asm["ptx"]):
        row["reason"] = "compiled to instructions that flush subnormal numbers"
    row["shared_bytes"] = int(compiled.metadata.shared)
    row["registers"], row["spill_bytes"] = resource_usage(compiled.asm["cubin"])
    row["mma"] = matrix_instructions(compiled.asm["ptx"])
    return row


def complaint(spec: KernelSpec, row: KernelRow) -> str:
    """What is wrong with a kernel as it was compiled; empty when nothing is."""
    capability = row["capability"]
    name = f"sm_{capability} {spec.label} ({spec.impl})"
    if row["reason"] != spec.reason:
        return f"{name}: {row['reason']}"
    there = CLASSES[capability].shared_bytes
    if row["shared_bytes"] > there:
        return f"{name}: {row['shared_bytes']} bytes of shared memory, the card has {there}"
    if spec.decode and capability >= 80 and row["spill_bytes"]:
        return f"{name}: a decoding kernel with {row['spill_bytes']} bytes of spills or local memory a thread"
    if spec.expect_mma not in row["mma"]:
        return f"{name}: expected {spec.expect_mma}, found {row['mma'] or 'no matrix instruction'}"
    return ""


def build(spec: KernelSpec, capability: int) -> Any:
    """The compiled kernel (`asm`, `metadata`). Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch = spec.launch
    names, types = launch.kernel.arg_names, launch.signature
    missing = [n for n in names if n not in types and n not in launch.constexprs]
    unknown = [n for n in (*types, *launch.constexprs) if n not in names]
    if missing or unknown:
        raise ValueError(f"{spec.label}: arguments without a type {missing}, unknown {unknown}")
    signature = {n: types.get(n, "constexpr").removesuffix(HINT) for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types.get(n, "").endswith(HINT)}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=dict(launch.constexprs), attrs=attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options | launch.options)


@cache
def _cuobjdump() -> str:
    import triton

    assert triton.__file__ is not None
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack and local memory a thread) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", text))) for name in ("REG", "STACK", "LOCAL")}
    return found["REG"], found["STACK"] + found["LOCAL"]


def matrix_instructions(ptx: str) -> str:
    """The distinct matrix instructions of a kernel, without operands, comma separated."""
    found = re.findall(r"\b((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*)", ptx)
    return ", ".join(sorted(set(found)))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"
