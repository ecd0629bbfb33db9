"""One command for a card at hand: are all kernels right, and how fast are they against what the card can do?

    python benchmarks/gpu.py --check               every op against its reference, in the shapes of many models
    python benchmarks/gpu.py --minutes 9           the lines that decide, then as much of the grid as there is time for
    python benchmarks/gpu.py --only 8B --tune 20   rows whose name contains 8B, after timing tile sizes

Weights are random and made on the device, in Qwen3's shapes: nothing is downloaded. Needs torch, triton, numpy and this
checkout, installed or not. Every row is written to the JSON file at once, so a run may be stopped at any time; several
runs append to one file. Exit 1 when a check failed or a line was missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STARTED = time.time()
ROOT = Path(__file__).resolve().parents[1]
WARM_BYTES = 10 << 30
CHECK_LIMIT_S = 540  # of one group of checks
SPEED = (  # model, format, KV; the lines of the issue come first
    ("8B", "int4", "fp8"),
    ("8B", "nvfp4", "fp8"),
    ("8B", "bf16", "bf16"),
    ("0.6B", "bf16", "bf16"),
)


class Report:
    """Rows, printed as they come and kept in a file after each."""

    def __init__(self, file: Path, device: str, deadline: float) -> None:
        import torch
        import triton

        self._file = file
        self.deadline = deadline
        name = torch.cuda.get_device_name(device) if device != "cpu" else platform.processor() or platform.machine()
        self.document: dict[str, Any] = {
            "schema": "localllm.gpu-bench/1",
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "command": "python benchmarks/gpu.py " + " ".join(sys.argv[1:]),
            "card": name,
            "versions": {
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "rows": [],
        }
        self._before = json.loads(file.read_text()) if file.exists() else []
        self.missed = 0

    def row(self, name: str, value: float, unit: str, line: str = "", holds: bool | None = None, **more: Any) -> None:
        """One number; `line` is what it should meet."""
        self.missed += holds is False
        mark = "" if holds is None else "ok" if holds else "MISSED"
        print(f"{name:58} {value:12.4g} {unit:8} {line:10} {mark}", flush=True)
        entry = {"name": name, "value": value, "unit": unit, "line": line, "holds": holds, **more}
        self.document["rows"].append(entry)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".part")
        temporary.write_text(json.dumps([*self._before, self.document], indent=1) + "\n")
        temporary.replace(self._file)

    def has_time(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return time.time() + seconds < self.deadline


def child(
    words: Iterable[str], limit_s: float, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """This script again, in a process of its own, with `more` environment: what crashes a CUDA context ends there."""
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=os.environ | (more or {}))
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 124, said, f"stopped after {limit_s:.0f} s")


# --- right? ----------------------------------------------------------------------------------------------------------


def check(device: str, only: str, report: Report, workers: int) -> int:
    """Run the groups of checks side by side (compiling takes most of the time); how many checks failed."""
    from gpu_checks import groups

    names = [name for name in groups(device) if only in name]
    failed = 0

    def run(name: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        limit = max(10.0, min(CHECK_LIMIT_S, report.deadline - time.time()))
        return name, child(["--group", name, "--device", device], limit)

    with ThreadPoolExecutor(workers) as pool:
        for name, done in pool.map(run, names):
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
            wrong = [(what, said) for what, said in found if said]
            if done.returncode not in (0, 1) or not found:
                wrong.append((name, (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]))
            for what, said in wrong:
                print(f"WRONG {what}: {said}", flush=True)
            failed += len(wrong)
            good = len(found) - len([1 for _, said in found if said])
            report.row(f"check {name}", good, "right", "all", not wrong, wrong=wrong)
    return failed


def check_group(device: str, name: str) -> int:
    """One group, in this process: a JSON pair a line."""
    from gpu_checks import groups

    failed = 0
    for what, said in groups(device)[name]():
        failed += bool(said)
        print(json.dumps([what, said]), flush=True)
    return 1 if failed else 0


# --- fast? -----------------------------------------------------------------------------------------------------------


def warm(models: Iterable[tuple[str, str, str]], device: str, workers: int, limit_s: float) -> None:
    """Compile the kernels of models side by side, two layers of each in a process of its own."""
    words = [["--warm", ":".join(model), "--device", device] for model in models]
    with ThreadPoolExecutor(workers) as pool:
        for model, done in zip(words, pool.map(lambda w: child(w, limit_s), words), strict=True):
            if done.returncode:
                print(f"{model[1]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)


def warm_one(model: str, device: str) -> None:
    """Every kernel of a model once: all buckets, a chunk, sampling."""
    from gpu_models import facts_of, load
    from gpu_rows import BATCHES, Bench, limited

    from localllm.device import machine

    size, form, kv = model.split(":")
    on_card = device != "cpu"
    loaded = load(facts_of(size, form, 2), form, kv, device, dtype="bfloat16" if on_card else "float32")
    facts = limited(machine(), WARM_BYTES)  # others compile on this card, too
    bench = Bench(loaded, facts, kv, 8192 if on_card else 512, max(BATCHES) if on_card else 2, device)
    bench.prefill_seconds(4096 if on_card else 64)
    bench.decode_seconds(1, 4096 if on_card else 64, 3)
    bench.close()


def speed(options: argparse.Namespace, report: Report) -> None:
    """The deciding lines, then transformers, the start, and the grid, while there is time."""
    from gpu_models import FORMATS, SIZES

    device = options.device
    on_card = device != "cpu"
    chosen = SPEED if on_card else (("tiny", "int4", "bf16"), ("tiny", "bf16", "bf16"))
    wanted = [model for model in chosen if options.only in f"{model[0]} {model[1]}, KV {model[2]}"]
    if on_card and options.workers > 1:
        started = time.time()
        warm(wanted, device, options.workers, max(30.0, report.deadline - time.time()) * 0.4)
        report.row("kernels compiled, side by side", time.time() - started, "s")
    from gpu_speed import Speed

    timed = Speed(device, report, options.only, options.tune, child)
    for model in chosen:
        timed.model(*model, timed.lines)
    timed.eager("8B", "int4", "fp8")
    timed.transformers("8B" if on_card else "tiny")
    timed.cold("8B" if on_card else "tiny")
    if options.lines:
        return
    for size in [name for name in SIZES if (name != "tiny") == on_card]:
        for form in FORMATS:
            for kv in ("bf16", "fp8"):
                timed.model(size, form, kv, timed.grid, 60 if on_card else 1)
    if options.llama_bench:
        timed.llama_cpp(*options.llama_bench)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare every op with its reference and stop")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop cleanly after so long")
    parser.add_argument("--only", default="", help="checks or models whose name contains this")
    parser.add_argument("--lines", action="store_true", help="only the lines that decide, not the grid")
    parser.add_argument(
        "--tune", type=float, default=0.0, metavar="S", help="time tile sizes for S seconds a model first"
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu for a dry run with a tiny model")
    parser.add_argument("--workers", type=int, default=6, help="processes that compile side by side")
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/gpu-CARD.json by default")
    parser.add_argument("--llama-bench", nargs=2, metavar=("BINARY", "GGUF"), help="compare with llama.cpp at the end")
    for hidden in ("--group", "--warm", "--cold"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # a checkout that is not installed
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA device: torch sees none; --device cpu is a dry run", file=sys.stderr)
        return 2
    if options.group:
        return check_group(options.device, options.group)
    if options.warm:
        warm_one(options.warm, options.device)
        return 0
    if options.cold:
        from gpu_files import first_token

        kv = "fp8" if options.device != "cpu" else "bf16"
        print(json.dumps(first_token(Path(options.cold), options.device, kv, STARTED)))
        return 0
    card = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu"
    plain = "".join(c if c.isalnum() else "-" for c in card.lower())
    file = options.out or ROOT / "benchmarks/results" / f"gpu-{plain}.json"
    report = Report(file, options.device, STARTED + 60 * options.minutes)
    if options.check:
        failed = check(options.device, options.only, report, options.workers)
        print("all kernels are right" if not failed else f"{failed} checks failed")
        return 1 if failed else 0
    speed(options, report)
    print(f"{report.missed} lines missed, {len(report.document['rows'])} rows in {file}")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
