"""The table of kernels compiled ahead of time for every card, made in child processes without TRITON_INTERPRET.

`python -P -m localllm.kernels.triton.aot CAPABILITY...` prints one JSON row a line; `table` runs it and collects.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .aot_cases import all_specs
from .aot_spec import KernelRow, KernelSpec, compile_spec, complaint
from .cards import CLASSES


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


def main() -> None:
    """Compile one part for the capabilities named, one JSON row a line."""
    parser = argparse.ArgumentParser(prog="aot", description=main.__doc__)
    parser.add_argument("capability", type=int, nargs="+")
    parser.add_argument("--part", type=int, nargs=3, default=(0, 1, 1), metavar=("INDEX", "COUNT", "STRIDE"))
    parser.add_argument("--only", default="", help="kernels whose op and shape class contain this")
    parser.add_argument("--check", action="store_true", help="fail where a kernel is not as it must be")
    parser.add_argument("--may-differ", default="", help="but not for kernels whose op and shape class contain this")
    args = parser.parse_args()
    complaints: list[str] = []
    index, count, stride = args.part
    for place, capability in enumerate(args.capability):
        specs = [spec for spec in all_specs(capability) if args.only in spec.label]
        for spec in shard(specs, index + place * stride, count):
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
