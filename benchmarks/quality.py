"""Quality cost of every weight and KV format on the two real models: perplexity, and KL from float32 with its tail.

    python benchmarks/quality.py                      both models, all formats
    python benchmarks/quality.py smollm2 --tokens 2000
    python benchmarks/quality.py --table              only print the table of saved results
    python benchmarks/quality.py --questions          correct answers to simple questions with default sampling

The file's weights are decoded and quantized again while loading, without calibration; a model quantized from BF16
weights with `localllm quantize` loses less. The reference is the same file in float32 with float32 keys and values.
Results are saved as they come, and an interrupted run continues with the missing ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "quality.json"
QUESTIONS = Path(__file__).parent / "questions.json"  # question -> strings, one of which a correct answer contains
SEEDS = (1, 2, 3)
MODELS = ("smollm2", "gemma3-270m")
WEIGHTS = ("auto", "int8", "fp8", "int4", "nvfp4", "mxfp4")
KV = ("bf16", "int8", "fp8")


def main() -> int:
    """Measure the missing combinations, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--questions", action="store_true", help="count correct answers of smollm2 instead")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if options.questions:
        return ask_questions()
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not options.table:
        for model in options.models:
            measure(model, options.tokens, rows)
    print(table(rows))
    return 0


def measure(name: str, tokens: int, rows: list[dict[str, Any]]) -> None:
    """Measure every combination of `name` that `rows` lacks at this length."""
    import torch

    from localllm import LLM, __version__
    from localllm.quality.evaluate import WINDOW, evaluate, sample_text

    done = {(row["model"], row["asked"], row["kv"]) for row in rows if row["asked_tokens"] == tokens}
    missing = [(w, kv) for w in WEIGHTS for kv in KV if (name, w, kv) not in done]
    if not missing:
        return
    with LLM(name, dtype="float32", kv="f32", ctx=WINDOW + 1, max_parallel=1) as reference:
        for weights, kv in missing:
            with LLM(name, quant=weights, kv=kv, ctx=WINDOW + 1, max_parallel=1) as model:
                found = evaluate(model, reference, sample_text("evaluation"), max_tokens=tokens)
            rows.append(
                asdict(found)
                | {
                    "asked": weights,
                    "asked_tokens": tokens,
                    "machine": platform.processor() or platform.machine(),
                    "torch": torch.__version__,
                    "localllm": __version__,
                    "command": " ".join(["python", *sys.argv]),
                }
            )
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{name} {found.weights} {kv}: KL {found.kl_mean:.5f} p99 {found.kl_p99:.4f}", file=sys.stderr)


def ask_questions() -> int:
    """Count smollm2's correct answers to all questions and seeds with its, llama.cpp's and the previous defaults."""
    from localllm import LLM, SamplingParams, __version__

    questions: dict[str, list[str]] = json.loads(QUESTIONS.read_text())
    with LLM("smollm2", max_parallel=8) as llm:
        ways = {
            "default": llm.default_params(),
            "llama.cpp's defaults": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
            "temperature 0.7 alone": SamplingParams(temperature=0.7),
        }
        rows = []
        for way, params in ways.items():
            right = 0
            for seed in SEEDS:
                for question, answers in questions.items():
                    asked = [{"role": "user", "content": question}]
                    answer = llm.chat(asked, replace(params, seed=seed, max_tokens=64)).text.casefold()
                    right += any(one.casefold() in answer for one in answers)
            stated = {key: getattr(params, key) for key in ("temperature", "top_k", "top_p", "min_p")}
            rows.append({"sampling": way, "right": right, "of": len(questions) * len(SEEDS)} | stated)
            print(f"smollm2, {way}: {right} of {rows[-1]['of']} right")
    document = {"localllm": __version__, "machine": platform.processor() or platform.machine(), "rows": rows}
    RESULTS.with_name("questions.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | weights | KV | perplexity | KL mean | p99 | p99.9 | same top token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shown = row["weights"] if row["asked"] != "auto" else f"{row['weights']} (as stored)"
        lines.append(
            f"| {row['model']} | {shown} | {row['kv']} | {row['perplexity']:.2f} | {row['kl_mean']:.5f} | "
            f"{row['kl_p99']:.4f} | {row['kl_p999']:.4f} | {row['agreement']:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
