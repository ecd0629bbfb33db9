"""Whether the parts of a GGUF file's vocabulary fit together: array types, lengths, special ids, merges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .fields import Fields
from .gguf_file import StringArray
from .mapped_file import bad, shown

_INT, _FLOAT = "iu", "f"
_KEY_ARRAYS = {
    # arrays the tokenizer and the facts rely on: what their elements must be
    "tokenizer.ggml.tokens": "string",
    "tokenizer.ggml.merges": "string",
    "tokenizer.ggml.scores": _FLOAT,
    "tokenizer.ggml.token_type": _INT,
}
_TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
_NO_TOKEN = (None, -1, 2**32 - 1)  # how converters write "none": nothing, -1, or -1 as u32
_TEXT_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template", "tokenizer.huggingface.json")
_FLAG_KEYS = tuple(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "sep_token", "space_prefix"))
MAX_TEMPLATE_CHARS = 1 << 20
MAX_MERGES_PER_TOKEN = 8  # Gemma has 2; each costs the tokenizer 500 bytes


def special_ids(general: Fields, vocab_size: int, *names: str) -> tuple[int, ...]:
    """The ids of the named special tokens that there are, in order, each once."""
    ids: list[int] = []
    for name in names:
        key = f"tokenizer.ggml.{name}_token_id"
        if general.raw(key) not in _NO_TOKEN:
            ids += general.token_ids(key, vocab_size)
    return tuple(dict.fromkeys(ids))


def check_vocabulary(path: Path, metadata: Mapping[str, Any], vocab_size: int) -> None:
    """Raise BadModelFile unless the vocabulary is sound and has `vocab_size` tokens."""
    general = Fields(path, metadata)
    for key, kind in _KEY_ARRAYS.items():
        value = metadata.get(key)
        fits = isinstance(value, StringArray) if kind == "string" else getattr(value, "dtype", None) is not None
        if value is not None and not (fits and (kind == "string" or value.dtype.kind in kind)):
            wanted = {"string": "strings", _FLOAT: "floats", _INT: "integers"}[kind]
            raise bad(path, f"must be an array of {wanted}", key=key)
    for key in _TEXT_KEYS:
        general.text(key)
    for key in _FLAG_KEYS:
        general.flag(key)
    if len(general.text("tokenizer.chat_template")) > MAX_TEMPLATE_CHARS:
        what = f"has {len(metadata['tokenizer.chat_template']):,} characters, the limit is {MAX_TEMPLATE_CHARS:,}"
        raise bad(path, what, key="tokenizer.chat_template")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise bad(path, "is missing: the file has no vocabulary", key="tokenizer.ggml.tokens")
    if len(tokens) != vocab_size:
        what = f"holds {len(tokens):,} tokens, the embedding has {vocab_size:,} rows"
        raise bad(path, what, key="tokenizer.ggml.tokens")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if metadata.get(key) is not None and len(metadata[key]) != vocab_size:
            raise bad(path, f"has {len(metadata[key]):,} entries for {vocab_size:,} tokens", key=key)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is not None and not np.isfinite(scores).all():
        raise bad(path, "holds a value that is not finite", key="tokenizer.ggml.scores")
    special_ids(general, vocab_size, *_TOKEN_IDS)
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is not None and len(merges):
        if len(merges) > MAX_MERGES_PER_TOKEN * vocab_size:
            what = f"holds {len(merges):,} merges, the limit for {vocab_size:,} tokens is"
            raise bad(path, f"{what} {MAX_MERGES_PER_TOKEN * vocab_size:,}", key="tokenizer.ggml.merges")
        _check_merges(path, merges)


def _check_merges(path: Path, merges: StringArray) -> None:
    """Each merge is `left right`: a space that is neither its first nor its last byte."""
    blob = np.frombuffer(merges.blob, np.uint8)
    spaces = np.flatnonzero(blob == 0x20)
    found = np.searchsorted(spaces, merges.starts + 1)
    at = np.append(spaces, len(blob))[found]
    wrong = at >= merges.ends - 1
    if wrong.any():
        index = int(np.argmax(wrong))
        what = f"entry {index:,}, '{shown(merges[index])}', is not two parts with a space between them"
        raise bad(path, what, key="tokenizer.ggml.merges")
