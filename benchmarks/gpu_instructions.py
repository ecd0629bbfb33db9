"""Instructions per weight of the matrix products of a decoding step, counted in the compiled kernels.

    python -P benchmarks/gpu_instructions.py 90 120 --out benchmarks/results/gpu-instructions.json

No GPU is needed. A kernel's loop is the longest stretch of its machine code (SASS) that ends with a jump back to its
start; without a loop all of its instructions count, also those that only its last programs execute. The launch
parameters give the number of weights that a thread multiplies per pass. A multiprocessor issues four instructions for
32 threads per cycle, so an H100 (132 of them at 1.7 GHz, 3.05 TB/s copy bandwidth) has time for 4.7 instructions per
4-bit weight while its bytes arrive; half-rate instructions count twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# integer and conversion pipes: 64 per cycle on sm_90, the others 128 (throughput table of the CUDA C++ guide)
HALF_RATE = ("IADD3", "IDP", "IMAD", "IMNMX", "ISETP", "LEA", "LOP3", "PRMT", "SHF", "F2F", "F2I", "I2F")
OPERATION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
LABEL = re.compile(r"^(\.L_x_\d+):")


def longest_loop(sass: str) -> list[str]:
    """Operations of the longest loop by name; all operations if there is none, because K is done in one pass."""
    operations: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(operations)
        elif operation := OPERATION.match(line):
            operations.append((operation[1], operation[2]))
    loops: list[list[str]] = [[]]
    for index, (name, rest) in enumerate(operations):
        target = re.search(r"\.L_x_\d+", rest) if name.startswith("BRA") else None
        if target and labels.get(target[0], index) < index:
            loops.append([name.partition(".")[0] for name, _ in operations[labels[target[0]] : index + 1]])
    return max(loops, key=len) or [name.partition(".")[0] for name, _ in operations]


def weights_of_a_pass(constants: dict[str, Any], warps: int) -> float:
    """Weights that a thread multiplies per pass: rows of the program's tile times its stretch of K."""
    codes = 16 // constants["LOW"]  # in 16 bits
    halves = constants["CHUNKS"] * 8 if "CHUNKS" in constants else constants["HALVES"]
    return constants["ROWS"] * halves * codes / (32 * warps)


def rows(capability: int, only: str) -> list[dict[str, Any]]:
    """Count every decode product of one compute capability."""
    import triton

    from localllm.kernels.triton import aot, aot_cases

    tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/nvdisasm"
    found = []
    for spec in aot_cases.all_specs(capability):
        if spec.op != "linear" or not spec.decode or spec.launch is None or only not in spec.label:
            continue
        compiled = aot.build(spec, capability)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            sass = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
        loop = longest_loop(sass)
        weights = weights_of_a_pass(dict(spec.launch.constexprs), spec.launch.options["num_warps"])
        slow = sum(loop.count(name) for name in HALF_RATE)
        registers, spilled = aot.resource_usage(compiled.asm["cubin"])
        found.append(
            {
                "kernel": spec.label.removeprefix("linear "),
                "capability": capability,
                "instructions": round(len(loop) / weights, 2),
                "half_rate": round(slow / weights, 2),
                "registers": registers,
                "spill_bytes": spilled,
                "most": dict(Counter(loop).most_common(4)),
            }
        )
        row = found[-1]
        print(
            f"sm_{capability:<4}{row['kernel']:34}{row['instructions']:6.2f} a weight, {row['half_rate']:5.2f} at half"
            f" rate, {registers:3} registers, {spilled} bytes spilled",
            flush=True,
        )
    return found


def main() -> int:
    """Parse the options and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, nargs="+", help="90 for an H100 or H200, 120 for an RTX 5090, ...")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    options = parser.parse_args()
    if os.environ.pop("TRITON_INTERPRET", ""):
        print("unset TRITON_INTERPRET: interpreted kernels have no machine code", file=sys.stderr)
        return 2
    table = [row for capability in options.capability for row in rows(capability, options.only)]
    if not table:
        print(f"no kernel name contains {options.only!r}", file=sys.stderr)
        return 2
    if options.out:
        import triton

        document = {"schema": "localllm.gpu-instructions/1", "triton": triton.__version__, "rows": table}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
