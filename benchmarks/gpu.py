"""Check and time all kernels on a GPU: correctness, speed relative to the GPU's limits, and other engines.

    python benchmarks/gpu.py --plan            print what to run first, each part within ten minutes
    python benchmarks/gpu.py check             every op against its reference, graphs against eager steps, first start
    python benchmarks/gpu.py speed             rows with targets, and a decoding step kernel by kernel
    python benchmarks/gpu.py rivals            transformers and torch's own kernels on the same GPU
    python benchmarks/gpu.py grid --only 8B    all sizes, formats, batches and contexts, as far as time allows
    python benchmarks/gpu.py --dry             rehearse every part without a GPU: H100 facts, Triton's interpreter

Weights are random and created on the device, in Qwen3's shapes: nothing is downloaded. Needs torch, triton, numpy and
this checkout, installed or not. Every row is written to the JSON file at once, so a run may be stopped at any time, and
several runs append to one file. The exit status is 1 if a check failed or a target was missed, or, in a rehearsal, if a
part did not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_place import Place

STARTED = time.time()
ROOT = Path(__file__).resolve().parents[1]
WARM_BYTES = 10 << 30
CHECK_LIMIT_S = 540  # for one group of checks
LEAST_S = 10  # start no group with less time left
SPEED = (  # model, format, KV; rows with targets come first
    ("8B", "int4", "fp8"),
    ("qwen3.5-27b", "int4", "fp8"),
    ("30B-A3B", "int4", "fp8"),
    ("8B", "nvfp4", "fp8"),
    ("8B", "bf16", "bf16"),
    ("gpt-oss-20b", "mxfp4", "fp8"),
    ("0.6B", "bf16", "bf16"),
)
PARTS = ("check", "speed", "rivals", "grid")
DRY = {"TRITON_INTERPRET": "1", "LOCALLLM_TESTING": "1", "LOCALLLM_FAKE_HW": "h100"}
PLAN = """\
Three runs of ten minutes, most valuable first. Rows go to benchmarks/results/gpu-CARD.json at once: stop at any time.

1. python benchmarks/gpu.py check --minutes 9.5 --file .cache/pieces
   start     first ever start (target: 60 s) and one with cached kernels (8 s)
   ops       each implementation of each op, with the heads of seven models, KV bf16, fp16, int8 and fp8
   products  {forms} weight formats x {shapes} shapes, from one row to a prompt, every implementation that fits
   models    self-test, then graphs and steps ahead = eager over {same} tokens, also with speculation; bf16, fp8, int4,
             nvfp4, and the file; the same for mixtures: layers of Qwen3-30B-A3B in bf16, int4 and nvfp4; and for layers
             of each kind of {families} families, from Qwen3.5 to DeepSeek V4, in the sizes of the catalog
2. python benchmarks/gpu.py speed --minutes 9.5 --out FILE
{speed}
   each: MBU of the engine and of a step, steps and answers with two draft tokens relative to plain ones, a step kernel
   by kernel (CUPTI), attention at 32k, prefill, batch 64, memory
   then one step without graphs
3. python benchmarks/gpu.py rivals --minutes 9.5 --out FILE
   torch.mm, _weight_int4pack_mm, _scaled_mm and SDPA against our kernels; transformers at batch 1 and 32
   If time is left: python benchmarks/gpu.py grid

With a quarter of an hour in all, instead:
   python benchmarks/gpu.py check --minutes 6 --only model,mixture,family,cold
   python benchmarks/gpu.py speed --minutes 6

