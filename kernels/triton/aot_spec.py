"""What is compiled ahead of time: `KernelSpec` says how one kernel is launched, `compile_spec` builds it for a card
that need not be there and reads shared memory, registers, spills and matrix instructions from the result.

A kernel module exposes `specs(capability: int) -> Iterable[KernelSpec]`: every kernel it would launch on such a card,
one per shape class, with the constants its launcher would choose; it is listed in `aot.MODULES`. This file imports
Triton only inside `compile_spec`, which belongs into a process without TRITON_INTERPRET (`aot.py` starts it).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120, 121)
"""What every kernel is compiled for."""
SHARED_LIMIT = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
    121: 101_376,
}
"""bytes of shared memory one program may have"""
HINT = ":16"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel as its launcher would start it."""

    op: str
    """the op it implements: linear, rms_norm, paged_attention_decode, ..."""
    impl: str
    """name of the implementation, as in the run summary"""
    shape_class: str
    """what distinguishes this launch: form, rows, head_dim, KV format, ..."""
    kernel: Any
    """the function under @triton.jit"""
    signature: Mapping[str, str]
    """name -> type of every argument that is no constant: `*bf16`, `*u8`, `i32`, `fp32`; `:16` after it says that the
    pointer or number is a multiple of 16, as the launcher guarantees or Triton sees it"""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    """more compile options: launch_pdl, maxnreg, ..."""
    decode: bool = False
    """runs in every decoding step: no spills or local memory allowed from sm_80 on"""
    expect_mma: str = ""
    """what `mma` of the row must contain, empty for anything"""
    reason: str = ""
    """why there is no such kernel on this card: nothing is compiled"""
    subnormals: bool = False
    """reads bits as subnormal numbers: instructions that flush those to zero would make it wrong"""

    @property
    def label(self) -> str:
        """op and shape class, as the table shows them."""
        return f"{self.op} {self.shape_class}"


class KernelRow(TypedDict):
    """A row of `localllm.kernels/1`."""

    op: str
    capability: int
    impl: str
    reason: str
    """empty, or why there is no such kernel"""
    shared_bytes: int
    registers: int
    spill_bytes: int
    mma: str
    """the matrix instructions it uses, as in the PTX; empty for none"""


def compile_spec(spec: KernelSpec, capability: int) -> KernelRow:
    """Build `spec` for compute capability `capability` (as 90): what it needs, or the reason why it cannot be built."""
    row = KernelRow(
        op=spec.label,
        capability=capability,
        impl=spec.impl,
        reason=spec.reason,
        shared_bytes=0,
        registers=0,
        spill_bytes=0,
        mma="",
    )
    if spec.reason:
        return row
    try:
        compiled = build(spec, capability)
    except Exception as error:  # whatever the compiler raises is the reason
        row["reason"] = f"does not compile: {_last_line(error)}"
        return row
    if spec.subnormals and re.search(r"\b(?:fma|mul|add|sub)(?:\.rn)?\.ftz\.f32", compiled.asm["ptx"]):
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
    if row["shared_bytes"] > SHARED_LIMIT[capability]:
        return f"{name}: {row['shared_bytes']} bytes of shared memory, the card has {SHARED_LIMIT[capability]}"
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

    names = spec.kernel.arg_names
    missing = [n for n in names if n not in spec.signature and n not in spec.constexprs]
    unknown = [n for n in (*spec.signature, *spec.constexprs) if n not in names]
    if missing or unknown:
        raise ValueError(f"{spec.label}: arguments without a type {missing}, unknown {unknown}")
    signature = {n: spec.signature.get(n, "constexpr").removesuffix(HINT) for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if spec.signature.get(n, "").endswith(HINT)}
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=dict(spec.constexprs), attrs=attrs)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True, **spec.options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


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
