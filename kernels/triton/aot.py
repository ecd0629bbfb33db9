"""The table of kernels compiled ahead of time for every card, made in child processes without TRITON_INTERPRET.

Shared memory, registers, spills and matrix instructions are read from what was compiled; no card need be there.
`python -P -m localllm.kernels.triton.aot CAPABILITY...` prints one JSON row a line; `table` runs it and collects.
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
    reason: str  # empty, or why there is no such kernel
    shared_bytes: int
    registers: int
    spill_bytes: int
    mma: str  # the matrix instructions it uses, as in the PTX; empty for none


def shard(specs: Sequence[KernelSpec], index: int, count: int) -> list[KernelSpec]:
    """Part `index` of `count`: every op appears in some part, no spec in two."""
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
    """Compile the kernels for the capabilities and give their rows.

    part        (index, count): only every count-th kernel, shifted by one from capability to capability
    workers     child processes, each with its share of the capabilities
    cache_dir   where Triton keeps what it compiled; its own default when None
    check       hold every kernel to `complaint`, but for those whose op and shape class contain `may_differ`

    Raises RuntimeError with the child's last lines when a child fails otherwise than by a kernel, and with all
    complaints where kernels are checked.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if cache_dir is not None:
        env["TRITON_CACHE_DIR"] = str(cache_dir)

    def share(worker: int) -> list[KernelRow]:
        mine = [str(c) for c in capabilities[worker::workers]]
        if not mine:
            return []
        # the parts of a worker's capabilities are `workers` apart, so that all of them differ
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
    """Build `spec` for compute capability `capability` (as 90): what it needs, or the reason why it cannot be built."""
    row = KernelRow(
        op=spec.label, capability=capability, impl=spec.impl, reason=spec.reason,
        shared_bytes=0, registers=0, spill_bytes=0, mma="",
    )  # fmt: skip
    if spec.launch is None:
        return row
    try:
        compiled = build(spec, capability)
    except Exception as error:  # whatever the compiler raises is the reason
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
    """What is wrong with a kernel as it was compiled; empty when nothing is."""
    capability = row["capability"]
    name = f"{name_of(capability)} {spec.label} ({spec.impl})"
    if row["reason"] != spec.reason:
        return f"{name}: {row['reason']}"
    there = CLASSES[capability].shared_bytes
    if row["shared_bytes"] > there:
        return f"{name}: {row['shared_bytes']} bytes of shared memory, the card has {there}"
    if spec.decode and 80 <= capability < AMD and row["spill_bytes"]:  # gfx1100 spills for heads of 256
        return f"{name}: a decoding kernel with {row['spill_bytes']} bytes of spills or local memory a thread"
    if spec.expect_mma not in row["mma"]:
        return f"{name}: expected {spec.expect_mma}, found {row['mma'] or 'no matrix instruction'}"
    return ""


def build(spec: KernelSpec, capability: int) -> Any:
    """The compiled kernel (`asm`, `metadata`). Raises what Triton raises."""
    launch = spec.launch
    assert launch is not None
    names, types = launch.kernel.arg_names, launch.signature
    missing = [n for n in names if n not in types and n not in launch.constexprs]
    unknown = [n for n in (*types, *launch.constexprs) if n not in names]
    if missing or unknown:
        raise ValueError(f"{spec.label}: arguments without a type {missing}, unknown {unknown}")
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
    """(registers a thread, bytes of stack and local memory a thread) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", text))) for name in ("REG", "STACK", "LOCAL")}
    return found["REG"], found["STACK"] + found["LOCAL"]


def amd_usage(text: str) -> tuple[int, int]:
    """(vector registers a thread, bytes of scratch memory a thread) by the assembly of an AMD kernel."""
    registers, scratch = (re.findall(rf"\.{name}:\s+(\d+)", text) for name in AMD_USAGE)
    return int(registers[-1]), int(scratch[-1])


def matrix_instructions(ptx: str) -> str:
    """The distinct matrix instructions of a kernel, without operands, comma separated."""
    found = re.findall(r"\b((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*)", ptx)
    return ", ".join(sorted(set(found)))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"


def main() -> None:
    """Compile one part for the capabilities named, one JSON row a line."""
    parser = argparse.ArgumentParser(prog="aot", description=main.__doc__)
    parser.add_argument("capability", type=int, nargs="+")
    parser.add_argument("--part", type=int, nargs=3, default=(0, 1, 1), metavar=("INDEX", "COUNT", "STRIDE"))
    parser.add_argument("--check", action="store_true", help="fail where a kernel is not as it must be")
    parser.add_argument("--may-differ", default="", help="but not for kernels whose op and shape class contain this")
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
