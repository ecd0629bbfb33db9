"""Quality cost of 4-bit keys and values, estimated before writing kernels: KL against float32 ones.

    python benchmarks/kv_four_bits.py                  both real models, every setting
    python benchmarks/kv_four_bits.py smollm2 --tokens 500

Weights and activations are float32, so rounding to codes is the only difference: each key and value is encoded and
decoded again before it is written to a float32 cache. Scales and offsets are not rounded. The result is the table in
docs/quality.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Codec = Callable[[Tensor], Tensor]  # numbers -> numbers after encoding and decoding


def to_int8(x: Tensor) -> Tensor:
    """One scale per vector, as in `--kv int8`."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale.clamp(min=1e-30)).round() * scale


def to_int4(group: int, offset: bool) -> Codec:
    """One scale per `group` numbers; with `offset` their minimum is the lowest code, else zero is the middle code."""

    def through(x: Tensor) -> Tensor:
        runs = x.reshape(*x.shape[:-1], -1, min(group, x.shape[-1]))
        low = runs.amin(-1, keepdim=True) if offset else 0.0
        scale = (runs.amax(-1, keepdim=True) - low) / 15 if offset else runs.abs().amax(-1, keepdim=True) / 7
        return (((runs - low) / scale.clamp(min=1e-30)).round() * scale + low).reshape(x.shape)

    return through


def rotated(codec: Codec) -> Codec:
    from localllm.kernels.kv_codes import hadamard

    return lambda x: hadamard(codec(hadamard(x)))


def settings(head_dim: int) -> Iterator[tuple[str, Codec, Codec]]:
    """(label, codec of keys, codec of values)"""
    groups = [group for group in (32, 64, 128) if group <= head_dim]
    yield "K, V int8; K rotated", rotated(to_int8), to_int8
    for offset in (False, True):
        kind = "int4 with offset" if offset else "int4"
        yield f"K, V {kind}, group 32", to_int4(32, offset), to_int4(32, offset)
        for group in groups:
            codec = to_int4(group, offset)
            yield f"K, V {kind}, group {group}; K rotated", rotated(codec), codec
            yield f"K, V {kind}, group {group}; both rotated", rotated(codec), rotated(codec)
    for group in groups:
        codec = to_int4(group, True)
        yield f"K int8, V int4 with offset, group {group}; K rotated", rotated(to_int8), codec
        yield f"K int8, V int4 with offset, group {group}; both rotated", rotated(to_int8), rotated(codec)
    yield "K int4 with offset, group 32, V int8; K rotated", rotated(to_int4(32, True)), to_int8


@contextmanager
def codes_of(chosen: dict[str, Codec]) -> Iterator[None]:
    """Make models loaded inside write keys and values through the codecs, with the plain kv_write and nothing fused."""
    from localllm.kernels import reference, table
    from localllm.kernels.registry import SEGMENTS, Impl, fits_always

    def kv_write(k: Tensor, v: Tensor, pages: Any, slot_mapping: Tensor) -> None:
        reference.kv_write(chosen["k"](k.float()), chosen["v"](v.float()), pages, slot_mapping)

    usual = table.implementations
    coded = (Impl("kv_write", "codes", fits_always, kv_write),)
    table.implementations = lambda op: coded if op == "kv_write" else table.PLAIN[op] if op in SEGMENTS else usual(op)  # type: ignore[assignment]
    try:
        yield
    finally:
        table.implementations = usual


def cache(score: Callable[..., Any], known: dict[Any, list[Any]]) -> Callable[..., Any]:
    """Cache the scores of a text."""

    def cached(ids: list[int], chunk: int) -> list[Any]:
        key = tuple(ids)
        if key not in known:
            known[key] = list(score(ids, chunk=chunk))
        return known[key]

    return cached


def main() -> None:
    """Measure and print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=("smollm2", "gemma3-270m"))
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    from localllm import LLM
    from localllm.quality.evaluate import WINDOW, evaluate, sample_text

    how: Any = {"dtype": "float32", "kv": "f32", "ctx": WINDOW + 1, "max_parallel": 1}
    print("| model | keys and values | KL mean | p99 | p99.9 | same top token |\n| --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        chosen: dict[str, Codec] = {"k": to_int8, "v": to_int8}
        with LLM(name, **how) as exact:
            exact.score = cache(exact.score, {})  # type: ignore[method-assign]
            with codes_of(chosen):
                coded = LLM(name, **how)
            with coded:
                for label, k, v in settings(exact.facts.head_dim):
                    chosen["k"], chosen["v"] = k, v
                    found = evaluate(coded, exact, sample_text("evaluation"), max_tokens=options.tokens)
                    tail = f"{found.kl_p99:.4f} | {found.kl_p999:.4f} | {found.agreement:.1%}"
                    print(f"| {name} | {label} | {found.kl_mean:.5f} | {tail} |", flush=True)


if __name__ == "__main__":
    main()
