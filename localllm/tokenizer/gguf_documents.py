"""Converts Unigram (`t5`) and WordPiece (`bert`) vocabularies of GGUF files to an equivalent tokenizer.json.

This applies the checks for tokenizer.json files to them: the tables with which a unigram file rewrites text are
untrusted.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from localllm.checkpoint.fields import Fields
from localllm.tokenizer.gguf_vocabulary import CONTROL, USER_DEFINED, Vocabulary

MODELS = ("t5", "bert")
MAX_WORD_CHARS = 100  # for WordPiece: a longer word becomes the unknown token
_WORDS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def document(path: Path, metadata: Any, vocabulary: Vocabulary) -> str:
    """Build the tokenizer.json of a vocabulary of one of MODELS. Raises BadModelFile for missing keys."""
    fields = Fields(path, metadata, "tokenizer.ggml.")
    unknown = vocabulary.ids.get("unknown", vocabulary.token_ids.get("[UNK]", vocabulary.token_ids.get("<unk>")))
    if unknown is None:
        raise fields.fail("unknown_token_id", "is missing: the vocabulary needs a token for unknown text")
    made = _unigram(fields, vocabulary, unknown) if vocabulary.model == "t5" else _wordpiece(vocabulary, unknown)
    added = [
        {"id": index, "content": vocabulary.tokens[index], "special": bool(vocabulary.types[index] == CONTROL)}
        for index in np.flatnonzero(np.isin(vocabulary.types, (CONTROL, USER_DEFINED))).tolist()
        if vocabulary.tokens[index] and index != unknown  # ordinary text may become the unknown token
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = {"version": "1.0", "added_tokens": [one | flags for one in added], "post_processor": None, **made}
    return json.dumps(whole, ensure_ascii=False)


def _unigram(fields: Fields, vocabulary: Vocabulary, unknown: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    table = fields.raw("precompiled_charsmap")
    if table is not None and len(table):
        if not isinstance(table, np.ndarray) or table.dtype.kind not in "iu":
            raise fields.fail("precompiled_charsmap", "must be an array of bytes")
        text = base64.b64encode(table.astype(np.uint8).tobytes()).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    if fields.flag("remove_extra_whitespaces", True):
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    words = _WORDS | {"prepend_scheme": "always" if fields.flag("add_space_prefix", True) else "never"}
    pairs = list(zip(vocabulary.tokens, vocabulary.scores.tolist(), strict=True))
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": words,
        "decoder": words,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": pairs, "byte_fallback": False},
    }


def _wordpiece(vocabulary: Vocabulary, unknown: int) -> dict[str, Any]:
    """GGUF files write `▁word` and `ing` for `word` and `##ing`: the mark is on the start of words instead."""
    control = set(np.flatnonzero(vocabulary.types == CONTROL).tolist()) | {unknown}
    cased = any(token.lower() != token for index, token in enumerate(vocabulary.tokens) if index not in control)
    normal = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    return {
        "normalizer": normal | {"lowercase": not cased},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "BertPreTokenizer"}, _WORDS]},
        "decoder": _WORDS,
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[unknown],
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": MAX_WORD_CHARS + 1,
            "vocab": vocabulary.token_ids,
        },
    }
