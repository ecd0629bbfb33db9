"""Reads `tiktoken.model`, the vocabulary in Moonshot's repositories: byte-level BPE, one `base64 rank` per line.

The regex that splits text is missing there; it is in Python code next to the file, which is never run. The name of its
class identifies it. Control tokens are in tokenizer_config.json. The converter of transformers is not used: it needs
the `tiktoken` package, and neither is needed to run a model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localllm.checkpoint.mapped_file import bad
from localllm.errors import UnsupportedFormat
from localllm.tokenizer.gguf_vocabulary import CONTROL, NORMAL, Vocabulary

NAME = "tiktoken.model"
# classes of Kimi Linear, Kimi K2 and Moonlight, which share a regex
_CLASSES = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
RESERVED = 256  # ids after the ordinary tokens; those without a name are <|reserved_token_ID|>
MAX_TOKENS = 1 << 20


def check_class(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedFormat if the class in tokenizer_config.json is not one whose regex is known."""
    classes = config.get("auto_map")
    found = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    name = found[0] if isinstance(found, list) and found else found
    if name not in _CLASSES:
        stated = f"of class {ascii(name)[:60]}" if name else "without a class in tokenizer_config.json"
        what = f"the model's tokenizer is {NAME}, {stated}, which is not supported"
        raise UnsupportedFormat(what, "use a GGUF version of the model, or one with a tokenizer.json")


def read_vocabulary(path: Path, data: bytes, named: Mapping[int, str]) -> Vocabulary:
    """The vocabulary in `data`, whose ranks are ids, and its control tokens. `named`: their names by id.

    Raises BadModelFile, naming `path`, for damaged lines and for ranks that are not 0, 1, 2, ...
    """
    from tokenizers.pre_tokenizers import ByteLevel

    lines = data.split(None, 2 * MAX_TOKENS)  # what exceeds the limit stays one piece
    if not lines or len(lines) % 2 or len(lines) > 2 * MAX_TOKENS:
        raise bad(
            path, f"has {len(lines):,} words; expected a token and its rank per line, at most {MAX_TOKENS:,} of them"
        )
    try:
        parts = [base64.b64decode(text, validate=True) for text in lines[::2]]
        ranks = list(map(int, lines[1::2]))
    except (binascii.Error, ValueError) as error:
        raise bad(path, f"a line is not a token in base64 and a rank ({ascii(str(error))[1:-1][:60]})") from error
    size = len(parts)
    if ranks != list(range(size)) or len({*parts}) < size or not all(parts):
        raise bad(path, f"must have {size:,} different tokens with ranks from 0 to {size - 1:,}, in this order")
    letters = _letters(ByteLevel.alphabet())
    tokens = ["".join(letters[byte] for byte in part) for part in parts]
    # not two more, as the Python code has: the model has no embeddings for them
    last = max(size + RESERVED, *(index + 1 for index in named if index < size + 2 * RESERVED), 0)
    tokens += [named.get(index, f"<|reserved_token_{index}|>") for index in range(size, last)]
    if len(set(tokens)) < last:
        raise bad(path, "two tokens have the same text, one of them in tokenizer_config.json")
    types = np.full(last, NORMAL, np.int32)
    types[size:] = CONTROL
    return Vocabulary(
        model="tiktoken",
        pre="kimi-k2",
        tokens=tokens,
        token_ids={token: index for index, token in enumerate(tokens)},
        types=types,
        scores=-np.arange(last, dtype=np.float64),
        merges=[],
        ids={},
        add_bos=False,
        around=((), ()),
        add_space_prefix=False,
        strips=frozenset(),
        key=hashlib.sha256(data + types.tobytes()).hexdigest(),
    )


def _letters(alphabet: list[str]) -> list[str]:
    """The letter of every byte in byte-level vocabularies: its own of Latin-1 if visible, else one from 256 on."""
    found = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    others = iter(sorted(letter for letter in alphabet if ord(letter) >= 256))
    return [found.get(byte) or next(others) for byte in range(256)]
