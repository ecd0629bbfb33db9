"""The cost of a LoRA adapter: decoding with and without one in alternation, medians of both and of their ratio.

    python benchmarks/adapters.py MODEL [--rank 16] [--rounds 15] [--tokens 96] [--dtype float32] [--threads 1]

The adapter is random and changes every linear module of attention and feed-forward layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from localllm import LLM, SamplingParams
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import linear_shapes

PROMPT = "Once upon a time, in a town by the sea,"


def random_adapter(folder: Path, model: Path, rank: int) -> Path:
    """Write a random adapter of all linear modules in PEFT format."""
    with open_model(model) as checkpoint:
        facts = checkpoint.facts
    tensors = {}
    for index, layer in enumerate(facts.layers):
        for module, (rows, inputs) in linear_shapes(layer, facts.hidden_size).items():
            start = f"base_model.model.model.layers.{index}.{module}."
            tensors[f"{start}lora_A.weight"] = torch.randn(rank, inputs) * inputs**-0.5
            tensors[f"{start}lora_B.weight"] = torch.randn(rows, rank) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    asked = parser.parse_args()
    quiet = SamplingParams(temperature=0, max_tokens=asked.tokens, ignore_eos=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            asked.model, offline=True, ctx=1024, speculation="off", dtype=asked.dtype, threads=asked.threads or "auto"
        ) as llm,
    ):
        llm.load_adapter("one", random_adapter(Path(folder), llm.path, asked.rank))
        speeds: dict[str, list[float]] = {"": [], "one": []}
        spent: dict[str, list[float]] = {
            "": [],
            "one": [],
        }  # CPU time of all threads
        for number in range(asked.rounds + 1):
            for name, found in speeds.items():
                begun = time.process_time()
                timing = llm.generate(PROMPT, quiet, adapter=name).timing
                if number:  # the first round warms up
                    found.append(timing.decode_tps)
                    spent[name].append((time.process_time() - begun) / asked.tokens * 1000)
        plain, adapted = (statistics.median(found) for found in speeds.values())
        each = [a / b for a, b in zip(speeds["one"], speeds[""], strict=True)]
        cpu = [a / b for a, b in zip(spent["one"], spent[""], strict=True)]
        row = {
            "model": llm.path.name, "dtype": asked.dtype, "rank": asked.rank, "rounds": asked.rounds,
            "adapter_bytes": sum(one.nbytes for one in llm.adapters.known()), "plain_tps": round(plain, 1),
            "adapter_tps": round(adapted, 1), "cost_percent": round(100 * (plain / adapted - 1), 1),
            "median_of_pairs_percent": round(100 * (1 / statistics.median(each) - 1), 1),
            "threads": llm.plan.threads, "plain_cpu_ms": round(statistics.median(spent[""]), 2),
            "adapter_cpu_ms": round(statistics.median(spent["one"]), 2),
            "cpu_of_pairs_percent": round(100 * (statistics.median(cpu) - 1), 1),
        }  # fmt: skip
        print(json.dumps(row))


if __name__ == "__main__":
    main()
