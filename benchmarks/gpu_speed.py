"""The rows of `gpu.py` that are timed: the lines that decide, and the grid."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_rows
import torch
from gpu_files import write_checkpoint
from gpu_models import facts_of, kv_bytes, load, read_bytes
from gpu_rows import BATCHES, CONTEXTS, PREFILLS, Bench

from localllm.device import machine
from localllm.errors import LocalLLMError
from localllm.kernels.verify.trial import is_device_lost
from localllm.kernels.verify.tuning import gpu_seconds, tuner


class Speed:
    """Everything that is timed, against the copy bandwidth and the matmul peak of this card."""

    def __init__(
        self,
        device: str,
        report: Any,
        only: str,
        tune_s: float,
        child: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        self.device, self.report, self.only, self.tune_s = device, report, only, tune_s
        self.child = child
        self.prefills: dict[tuple[str, str], float] = {}  # seconds of a prompt, by size and form
        self.machine = machine()
        self.bandwidth = gpu_rows.copy_bandwidth(device)
        self.peak = gpu_rows.matmul_peak(device)
        report.row("copy bandwidth", self.bandwidth / 1e9, "GB/s")
        report.row("bf16 matmul peak", self.peak / 1e12, "TFLOP/s")

    def model(self, size: str, form: str, kv: str, measure: Callable[[Any, str], None], needs_s: float = 40.0) -> None:
        """Load a model, measure, free it; left out where it does not fit or there is no time."""
        name = f"{size} {form}, KV {kv}"
        if self.only not in name or not self.report.has_time(needs_s):
            return
        facts, on_card = facts_of(size, form), self.device != "cpu"
        ctx = min(max(CONTEXTS) + 64, facts.max_context) if on_card else 1024
        model = bench = None
        try:
            model = load(facts, form, kv, self.device, dtype="bfloat16" if on_card else "float32")
            bench = Bench(model, self.machine, kv, ctx, max(BATCHES) if on_card else 2, self.device)
            if self.tune_s:
                self._tune(bench, name)
            measure(bench, name)
            if on_card:
                peak = torch.cuda.max_memory_allocated()
                planned = bench.plan.need_bytes - bench.plan.margin_bytes - dict(bench.plan.work_terms)["context"]
                off = (peak - planned) / planned
                self.report.row(f"{name}: peak memory over plan", off, "", "<= 0.03", off <= 0.03, planned=planned)
        except (LocalLLMError, torch.OutOfMemoryError) as error:
            print(f"{name}: left out: {error}", flush=True)
        finally:
            if bench is not None:
                bench.close()
            del model, bench
            if on_card:
                torch.cuda.empty_cache()

    def _tune(self, bench: Any, name: str) -> None:
        for batch in (1, 4, 64):
            bench.decode_seconds(batch, 512, 3)
        bench.prefill_seconds(512)
        for one in tuner().tune(gpu_seconds, self.tune_s):
            self.report.row(f"{name}: tile {one.shape.name}", one.us, "us", tile=dict(one.tile), first_us=one.first_us)
        bench.engine.runner.capture()

    def lines(self, bench: Any, name: str) -> None:
        """The lines that decide: one person's decoding, attention, prefill, throughput."""
        report, facts, kv = self.report, bench.model.facts, bench.plan.kv
        on_card = self.device != "cpu"
        ctx = 4096 if on_card else 256
        read = read_bytes(bench.model)
        answer = bench.answer(ctx, 96 if on_card else 4)
        mbu = (read + kv_bytes(facts, kv, ctx)) / answer["tpot_s"] / self.bandwidth
        line = 0.70 if "0.6B" in name else 0.88 if "bf16," in name else 0.80
        shown = {"tpot_ms": answer["tpot_s"] * 1e3, "ttft_ms": answer["ttft_s"] * 1e3}
        report.row(f"{name}: MBU, batch 1, {ctx} tokens, engine", mbu, "", f">= {line}", mbu >= line, **shown)
        step = bench.decode_seconds(1, ctx)
        report.row(
            f"{name}: step, batch 1, {ctx} tokens",
            step * 1e3,
            "ms",
            mbu=(read + kv_bytes(facts, kv, ctx)) / step / self.bandwidth,
        )
        deep = 32768 if on_card else 512
        if bench.fits(1, deep):
            alone = bench.attention_seconds(deep)
            share = kv_bytes(facts, kv, deep) / facts.num_layers / alone / self.bandwidth
            report.row(
                f"{name}: attention alone, {deep} tokens", share, "of copy", ">= 0.85", share >= 0.85, us=alone * 1e6
            )
            slow = bench.decode_seconds(1, deep)
            extra = (slow - step) / (kv_bytes(facts, kv, deep - ctx) / self.bandwidth)
            report.row(f"{name}: 32k against its bytes", extra, "x", "<= 1.25", extra <= 1.25, step_ms=slow * 1e3)
        prefill = bench.prefill_seconds(ctx)
        flops = (
            2 * (facts.num_params - facts.vocab_size * facts.hidden_size * (1 if facts.tied_embeddings else 2)) * ctx
        )
        flops += 4 * ctx * ctx / 2 * facts.num_heads * facts.head_dim * facts.num_layers
        share = flops / prefill / self.peak
        report.row(f"{name}: prefill {ctx}", share, "of peak", ">= 0.65", share >= 0.65, tokens_s=ctx / prefill)
        size, form = name.partition(",")[0].split()
        self.prefills[size, form] = prefill
        both = [self.prefills.get((size, kind)) for kind in ("bf16", "int4")]
        if both[0] and both[1] and form in ("bf16", "int4"):
            ratio = both[0] / both[1]
            report.row(f"{size} int4: prefill over that of bf16", ratio, "x", ">= 0.8", ratio >= 0.8)
        if bench.fits(64, 1024):
            many, one = bench.decode_seconds(64, 1024), bench.decode_seconds(1, 1024)
            report.row(f"{name}: batch 64 over batch 1", 64 * one / many, "x", ">= 10", 64 * one / many >= 10)

    def eager(self, size: str, form: str, kv: str) -> None:
        """The same step without graphs."""
        if self.device == "cpu" or self.only not in f"{size} {form}" or not self.report.has_time(30):
            return
        with self._left_out(f"{size} {form} without graphs"):
            model = load(facts_of(size, form), form, kv, self.device)
            bench = Bench(model, self.machine, kv, 4160, 4, self.device, graphs=False)
            self.report.row(f"{size} {form}: step without graphs", bench.decode_seconds(1, 4096) * 1e3, "ms")
            bench.close()

    @contextmanager
    def _left_out(self, name: str) -> Iterator[None]:
        """What fails for reasons of its own ends nothing else; a card that is lost does."""
        try:
            yield
        except (LocalLLMError, ImportError, RuntimeError, ValueError, OSError) as error:
            if is_device_lost(error):
                raise
            print(f"{name}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
        finally:
            if self.device != "cpu":
                torch.cuda.empty_cache()

    def transformers(self, size: str) -> None:
        """Our decoding against theirs: >= 5 x at batch 1, >= 10 x at batch 32."""
        if self.only not in f"transformers {size}" or not self.report.has_time(90):
            return
        with self._left_out("transformers"):
            from gpu_transformers import decode_tps

            length = 1024 if self.device != "cpu" else 64
            self._against({batch: decode_tps(size, batch, length, self.device) for batch in (1, 32)}, size)

    def _against(self, theirs: dict[int, float], size: str) -> None:
        on_card = self.device != "cpu"
        model = load(facts_of(size, "bf16"), "bf16", "bf16", self.device, dtype="bfloat16" if on_card else "float32")
        bench = Bench(model, self.machine, "bf16", 1152 if on_card else 256, 32, self.device)
        for batch, line in ((1, 5.0), (32, 10.0)):
            ours = batch / bench.decode_seconds(batch, 1024 if on_card else 64)
            ratio = ours / theirs[batch]
            report = {"ours_tps": ours, "theirs_tps": theirs[batch]}
            self.report.row(
                f"{size} bf16 over transformers, batch {batch}", ratio, "x", f">= {line:g}", ratio >= line, **report
            )
        bench.close()

    def cold(self, size: str) -> None:
        """From a process's start to the first token, the file in the page cache: first with kernels to compile."""
        if self.only not in f"cold {size}" or not self.report.has_time(120):
            return
        with tempfile.TemporaryDirectory() as folder:
            nbytes = write_checkpoint(Path(folder) / "model", size, self.device)
            fresh = {  # nothing compiled, no verdicts, no profiles: as on the first day
                "TRITON_CACHE_DIR": str(Path(folder) / "triton"), "LOCALLLM_CACHE": str(Path(folder) / "cache"),
            }  # fmt: skip
            for name, line in (("first ever start", 60.0), ("cold start, kernels cached", 8.0)):
                done = self.child(["--cold", str(Path(folder) / "model"), "--device", self.device], 200, fresh)
                if done.returncode:
                    print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                    return
                stages = json.loads(done.stdout.splitlines()[-1])
                took = stages["first_token"]
                self.report.row(
                    f"{size} int4: {name}", took, "s", f"<= {line:g}", took <= line, file_bytes=nbytes, **stages
                )

    def grid(self, bench: Any, name: str) -> None:
        """Every batch and context that fits, and every prefill."""
        facts, kv, read = bench.model.facts, bench.plan.kv, read_bytes(bench.model)
        for ctx in CONTEXTS:
            for batch in BATCHES:
                if bench.fits(batch, ctx) and self.report.has_time(3):
                    step = bench.decode_seconds(batch, ctx, 12)
                    mbu = (read + batch * kv_bytes(facts, kv, ctx)) / step / self.bandwidth
                    self.report.row(
                        f"{name}: decode {batch} x {ctx}", batch / step, "tok/s", tpot_ms=step * 1e3, mbu=mbu
                    )
        for length in PREFILLS:
            if bench.fits(1, length) and self.report.has_time(6):
                took = bench.prefill_seconds(length)
                self.report.row(f"{name}: prefill {length}", length / took, "tok/s", ttft_ms=took * 1e3)

    def llama_cpp(self, binary: str, model: str) -> None:
        """llama-bench of a CUDA build that was made here, on a file that was brought along."""
        done = subprocess.run(
            [binary, "-m", model, "-p", "4096", "-n", "128", "-o", "json"], capture_output=True, text=True
        )
        for row in json.loads(done.stdout) if done.returncode == 0 else []:
            kind = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode {row['n_gen']}"
            self.report.row(f"llama.cpp {Path(model).name}: {kind}", row["avg_ts"], "tok/s")
