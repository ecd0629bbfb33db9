"""Plain transformers, driven by lines of JSON: the child process of `peer.Peer`. It imports nothing of ours.

Quantised GGUF files are dequantised to float32, as transformers does it; the model is run eagerly with its own cache.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Transformers:
    """One model."""

    def __init__(self, path: str, threads: int, ctx: int, streams: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch: Any = torch
        self.transformers: Any = transformers
        file = Path(path)
        options: dict[str, Any] = {"torch_dtype": torch.float32} if file.is_file() else {"torch_dtype": "auto"}
        if file.is_file():
            options["gguf_file"] = file.name
        folder = file.parent if file.is_file() else file
        self.model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options).eval()

    def _run(self, ids: Any, cache: Any) -> None:
        with self.torch.inference_mode():
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _read(self, ids: list[list[int]]) -> Any:
        cache = self.transformers.DynamicCache()
        if ids[0]:
            self._run(self.torch.tensor(ids), cache)
        return cache

    def prefill(self, context: list[int], ids: list[int]) -> dict[str, Any]:
        """Seconds to read `ids` behind `context`."""
        cache = self._read([context])
        started = time.perf_counter()
        self._run(self.torch.tensor([ids]), cache)
        return {"seconds": time.perf_counter() - started}

    def decode(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        """Seconds to decode `count` tokens behind each prompt; the prompts have one length."""
        cache = self._read(prompts)
        started = time.perf_counter()
        for step in range(count):
            self._run(self.torch.tensor([[ids[step % len(ids)]] for ids in prompts]), cache)
        return {"seconds": time.perf_counter() - started}

    def facts(self) -> dict[str, Any]:
        """Versions."""
        return {"versions": {"transformers": self.transformers.__version__, "torch": self.torch.__version__}}


def main() -> None:
    """Answer one line per line: {"do": name, ...} -> its result, or {"error": text}."""
    out = sys.stdout
    sys.stdout = sys.stderr
    peer: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("do")
        try:
            if name == "load":
                peer = Transformers(**asked)
                answer: dict[str, Any] = peer.facts()
            else:
                answer = getattr(peer, name)(**asked)
        except ImportError as error:
            answer = {"error": str(error), "missing": error.name}
        except Exception as error:  # told to the parent, which ends this process
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
