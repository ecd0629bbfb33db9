"""Time from a command to its first token, with and without repacked weights on disk, and its memory.

    python benchmarks/loading.py MODEL.gguf ... [--json FILE] [--repeat 3]

For each model, in alternation: a start without the file (`off`), the start that writes it (`first`), and one that reads
it (`second`), with the default of `engine.packed_store`. All files are in the page cache; the repacked file goes to a
temporary folder. A row has medians: seconds to the first byte of the answer, CPU seconds until then, peak anonymous
memory, and tokens per second over 32 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from localllm.kernels.cpu.build import cache_folder

LOCALLLM = [str(Path(sys.executable).with_name("localllm")), "run"]
OPTIONS = ["--stream", "--temp", "0", "--max-tokens", "32", "--attach-to", "off", "--json", "hi"]
LINES = {"first": 6.0, "second": 2.5}  # targets in seconds, for a 4B model
PHASES = ("resolve", "import", "weights", "ready")  # start of each phase, in seconds from the command
STATUS_S = 0.05


def start(model: str, home: Path, keeps: bool) -> dict[str, float]:
    """Run and measure one command."""
    limit = {"LOCALLLM_ENGINE_PACKED_STORE": "auto" if keeps else "0"}
    environment = os.environ | limit | {"LOCALLLM_HOME": str(home), "LOCALLLM_CACHE": str(cache_folder().parent)}
    begun, peak, ends = time.monotonic(), [0], threading.Event()
    with subprocess.Popen(
        [*LOCALLLM, model, *OPTIONS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        watch = threading.Thread(target=_watch, args=(process.pid, peak, ends))
        watch.start()
        assert process.stdout is not None
        first = cpu = 0.0
        done: dict[str, Any] = {}
        phases: dict[str, float] = {}
        for line in process.stdout:
            event, now = json.loads(line), time.monotonic() - begun
            if "event" not in event:
                ends.set()
                raise SystemExit(line)
            phases.setdefault(str(event.get("phase") or event["event"]), now)
            if not first and event["event"] == "token":
                first, cpu = now, _cpu_seconds(process.pid)
            done = event
        ends.set()
        watch.join()
    at = {f"{name}_s": phases.get(name, 0.0) for name in PHASES}
    return {"first_token_s": first, "cpu_s": cpu, "rss_anon": peak[0], "tps": done["timing"]["decode_tps"]} | at


def _watch(pid: int, peak: list[int], ends: threading.Event) -> None:
    while not ends.wait(STATUS_S):
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            peak[0] = max(peak[0], 1024 * int(next(line for line in status if line.startswith("RssAnon")).split()[1]))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rows(model: Path, repeat: int) -> list[dict[str, Any]]:
    """Measure in alternation, after one warm-up start."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "first": [], "second": []}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        start(str(model), home, keeps=False)
        for _ in range(repeat):
            shutil.rmtree(home / "cache/packed", ignore_errors=True)
            for name, runs in found.items():
                runs.append(start(str(model), home, keeps=name != "off"))
            if not any(home.glob("cache/packed/*.packed")):
                raise SystemExit(f"{home} has too little free space for {model.name}")
    return [
        {"model": model.name, "bytes": model.stat().st_size, "start": name, "line_s": LINES.get(name)}
        | {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        | {"runs": runs}
        for name, runs in found.items()
    ]


def main() -> None:
    """Parse the options, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":")
    document = {
        "schema": "localllm.loading/1",
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "command": f"python benchmarks/loading.py {' '.join(model.name for model in options.models)}"
        f" --repeat {options.repeat}",
        "cpu": cpu.partition(":")[2].strip(),
        "versions": {name: metadata.version(name) for name in ("localllm", "torch")},
        "rows": [row for model in options.models for row in rows(model, options.repeat)],
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
