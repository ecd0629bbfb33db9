"""Unigram and WordPiece vocabularies of GGUF files cut text as the tokenizers they were made from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import gguf_checkpoint
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from localllm.errors import BadModelFile
from localllm.tokenizer.files import load_tokenizer
from localllm.tokenizer.regex import PRE_TOKENIZERS
from localllm.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "hello world",
    "  Hello,  wörld! ",
    "unhappiness (re)play\n\tno",
    "xyz hello",
    "世界 hello",
    "",
    "playing... played?",
    "a" * 101,
]
UNIGRAM = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -3.0, "▁hello": -4.0, "▁world": -4.5, "▁he": -5.0, "llo": -5.5,
           "wor": -6.0, "ld": -6.5, "▁play": -4.2, "ing": -4.1, "ed": -4.3, ".": -4.4, ",": -4.4, "?": -7.0, "un": -6.0,
           **{char: -9.0 - i / 10 for i, char in enumerate("abcdehilnoprswyH")}}  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "un", "##happi", "##ness", "play", "##ing", "##ed", "re",
         "no", "(", ")", ",", ".", "!", "?", "世", "界", "wo", "##r", "##ld", "xy", "##z"]  # fmt: skip


def from_gguf(**keys: Any) -> Tokenizer:
    return load_tokenizer(gguf_checkpoint({f"tokenizer.ggml.{key}": value for key, value in keys.items()}))


def unigram(**more: Any) -> Tokenizer:
    types = [3, 3, 2] + [1] * (len(UNIGRAM) - 3)
    keys = {"tokens": [*UNIGRAM], "scores": [*UNIGRAM.values()], "token_type": types, "unknown_token_id": 2}
    return from_gguf(model="t5", **keys, **more)


def test_unigram() -> None:
    reference = Backend(models.Unigram([*UNIGRAM.items()], 2, False))
    reference.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    reference.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = unigram()
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids, text
    assert tokenizer.decode(tokenizer.encode("hello  playing")) == "hello playing"
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("hello")] == ["▁hello"]
    loose = unigram(add_space_prefix=False, remove_extra_whitespaces=False)
    assert [loose.id_to_token(i) for i in loose.encode("llo")] == ["llo"]
    assert len(loose.encode("llo   llo")) > len(tokenizer.encode("llo llo"))


def test_tables_that_rewrite_text_are_checked() -> None:
    """In the way of other tokenizer.json files: what would grow a text without bound does not open."""
    rng = np.random.default_rng(0)
    for table in (
        rng.integers(0, 256, 40, dtype=np.uint8),
        np.zeros(3, np.uint8),
        np.frombuffer(b"\0\0\0\0" + b"x" * 5000, np.uint8),
    ):
        with pytest.raises(BadModelFile):
            unigram(precompiled_charsmap=table).encode("hello")
    with pytest.raises(BadModelFile, match="precompiled_charsmap"):
        unigram(precompiled_charsmap=["a"])


def wordpiece(words: list[str], **ids: int) -> Tokenizer:
    tokens = [w if w[0] == "[" and w[-1] == "]" else w[2:] if w.startswith("##") else f"▁{w}" for w in words]
    types = [3] * 4 + [1] * (len(words) - 4)
    return from_gguf(model="bert", tokens=tokens, token_type=types, unknown_token_id=1, **ids)


@pytest.mark.parametrize("words", [WORDS, [*WORDS, "Hello"]], ids=["lower case", "cased"])
def test_wordpiece(words: list[str]) -> None:
    reference = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer(lowercase=len(words) == len(WORDS))
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    reference.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = wordpiece(words, bos_token_id=2, eos_token_id=3)
    assert tokenizer.add_bos
    # the ids that files leave out are found by name
    assert tokenizer.around == wordpiece(words, seperator_token_id=3).around == wordpiece(words).around == ([2], [3])
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids, text
        known = [i for i in tokenizer.encode(text) if i != 1]
        assert tokenizer.decode(known) == reference.decode(known), text
    assert tokenizer.encode("[CLS]", special=True) == [2]


def test_deepseek_llm_cuts_text_by_script() -> None:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS["deepseek-llm"]]
    cut = pre_tokenizers.Sequence(splits).pre_tokenize_str
    pieces = [piece for piece, _ in cut("Hello wörld 世界, x=12!\n\nДа ⴀ𝐀Ab  ")]
    assert "|".join(pieces) == "Hello| w|ö|rld| |世界|,| x|=|12|!|\n|\n|Да| |ⴀ|𝐀|Ab|  "


def test_digits_of_trinity_are_grouped_from_the_right() -> None:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS["afmoe"]]
    pieces = [text for text, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str("x12345 1234567 12 ไทย you're")]
    assert pieces == ["x", "12", "345", " ", "1", "234", "567", " ", "12", " ", "ไทย", " you", "'re"]
