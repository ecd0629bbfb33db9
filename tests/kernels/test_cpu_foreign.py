"""Instruction sets this machine does not have: NEON cross-compiled and run under qemu-user, AMX tiles in emulation.

Integer products are equal to those of this machine, bit for bit. All of it is slow: `make test-all`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.kernels import Weight, reference
from localllm.kernels.cpu import build, interface, layout, linear
from localllm.kernels.kv_pages import KVPages

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "kernels/cpu"
ARM = ("neon", "neondot", "neoni8mm")
GGUF = {"Q5_1": 24, "Q6_K": 210, "Q5_K": 176, "Q4_K": 144, "Q3_K": 110, "Q2_K": 84, "IQ4_XS": 136}
BLOCK = {"Q5_1": 32}


def cross_compiler() -> tuple[str, ...]:
    """A compiler for 64-bit Arm; skips where there is none."""
    if shutil.which("aarch64-linux-gnu-gcc"):
        return ("aarch64-linux-gnu-gcc",)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl")
    pytest.skip("no compiler for 64-bit Arm: install gcc-aarch64-linux-gnu, or the ziglang wheel")


def emulator() -> str:
    """qemu's user mode; skips where there is none."""
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if found is None:
        pytest.skip("no emulator of 64-bit Arm: install qemu-user-static")
    return found


@pytest.fixture(scope="module", params=ARM)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], bytes]:
    """Cases -> results, computed by the kernels of an Arm instruction set."""
    compiler, qemu = cross_compiler(), emulator()
    program = tmp_path_factory.mktemp("arm") / request.param
    flags = [flag for flag in build._flags(request.param) if flag not in ("-shared", "-fPIC")]
    command = [*compiler, *flags, "-static", str(HERE / "harness.c"), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, timeout=600)

    def run(cases: bytes) -> bytes:
        return subprocess.run([qemu, "-cpu", "max", program], input=cases, stdout=-1, check=True, timeout=600).stdout

    run.isa = request.param  # type: ignore[attr-defined]
    return run


