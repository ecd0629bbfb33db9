"""Loads tokenizer.json into a `tokenizers` back end in short steps, so a server keeps answering meanwhile.

`Tokenizer.from_buffer` holds the GIL throughout, 0.7 s for Gemma 3's 262,144 tokens, which stalls every stream of
another model. Large BPE files are therefore parsed here and handed over in parts, which holds the GIL for 0.3 s at a
time, 0.4 s on a busy machine. All other files go to `from_buffer`, which also reports errors.
"""

from __future__ import annotations

import gc
import json
from collections import UserList
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

PIECE = 4096  # merges per step: about 2 ms, in which no other thread runs
LARGE_BYTES = 1 << 20  # files from this size are read in steps; smaller ones take up to 50 ms
# commas and brackets in a file parsed here: Gemma 3 has 1.9 million; each may become an object of 64 bytes
MAX_VALUES = 4_000_000
# alternating runs of control tokens and others: the library rebuilds its search tree for each (2 ms for 6,000 tokens)
MAX_RUNS = 32

_FLAGS = ("fuse_unk", "byte_fallback", "ignore_merges")
_OPTIONS = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class Patient(UserList[tuple[str, str]]):
    """Merges that let other threads run while `tokenizers` reads them."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return chain.from_iterable(self.data[at : at + PIECE] for at in range(0, len(self), PIECE))


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection while creating millions of live objects, where it takes a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def parsed(data: bytes) -> Any:
    """Parse a tokenizer.json; None if it is malformed or would create too many objects."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        return None
    with suppress(ValueError, RecursionError), no_collection():
        return json.loads(data)
    return None


def read_backend(data: bytes, document: Any) -> Backend:
    """Build the back end of a `parsed` tokenizer.json. Raises what `tokenizers` raises, which may be a panic."""
    from tokenizers import Tokenizer

    if len(data) >= LARGE_BYTES:
        # if it is malformed, `from_buffer` reports how
        with suppress(Exception), no_collection():
            backend = _in_pieces(document)
            if backend is not None:
                return backend
    return Tokenizer.from_buffer(data)


def _in_pieces(document: Any) -> Backend | None:
    """Build the back end of a parsed file, or return None if it is not plain BPE."""
    from tokenizers import AddedToken, Tokenizer, models

    model, added = document["model"], document["added_tokens"]
    if model.get("type") != "BPE" or set(model) - {"type", "vocab", "merges", *_FLAGS, *_OPTIONS}:
        return None
    flags, options = ({name: model[name] for name in names if name in model} for names in (_FLAGS, _OPTIONS))
    vocab, pairs = model["vocab"], _pairs(model["merges"])
    if pairs is None or set(map(type, vocab.values())) != {int} or set(map(type, flags.values())) - {bool}:
        return None
    frame = document | {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    backend = Tokenizer.from_str(json.dumps(frame))
    backend.model = models.BPE(
        vocab=vocab, merges=Patient(pairs), **flags, **{k: v for k, v in options.items() if v is not None}
    )
    runs = [(is_special, list(run)) for is_special, run in groupby(added, lambda token: token["special"])]
    if len(runs) > MAX_RUNS:
        return None
    for is_special, run in runs:
        some = [AddedToken(t["content"], special=is_special, **{flag: t[flag] for flag in TOKEN_FLAGS}) for t in run]
        (backend.add_special_tokens if is_special else backend.add_tokens)(some)
    plain = all(backend.token_to_id(token["content"]) == token["id"] for token in added)
    return backend if plain else None


def _pairs(merges: Any) -> list[tuple[str, str]] | None:
    """Convert merges to pairs from either of the two notations in files; None if they use neither."""
    made: list[tuple[str, str]] = []
    for at in range(0, len(merges), PIECE):
        part = merges[at : at + PIECE]
        kinds = set(map(type, part))
        if kinds == {list}:
            made += map(tuple, part)
        elif kinds == {str}:
            made += [tuple(merge.split(" ")) for merge in part]
        else:
            return None
        if set(map(len, made[at:])) != {2}:
            return None
    return made
