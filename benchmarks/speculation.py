"""Gain of speculation when an answer repeats its prompt, and its cost when nothing repeats.

    python benchmarks/speculation.py [MODEL ...] [--draft | --dflash | --eagle3] [--tokens 400] [--repeat 5]
        [--threads 2] [--json FILE]

The answer is forced token by token, so both modes write the same text: `edit` is the prompt with one line in five
rewritten (80 % repeats), `fresh` repeats nothing. Modes alternate; a row is the median of tokens per second and of
processor seconds per token (including waiting threads). Targets: edit >= 2.0 times, fresh <= 2 % slower.

--draft measures a draft model instead: smollm2 drafts four tokens per step for a random model with its vocabulary
(--target-layers). The text is smollm2's own greedy answer with every tenth token replaced, so nine in ten guesses are
right. The row compares the speed with that predicted from this rate and the step and round times; target: within 10 %.

--dflash measures a DFlash drafter with random weights (five layers, blocks of 16) for a random Qwen3-1.7B in Q4_K_M.
`wrong` is the cost of drafts that are never right, in mode auto (target: <= 2 % slower); `right` replaces the drafts by
the text, nine in ten tokens right, and compares the speed with that without drafts.

--eagle3 measures an EAGLE-3 drafter (one layer, a head for 32,000 tokens) likewise.
The last stdout line is one JSON document, which `--json` also writes to a file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import synthetic

from localllm import LLM, SamplingParams
from localllm.bench.results import versions
from localllm.bench.throughput import words
from localllm.engine.draft_model import DraftModel
from localllm.request import Request

MODELS = ("smollm2", "gemma3-270m")
MODES = ("off", "auto")
LINE = 20  # tokens per line
EDIT_LINE, COST_LINE = 2.0, 1.02
DRAFT, RIGHT, OFF_LINE = "smollm2", 0.9, 0.10


class Dictated:
    """Mask that allows only the next token of a given text; none counts as forced, so each is computed."""

    is_done = False

    def __init__(self, text: list[int], at: int = 0) -> None:
        self._text, self._at = text, at

    def fill(self, row: Any) -> bool:
        token = self._text[self._at]
        row.view("uint32")[token // 32] = 1 << token % 32
        return True

    def accept(self, token_id: int) -> None:
        assert token_id == self._text[self._at]
        self._at += 1

    def jump_forward(self, last: int | None = None) -> list[int]:
        return [] if last is None else [last]

    def rollback(self, count: int) -> None:
        self._at -= count

    def fork(self) -> Dictated:
        return Dictated(self._text, self._at)


def tasks(llm: LLM, count: int, rng: random.Random) -> dict[str, tuple[list[int], list[int]]]:
    """Map of task name to (prompt, answer), with lines of random words."""
    lines = [words(llm, rng, LINE) for _ in range(-(-count // LINE))]
    edited = [words(llm, rng, LINE) if number % 5 == 2 else line for number, line in enumerate(lines)]
    prompt = [token for line in lines for token in line]
    return {
        "edit": (prompt, [token for line in edited for token in line][:count]),
        "fresh": (prompt, words(llm, rng, count)),
    }


def one_run(llm: LLM, prompt: list[int], answer: list[int]) -> dict[str, float]:
    """Decode one forced answer."""
    llm.engine.clear_prefix_cache()
    before, start = llm.stats(), 0.0
    params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    stream = llm.engine.submit(Request(prompt, params, token_mask=Dictated(answer)))
    for event in stream:
        if event.token_ids and not start:
            start, wall = time.process_time(), time.monotonic()
        if event.error is not None:
            raise event.error
    spent, seconds, after = time.process_time() - start, time.monotonic() - wall, llm.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return {
        "tps": (len(answer) - 1) / seconds,
        "cpu_ms": 1000 * spent / (len(answer) - 1),
        "steps": after.num_steps - before.num_steps,
        "acceptance": (after.num_accepted_tokens - before.num_accepted_tokens) / drafted if drafted else 0.0,
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate both modes in one process, each with its own copy of the weights."""
    rng = random.Random(0)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    llms = {mode: LLM(name, speculation=mode, threads=options.threads, ctx=4096) for mode in MODES}
    try:
        for number in range(options.repeat + 1):
            for task, (prompt, answer) in tasks(llms["off"], options.tokens, rng).items():
                for mode, llm in llms.items():
                    run = one_run(llm, prompt, answer)
                    if number:  # the first one warms up
                        found.setdefault(task, {}).setdefault(mode, []).append(run)
    finally:
        for llm in llms.values():
            llm.close()
    rows: dict[str, Any] = {}
    for task, modes in found.items():
        medians = {m: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for m, runs in modes.items()}
        off, on = medians["off"], medians["auto"]
        # per round: whatever slowed one mode also slowed the other
        pairs = zip(modes["off"], modes["auto"], strict=True)
        ratios = [(b["tps"] / a["tps"], a["cpu_ms"] / b["cpu_ms"]) for a, b in pairs]
        wall, cpu = (round(statistics.median(column), 3) for column in zip(*ratios, strict=True))
        rows[task] = {"off": off, "auto": on, "speedup": wall, "cpu_speedup": cpu}
        print(
            f"{name} {task}: {off['tps']:.1f} -> {on['tps']:.1f} tok/s ({wall:.2f}x, processor time {cpu:.2f}x),"
            f" {off['steps']:.0f} -> {on['steps']:.0f} steps, {on['acceptance']:.0%} of draft tokens accepted",
            flush=True,
        )
    rows["met"] = rows["edit"]["speedup"] >= EDIT_LINE and rows["fresh"]["speedup"] >= 1 / COST_LINE
    return rows