SUPER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def gguf_weight(block_type: str, n: int, k: int) -> Weight:
    """Random bytes, with scales that are small numbers."""
    size = GGUF[block_type]
    data = torch.randint(0, 256, (n, k // BLOCK.get(block_type, 256), size), dtype=torch.uint8)
    places = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "IQ4_XS": (0,)}.get(block_type, (0, 2))
    for at in places:
        data[:, :, at : at + 2] = (torch.rand(n, data.shape[1], 1) * 0.1).half().view(torch.uint8)
    return Weight("gguf", (n, k), data.view(n, -1), block_type=block_type)


def weights() -> dict[str, Weight]:
    n, k = 40, 256
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    ints = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    made = {name: gguf_weight(name, n, k) for name in GGUF}
    scales = torch.rand(n, k // 32).half()
    made["int4"] = Weight("int4g", (n, k), codes, scales, group_size=32)
    made["int4 min"] = Weight("int4g", (n, k), codes, scales, mins=-scales, group_size=32)
    made["int8"] = Weight("int8", (n, k), ints, scales, group_size=32)
    made["one row, odd K"] = Weight("int8", (1, 75), ints[:1, :75].contiguous(), torch.rand(1, 1), group_size=75)
    made["fp4"] = Weight("fp4g32", (n, k), codes, torch.randint(120, 130, (n, k // 32), dtype=torch.uint8))
    made["bf16"] = Weight("dense", (n, k), torch.randn(n, k).bfloat16())
    return made


def test_products(arm: Callable[[bytes], bytes]) -> None:
    cases, expected = b"", []
    takes_bytes = arm.isa != "neon" and build.lib().ll_abi() & 1
    for name, weight in weights().items():
        prepared = linear.prepare(weight)
        w = interface.CWeight.from_buffer_copy(prepared.struct)
        w.data = w.row_scale = w.perm = w.pre_scale = None
        eight = ((1, 2), (5, 2), (40, 2)) if takes_bytes and weight.form != "dense" else ()
        for m, takes in ((1, 0), (3, 0), (5, 0), (40, 0), (2, 1), (9, 1), *eight):
            x = torch.randn(m, weight.shape[1]) * torch.logspace(-2, 2, weight.shape[1])
            head = struct.pack("<5q", 1, 0, 0, 0, 0)[:8] + bytes(w)
            cases += head + struct.pack("<4q", prepared.data.numel(), m, takes, 0)
            cases += prepared.data.numpy().tobytes() + x.numpy().tobytes()
            floats = linear.run(x, prepared, takes=interface.Take.FLOATS)
            expected.append((name, m, takes, linear.run(x, prepared, takes=takes), floats))
    out = np.frombuffer(arm(cases), np.float32)
    for name, m, takes, y, floats in expected:
        found, out = torch.from_numpy(out[: y.numel()].copy()).view(y.shape), out[y.numel() :]
        if takes == interface.Take.FLOATS or name == "bf16":
            torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()), msg=f"{name} {m}")
        elif name in SUPER and takes == interface.Take.INT16 and arm.isa != "neon":
            # products of bytes in 128 bits: activations have one scale for 32, in the kernels at hand one for 256
            torch.testing.assert_close(found, floats, rtol=0, atol=1e-4 * float(y.abs().max()), msg=f"{name} {m}")
        else:
            assert torch.equal(found, y), (name, m, takes)
    assert out.size == 0


def test_attention(arm: Callable[[bytes], bytes]) -> None:
    cases, expected = b"", []
    for kv_format, dim, window, queries in (
        ("f32", 64, 0, 1),
        ("bf16", 64, 0, 2),
        ("bf16", 256, 100, 30),
        ("fp16", 48, 0, 5),
        ("int8", 64, 0, 1),
        ("int8", 80, 50, 60),
        ("fp8", 128, 0, 3),
    ):
        tokens, heads, kv_heads, page = 300, 6, 2, 16
        count = -(-tokens // page)
        pages = KVPages.empty(kv_format, count, kv_heads, page, dim)
        k, v, q = (torch.randn(n, h, dim) for n, h in ((tokens, kv_heads), (tokens, kv_heads), (queries, heads)))
        table = torch.randperm(count).int()
        at = torch.arange(tokens)
        slots = table.long()[at // page] * page + at % page
        numbers = (
            kv_heads,
            page,
            dim,
            list(interface.KV_DTYPES).index(kv_format),
            count,
            tokens,
            heads,
            queries,
            window,
        )
        cases += struct.pack("<10q", 2, *numbers) + b"".join(t.numpy().tobytes() for t in (k, v, slots, table, q))
        reference.kv_write(k, v, pages, slots)
        where = table[None], torch.tensor([0, queries]).int(), torch.tensor([tokens]).int()
        expected.append((kv_format, pages, reference.paged_attention(q, pages, *where, 0.125, window or None)))
    out = arm(cases)
    for kv_format, pages, y in expected:
        parts: list[Tensor] = []
        rows = torch.zeros(pages.k.shape[:3])
        for like in (pages.k, pages.v, pages.k_scales, pages.v_scales, y):
            like = rows if like is None else like
            size = like.numel() * like.element_size()
            parts.append(torch.frombuffer(bytearray(out[:size]), dtype=like.dtype).view(like.shape))
            out = out[size:]
        for found, wanted in zip(parts, pages, strict=False):
            assert wanted is None or torch.equal(found, wanted), kv_format
        atol = 3e-6 * max(1.0, float(y.abs().max()))  # sums of 256 dimensions, in another order: 27 roundings
        torch.testing.assert_close(parts[4], y, rtol=0, atol=atol, msg=kv_format)
    assert not out


def library(path: Path, isa: str, *extra: str) -> ctypes.CDLL:
    """The kernels for an instruction set with more flags; skips where this machine has none."""
    if isa not in build.runnable_isas():
        pytest.skip(f"{isa} is needed beside what is emulated")
    compiler = build._compiler()
    command = [*compiler, *build._flags(isa), *extra, str(FOLDER / "main.c"), "-o", str(path), "-lm"]
    subprocess.run(command, check=True, timeout=600)
    lib = ctypes.CDLL(str(path))
    interface.declare(lib)
    return lib


def check_rows(lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows give the bits of single ones, and those are close to what floats give."""
    for module in (linear, layout):
        monkeypatch.setattr(module, "lib", lambda: lib)
    # 256 inputs three times, and more tiles of 32 rows than are computed together
    names = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
    several = {f"{name} of 768": gguf_weight(name, 136, 768) for name in names}
    ints, scales = torch.randint(-128, 128, (136, 768), dtype=torch.int8), torch.rand(136, 24).half()
    codes, bytes_ = (torch.randint(0, top, (136, n), dtype=torch.uint8) for top, n in ((256, 384), (120, 48)))
    several["int8 of 768"] = Weight("int8", (136, 768), ints, scales, group_size=32)
    several["int4 of 768"] = Weight("int4g", (136, 768), codes, scales, group_size=32)
    several["fp4g16 of 768"] = Weight("fp4g16", (136, 768), codes, bytes_.view(torch.float8_e4m3fn))
    for name, weight in (weights() | several).items():
        prepared = linear.prepare(weight)
        rows = ((13, 0), (16, 0), (40, 0), (150, 0), (16, 2), (40, 2))
        for m, takes in ((13, 0), (37, 0), (261 if name == "Q5_K of 768" else 16, 0)) if name in several else rows:
            if takes and weight.form == "dense":
                continue
            x = torch.randn(m, weight.shape[1])
            single = torch.cat([linear.run(row, prepared, takes=takes) for row in x.split(1)])
            assert torch.equal(linear.run(x, prepared, takes=takes), single), (name, m, takes)
            floats = linear.run(x, prepared, takes=interface.Take.FLOATS)
            # of 8, of 14 and of 16 bits
            off = 3e-2 if takes == interface.Take.INT8 else 4e-4 if "K" in name or "XS" in name else 1e-4
            torch.testing.assert_close(single, floats, rtol=0, atol=off * float(floats.abs().max()), msg=f"{name} {m}")


def test_amx_in_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = (*(f"-D__AMX_{name}__" for name in ("TILE", "INT8", "BF16")), "-DLL_AMX_EMULATED")
    emulated += ("-include", str(HERE / "amx_emulation.h"))
    tiles = library(tmp_path / "tiles.so", "avx512vnni", *emulated)
    assert tiles.ll_amx() == 1
    check_rows(tiles, monkeypatch)


def test_avx_vnni_in_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = ("-D__AVXVNNI__", "-include", str(HERE / "avxvnni_emulation.h"))
    lib = library(tmp_path / "vnni.so", "avx2", *emulated)
    assert lib.ll_abi() & 1
    check_rows(lib, monkeypatch)


def test_amx_is_off_where_the_system_has_no_tiles(tmp_path: Path) -> None:
    lib = library(tmp_path / "amx.so", "avx512vnni", *build.ISAS["amx"])
    if "amx" not in build.runnable_isas():
        assert lib.ll_amx() == 0
