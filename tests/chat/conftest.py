"""The tokenizers of the real models, where their files are on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.checkpoint.opening import open_checkpoint
from localllm.paths import models_dir
from localllm.tokenizer import Tokenizer, load_tokenizer


def _load(name: str) -> Tokenizer:
    path: Path = models_dir() / name
    if not path.exists():
        pytest.skip(f"{name} is not on this machine")
    with open_checkpoint(path) as ckpt:
        return load_tokenizer(ckpt)


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    return _load("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma_tokenizer() -> Tokenizer:
    return _load("gemma3-270m/gemma-3-270m-Q4_K_M.gguf")
