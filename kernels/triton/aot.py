"""Compile all Triton kernels ahead of time for every GPU architecture and tabulate their resource usage.

Shared memory, registers, spills and matrix instructions are read from the compiled code; no GPU is needed. Compilation
runs in child processes without TRITON_INTERPRET: `python -P -m localllm.kernels.triton.aot CAPABILITY...` prints one
JSON row per line, and `table` collects them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .aot_cases import KernelSpec, all_specs
from .cards import AMD, CLASSES, name_of

HINT = ":16"
AMD_USAGE = ("vgpr_count", "private_segment_fixed_size")


class KernelRow(TypedDict):
    """A row of `localllm.kernels/1`."""

    op: str
    capability: int
    impl: str
    reason: str  # empty, or why this kernel does not exist
    shared_bytes: int
    registers: int
    spill_bytes: int
    mma: str  # matrix instructions used, as in the PTX; empty for none


def shard(specs: Sequence[KernelSpec], index: int, count: int) -> list[KernelSpec]:
    """Return part `index` of `count`; the parts are disjoint and cover all specs."""
    return [spec for i, spec in enumerate(specs) if i % count == index % count]


def table(
    capabilities: Sequence[int] = tuple(CLASSES),
    *,
    part: tuple[int, int] = (0, 1),
    workers: int = 2,
    cache_dir: Path | None = None,
    check: bool = False,
    may_differ: str = "",
    timeout_s: float = 1800,
) -> list[KernelRow]:
    """Compile the kernels for the given capabilities and return their rows.

    part        (index, count): only every count-th kernel, with an offset that grows by one per capability
    workers     number of child processes, each with a share of the capabilities
    cache_dir   Triton's compile cache; None: Triton's default
    check       check every kernel with `complaint`, except those whose op and shape class contain `may_differ`

    Raises RuntimeError with the child's last lines if a child fails for a reason other than a kernel, and with all
    complaints if `check` finds any.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if cache_dir is not None:
        env["TRITON_CACHE_DIR"] = str(cache_dir)

    def share(worker: int) -> list[KernelRow]:
        mine = [str(c) for c in capabilities[worker::workers]]
        if not mine:
            return []
        # part indices of a worker's capabilities are `workers` apart, so that each capability gets its own part
        places = [str(part[0] + worker), str(part[1]), str(workers)]
        command = [sys.executable, "-P", "-m", __name__, *mine, "--part", *places]
        command += ["--check", "--may-differ", may_differ] if check else []
        run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout_s)
        if run.returncode:
            lines = run.stderr.splitlines()
            raise RuntimeError(f"compiling for {', '.join(mine)}:\n" + "\n".join(lines if check else lines[-3:]))
        return [json.loads(line) for line in run.stdout.splitlines()]

    with ThreadPoolExecutor(workers) as pool:
        rows = [row for found in pool.map(share, range(workers)) for row in found]
    return sorted(rows, key=lambda row: capabilities.index(row["capability"]))


def compile_spec(spec: KernelSpec, capability: int) -> KernelRow:
    """Build `spec` for `capability` (e.g. 90) and return its resource usage, or the reason why it cannot be built."""
    row = KernelRow(
        op=spec.label, capability=capability, impl=spec.impl, reason=spec.reason,
        shared_bytes=0, registers=0, spill_bytes=0, mma="",
    )  # fmt: skip
    if spec.launch is None:
        return row
    try:
        compiled = build(spec, capability)
    except Exception as error:  # any compiler exception is the reason
        row["reason"] = f"does not compile: {_last_line(error)}"
        return row
    row["shared_bytes"] = int(compiled.metadata.shared)
    if capability >= AMD:
        text = compiled.asm["amdgcn"]
        row["registers"], row["spill_bytes"] = amd_usage(text)
        row["mma"] = ", ".join(sorted(set(re.findall(r"\b(v_(?:mfma|wmma)_\w+)", text))))
        return row
    if spec.launch.subnormals and re.search(r"\b(?:fma|mul|add|sub)(?:\.rn)?\.ftz\.f32", compiled.asm["ptx"]):
        row["reason"] = "compiled to instructions that flush subnormal numbers"
    row["registers"], row["spill_bytes"] = resource_usage(compiled.asm["cubin"])
    row["mma"] = matrix_instructions(compiled.asm["ptx"])
    return row


