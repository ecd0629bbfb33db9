"""Compilers over three vocabularies: the starter model's, a small SentencePiece one, Gemma's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_models import gguf_checkpoint

sys.path.append(str(Path(__file__).parent))

from localllm.checkpoint.opening import open_checkpoint
from localllm.grammar import Compiler
from localllm.tokenizer.files import load_tokenizer
from localllm.tokenizer.tokenizer import Tokenizer


def opened(path: Path) -> Tokenizer:
    with open_checkpoint(path) as checkpoint:
        return load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Compiler:
    """Byte-level BPE, 49k tokens."""
    tokenizer = opened(smollm2_path)
    return Compiler(tokenizer, tokenizer.vocab_size, tokenizer.chat_template or "")


@pytest.fixture(scope="session")
def spm() -> Compiler:
    """SentencePiece that puts a space before every text; letters, some JSON; logits wider than the vocabulary."""
    letters = '▁abcdefghijklmnopqrstuvwxyz0123456789{}[]":,-.é'
    words = ["▁the", '":', '",', '":▁"', '{"', "na", "me", "name", "tr", "true", "false", "null", "▁▁", "<x>"]
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, *words]
    types = [2, 3, 3, 3, *[6] * 256, *[1] * len(letters), *[1] * (len(words) - 1), 4]
    scores = [0.0] * (len(tokens) - len(letters) - len(words)) + [-9.0 - i / 100 for i in range(len(letters))]
    scores += [-1.0 - i / 100 for i in range(len(words))]
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "eos_token_id": 2}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = load_tokenizer(gguf_checkpoint(metadata))
    return Compiler(tokenizer, tokenizer.vocab_size + 13, "the template writes <x>")


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Compiler:
    """SentencePiece, 262k tokens."""
    tokenizer = opened(gemma_path)
    return Compiler(tokenizer, tokenizer.vocab_size)
