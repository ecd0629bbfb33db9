"""Every kernel compiles for every card: within its shared memory, no spills where it counts, the right instructions.

The default run takes a part of the table that changes with the kernels' sources; what it compiled is kept in `.cache`.
`make test-aot` takes all of it; TRITON=3.6 beside it takes another Triton, under which only `dot_scaled` may differ.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.kernels.triton import aot
from localllm.kernels.triton.aot import KernelRow, compile_spec, complaint, matrix_instructions
from localllm.kernels.triton.aot_cases import KernelSpec
from localllm.kernels.triton.cards import AMD, CLASSES
from localllm.kernels.verify.records import source_hash

import triton  # isort: skip

ROOT = Path(__file__).resolve().parents[3]
TESTED = "3.9"
"""the Triton of constraints.txt"""
PARTS = 390
"""the default run compiles one in so many kernels for one card, which has more than that"""

CACHE = ROOT / ".cache" / f"triton-{triton.__version__}-kernels"
SLABS = """
import re
from localllm.kernels.triton import aot, aot_cases

for spec in aot_cases.all_specs(90):
    if spec.label in ("linear int4 g128 slab", "linear e2m1 e4m3 slab"):
        text = aot.build(spec, 90).asm
        print(*sorted(set(re.findall(r"st[.]global[.](v[0-9])[.]b32", text["ptx"]))))
        layout = re.search(r"tt[.]store .*, (#blocked[0-9]*)>", text["ttgir"])[1]
        made = re.search(rf"^{layout} = (.*)$", text["ttgir"], re.MULTILINE)[1]
        print("sizePerThread = [1, 8], threadsPerWarp = [1, 32]" in made and "order = [1, 0]" in made)
"""
SHUFFLES = """
from localllm.kernels.triton import aot, aot_cases

for spec in aot_cases.all_specs(90):
    if spec.label.endswith("spread_kernel") and "int8" in spec.label or "int8 d256 gated" in spec.label:
        print(aot.build(spec, 90).asm["ptx"].count("shfl.sync"))
"""


def checked(**more: Any) -> list[KernelRow]:
    other = "" if triton.__version__.startswith(TESTED) else "dot_scaled"
    return aot.table(cache_dir=CACHE, check=True, may_differ=other, timeout_s=7200, **more)


def test_part_of_the_table() -> None:
    number = int(source_hash(), 16)
    card = (90, 120)[number // PARTS % 2]
    rows = checked(capabilities=(card,), part=(number % PARTS, PARTS))
    assert {row["capability"] for row in rows} == {card}
    assert all(row["registers"] for row in rows if not row["reason"])


@pytest.mark.slow
def test_whole_table() -> None:
    rows = checked()
    assert {row["capability"] for row in rows} == set(CLASSES)
    names = {(row["op"], row["capability"]) for row in rows}
    assert len(names) == len(rows), "two kernels of one name"
    found = {row["op"].split()[0] for row in rows}
    assert {"linear", "rms_norm", "rope", "kv_write"} <= found
    assert all(f"linear int4 g128 M={m}" in {r["op"] for r in rows if r["capability"] == 1201} for m in (1, 16, 128))
    for capability in CLASSES:
        mine = {row["op"]: row for row in rows if row["capability"] == capability}
        if 80 <= capability < AMD:
            assert not mine["linear bf16 M=1"]["mma"] and "mma" in mine["linear int4 g128 M=16"]["mma"]
    large = {row["capability"]: row["mma"] for row in rows if row["op"] == "linear e2m1 e4m3 M=64"}
    assert "wgmma" in large[90] and "tcgen05" in large[100]


@pytest.mark.slow
def test_slabs_are_written_in_whole_sectors() -> None:
    """Neighbouring threads store 16 bytes side by side."""
    command = [sys.executable, "-P", "-c", SLABS]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env | {"TRITON_CACHE_DIR": str(CACHE)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["v4", "True"] * 2


@pytest.mark.slow
def test_long_vectors_are_rotated_with_few_shuffles() -> None:
    """Each warp exchanged all elements of a latent with all others: 2,300 shuffles, one after the other."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", SHUFFLES]
    done = subprocess.run(command, env=env | {"TRITON_CACHE_DIR": str(CACHE)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2 and all(0 < int(count) < 300 for count in done.stdout.split())


WAITS = """
from localllm.kernels.triton import aot, aot_cases

found = {}
for spec in aot_cases.all_specs(90):
    if spec.label in ("compressed_attention_merge bf16 entries of 0", "paged_attention_decode bf16 d256 g12 p4"):
        ptx = aot.build(spec, 90).asm["ptx"]
        found[spec.op] = ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
print(found)
"""


@pytest.mark.slow
def test_lengths_that_the_kernel_before_writes_are_read_after_the_wait() -> None:
    """The interpreter has no dependent launches, so that only compiled code shows it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", WAITS]
    done = subprocess.run(command, env=env | {"TRITON_CACHE_DIR": str(CACHE)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == {"compressed_attention_merge": True, "paged_attention_decode": True}


def test_all_specs_are_described() -> None:
    """Names are unique on a card, and no part of the table is forgotten or taken twice."""
    for capability in CLASSES:
        specs = list(aot.all_specs(capability))
        assert len({spec.label for spec in specs}) == len(specs)
        parts = [spec.label for index in range(7) for spec in aot.shard(specs, index, 7)]
        assert sorted(parts) == sorted(spec.label for spec in specs)


def row(**more: Any) -> KernelRow:
    usual: dict[str, Any] = {
        "op": "linear x", "capability": 120, "impl": "triton", "reason": "", "shared_bytes": 0, "registers": 40,
        "spill_bytes": 0, "mma": "",
    }  # fmt: skip
    return KernelRow(**(usual | more))  # type: ignore[typeddict-item]


def test_complaints() -> None:
    spec = KernelSpec("linear", "triton", "x", decode=True, expect_mma="mxf4nvf4")
    good = row(mma="mma.sync.kind::mxf4nvf4.block_scale", shared_bytes=CLASSES[120].shared_bytes)
    assert complaint(spec, good) == ""
    assert "101377 bytes of shared memory" in complaint(spec, good | {"shared_bytes": CLASSES[120].shared_bytes + 1})
    assert "8 bytes of spills" in complaint(spec, good | {"spill_bytes": 8})
    assert "expected mxf4nvf4, found no matrix" in complaint(spec, good | {"mma": ""})
    assert "does not compile" in complaint(spec, good | {"reason": "does not compile: E"})
    prefill = KernelSpec("linear", "triton", "x")
    assert complaint(prefill, row(spill_bytes=8)) == ""
    amd = KernelSpec("linear", "triton", "x", decode=True, expect_mma="v_mfma")
    assert complaint(amd, row(capability=942, mma="v_mfma_f32_16x16x16_bf16", spill_bytes=8)) == ""
    assert complaint(amd, row(capability=942, shared_bytes=65_537, mma="v_mfma")).startswith("gfx942 linear x")


def test_a_missing_kernel_is_a_row_with_the_reason() -> None:
    spec = KernelSpec("linear", "triton", "x", reason="no FP8 instructions")
    found = compile_spec(spec, 86)
    assert found["reason"] == "no FP8 instructions" and complaint(spec, found) == ""


def test_matrix_instructions_are_read_from_ptx() -> None:
    ptx = "  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1};\n" + " mma.sync.aligned.m16n8k16 x;\n" * 2
    assert matrix_instructions(ptx) == "mma.sync.aligned.m16n8k16, wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