def complaint(spec: KernelSpec, row: KernelRow) -> str:
    """Describe what is wrong with a compiled kernel; "" if nothing is."""
    capability = row["capability"]
    name = f"{name_of(capability)} {spec.label} ({spec.impl})"
    if row["reason"] != spec.reason:
        return f"{name}: {row['reason']}"
    there = CLASSES[capability].shared_bytes
    if row["shared_bytes"] > there:
        return f"{name}: needs {row['shared_bytes']} bytes of shared memory, but the GPU has {there}"
    if spec.decode and 80 <= capability < AMD and row["spill_bytes"]:  # gfx1100 spills for heads of 256
        return f"{name}: decode kernel with {row['spill_bytes']} bytes of spills or local memory per thread"
    if spec.expect_mma not in row["mma"]:
        return f"{name}: expected {spec.expect_mma}, found {row['mma'] or 'no matrix instruction'}"
    return ""


def build(spec: KernelSpec, capability: int) -> Any:
    """Compile and return the kernel (`asm`, `metadata`). Triton's exceptions pass through."""
    launch = spec.launch
    assert launch is not None
    names, types = launch.kernel.arg_names, launch.signature
    missing = [n for n in names if n not in types and n not in launch.constexprs]
    unknown = [n for n in (*types, *launch.constexprs) if n not in names]
    if missing or unknown:
        raise ValueError(f"{spec.label}: arguments without a type: {missing}; unknown arguments: {unknown}")
    signature = {n: types.get(n, "constexpr").removesuffix(HINT) for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types.get(n, "").endswith(HINT)}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=dict(launch.constexprs), attrs=attrs)
    lanes = CLASSES[capability].lanes if capability in CLASSES else 32
    target = GPUTarget("cuda", capability, 32) if capability < AMD else GPUTarget("hip", name_of(capability), lanes)
    return triton.compile(source, target=target, options=dict(launch.options))


@cache
def _cuobjdump() -> str:
    assert triton.__file__ is not None
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) per thread of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", text))) for name in ("REG", "STACK", "LOCAL")}
    return found["REG"], found["STACK"] + found["LOCAL"]


def amd_usage(text: str) -> tuple[int, int]:
    """(vector registers, bytes of scratch memory) per thread, from the assembly of an AMD kernel."""
    registers, scratch = (re.findall(rf"\.{name}:\s+(\d+)", text) for name in AMD_USAGE)
    return int(registers[-1]), int(scratch[-1])


def matrix_instructions(ptx: str) -> str:
    """Distinct matrix instructions of a kernel, without operands, comma-separated."""
    found = re.findall(r"\b((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*)", ptx)
    return ", ".join(sorted(set(found)))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"


def main() -> None:
    """Compile one part for the given capabilities and print one JSON row per line."""
    parser = argparse.ArgumentParser(prog="aot", description=main.__doc__)
    parser.add_argument("capability", type=int, nargs="+")
    parser.add_argument("--part", type=int, nargs=3, default=(0, 1, 1), metavar=("INDEX", "COUNT", "STRIDE"))
    parser.add_argument("--check", action="store_true", help="fail if a kernel does not meet its limits")
    parser.add_argument("--may-differ", default="", help="skip the check if op and shape class contain this text")
    args = parser.parse_args()
    complaints: list[str] = []
    index, count, stride = args.part
    for place, capability in enumerate(args.capability):
        for spec in shard(all_specs(capability), index + place * stride, count):
            row = compile_spec(spec, capability)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            excused = args.may_differ and args.may_differ in spec.label
            if args.check and not excused and (wrong := complaint(spec, row)):
                complaints.append(wrong)
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
