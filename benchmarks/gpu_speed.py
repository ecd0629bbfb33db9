"""The timed rows of `gpu.py`: rows with targets, kernel by kernel, and the grid."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_rows
import torch
from gpu_files import write_checkpoint
from gpu_models import cache_bytes, facts_of, load, read_bytes, table_apart
from gpu_place import Place
from gpu_rows import Bench

from localllm.errors import LocalLLMError
from localllm.kernels.cpu.build import cache_folder
from localllm.kernels.verify.trial import is_device_lost
from localllm.kernels.verify.tuning import tuner
from localllm.models.architectures.facts import ModelFacts, kv_bytes_per_token, linear_shapes
from localllm.models.architectures.layers import Experts
from localllm.models.architectures.mixers import Attention

PROFILED_STEPS = 4


class Speed:
    """All timings, relative to the copy bandwidth and the matmul peak of this GPU."""

    def __init__(
        self,
        place: Place,
        report: Any,
        tune_s: float,
        child: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        self.place, self.report, self.tune_s = place, report, tune_s
        self.sizes = place.sizes
        self.child = child
        self.prefills: dict[tuple[str, str], float] = {}  # seconds of a prompt, by size and format
        self.bandwidth = gpu_rows.copy_bandwidth(place)
        self.peak = gpu_rows.matmul_peak(place)
        report.row("copy bandwidth", self.bandwidth / 1e9, "GB/s")
        report.row("bf16 matmul peak", self.peak / 1e12, "TFLOP/s")

    def model(self, size: str, form: str, kv: str, measure: Callable[[Any, str], None], needs_s: float = 40.0) -> None:
        """Load a model, measure it and free it; skipped if it does not fit or time is short."""
        size, form = self.place.model(size), self.place.form(form)
        name = f"{size} {form}, KV {kv}"
        if not self.report.wants(name) or not self.report.has_time(needs_s):
            return
        facts = facts_of(size, form)
        ctx = min(max(*self.sizes.contexts, self.sizes.deep) + 64, facts.max_context)
        model = bench = None
        try:
            model = load(facts, form, self.place.kv(kv), self.place)
            bench = Bench(model, self.place, self.place.kv(kv), ctx, max(self.sizes.batches))
            if self.tune_s:
                self._tune(bench, name)
            measure(bench, name)
            planned = bench.plan.need_bytes - bench.plan.margin_bytes - dict(bench.plan.work_terms)["context"]
            off = (self.place.peak_bytes() - planned) / planned
            self.report.row(f"{name}: peak memory over plan", off, "", "<= 0.03", off <= 0.03, planned=planned)
        except (LocalLLMError, torch.OutOfMemoryError) as error:
            self.report.left_out(name, error)
        finally:
            if bench is not None:
                bench.close()
            del model, bench
            self.place.free()

    def _tune(self, bench: Any, name: str) -> None:
        for batch in (1, 4, 64):
            if bench.fits(batch, self.sizes.contexts[0]):
                bench.decode_seconds(batch, self.sizes.contexts[0], 3)
        bench.prefill_seconds(self.sizes.contexts[0])
        for one in tuner(torch.device(self.place.device)).tune(self.place.cold_seconds, self.tune_s):
            self.report.row(f"{name}: tile {one.shape.name}", one.us, "us", tile=dict(one.tile), first_us=one.first_us)
        if bench.engine.runner.graphs is not None:
            bench.engine.runner.graphs.renew()
        bench.engine.runner.capture()

    def lines(self, bench: Any, name: str) -> None:
        """Rows with targets: batch-1 decoding, kernel by kernel, attention, prefill, throughput."""
        self._decoding(bench, name)
        self._profile(bench, name)
        self._prefill(bench, name)
        many, tokens = self.sizes.many
        if bench.fits(many, tokens):
            each, one = bench.decode_seconds(many, tokens), bench.decode_seconds(1, tokens)
            self.report.row(
                f"{name}: batch {many} over batch 1", many * one / each, "x", ">= 10", many * one / each >= 10
            )

    def _decoding(self, bench: Any, name: str) -> None:
        report, facts, kv, ctx = self.report, bench.model.facts, bench.plan.kv, self.sizes.ctx
        read = read_bytes(bench.model)
        answer = bench.answer(ctx, self.sizes.answer)
        mbu = (read + cache_bytes(facts, kv, ctx)) / answer["tpot_s"] / self.bandwidth
        line = self._mbu_line(facts, name)
        shown = {"tpot_ms": answer["tpot_s"] * 1e3, "ttft_ms": answer["ttft_s"] * 1e3}
        report.row(f"{name}: MBU, batch 1, {ctx} tokens, engine", mbu, "", f">= {line}", mbu >= line, **shown)
        step = bench.decode_seconds(1, ctx)
        mbu = (read + cache_bytes(facts, kv, ctx)) / step / self.bandwidth
        report.row(f"{name}: step, batch 1, {ctx} tokens", step * 1e3, "ms", mbu=mbu)
        if report.has_time(60.0):
            self._apart(bench, name, ctx, step)
        # a head guessing two tokens, 70 % of them right, yields 1 + 0.7 + 0.49 tokens per step, without its own time
        checks = bench.decode_seconds(1, ctx, guessed=2)
        report.row(f"{name}: step that checks 2 guesses", checks / step, "steps", "<= 1.25", checks <= 1.25 * step)
        found = bench.guessed(ctx, self.sizes.answer, 2, 0.7)
        times = found.pop("times")
        report.row(f"{name}: 2 guesses, 70 % right", times, "x", ">= 1.5", times >= 1.5, **found)
        if bench.head is not None:
            found = bench.guessed(ctx, self.sizes.answer, 2, 0.7, head=True)
            times = found.pop("times")
            report.row(f"{name}: 2 guesses of its head, 70 % right", times, "x", ">= 1.5", times >= 1.5, **found)
        deep = self.sizes.deep
        if not bench.fits(1, deep):
            return
        kinds = zip(facts.layers, facts.windows, strict=True)
        layer = next(
            (i for i, (one, window) in enumerate(kinds) if isinstance(one.mixer, Attention) and not window), None
        )
        if layer is not None:
            alone = bench.attention_seconds(layer, deep)
            share = kv_bytes_per_token([facts.layers[layer]], kv) * deep / alone / self.bandwidth
            least = 0.80 if kv == "fp8" else 0.85
            line = f">= {least:.2f}"
            report.row(
                f"{name}: attention alone, {deep} tokens", share, "of copy", line, share >= least, us=alone * 1e6
            )
        slow = bench.decode_seconds(1, deep)
        more = cache_bytes(facts, kv, deep) - cache_bytes(facts, kv, ctx)
        extra = (slow - step) / (more / self.bandwidth)
        report.row(f"{name}: {deep} tokens against their bytes", extra, "x", "<= 1.25", extra <= 1.25, ms=slow * 1e3)

    def _apart(self, bench: Any, name: str, ctx: int, step: float) -> None:
        """The same step with a kernel for each of what the products' programs also do, in turns with it."""
        model, capture = bench.model, bench.engine.runner.capture
        whole, apart = model.table, table_apart(model.facts, bench.plan.kv, self.place)
        rounds: dict[bool, list[float]] = {True: [step], False: []}
        for fused in (False, True, False):
            model.table = whole if fused else apart
            capture()
            rounds[fused].append(bench.decode_seconds(1, ctx))
        model.table = whole
        capture()
        slow, fast = (statistics.median(rounds[fused]) for fused in (False, True))
        self.report.row(f"{name}: step with a kernel for each", slow / fast, "x", ">= 1", slow >= fast, ms=slow * 1e3)

    @staticmethod
    def _mbu_line(facts: ModelFacts, name: str) -> float:
        if any(isinstance(layer.ffn, Experts) for layer in facts.layers):
            return 0.55
        if "0.6B" in name or facts.state_bytes:
            return 0.70
        return 0.88 if "bf16," in name else 0.80

    def _profile(self, bench: Any, name: str) -> None:
        """GPU time of a step at batch 1, by kernel."""
        kinds = torch.profiler.ProfilerActivity
        on_card = kinds.CUDA in torch.profiler.supported_activities()
        step = bench.decoding(1, self.sizes.ctx)
        step()
        with torch.profiler.profile(activities=[kinds.CUDA if on_card else kinds.CPU]) as profiled:
            for _ in range(PROFILED_STEPS):
                step()
            self.place.wait()
        for us, count, kernel in kernels_of(profiled.events(), on_card)[:16]:
            self.report.row(f"{name}: kernel {kernel[:60]}", us / PROFILED_STEPS, "us", count=count / PROFILED_STEPS)

    def _prefill(self, bench: Any, name: str) -> None:
        facts, ctx = bench.model.facts, self.sizes.ctx
        prefill = bench.prefill_seconds(ctx)
        flops = 2 * multiplied_params(facts) * ctx
        flops += sum(4 * ctx * ctx / 2 * one.num_heads * one.head_dim for one in _attention(facts))
        share, (size, form) = flops / prefill / self.peak, name.partition(",")[0].split()
        least = {"bf16": 0.70, "int4": 0.62}.get(form, 0.55)
        line = f">= {least:.2f}"
        self.report.row(f"{name}: prefill {ctx}", share, "of peak", line, share >= least, tokens_s=ctx / prefill)
        self.prefills[size, form] = prefill
        both = [self.prefills.get((size, kind)) for kind in ("bf16", "int4")]
        if both[0] and both[1] and form in ("bf16", "int4"):
            ratio = both[0] / both[1]
            self.report.row(f"{size} int4: prefill over that of bf16", ratio, "x", ">= 0.8", ratio >= 0.8)

    def eager(self, size: str, form: str, kv: str) -> None:
        """Measure the same step without graphs."""
        size, form = self.place.model(size), self.place.form(form)
        if not self.report.wants(f"{size} {form}") or not self.report.has_time(30):
            return
        with self.left_out(f"{size} {form} without graphs"):
            model = load(facts_of(size, form), form, self.place.kv(kv), self.place)
            bench = Bench(model, self.place, self.place.kv(kv), self.sizes.ctx + 64, 1, graphs=False)
            self.report.row(f"{size} {form}: step without graphs", bench.decode_seconds(1, self.sizes.ctx) * 1e3, "ms")
            bench.close()

    @contextmanager
    def left_out(self, name: str) -> Iterator[None]:
        """Report a part's failure and continue, unless the GPU itself is lost."""
        try:
            yield
        except (LocalLLMError, ImportError, RuntimeError, ValueError, OSError) as error:
            if is_device_lost(error):
                raise
            self.report.left_out(name, error)
        finally:
            self.place.free()

    def cold(self, size: str, file: str = "") -> None:
        """Time from process start to first token, file in the page cache: first with nothing compiled, then cached."""
        size, form = self.place.model(size), self.place.form("int4")
        if not self.report.wants(f"cold {size}") or not self.report.has_time(120):
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(file) if file else Path(folder) / "model"
            nbytes = path.stat().st_size if file else write_checkpoint(path, size, form, self.place)
            fresh = {  # nothing compiled, no verdicts, no profiles: a first start
                "TRITON_CACHE_DIR": str(Path(folder) / "triton"), "LOCALLLM_CACHE": str(Path(folder) / "cache"),
            }  # fmt: skip
            if self.place.is_dry:  # the C kernels serve only the host's part: compiling them took 30 s of CPU
                (Path(folder) / "cache/kernels").mkdir(parents=True)
                for library in cache_folder().glob("*.so"):
                    (Path(folder) / "cache/kernels" / library.name).symlink_to(library.resolve())
            for name, line in (("first ever start", 60.0), ("cold start, kernels cached", 8.0)):
                done = self.child(["--cold", str(path), *self.place.words], 200, fresh)
                if done.returncode:
                    self.report.left_out(name, RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1]))
                    return
                stages = json.loads(done.stdout.splitlines()[-1])
                took, what = stages["first_token"], path.name if file else f"{size} {form}"
                self.report.row(f"{what}: {name}", took, "s", f"<= {line:g}", took <= line, file_bytes=nbytes, **stages)

    def grid(self, bench: Any, name: str) -> None:
        """Measure every batch and context that fits, and every prefill length."""
        facts, kv, read = bench.model.facts, bench.plan.kv, read_bytes(bench.model)
        for ctx in self.sizes.contexts:
            for batch in self.sizes.batches:
                if bench.fits(batch, ctx) and self.report.has_time(3):
                    step = bench.decode_seconds(batch, ctx, min(12, self.sizes.steps))
                    mbu = (read + batch * cache_bytes(facts, kv, ctx)) / step / self.bandwidth
                    self.report.row(
                        f"{name}: decode {batch} x {ctx}", batch / step, "tok/s", tpot_ms=step * 1e3, mbu=mbu
                    )
        for length in self.sizes.contexts:
            if bench.fits(1, length) and self.report.has_time(6):
                took = bench.prefill_seconds(length)
                self.report.row(f"{name}: prefill {length}", length / took, "tok/s", ttft_ms=took * 1e3)


def _attention(facts: ModelFacts) -> Iterator[Attention]:
    return (layer.mixer for layer in facts.layers if isinstance(layer.mixer, Attention))


def multiplied_params(facts: ModelFacts) -> int:
    """Layer parameters that a token is multiplied with, counting only its selected experts."""
    total = 0
    for layer, times in facts.kinds:
        share = layer.ffn.top_k / layer.ffn.num_experts if isinstance(layer.ffn, Experts) else 1.0
        for name, (n, k) in linear_shapes(layer, facts.hidden_size).items():
            total += times * int(n * k * (share if ".experts." in name else 1.0))
    return total


def kernels_of(events: Any, on_card: bool) -> list[tuple[float, int, str]]:
    """(microseconds, launches, name) of the kernels that ran, longest first."""
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        if on_card and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        us, count = found.get(event.name, (0.0, 0))
        found[event.name] = us + event.time_range.elapsed_us(), count + 1
    return sorted(((us, count, name) for name, (us, count) in found.items()), reverse=True)
