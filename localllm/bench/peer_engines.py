"""Child process of `peer.Peer`: runs llama.cpp, ik_llama.cpp or transformers, driven by lines of JSON.

Imports nothing of localllm, to run under any Python that has the engine's package. `prefill` measures the seconds to
prefill `ids` after `context`, `decode` the seconds to decode `count` tokens after each prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 512
Q8_0 = 8  # ggml type number


class LlamaCpp:
    """One model and one context. Decodes like llama-bench: without sampling, with given next tokens."""

    def __init__(self, path: str, threads: int, ctx: int, streams: int, kv: str = "") -> None:
        self.api = self.open()
        self.api.llama_backend_init()
        options = self.api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = self.api.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise RuntimeError(f"this llama.cpp cannot load {path}")
        settings = self.api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = ctx * streams, streams
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self.prepare(settings)
        if kv == "int8":
            for name, value in (("type_k", Q8_0), ("type_v", Q8_0), ("flash_attn_type", 1)):
                if hasattr(settings, name):  # a quantized V cache needs flash attention
                    setattr(settings, name, value)
        self.context = self.api.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"this llama.cpp cannot create a context of {ctx} tokens for {streams} streams")
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.batch = self.api.llama_batch_init(max(BATCH, streams), 0, 1)

    def open(self) -> Any:
        """Return the module that wraps the functions of llama.h."""
        import llama_cpp

        self._quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self.wait = llama_cpp.llama_synchronize
        return llama_cpp

    def prepare(self, settings: Any) -> None:
        """Change default settings of the context."""

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def run(self, tokens: list[tuple[int, int, int]], wanted: set[int]) -> None:
        """Compute a batch of (id, position, sequence); only rows in `wanted` get logits."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i in wanted
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed for {len(tokens)} tokens")
        self.wait(self.context)

    def read(self, ids: list[int], start: int = 0, sequence: int = 0) -> None:
        """Prefill ids at positions from `start` on, with logits only for the last row."""
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            last = {len(part) - 1} if at + BATCH >= len(ids) else set()
            self.run([(token, start + at + i, sequence) for i, token in enumerate(part)], last)

    def prefill(self, context: list[int], ids: list[int]) -> dict[str, Any]:
        self.clear()
        self.read(context)
        started = time.perf_counter()
        self.read(ids, len(context))
        return {"seconds": time.perf_counter() - started}

    def decode(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        self.clear()
        for sequence, ids in enumerate(prompts):
            self.read(ids, 0, sequence)
        rows = set(range(len(prompts)))
        started = time.perf_counter()
        for step in range(count):
            self.run([(ids[step % len(ids)], len(ids) + step, s) for s, ids in enumerate(prompts)], rows)
        return {"seconds": time.perf_counter() - started}

    def scores(self, ids: list[int], file: str) -> dict[str, Any]:
        """Write the logits of every position to a file, as raw float32 [num_tokens, vocab]."""
        import numpy as np

        self.clear()
        step = 64
        with open(file, "wb") as out:
            for at in range(0, len(ids), step):
                part = ids[at : at + step]
                self.run([(token, at + i, 0) for i, token in enumerate(part)], set(range(len(part))))
                for i in range(len(part)):
                    row = self.api.llama_get_logits_ith(self.context, i)
                    out.write(np.ctypeslib.as_array(row, shape=(self.vocab_size,)).tobytes())
        return {"vocab": self.vocab_size}

    def facts(self) -> dict[str, Any]:
        info = self.api.llama_print_system_info().decode().strip()
        return {"versions": {"llama-cpp-python": self.api.__version__, "build": info}}


class IkLlamaCpp(LlamaCpp):
    """The ik_llama.cpp fork, with flash attention as its programs use by default."""

    def open(self) -> Any:
        import ctypes

        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api

        self.version = ik_llama_cpp.__version__
        # missing from its bindings
        self.wait = _ctypes_api._lib.llama_synchronize
        self.wait.argtypes, self.wait.restype = [ctypes.c_void_p], None
        return _ctypes_api

    def prepare(self, settings: Any) -> None:
        settings.flash_attn = True

    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)

    def facts(self) -> dict[str, Any]:
        return {"versions": {"ik-llama-cpp-python": self.version}}


class Transformers:
    """One model in eager mode with a DynamicCache. transformers dequantizes GGUF files to float32."""

    def __init__(self, path: str, threads: int, ctx: int, streams: int, kv: str = "") -> None:
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
        cache = self._read([context])
        started = time.perf_counter()
        self._run(self.torch.tensor([ids]), cache)
        return {"seconds": time.perf_counter() - started}

    def decode(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        cache = self._read(prompts)
        started = time.perf_counter()
        for step in range(count):
            self._run(self.torch.tensor([[ids[step % len(ids)]] for ids in prompts]), cache)
        return {"seconds": time.perf_counter() - started}

    def facts(self) -> dict[str, Any]:
        return {"versions": {"transformers": self.transformers.__version__, "torch": self.torch.__version__}}


ENGINES: dict[str, Any] = {"llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp, "transformers": Transformers}


def main() -> None:
    """Answer each line {"do": name, ...} with one line: its result, or {"error": text}."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect the engine's own output to stderr, including prints from C
    peer: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("do")
        try:
            if name == "load":
                peer = ENGINES[sys.argv[1]](**asked)
                answer: dict[str, Any] = peer.facts()
            else:
                answer = getattr(peer, name)(**asked)
        except ImportError as error:
            answer = {"error": str(error), "missing": error.name}
        except Exception as error:  # reported to the parent, which ends this process
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