def mostly_right(llm: LLM, count: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """(prompt, text): the model's greedy answer, with random tokens put in."""
    prompt = words(llm, rng, LINE)
    text: list[int] = []
    while len(text) < count:
        right = next(n for n in range(count) if rng.random() > RIGHT)
        quiet = SamplingParams(temperature=0, max_tokens=right + 1, ignore_eos=True)
        text += llm.generate(prompt + text, quiet).completions[0].token_ids[:right]
        text.append(rng.randrange(1000, 20_000))
    return prompt, text[:count]


def measure_draft(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a draft model against none, and against the prediction from its acceptance and step times."""
    rng = random.Random(0)
    with LLM(DRAFT, threads=options.threads, ctx=4096) as small, tempfile.TemporaryDirectory() as folder:
        prompt, text = mostly_right(small, options.tokens, rng)
        shape = synthetic.Shape(1024, 2816, options.target_layers, 16, 4, 64)
        path = synthetic.write_model(Path(folder) / "target.gguf", "Q4_0", 0, shape, small.path)
        common: dict[str, Any] = {"threads": options.threads, "ctx": 4096}
        with (
            LLM(path, speculation="off", **common) as off,
            LLM(path, speculation="draft", draft=str(small.path), **common) as on,
        ):
            runs = []
            for number in range(options.repeat + 1):
                pair = one_run(off, prompt, text), one_run(on, prompt, text)
                speculation = on.engine.stepper.speculation
                assert speculation is not None
                step_s, round_s = speculation.times_of(1, DraftModel.deep)  # means over the last steps of this run
                assert step_s and round_s, "too few tokens: no step was measured"
                if number:  # the first one warms up
                    runs.append((*pair, step_s, round_s))
    tokens = 1 + sum(RIGHT**depth for depth in range(1, DraftModel.deep + 1))
    expected = [tokens / (step_s + DraftModel.deep * round_s) for *_, step_s, round_s in runs]
    plain, drafted = (statistics.median(run[at]["tps"] for run in runs) for at in (0, 1))
    ratios = [run[1]["tps"] / tps for run, tps in zip(runs, expected, strict=True)]
    ratio = statistics.median(ratios)
    row = {
        "plain_tps": plain, "draft_tps": drafted, "predicted_tps": statistics.median(expected),
        "of_predicted": ratio, "runs_of_predicted": ratios,
        "step_ms": 1000 * statistics.median(run[2] for run in runs),
        "round_ms": 1000 * statistics.median(run[3] for run in runs),
        "acceptance": statistics.median(run[1]["acceptance"] for run in runs), "met": abs(ratio - 1) <= OFF_LINE,
    }  # fmt: skip
    print(f"draft: {plain:.1f} -> {drafted:.1f} tok/s, {ratio:.2f} x the predicted speed", flush=True)
    return row


def _layer(number: int, shape: synthetic.Shape, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors; attention reads `width` elements."""
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    shapes |= {f"self_attn.{name}_proj": (n, width) for name, n in zip("qkv", (q, kv, kv), strict=True)}
    shapes |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, shape.intermediate)}
    shapes |= {f"mlp.{name}_proj": (shape.intermediate, hidden) for name in ("gate", "up")}
    return {f"layers.{number}.{name}.weight": of for name, of in shapes.items()}


def _written(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], **more: Any) -> Path:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {name: torch.randn(of).mul_(of[-1] ** -0.5).bfloat16() for name, of in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | more, folder / "model.safetensors")
    return folder


