"""Checks that the parts of a GGUF vocabulary are consistent: array types, lengths, special ids, merges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .fields import Fields
from .gguf_file import StringArray
from .mapped_file import shown

# arrays used by the tokenizer and the facts -> (element type, numpy's kinds of it; "" for bytes)
_ARRAYS = {"tokens": ("strings", ""), "merges": ("strings", "")}
_ARRAYS |= {"scores": ("floats", "f"), "token_type": ("integers", "iu")}
TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
_NO_TOKEN = (None, -1, 2**32 - 1)  # converters write "no token" as nothing, -1, or -1 as u32
_TEXT_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template", "tokenizer.huggingface.json")
_FLAG_KEYS = tuple(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "sep_token", "space_prefix"))
MAX_TEMPLATE_CHARS = 1 << 20
MAX_MERGES_PER_TOKEN = 8  # Gemma has 2; each takes 500 bytes in the tokenizer


def special_ids(general: Fields, vocab_size: int, *names: str) -> tuple[int, ...]:
    """The ids of the named special tokens that exist, in order, without duplicates."""
    ids: list[int] = []
    for name in names:
        key = f"tokenizer.ggml.{name}_token_id"
        value = general.raw(key)
        if isinstance(value, np.ndarray):
            raise general.fail(key, f"is an array of {len(value):,}, expected one token id")
        if value not in _NO_TOKEN:
            ids += general.token_ids(key, vocab_size)
    return tuple(dict.fromkeys(ids))


def check_vocabulary(path: Path, metadata: Mapping[str, Any], rows: int | None = None) -> None:
    """Raise BadModelFile unless the vocabulary is consistent and has one token per row of the embedding (`rows`)."""
    general, keys = Fields(path, metadata), Fields(path, metadata, "tokenizer.ggml.")
    for key, (what, kinds) in _ARRAYS.items():
        value = keys.raw(key)
        is_text = isinstance(value, list | StringArray)
        fits = value.dtype.kind in kinds if isinstance(value, np.ndarray) else is_text and not kinds
        if value is not None and not fits:
            raise keys.fail(key, f"must be an array of {what}")
    for key in _TEXT_KEYS:
        general.text(key)
    for key in _FLAG_KEYS:
        general.flag(key)
    if (template := len(general.text("tokenizer.chat_template"))) > MAX_TEMPLATE_CHARS:
        what = f"has {template:,} characters; the limit is {MAX_TEMPLATE_CHARS:,}"
        raise general.fail("tokenizer.chat_template", what)
    tokens, scores, merges = keys.raw("tokens"), keys.raw("scores"), keys.raw("merges")
    if tokens is None:
        raise keys.fail("tokens", "is missing: the file has no vocabulary")
    vocab_size = len(tokens) if rows is None else rows
    if len(tokens) != vocab_size:
        raise keys.fail("tokens", f"holds {len(tokens):,} tokens; the embedding has {vocab_size:,} rows")
    for key in ("scores", "token_type"):
        if keys.raw(key) is not None and len(keys.raw(key)) != vocab_size:
            raise keys.fail(key, f"has {len(keys.raw(key)):,} entries for {vocab_size:,} tokens")
    if scores is not None and not np.isfinite(scores).all():
        raise keys.fail("scores", "holds a value that is not finite")
    special_ids(general, vocab_size, *TOKEN_IDS)
    limit = MAX_MERGES_PER_TOKEN * vocab_size
    if merges and len(merges) > limit:
        raise keys.fail("merges", f"holds {len(merges):,} merges; the limit for {vocab_size:,} tokens is {limit:,}")
    # `left right`: a space that is neither its first nor its last byte
    if isinstance(merges, StringArray):
        wrong = merges.first_undivided(ord(" "))
    else:
        wrong = next((number for number, merge in enumerate(merges or ()) if b" " not in merge[1:-1]), None)
    if merges and wrong is not None:
        what = f"entry {wrong:,}, '{shown(merges[wrong])}', is not two parts separated by a space"
        raise keys.fail("merges", what)
