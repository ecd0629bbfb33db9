"""tokenizer.json to a `tokenizers` back end, in pieces short enough for a server to go on answering meanwhile.

`Tokenizer.from_buffer` holds the interpreter for all it does, 0.7 s for the 262,144 words of Gemma 3: every stream of
another model stands still. Large BPE files are therefore parsed here, and the parts handed over one by one: 0.3 s
at a time, 0.4 on a busy machine. Whatever is not plainly such a file goes to `from_buffer`, for its own verdict.
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

PIECE = 4096  # merges handled at a time: some 2 ms, in which no other thread runs
LARGE_BYTES = 1 << 20  # files from this size are read in pieces: smaller ones are through in 50 ms
# commas and brackets of a file that is parsed here: Gemma 3 has 1.9 million; each may become an object of 64 bytes
MAX_VALUES = 4_000_000
# of control tokens and others in turns: with each the library makes its search tree anew (2 ms for 6,000 tokens)
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
    """While a million strings, lists and tuples are made, none of them garbage: looking takes a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def parsed(data: bytes) -> Any:
    """A tokenizer.json as JSON; None where it is malformed, or would make too many objects."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        return None
    with suppress(ValueError, RecursionError), no_collection():
        return json.loads(data)
    return None


def read_backend(data: bytes, document: Any) -> Backend:
    """The back end of a tokenizer.json, `parsed` before. Raises what `tokenizers` raises, which may be a panic."""
    from tokenizers import Tokenizer

    if len(data) >= LARGE_BYTES:
        # malformed in some way: `from_buffer` says how
        with suppress(Exception), no_collection():
            backend = _in_pieces(document)
            if backend is not None:
                return backend
    return Tokenizer.from_buffer(data)


def _in_pieces(document: Any) -> Backend | None:
    """The back end of a parsed file, or None where it is not the plain BPE that this reads."""
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
    """Merges as pairs, from either of the two ways in which files have them; None where they are neither."""
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