To check with a model file, copy it in pieces next to the checkout, in a folder that git ignores:
   python benchmarks/gpu.py --cut MODEL.gguf      on this machine: .carry/MODEL.gguf.000, .001, ... of 48 MiB
   mkdir -p .cache/pieces && cp .carry/* .cache/pieces    on the GPU machine, one call per piece; --file joins them
"""


class Report:
    """Rows, printed as they come and saved to a file after each."""

    def __init__(self, file: Path, place: Place, deadline: float, only: str = "") -> None:
        import torch
        import triton

        self._file = file
        self.deadline, self._only = deadline, only.split(",")
        self.document: dict[str, Any] = {
            "schema": "localllm.gpu-bench/1",
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "command": "python benchmarks/gpu.py " + " ".join(sys.argv[1:]),
            "card": place.name,
            "versions": {
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "rows": [],
        }
        self._before = json.loads(file.read_text()) if file.exists() else []
        self.without: list[str] = []  # parts that failed, except because of missing packages

    @property
    def missed(self) -> int:
        """Names of rows that missed their targets."""
        return sum(row["holds"] is False for row in self.document["rows"])

    def row(self, name: str, value: float, unit: str, line: str = "", holds: bool | None = None, **more: Any) -> None:
        """Add one number; `line` is its target."""
        mark = "" if holds is None else "ok" if holds else "MISSED"
        print(f"{name:58} {value:12.4g} {unit:8} {line:10} {mark}", flush=True)
        entry = {"name": name, "value": value, "unit": unit, "line": line, "holds": holds, **more}
        self.take([entry])

    def take(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows that were already printed."""
        self.document["rows"] += rows
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".part")
        temporary.write_text(json.dumps([*self._before, self.document], indent=1) + "\n")
        temporary.replace(self._file)

    def left_out(self, name: str, error: BaseException) -> None:
        """Report something that could not be measured, and why."""
        if not isinstance(error, ImportError):
            self.without.append(name)
        print(f"{name}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)

    def wants(self, name: str) -> bool:
        """Return whether `--only` selects this name."""
        return any(part in name for part in self._only)

    def has_time(self, seconds: float) -> bool:
        """Return whether so many seconds are left."""
        return time.time() + seconds < self.deadline


def child(
    words: Iterable[str], limit_s: float, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this script in a child process with `more` environment, which contains crashes of a CUDA context."""
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=os.environ | (more or {}))
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 124, output, f"stopped after {limit_s:.0f} s")


# --- checks ----------------------------------------------------------------------------------------------------------


def check(place: Place, options: argparse.Namespace, report: Report) -> int:
    """Run the groups of checks in parallel (mostly compiling) and return the number of failures."""
    from gpu_checks import groups

    names = [name for name in groups(place, options.file) if report.wants(name)]
    failed = 0

    def run(name: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        limit = min(CHECK_LIMIT_S, report.deadline - time.time())
        if limit < LEAST_S:
            return name, subprocess.CompletedProcess([], 124, "", "no time was left")
        return name, child(["--group", name, "--file", options.file, *place.words], limit)

    with ThreadPoolExecutor(options.workers) as pool:
        for name, done in pool.map(run, names):
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
            wrong = [(check_name, problem) for check_name, problem in found if problem]
            if done.returncode not in (0, 1) or not found:
                wrong.append((name, (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]))
            for check_name, problem in wrong:
                print(f"WRONG {check_name}: {problem}", flush=True)
            failed += len(wrong)
            good = len(found) - len([1 for _, problem in found if problem])
            report.row(f"check {name}", good, "right", "all", not wrong, wrong=wrong)
    print("all kernels are right" if not failed else f"{failed} checks failed")
    return failed


def check_group(place: Place, options: argparse.Namespace) -> int:
    """Run one group in this process and print one JSON pair per line."""
    from gpu_checks import groups

    failed = 0
    for check_name, problem in groups(place, options.file)[options.group]():
        failed += bool(problem)
        print(json.dumps([check_name, problem]), flush=True)
    return 1 if failed else 0


# --- speed ------------------------------------------------------------------------------------------------------------


def warm(models: Iterable[tuple[str, str, str]], place: Place, workers: int, limit_s: float) -> None:
    """Compile the kernels of models in parallel, a few layers of each in a child process."""
    words = [["--warm", ":".join(model), *place.words] for model in models]
    with ThreadPoolExecutor(workers) as pool:
        for model, done in zip(words, pool.map(lambda w: child(w, limit_s), words), strict=True):
            if done.returncode:
                print(f"{model[1]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)


def warm_one(model: str, place: Place) -> None:
    """Run every kernel of a model once: all buckets, a chunk, sampling."""
    from gpu_models import facts_of, load
    from gpu_rows import Bench

    size, form, kv = model.split(":")
    loaded, sizes = load(facts_of(size, form, 0), form, place.kv(kv), place), place.sizes
    # other processes compile on this GPU at the same time
    bench = Bench(loaded, place, place.kv(kv), 2 * sizes.ctx, max(sizes.batches), free=WARM_BYTES)
    bench.prefill_seconds(sizes.ctx)
    bench.decode_seconds(1, sizes.ctx, 3)
    bench.close()


def run_part(part: str, place: Place, options: argparse.Namespace, report: Report) -> int:
    """Run one part and return the number of failed checks."""
    from gpu_models import FORMATS, HEADED, SIZES
    from gpu_rivals import Rivals
    from gpu_speed import Speed

    failed = 0
    wanted = [model for model in SPEED if report.wants(f"{model[0]} {model[1]}, KV {model[2]}")]
    if part == "speed" and options.workers > 1 and not place.is_dry:
        started = time.time()
        warm(wanted, place, options.workers, max(30.0, report.deadline - time.time()) * 0.4)
        report.row("kernels compiled, side by side", time.time() - started, "s")
    timed = Speed(place, report, options.tune, child)
    if part == "check":
        timed.cold("8B")  # first: the checks take what time there is
        if options.file:
            from gpu_files import joined

            timed.cold("8B", str(joined(Path(options.file))))
        failed = check(place, options, report)
    elif part == "speed":
        for model in SPEED if not place.is_dry else ((HEADED, "bf16", "bf16"),):
            timed.model(*model, timed.lines)
        timed.eager("8B", "int4", "fp8")
    elif part == "rivals":
        rivals = Rivals(place, timed)
        rivals.kernels()
        rivals.transformers("8B")
        if options.llama_bench:
            rivals.llama_cpp(*options.llama_bench)
    else:
        sizes = [name for name in SIZES if "tiny" not in name]
        models = [(size, form, kv) for size in sizes for form in FORMATS for kv in ("bf16", "fp8")]
        for model in models if not place.is_dry else models[:1]:
            timed.model(*model, timed.grid, 60)
    return failed


def rehearse(options: argparse.Namespace, report: Report) -> int:
    """Run the checks in one process and all other parts in another, with rows in one file; return the failures."""
    with tempfile.TemporaryDirectory() as folder:
        halves = []
        for parts in (PARTS[:1], PARTS[1:]):
            file = Path(folder) / f"{parts[0]}.json"
            words = [*parts, "--dry", "--half", "yes", "--out", str(file), "--only", options.only]
            words += ["--minutes", str(options.minutes), "--workers", str(options.workers), "--file", options.file]
            halves.append((subprocess.Popen([sys.executable, str(Path(__file__).resolve()), *words]), file))
        failed = sum(process.wait() != 0 for process, _ in halves)
        found = [json.loads(file.read_text())[-1]["rows"] for _, file in halves if file.exists()]
    report.take(row for rows in found for row in rows)
    return failed


def parser() -> argparse.ArgumentParser:
    """Argument parser of this command."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", nargs="*", choices=[*PARTS, []], help="part to run; --dry runs all")
    made.add_argument("--plan", action="store_true", help="print a plan of three runs of ten minutes")
    made.add_argument("--dry", action="store_true", help="rehearse without a GPU")
    made.add_argument("--minutes", type=float, default=9.5, help="stop cleanly after this time")
    made.add_argument("--only", default="", help="A,B: only models and checks whose names contain A or B")
    made.add_argument("--file", default="", help="a model to check with: a file, or a folder of its pieces")
    made.add_argument("--cut", type=Path, metavar="MODEL", help="cut a file into pieces that can be copied one by one")
    made.add_argument(
        "--tune", type=float, default=0.0, metavar="S", help="first time tile sizes for S seconds per model"
    )
    made.add_argument("--device", default="cuda:0", help="cuda:N")
    made.add_argument(
        "--workers", type=int, default=min(15, os.cpu_count() or 1), help="number of processes that compile in parallel"
    )
    made.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/gpu-CARD.json")
    made.add_argument("--llama-bench", nargs=2, metavar=("BINARY", "GGUF"), help="compare with llama.cpp at the end")
    for hidden in ("--group", "--warm", "--cold", "--half"):
        made.add_argument(hidden, help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Parse the options and run."""
    options = parser().parse_args()
    # find a checkout that is not installed, and the modules beside this one even with PYTHONSAFEPATH
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    if not options.dry:
        return run(options)
    os.environ.update(DRY)  # before localllm is imported; children inherit it
    from interpreted import quick_interpreter

    with quick_interpreter():
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Run what the options ask for."""
    import torch
    from gpu_place import place_of

    if options.plan or options.cut:
        return prepare(options)
    if not options.dry and not torch.cuda.is_available():
        print("no CUDA device: torch sees none; --dry rehearses without one", file=sys.stderr)
        return 2
    place = place_of(options.device, options.dry)
    if options.group:
        return check_group(place, options)
    if options.warm:
        warm_one(options.warm, place)
        return 0
    if options.cold:
        from gpu_files import first_token

        print(json.dumps(first_token(Path(options.cold), place, "fp8", STARTED)))
        return 0
    plain = "".join(c if c.isalnum() else "-" for c in place.name.lower())
    file = options.out or ROOT / "benchmarks/results" / f"gpu-{plain}.json"
    report = Report(file, place, STARTED + 60 * options.minutes, options.only)
    if options.dry and not options.part:
        failed = rehearse(options, report)
    else:
        failed = sum(run_part(part, place, options, report) for part in options.part or ("speed",))
    if not options.half:
        print(f"{report.missed} targets missed, {len(report.document['rows'])} rows in {file}")
    if options.dry:  # speeds of a rehearsal are meaningless
        return 1 if failed or report.without else 0
    return 1 if failed or report.missed else 0


def prepare(options: argparse.Namespace) -> int:
    """Handle what needs no GPU: the plan, and pieces of a file."""
    from gpu_checks import FORMS
    from gpu_files import cut
    from gpu_models import FAMILIES
    from gpu_place import Sizes

    if options.cut:
        for piece in cut(options.cut, ROOT / ".carry"):
            print(f"{piece.relative_to(ROOT)} {piece.stat().st_size:,} bytes")
        return 0
    named = (f"{size if size[0].islower() else f'Qwen3-{size}'} {form}, KV {kv}" for size, form, kv in SPEED)
    speed = textwrap.fill("; ".join(named), 116, initial_indent="   ", subsequent_indent="   ")
    sizes = Sizes()
    counts = {"forms": FORMS, "shapes": len(sizes.products), "same": sizes.same, "families": len(FAMILIES)}
    print(PLAN.format(**counts, speed=speed), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
