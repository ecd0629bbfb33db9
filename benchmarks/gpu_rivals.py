"""Comparisons on the same GPU with transformers, torch's own kernels and llama.cpp."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_models import INT4_GROUP, facts_of, load, random_weight
from gpu_place import Place
from gpu_rows import Bench
from gpu_speed import Speed
from torch.nn.functional import scaled_dot_product_attention

from localllm.kernels import LinearFacts
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.registry import OpFacts, choose
from localllm.kernels.table import implementations

PRODUCTS = ((6144, 4096), (24_576, 4096), (4096, 12_288))  # N, K of an 8B
DIM, PAGE = 128, 16
Call = Callable[[], torch.Tensor]


class Rivals:
    """Pairs of calls, timed with cold caches."""

    def __init__(self, place: Place, timed: Speed) -> None:
        self.place, self.timed, self.report = place, timed, timed.report
        self.dtype: torch.dtype = getattr(torch, place.dtype)

    def kernels(self) -> None:
        """Products and attention: torch's time divided by ours, above 1 if ours is faster."""
        for name, make in (*self._products(), *self._attention()):
            if not self.report.wants(name) or not self.report.has_time(5):
                continue
            with self.timed.left_out(name), torch.inference_mode():
                ours, theirs = (self.place.cold_seconds(call) for call in make())
                more = {"ours_us": ours * 1e6, "theirs_us": theirs * 1e6}
                self.report.row(f"torch over ours: {name}", theirs / ours, "x", **more)

    def _products(self) -> Iterator[tuple[str, Callable[[], tuple[Call, Call]]]]:
        for n, k in PRODUCTS if not self.place.is_dry else ((32, 64),):
            for rows in (1, 16, self.place.sizes.ctx)[:: 2 if self.place.is_dry else 1]:
                for form, what in (("bf16", "mm"), ("int4", "_weight_int4pack_mm"), ("fp8", "_scaled_mm by row")):
                    if self.place.form(form) == form:
                        yield f"{form} {n}x{k}, {rows} rows, {what}", partial(self._product, form, (n, k), rows)

    def _product(self, form: str, shape: tuple[int, int], rows: int) -> tuple[Call, Call]:
        device = torch.device(self.place.device)
        weight = random_weight(form, shape, device)
        x = torch.randn(rows, shape[1], device=device).to(self.dtype)
        facts = LinearFacts(
            weight.form, shape, weight.group_size, device=device.type, capability=self.place.capability,
            dtype=self.place.dtype, deterministic=False, activations="fp8" if rows > 16 else "",
        )  # fmt: skip
        impl = choose(implementations("linear"), facts).impl
        prepared = impl.prepare(weight)
        if form == "bf16":
            dense = weight.qweight.to(self.dtype).t()
            return lambda: impl.run(x, prepared, None), lambda: torch.mm(x, dense)
        if form == "int4":
            assert weight.scales is not None
            packed = torch._convert_weight_to_int4pack(weight.qweight, 8)
            scales = weight.scales.to(self.dtype).t()
            both = torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()
            return lambda: impl.run(x, prepared, None), lambda: torch._weight_int4pack_mm(x, packed, INT4_GROUP, both)
        codes = x.to(torch.float8_e4m3fn)
        ones, scales = torch.ones(rows, 1, device=device), torch.ones(1, shape[0], device=device)
        given = (codes, weight.qweight.t(), ones, scales)
        return lambda: impl.run(x, prepared, None), lambda: torch._scaled_mm(*given, out_dtype=torch.bfloat16)

    def _attention(self) -> Iterator[tuple[str, Callable[[], tuple[Call, Call]]]]:
        ctx, deep = self.place.sizes.ctx, self.place.sizes.deep
        for new, length in ((1, ctx), (1, deep), (ctx, ctx)):
            yield f"attention, {new} of {length} tokens, SDPA", partial(self._attended, new, length)

    def _attended(self, new: int, length: int) -> tuple[Call, Call]:
        device, count = self.place.device, -(-length // PAGE)
        heads, kv_heads = (32, 8) if not self.place.is_dry else (2, 1)
        facts = OpFacts(
            self.place.kv("bf16"), heads, kv_heads, DIM, PAGE, device=torch.device(device).type,
            capability=self.place.capability, dtype=self.place.dtype, deterministic=False,
        )  # fmt: skip
        run = choose(implementations("paged_attention"), facts).impl.run
        empty = KVPages.empty(self.place.kv("bf16"), count, kv_heads, PAGE, DIM)
        pages = KVPages(*(None if part is None else torch.randn_like(part, device=device) for part in empty))
        table = torch.arange(count, dtype=torch.int32, device=device)[None]
        bounds, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, new], [length]))
        q = torch.randn(new, heads, DIM, device=device).to(self.dtype)
        k, v = (torch.randn(1, kv_heads, length, DIM, device=device).to(self.dtype) for _ in range(2))
        theirs = q.transpose(0, 1)[None]
        return (
            lambda: run(q, pages, table, bounds, lengths, DIM**-0.5),
            lambda: scaled_dot_product_attention(theirs, k, v, is_causal=new > 1, enable_gqa=True),
        )

    def transformers(self, size: str) -> None:
        """Decoding speed relative to transformers; targets: >= 5 x at batch 1, >= 10 x with many sequences."""
        size = self.place.model(size)
        if not self.report.wants(f"transformers {size}") or not self.report.has_time(90):
            return
        with self.timed.left_out("transformers"):
            from gpu_transformers import decode_tps

            many, tokens = self.place.sizes.rivals
            theirs = {batch: decode_tps(size, batch, tokens, self.place) for batch in (1, many)}
            kv = self.place.kv("bf16")
            bench = Bench(load(facts_of(size, "bf16"), "bf16", kv, self.place), self.place, kv, tokens + 128, many)
            for batch, line in ((1, 5.0), (many, 10.0)):
                ours = batch / bench.decode_seconds(batch, tokens)
                ratio, shown = ours / theirs[batch], {"ours_tps": ours, "theirs_tps": theirs[batch]}
                name = f"{size} bf16 over transformers, batch {batch}"
                self.report.row(name, ratio, "x", f">= {line:g}", ratio >= line, **shown)
            bench.close()

    def llama_cpp(self, binary: str, model: str) -> None:
        """Run llama-bench of a CUDA build made on this machine on a given file."""
        done = subprocess.run(
            [binary, "-m", model, "-p", "4096", "-n", "128", "-o", "json"], capture_output=True, text=True
        )
        rows: list[dict[str, Any]] = json.loads(done.stdout) if done.returncode == 0 else []
        for row in rows:
            kind = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode {row['n_gen']}"
            self.report.row(f"llama.cpp {Path(model).name}: {kind}", row["avg_ts"], "tok/s")
