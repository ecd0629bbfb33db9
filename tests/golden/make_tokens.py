"""Write tokens_<model>.json: ids of the awkward texts by transformers' tokenizer of a GGUF file.

    python tests/golden/make_tokens.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/golden/make_tokens.py gemma3-270m path/to/gemma-3-270m-Q4_K_M.gguf

`special` are the ids with control tokens recognised, `plain` with them as text. transformers 5.23 knows no
pre-tokenizer for `smollm` files and takes GPT-2's; the model's own tokenizer.json cuts single digits first, so that is
put in, and the texts on which it matters are listed under `patched`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from awkward import TEXTS
from tokenizers import pre_tokenizers


def encode(tokenizer: Any, *, split_special: bool) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False, split_special_tokens=split_special).input_ids for text in TEXTS]


def load(name: str, path: Path) -> tuple[Any, list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    patched: list[int] = []
    if name == "smollm2":
        before = encode(tokenizer, split_special=False)
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        after = encode(tokenizer, split_special=False)
        patched = [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    return tokenizer, patched


def main(name: str, path: Path) -> None:
    tokenizer, patched = load(name, path)
    special, plain = encode(tokenizer, split_special=False), encode(tokenizer, split_special=True)
    rows = [
        {"text": text, "special": ids} | ({"plain": other} if other != ids else {})
        for text, ids, other in zip(TEXTS, special, plain, strict=True)
    ]
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    head = {"file": path.name, "versions": versions, "patched": patched}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    target = Path(__file__).with_name(f"tokens_{name}.json")
    target.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
