"""Kernel launches of one decoding step of a model, and the time to read its bytes, recorded from the code.

    python -P benchmarks/gpu_launches.py        8B, int4, FP8 keys and values, 4,096 tokens; H100 and RTX 5090
    python -P benchmarks/gpu_launches.py --model 30b-a3b       a mixture, with a bfloat16 router
    python -P benchmarks/gpu_launches.py --model 27b           three gated delta layers for each of gated attention
    python -P benchmarks/gpu_launches.py --model 35b-a3b       the same layers with a mixture and a shared expert
    python -P benchmarks/gpu_launches.py --model glm-flash     latent attention
    python -P benchmarks/gpu_launches.py --form bf16 --kv bf16 --ctx 32768 --cards h200

An op of torch counts as one launch, unless it only makes a view or allocates memory; those before the first layer are
left out. No GPU is needed. The copy bandwidths are assumed, not measured: 3.05 TB/s on an H100 (SXM), 4.3 on an H200,
1.63 on an RTX 5090.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

CARDS = {"h100": (90, 132, 3.05e12), "h200": (90, 132, 4.3e12), "5090": (120, 170, 1.63e12)}
FORMS = {"int4": "int4 g128", "nvfp4": "e2m1 e4m3", "bf16": "bf16", "fp8": "e4m3 row", "q4_k": "int4 sub"}
PAGE = 16


class Model(NamedTuple):
    """Sizes of a model; `delta` of its layers are gated delta layers, and then all others have gated attention, and
    mixtures have a gated shared expert. With `still`, the elements of a head without RoPE, it has latent attention.
    """

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    top_k: int = 0
    dim: int = 128
    half: int = 64
    vocab: int = 151_936
    delta: int = 0
    value_heads: int = 0  # of gated delta layers
    query_rank: int = 0
    still: int = 0


MODELS = {
    "8b": Model("Qwen3-8B", 4096, 12288, 36, 32, 8),
    "30b-a3b": Model("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, 128, 8),
    "27b": Model("Qwen3.8-27B", 5120, 17408, 64, 24, 4, 0, 0, 256, 32, 248_320, 48, 48),
    "35b-a3b": Model("Qwen3.6-35B-A3B", 2048, 512, 40, 16, 2, 256, 8, 256, 32, 248_320, 30, 32),
    "glm-flash": Model("GLM-4.7-Flash", 2048, 1536, 47, 20, 1, 64, 4, half=32, query_rank=768, still=192),
}
K_HEADS, DELTA_DIM, CONV_WIDTH = 16, 128, 4  # of gated delta layers
GEMV = (
    "gemv_kernel",
    "gemv_heads_kernel",
    "gemv_conv_kernel",
    "gemv_digits_kernel",
    "gemv_route_kernel",
    "gemv_sum_kernel",
)
PRODUCTS = *GEMV, "gemm_kernel"
PREPARING = "digits_kernel", "norm_rows"


def launches(
    model: str, form: str, kv: str, ctx: int, capability: int, num_sms: int
) -> Iterator[tuple[str, str, int, int]]:
    """Return (part of the step, kernel, launches per step, bytes it must read)."""
    one = MODELS[model]
    _, hidden, inner, layers, heads, kv_heads, experts, top_k, dim, half, vocab, delta_layers, v_heads = one[:-2]
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from localllm.kernels import OpFacts
    from localllm.kernels.layer_weights import (
        AttentionWeights,
        DeltaWeights,
        ExpertsWeights,
        HeadWeights,
        Linear,
        LinearPart,
        MlpWeights,
        Norm,
    )
    from localllm.kernels.sampling import SamplingInputs
    from localllm.kernels.state_slots import StateSlots
    from localllm.kernels.table import implementations, kernel_table
    from localllm.kernels.triton import aot_cases
    from localllm.kernels.triton.cards import Card
    from localllm.kernels.triton.launch import recording
    from localllm.kernels.triton.sampling import sample

    class Ops(TorchDispatchMode):
        """Adds the ops of torch that launch a kernel to the launches."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if not (func.is_view or "empty" in name or name == "_unsafe_view"):
                found.append(name)
            return func(*args, **(kwargs or {}))

    described = {one.name: one for one in aot_cases.FORMS}
    impl = next(one for one in implementations("linear") if one.name == "triton")
    x = torch.empty(1, hidden, dtype=torch.bfloat16, device="meta")

    def linear(n: int, k: int, name: str) -> Linear:
        return Linear((LinearPart(impl, aot_cases.described(described[name], n, k), None, (n, k)),))

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def norm(size: int) -> Norm:
        return Norm(floats(size), 1e-6)

    stored = FORMS[form]
    rows = heads * (2 if delta_layers else 1) + 2 * kv_heads
    qkv, out = linear(rows * dim, hidden, stored), linear(hidden, heads * dim, stored)
    gate_up, down = linear(2 * inner, hidden, stored), linear(hidden, inner, stored)
    sizes, norms = (heads, kv_heads, dim), (norm(dim), norm(dim))
    attention = AttentionWeights(norm(hidden), qkv, out, *sizes, dim**-0.5, *norms, gate=delta_layers > 0)
    mlp = MlpWeights(norm(hidden), gate_up, down, "silu")
    router = linear(experts or 1, hidden, "bf16")
    all_up, all_down = (
        linear(max(experts, 1) * 2 * inner, hidden, stored),
        linear(max(experts, 1) * hidden, inner, stored),
    )
    both = all_up.parts[0], all_down.parts[0]
    each = (gate_up,) * experts, (down,) * experts
    shared: dict[str, Any] = {}
    if delta_layers and experts:
        shared = {"shared_gate": linear(1, hidden, "bf16"), "shared_gate_up": gate_up, "shared_down": down}
    mixture = ExpertsWeights(norm(hidden), router, *each, top_k, "softmax", "silu", stacked=both, **shared)
    values, channels = v_heads * DELTA_DIM, (2 * K_HEADS + v_heads) * DELTA_DIM
    qkvz, ba, delta_out = (
        linear(channels + values, hidden, stored),
        linear(2 * v_heads, hidden, "bf16"),
        linear(hidden, values, stored),
    )
    of_delta = norm(hidden), qkvz, ba, delta_out, floats(channels, CONV_WIDTH), floats(v_heads), floats(v_heads)
    delta = DeltaWeights(*of_delta, norm(DELTA_DIM), K_HEADS, v_heads, DELTA_DIM, DELTA_DIM)
    states = StateSlots(floats(1, channels, CONV_WIDTH - 1), floats(1, v_heads, DELTA_DIM, DELTA_DIM))
    head = HeadWeights(norm(hidden), linear(vocab, hidden, "bf16"), None)
    card: dict[str, Any] = {"device": "cuda", "capability": capability, "dtype": "bfloat16"}
    table = kernel_table(OpFacts(kv, *sizes, PAGE, **card, deterministic=False, gated=attention.gate))
    pages = aot_cases._pages(kv, kv_heads, PAGE, dim)
    meta: dict[str, Any] = {"device": "meta"}
    turns = floats(1, half)
    where = torch.empty(1, -(-ctx // PAGE), dtype=torch.int32, **meta), torch.empty(1, dtype=torch.int64, **meta)
    bounds, lengths = torch.empty(2, dtype=torch.int32, **meta), torch.empty(1, dtype=torch.int32, **meta)
    kept = 2 * kv_heads * (dim * (1 if kv in ("fp8", "int8") else 2) + (4 if kv in ("fp8", "int8") else 0)) * ctx
    q = torch.empty(1, heads, dim * (2 if attention.gate else 1), dtype=x.dtype, **meta)
    attended = torch.empty(1, heads * dim, dtype=x.dtype, **meta)
    sampling = floats(1, vocab), SamplingInputs.empty(1, 1, vocab, "meta")
    attending = 0 if one.still else layers - delta_layers
    latent = aot_cases.latent_weights(torch.bfloat16, heads, one.query_rank, one.still or 1, gated=False)
    latents = aot_cases.latent_pages(kv)
    of_latents = (latent.qkv, latent.q_up, *(part.prepared for part in latent.stacked or ()), latent.out)
    kept_latents = 576 * (1 if kv in ("fp8", "int8") else 2) * ctx
    # calls per step, the call, bytes that its products read, and bytes that its other kernels read
    parts: dict[str, tuple[int, Callable[[], object], list[int], list[int]]] = {
        "delta": (
            delta_layers,
            lambda: table.gated_delta(x, delta, states, where[1], bounds),
            [qkvz.nbytes, ba.nbytes, delta_out.nbytes],
            [states.conv.nbytes, states.state.nbytes],
        ),
        "latent": (
            layers if one.still else 0,
            lambda: table.latent_attention(x, latent, latents, (turns, turns, *where), bounds, lengths),
            [part.nbytes for part in of_latents if part is not None],
            [0, kept_latents],
        ),
        "qkv": (attending, lambda: table.attn_in(x, attention, turns, turns, pages, where[1]), [qkv.nbytes], []),
        "attention": (attending, lambda: table.attention(q, attention, pages, where[0], bounds, lengths), [], [kept]),
        "o": (attending, lambda: table.attn_out(attended, x, attention), [out.nbytes], []),
        "mlp": (0 if experts else layers, lambda: table.mlp(x, mlp), [gate_up.nbytes, down.nbytes], []),
        "experts": (
            layers if experts else 0,
            lambda: table.experts(x, mixture),
            [router.nbytes, *(one.nbytes for one in shared.values()), top_k * gate_up.nbytes, top_k * down.nbytes],
            [],
        ),
        "head": (1, lambda: table.head(x, head), [head.linear.nbytes], []),
        "sampler": (1, lambda: sample(*sampling), [], [4 * vocab] * 9),
    }
    for name, (times, run, of_products, of_others) in parts.items():
        if not times:
            continue
        for _ in range(2):  # the first call also fills caches
            with recording(Card(capability, num_sms)) as found, torch.no_grad(), Ops():
                run()
        products, others = iter(of_products), iter(of_others)
        for launch in found:
            if isinstance(launch, str):
                yield name, f"aten.{launch}", times, 0
                continue
            kernel = launch.kernel.__name__.strip("_")
            left = products if kernel in PRODUCTS else iter(()) if kernel in PREPARING else others
            yield name, kernel, times, next(left, 0)


def main() -> int:
    """Record the launches and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--form", choices=FORMS, default="int4")
    parser.add_argument("--kv", choices=("fp8", "int8", "bf16"), default="fp8")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=["h100", "5090"])
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    for card in options.cards:
        capability, num_sms, bandwidth = CARDS[card]
        found = list(launches(options.model, options.form, options.kv, options.ctx, capability, num_sms))
        print(f"{card}: {MODELS[options.model].name} {options.form}, KV {options.kv}, {options.ctx:,} tokens")
        for part, kernel, times, nbytes in found:
            print(f"  {part:10} {kernel:18} x {times:2} {nbytes / 1e6:8.2f} MB {nbytes / bandwidth * 1e6:8.1f} us")
        step = sum(times * nbytes for *_, times, nbytes in found) / bandwidth
        of_torch = sum(times for _, kernel, times, _ in found if kernel.startswith("aten."))
        print(
            f"  {sum(times for *_, times, _ in found)} launches, {of_torch} of them by torch; "
            f"bytes alone: {step * 1e3:.2f} ms, {1 / step:.0f} tok/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
