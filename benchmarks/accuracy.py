"""KL divergence per token of our CPU engine and of llama.cpp from float32, on the same files in the same run.

    python benchmarks/accuracy.py --peer-python PATH              both real models, then a synthetic file per block type
    python benchmarks/accuracy.py smollm2 --tokens 20000 --keep FILE --json benchmarks/results/accuracy-HOST.json

The reference is the same file with float32 products and float32 keys and values. The text is the documentation that
comes with CPython, in windows of 1,000 tokens. Targets: mean KL <= 0.002, 99th percentile <= half of llama.cpp's.
Without llama-cpp-python only our engine is measured. --keep stores finished windows, token by token, so an interrupted
run can continue. --json writes the table to a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from synthetic import TYPES, VOCAB, write_model

from localllm import LLM
from localllm.bench.peer import Peer
from localllm.bench.results import versions
from localllm.errors import ConfigError
from localllm.quality.evaluate import divergence

MODELS = ("smollm2", "gemma3-270m")
WINDOW = 1000
ROWS = 64
MEAN_LINE = 0.002


def main() -> int:
    """Measure the selected models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="smollm2, gemma3-270m, or block types; default: all")
    parser.add_argument("--tokens", type=int, default=20_000, help="length of the text for the real models")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--keep", type=Path, help="file to read finished windows from and write them to")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    measured: dict[str, list[dict[str, Any]]] = kept.setdefault("windows", {})
    for name in options.models or (*MODELS, *TYPES):
        with tempfile.TemporaryDirectory() as folder:
            synthetic = name in TYPES
            path = str(write_model(Path(folder) / f"{name}.gguf", name)) if synthetic else name
            tokens = 2 * WINDOW if synthetic else options.tokens
            done = measured.setdefault(name, [])
            for window in windows(path, tokens, synthetic)[len(done) :] if len(done) * WINDOW < tokens else ():
                done.append(compare(path, window, options.threads, options.peer_python))
                if options.keep:
                    options.keep.write_text(json.dumps(kept) + "\n")
                print(f"{name}: {len(done) * WINDOW:,} of {tokens:,} tokens", flush=True)
    found = rows(measured)
    print(table(found))
    if options.json:
        about = {"schema": "localllm.accuracy/1", "versions": versions(), "command": " ".join(["python", *sys.argv])}
        options.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")
    return 0 if all(row["holds"] for row in found) else 1


def windows(path: str, tokens: int, synthetic: bool) -> list[list[int]]:
    """Token ids in windows, each starting without context."""
    if synthetic:
        random = np.random.default_rng(1)
        return [random.integers(3, VOCAB, WINDOW).tolist() for _ in range(tokens // WINDOW)]
    with LLM(path, ctx=WINDOW + 8) as model:
        text = "\n\n".join(topics[key] for key in sorted(topics))
        ids = model.tokenizer.encode(text)[:tokens]
        bos = model.tokenizer.bos_token_id if model.tokenizer.add_bos else None
    cut = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
    return [[bos, *part[:-1]] if bos is not None else part for part in cut if len(part) == WINDOW]


def compare(path: str, ids: Sequence[int], threads: int | None, peer_python: str | None) -> dict[str, Any]:
    """Compute the KL of every position of one window, and count positions with another top token."""
    reference, ours = models(path, threads)
    found: dict[str, Any] = {"ours": [], "llama.cpp": [], "ours_flips": 0, "llama.cpp_flips": 0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores"
        theirs = peer_scores(reference, ids, file, peer_python)
        for p, q in zip(reference.score(ids, chunk=ROWS), ours.score(ids, chunk=ROWS), strict=True):
            engines = {"ours": q} | ({"llama.cpp": log_softmax(next(theirs))} if theirs is not None else {})
            for name, scores in engines.items():
                found[name] += [float(f"{kl:.3g}") for kl in divergence(p, scores)]
                found[f"{name}_flips"] += int((p.argmax(-1) != scores.argmax(-1)).sum())
    return found


_loaded: dict[str, tuple[LLM, LLM]] = {}


def models(path: str, threads: int | None) -> tuple[LLM, LLM]:
    """Return (float32 model, model with default settings), loaded once."""
    if path not in _loaded:
        for pair in _loaded.values():
            for model in pair:
                model.close()
        _loaded.clear()
        settings: dict[str, Any] = {"ctx": WINDOW + 8, "max_parallel": 1, "threads": threads, "device": "cpu"}
        _loaded[path] = (LLM(path, dtype="float32", kv="f32", **settings), LLM(path, **settings))
    return _loaded[path]


_peers: dict[Path, Peer | None] = {}


def peer_scores(model: LLM, ids: Sequence[int], file: Path, python: str | None) -> Iterator[np.ndarray] | None:
    """llama.cpp's logits of the window in chunks of ROWS rows; None if it is not installed."""
    if model.path not in _peers:
        for peer in _peers.values():
            if peer is not None:
                peer.close()
        _peers.clear()
        try:
            threads, ctx = model.plan.threads, WINDOW + 8
            _peers[model.path] = Peer("llama.cpp", model.path, threads=threads, ctx=ctx, python=python)
        except ConfigError as error:
            print(f"without llama.cpp: {error.message}", flush=True)
            _peers[model.path] = None
    peer = _peers[model.path]
    if peer is None:
        return None
    vocab = peer.scores(ids, file)
    scores = np.memmap(file, np.float32, "r").reshape(-1, vocab)
    return (scores[at : at + ROWS] for at in range(0, len(scores), ROWS))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last dimension, in float32."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def rows(measured: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per model: each engine's mean, 99th percentile and top-token flips per 1,000, and whether the targets are met."""
    found = []
    for name, done in measured.items():
        row: dict[str, Any] = {"model": name, "tokens": sum(len(window["ours"]) for window in done)}
        for engine in ("ours", "llama.cpp"):
            kl = np.array([value for window in done for value in window[engine]])
            if len(kl):
                flips = 1000 * sum(window[f"{engine}_flips"] for window in done) / len(kl)
                row[engine] = {
                    "mean": round(float(kl.mean()), 6),
                    "p99": round(float(np.quantile(kl, 0.99)), 6),
                    "flips": round(flips, 2),
                }
        if "ours" in row:
            tail = row["ours"]["p99"] <= row["llama.cpp"]["p99"] / 2 if "llama.cpp" in row else True
            found.append(row | {"holds": row["ours"]["mean"] <= MEAN_LINE and tail})
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown table of both engines' mean, tail and flips, and whether the targets are met."""
    lines = [
        "| model | tokens | ours: KL mean | p99 | flips/1000 | llama.cpp: KL mean | p99 | flips/1000 | holds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in found:
        cells = [
            cell
            for engine in ("ours", "llama.cpp")
            for e in (row.get(engine),)
            for cell in ((f"{e['mean']:.5f}", f"{e['p99']:.4f}", f"{e['flips']:.1f}") if e else ("", "", ""))
        ]
        lines.append(
            f"| {row['model']} | {row['tokens']:,} | {' | '.join(cells)} | {'yes' if row['holds'] else 'NO'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
