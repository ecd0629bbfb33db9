"""Random answers within a mask: what a model could say at worst."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
from tiny_models import gguf_checkpoint

from localllm.errors import LocalLLMError
from localllm.grammar import Compiler, GrammarMask, source_of
from localllm.request import Constraint, TokenMask
from localllm.tokenizer.files import load_tokenizer
from localllm.tokenizer.tokenizer import Tokenizer

ENDS = [b'"', b"}", b"]", b'"}', b'",', b"1", b"true"]


def mask_of(compiler: Compiler, kind: str, value: Any = None, **more: Any) -> GrammarMask:
    return compiler.mask(source_of(Constraint(kind, value, **more)))  # type: ignore[arg-type]


def refusal(compiler: Compiler, kind: str, value: Any) -> LocalLLMError | None:
    try:
        mask_of(compiler, kind, value)
    except LocalLLMError as error:
        return error
    return None


def flags(compiler: Compiler, mask: TokenMask) -> np.ndarray:
    """Which ids the mask allows, as bool [width]."""
    width = compiler.vocabulary.width
    row = np.zeros(-(-width // 32), dtype=np.int32)
    if not mask.fill(row):
        return np.ones(width, dtype=bool)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little").view(bool)
    assert not bits[width:].any()
    return bits[:width]


def allowed(compiler: Compiler, mask: TokenMask) -> list[int]:
    """The ids the mask allows."""
    return np.flatnonzero(flags(compiler, mask)).tolist()


def controlled_tokenizer(control: list[str]) -> Tokenizer:
    """A SentencePiece vocabulary of bytes, letters and a few words, with these control tokens."""
    letters = '▁abcdefghijklmnopqrstuvwxyz0123456789{}[]":,-.é\n<>/=_ADP`|'
    words = ['":', '",', '{"', "name", "arg", "true", "false", "null", "call:", "search", "tool", "json", "func"]
    tokens = ["<unk>", "<s>", "</s>", *control, *[f"<0x{byte:02X}>" for byte in range(256)], *letters, *words]
    types = [2, 3, 3, *[3] * len(control), *[6] * 256, *[1] * (len(letters) + len(words))]
    scores = [0.0] * (3 + len(control) + 256) + [-float(i) for i in range(len(letters) + len(words))]
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1,
            "eos_token_id": 2, "add_bos_token": False, "add_space_prefix": False}  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer(gguf_checkpoint(metadata))


@cache
def leaning_ids(tokenizer: Tokenizer) -> list[int]:
    return [index for index, data in enumerate(tokenizer.vocabulary_bytes()) if data in ENDS]


def walk(
    compiler: Compiler, mask: TokenMask, seed: int, *, jumps: bool = True, most: int = 400
) -> tuple[list[int], bool]:
    """Ids of a random answer, and whether it came to its end: it leans there, or strings would go on indefinitely."""
    rng, ids = random.Random(seed), []
    short, ends = leaning_ids(compiler.tokenizer), compiler.vocabulary.end_ids
    while not mask.is_done and len(ids) < most:
        forced = mask.jump_forward() if jumps else []
        if not forced:
            may = flags(compiler, mask)
            over = any(may[index] for index in ends)
            may[list(ends)] = False
            choices = np.flatnonzero(may)
            assert over or len(choices)
            if over and (rng.random() < 0.5 or not len(choices)):
                return ids, True
            leaning = [index for index in short if may[index]]
            forced = [rng.choice(leaning) if leaning and rng.random() < 0.3 else int(rng.choice(choices))]
        for index in forced:
            assert not mask.is_done
            mask.accept(index)
            ids.append(index)
    return ids, mask.is_done