def _sizes(shape: synthetic.Shape, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden, "vocab_size": vocab, "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip


def write_dflash(folder: Path, shape: synthetic.Shape, vocab: int) -> Path:
    """A DFlash drafter with random weights for a model of this shape."""
    hidden, taps = shape.hidden, [1 + number * (shape.layers - 4) // 4 for number in range(5)]
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5, "block_size": 16,
        "num_target_layers": shape.layers, "dflash_config": {"target_layer_ids": taps, "mask_token_id": vocab - 1},
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(taps) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(5):
        norms = {f"layers.{layer}.self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
        shapes |= _layer(layer, shape, hidden) | norms
    return _written(folder, config | _sizes(shape, vocab), shapes)


def write_eagle3(folder: Path, shape: synthetic.Shape, vocab: int) -> Path:
    """An EAGLE-3 drafter with random weights for a model of this shape."""
    import torch

    hidden, drafted = shape.hidden, min(32_000, vocab)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": drafted}
    shapes = _layer(0, shape, 2 * hidden) | {"layers.0.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (drafted, hidden)}
    d2t = torch.zeros(drafted, dtype=torch.int64)
    return _written(folder, config | _sizes(shape, vocab) | {"num_hidden_layers": 1}, shapes, d2t=d2t)


def corrected(llm: LLM, text: list[int], prompt: int, rng: random.Random) -> None:
    """Replace the drafts of `llm` by what follows in `text`, with as many right tokens as RIGHT."""
    drafter: Any = llm.engine.runner.listener
    assert drafter is not None
    compute = type(drafter).propose

    def propose(sequences: Any, counts: Any) -> list[tuple[int, ...]]:
        found = compute(drafter, sequences, counts)
        (sequence,), (drafts,) = sequences, found
        at = sequence.num_tokens - prompt
        right = text[at : at + len(drafts)]
        return [tuple(token if rng.random() < RIGHT else (token + 1) % 1000 for token in right)]

    drafter.propose = propose


def measure_drafter(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a drafter whose drafts are wrong, and one whose drafts are mostly right, against none."""
    name, write, deep = ("eagle3", write_eagle3, 1) if options.eagle3 else ("dflash", write_dflash, 15)
    rng, shape = random.Random(0), synthetic.REAL["qwen3-1.7b"]
    with tempfile.TemporaryDirectory() as folder, LLM(DRAFT, ctx=512) as small:
        path = synthetic.write_model(Path(folder) / "target.gguf", "Q4_K_M", 0, shape, small.path)
        draft = str(write(Path(folder) / "drafter", shape, small.facts.vocab_size))
        common: dict[str, Any] = {"threads": options.threads, "ctx": 2048}
        with (
            LLM(path, speculation="off", **common) as off,
            LLM(path, draft=draft, **common) as wrong,
            LLM(path, draft=draft, **common) as right,
        ):
            # n-gram drafts, which `auto` also uses, find nothing in these words
            runs = []
            for number in range(options.repeat + 1):
                prompt, text = words(off, rng, 64), words(off, rng, options.tokens)
                corrected(right, text, len(prompt), rng)
                run = [one_run(llm, prompt, text) for llm in (off, wrong, right)]
                speculation = right.engine.stepper.speculation
                assert speculation is not None
                _, pass_s = speculation.times_of(1, deep)
                if number:  # the first one warms up
                    runs.append((*run, pass_s or 0.0))
    plain, unused, used = (statistics.median(run[at]["tps"] for run in runs) for at in range(3))
    pass_ms = 1000 * statistics.median(run[3] for run in runs)
    cost, gain = (statistics.median(run[at]["tps"] / run[0]["tps"] for run in runs) for at in (1, 2))
    row = {
        "plain_tps": plain, "wrong_tps": unused, "right_tps": used, "of_plain_wrong": cost, "of_plain_right": gain,
        "pass_ms": pass_ms, "steps": statistics.median(run[2]["steps"] for run in runs),
        "acceptance": statistics.median(run[2]["acceptance"] for run in runs), "met": cost >= 1 / COST_LINE,
    }  # fmt: skip
    print(
        f"{name}: {plain:.1f} tok/s; wrong {unused:.1f} ({cost:.2f}x), right {used:.1f} ({gain:.2f}x);"
        f" a pass {pass_ms:.0f} ms",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--dflash", action="store_true")
    parser.add_argument("--eagle3", action="store_true")
    parser.add_argument("--target-layers", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "schema": "localllm.speculation/1", "date": datetime.date.today().isoformat(), "versions": versions(),
        "threads": options.threads, "load_before": os.getloadavg()[0],
        "models": (
            {"draft": measure_draft(options)} if options.draft
            else {"eagle3" if options.eagle3 else "dflash": measure_drafter(options)}
            if options.dflash or options.eagle3
            else {Path(name).name: measure(name, options) for name in options.models}
        ),
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
