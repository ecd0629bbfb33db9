"""Write greedy_<model>.json: 64 greedy tokens on 20 prompts by transformers in float32, same dequantised weights.

    python tests/golden/make_greedy.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/golden/make_greedy.py gemma3-270m path/to/gemma-3-270m-Q4_K_M.gguf

`gaps` holds, per token, by how much the first logit leads the second: below 1e-3 either may be chosen. The prompts are
stored as ids, so the comparison does not depend on the tokenizer.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

NUM_TOKENS = 64
TEXTS = [
    "What is the capital of France?",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "Translate to German: The cat sleeps on the warm stone.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM orders",
    "Explain why the sky is blue to a child of six.",
    "ÄÖÜ ß – «déjà vu» … naïve café",
    "日本の首都は",
    "🙂🚀 emoji are",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "List five fruits:\n1.",
    '{"name": "Alice", "age": 30, "city":',
    "Water boils at a temperature of",
    "In 1969, the first humans",
    "x" * 40,
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n",
    "    \n\n\t  indented\n",
]


def main(name: str, path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    rows = []
    for index, text in enumerate(TEXTS):
        if name == "smollm2" and index % 2 == 0:
            messages = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
        else:
            ids = tokenizer(text).input_ids
        with torch.inference_mode():
            cache, given, out, gaps = None, torch.tensor([ids]), [], []
            for _ in range(NUM_TOKENS):
                result = model(input_ids=given, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                best = torch.topk(result.logits[0, -1].float(), 2)
                out.append(int(best.indices[0]))
                gaps.append(round(float(best.values[0] - best.values[1]), 5))
                given = best.indices[:1].view(1, 1)
        rows.append({"text": text, "prompt_ids": ids, "ids": out, "gaps": gaps})
        print(index, tokenizer.decode(out)[:80].replace("\n", "|"), flush=True)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    target = Path(__file__).with_name(f"greedy_{name}.json")
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    target.write_text(f'{{"file": "{path.name}", "versions": {json.dumps(versions)}, "prompts": [\n{lines}\n]}}\n')


main(sys.argv[1], Path(sys.argv[2]))
