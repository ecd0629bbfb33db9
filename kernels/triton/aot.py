"""The table of kernels compiled ahead of time for every card, made in child processes without TRITON_INTERPRET.

`python -P -m localllm.kernels.triton.aot CAPABILITY...` prints one JSON row a line; `table` runs it and collects.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .aot_spec import CAPABILITIES, KernelRow, KernelSpec, compile_spec

MODULES: tuple[str, ...] = (
    "product_specs",
    "narrow_product",
    "attention_specs",
    "rms_norm",
    "rope",
    "activation",
    "kv_write",
    "qk_norm_rope_kv",
    "embedding",
    "sampling",
)
"""Modules of this package with `specs(capability)`."""


def all_specs(capability: int) -> Iterator[KernelSpec]:
    """Every kernel that would be launched on such a card."""
    for name in MODULES:
        yield from importlib.import_module(f".{name}", __package__).specs(capability)


def shard(specs: Sequence[KernelSpec], index: int, count: int) -> list[KernelSpec]:
    """Part `index` of `count`: every op appears in some part, no spec in two."""
    return [spec for i, spec in enumerate(specs) if i % count == index % count]


def table(
    capabilities: Sequence[int] = CAPABILITIES,
    *,
    part: tuple[int, int] = (0, 1),
    workers: int = 2,
    cache_dir: Path | None = None,
    python: str = sys.executable,
    timeout_s: float = 900,
) -> list[KernelRow]:
    """Compile the kernels for the capabilities and give their rows.

    part        (index, count): only every count-th kernel, shifted by one from capability to capability
    cache_dir   where Triton keeps what it compiled; its own default when None
    python      the interpreter, one whose environment has localllm and a Triton

    Raises RuntimeError with the child's last lines when a child fails otherwise than by a kernel.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if cache_dir is not None:
        env["TRITON_CACHE_DIR"] = str(cache_dir)

    def one(place: int) -> list[KernelRow]:
        capability = capabilities[place]
        command = [python, "-P", "-m", __name__, str(capability), "--part", str(part[0] + place), str(part[1])]
        run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout_s)
        if run.returncode:
            raise RuntimeError(f"compiling for sm_{capability} failed: {' / '.join(run.stderr.splitlines()[-3:])}")
        return [json.loads(line) for line in run.stdout.splitlines()]

    with ThreadPoolExecutor(workers) as pool:
        return [row for rows in pool.map(one, range(len(capabilities))) for row in rows]


def main() -> None:
    """Compile one part for the capabilities named, one JSON row a line."""
    parser = argparse.ArgumentParser(prog="aot", description=main.__doc__)
    parser.add_argument("capability", type=int, nargs="+")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "COUNT"))
    parser.add_argument("--only", default="", help="kernels whose op and shape class contain this")
    args = parser.parse_args()
    for capability in args.capability:
        specs = [spec for spec in all_specs(capability) if args.only in spec.label]
        for spec in shard(specs, *args.part):
            sys.stdout.write(json.dumps(compile_spec(spec, capability)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
