"""Limits of matrix products on this CPU: peak multiply-adds per second, and memory read bandwidth.

    python benchmarks/peaks.py [--threads 2] [--seconds 5] [--json FILE]

Each kind of instruction runs on registers only, with twelve independent sums (an Intel core issues two per cycle with
a latency of five), alternating with the others and with reading memory. Prefill multiplies every weight once per
token, in pairs of 16 bits (`vpdpwssd`) or as bytes (`vpdpbusd`); on AMD CPUs three of four sums use half of the
multiplications, with two additions each (`vpaddw`). Decoding reads every weight once per token.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from localllm.device import machine
from localllm.device.cpu import read_bandwidth
from localllm.kernels.cpu import build

SOURCE = r"""
#include "vec.h"
#define LOOP(NAME, STEP) \
    vi NAME(int64_t rounds, vi a, vi b) \
    { \
        vi s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a, s8 = a, s9 = a, s10 = a, s11 = a; \
        for (int64_t n = 0; n < rounds; n++) { \
            int i = 0; \
            (void)i; \
            STEP(s0); STEP(s1); STEP(s2); STEP(s3); STEP(s4); STEP(s5); STEP(s6); STEP(s7); \
            STEP(s8); STEP(s9); STEP(s10); STEP(s11); \
            __asm__ volatile("" : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+v"(s4), "+v"(s5)); \
            __asm__ volatile("" : "+v"(s6), "+v"(s7), "+v"(s8), "+v"(s9), "+v"(s10), "+v"(s11)); \
        } \
        return s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11; \
    }
#define PAIRS(s) s = madd16(s, a, b)
#define BYTES(s) s = DPBUSD(s, a, b)
#define HALVED(s) \
    { \
        vi x, y; \
        __asm__ volatile("vpaddw %2, %3, %0\n\tvpaddw %3, %2, %1" : "=&v"(x), "=v"(y) : "v"(a), "v"(b)); \
        s = madd16(s, x, y); \
    }
#define TWICE(s) { PAIRS(s); PAIRS(s); }
#define MOSTLY_HALVED(s) if ((i++ & 3) == 0) TWICE(s) else HALVED(s)
static LOOP(pairs, PAIRS)
static LOOP(halved, HALVED)
static LOOP(mostly_halved, MOSTLY_HALVED)
static LOOP(bytes, BYTES)
void peak_pairs(int64_t rounds, int32_t *out) { vi_store(out, pairs(rounds, vi_set1(3), vi_set1(5))); }
void peak_halved(int64_t rounds, int32_t *out) { vi_store(out, halved(rounds, vi_set1(3), vi_set1(5))); }
void peak_mostly_halved(int64_t rounds, int32_t *out) { vi_store(out, mostly_halved(rounds, vi_set1(3), vi_set1(5))); }
void peak_bytes(int64_t rounds, int32_t *out) { vi_store(out, bytes(rounds, vi_set1(3), vi_set1(5))); }
int64_t lanes(void) { return VW; }
"""
HALVED = "vpdpwssd with two vpaddw"
MOSTLY_HALVED = f"{HALVED}, but for a quarter"
MACS = {"vpdpwssd": 2, HALVED: 4, MOSTLY_HALVED: 4, "vpdpbusd": 4}  # multiply-adds per lane and step
SUMS, ROUNDS = 12, 1 << 23


def compiled(folder: Path) -> ctypes.CDLL:
    """Compile the loops for the instruction set of the kernels on this CPU; exit if it has none of them."""
    isa = build.library().isa
    compiler = build._compiler()
    if compiler is None or isa not in ("avx512vnni", "amx"):
        raise SystemExit(f"{isa}: none of these instructions")
    (folder / "peaks.c").write_text(SOURCE)
    kernels = Path(build.__file__).parent
    command = [*compiler, *build._flags(isa), f"-I{kernels}", str(folder / "peaks.c"), "-o", str(folder / "peaks.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "peaks.so"))


def rate(function: Any, threads: int) -> float:
    """Loop steps per second of all threads together."""
    outs = [(ctypes.c_int32 * 16)() for _ in range(threads)]
    begun = time.perf_counter()
    running = [threading.Thread(target=function, args=(ctypes.c_int64(ROUNDS), out)) for out in outs]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return threads * ROUNDS * SUMS / (time.perf_counter() - begun)


def main() -> None:
    """Measure in alternation, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in (*MACS, "read")}
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        kinds = ("pairs", "halved", "mostly_halved", "bytes")
        functions = {name: library[f"peak_{kind}"] for name, kind in zip(MACS, kinds, strict=True)}
        until = time.monotonic() + options.seconds
        while time.monotonic() < until or not found["read"]:
            for name, function in functions.items():
                found[name].append(rate(function, options.threads) * library.lanes() * MACS[name] / 1e9)
            found["read"].append(read_bandwidth.__wrapped__(options.threads, 64 << 20) / 1e9)
    rows = {name: {"median": statistics.median(each), "best": max(each)} for name, each in found.items()}
    for name, row in rows.items():
        unit = "GB/s" if name == "read" else "billion multiply-adds per second"
        print(f"{name}: {row['median']:.1f} (best {row['best']:.1f}) {unit}, {options.threads} threads")
    if options.json:
        cpu = machine().cpu.name
        kept = {"schema": "localllm.peaks/1", "date": datetime.date.today().isoformat(), "cpu": cpu, "rows": rows}
        options.json.write_text(json.dumps(kept | {"threads": options.threads}, indent=1) + "\n")


if __name__ == "__main__":
    main()
