"""Tokenizers: identity with transformers, rebuilding from GGUF metadata, damaged files, control tokens."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import gguf_checkpoint

from localllm.checkpoint.opening import open_checkpoint
from localllm.errors import BadModelFile, LocalLLMError, UnsupportedFormat
from localllm.paths import cache_dir, models_dir
from localllm.tokenizer import gguf_vocabulary as tokenizer_gguf
from localllm.tokenizer import tiktoken_model
from localllm.tokenizer.files import load_tokenizer
from localllm.tokenizer.gguf_vocabulary import derive_merges, pre_tokenizer
from localllm.tokenizer.regex import PRE_TOKENIZERS
from localllm.tokenizer.tokenizer import Tokenizer

FILES = {
    "smollm2": "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma3-270m/gemma-3-270m-Q4_K_M.gguf",
}
GOLDEN = Path(__file__).parents[1] / "golden"


# the larger vocabulary takes seconds to load
@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def real(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    path = models_dir() / FILES[request.param]
    if not path.exists():
        pytest.skip(f"{request.param} is not on this machine")
    with open_checkpoint(path) as ckpt:
        return request.param, load_tokenizer(ckpt)


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(gguf_checkpoint(metadata))


def from_folder(folder: Path, **more: Any) -> Tokenizer:
    files = {path.name: path for path in folder.iterdir() if path.is_file()}
    given = {"kind": "safetensors", "path": folder, "tokenizer_files": files, "config": {}, "generation_config": {}}
    return load_tokenizer(SimpleNamespace(**{**given, **more}))  # type: ignore[arg-type]


# --- the real models -------------------------------------------------------------------------------------------------


def test_ids_are_those_of_transformers(real: tuple[str, Tokenizer]) -> None:
    name, tokenizer = real
    rows = json.loads((GOLDEN / f"tokens_{name}.json").read_text())["rows"]
    assert len(rows) > 300
    wrong = [
        row["text"]
        for row in rows
        if tokenizer.encode(row["text"], special=True) != row["special"]
        or tokenizer.encode(row["text"]) != row.get("plain", row["special"])
    ]
    assert not wrong


def test_texts_survive(real: tuple[str, Tokenizer]) -> None:
    name, tokenizer = real
    for row in json.loads((GOLDEN / f"tokens_{name}.json").read_text())["rows"]:
        text = row["text"] if name == "smollm2" else row["text"].replace("▁", " ")
        assert tokenizer.decode(tokenizer.encode(row["text"])) == text
        assert tokenizer.decode(tokenizer.encode(row["text"], special=True), skip_special=False) == text


def test_plain_text_has_no_control_tokens(real: tuple[str, Tokenizer]) -> None:
    _, tokenizer = real
    texts = list(tokenizer.control_text.ids)[:300]
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("".join(texts) + " ".join(texts)))
    assert tokenizer.special_ids.issuperset(tokenizer.encode("".join(texts), special=True))


def named(tokenizer: Tokenizer) -> tuple[str, str]:
    return tokenizer.named_tokens["bos_token"], tokenizer.named_tokens["eos_token"]


def test_facts_of_the_real_models(real: tuple[str, Tokenizer]) -> None:
    name, tokenizer = real
    if name == "smollm2":
        assert (*named(tokenizer), tokenizer.add_bos) == ("<|im_start|>", "<|im_end|>", False)
        assert tokenizer.eos_token_ids == {0, 2}
        assert tokenizer.chat_template
    else:
        assert (*named(tokenizer), tokenizer.add_bos) == ("<bos>", "<eos>", True)
        assert tokenizer.eos_token_ids == {1, 106}  # not 212, </s>, which is an HTML tag there
        assert tokenizer.chat_template is None
    assert tokenizer.vocab_size == {"smollm2": 49152, "gemma3-270m": 262144}[name]
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_to_id("no such token at all") is None


@pytest.mark.slow
def test_ids_are_those_of_transformers_live(real: tuple[str, Tokenizer]) -> None:
    """The stored ids are what transformers says today, but for the texts that the file lists as patched."""
    transformers = pytest.importorskip("transformers")
    name, tokenizer = real
    stored = json.loads((GOLDEN / f"tokens_{name}.json").read_text())
    path = models_dir() / FILES[name]
    other = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for number, row in enumerate(stored["rows"]):
        ids = other(row["text"], add_special_tokens=False).input_ids
        assert (ids == tokenizer.encode(row["text"], special=True)) == (number not in stored["patched"]), row["text"]


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def spm_metadata(words: dict[str, float], control: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: unk, bos, eos, control tokens, 256 bytes, then words with scores."""
    tokens = ["<unk>", "<s>", "</s>", *control, *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    types = [2, 3, 3, *[3] * len(control), *[6] * 256, *[1] * len(words)]
    scores = [0.0] * (len(tokens) - len(words)) + list(words.values())
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def naive_spm(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's way: join the adjacent pair whose result scores highest, leftmost first."""
    parts = list(text)
    while True:
        joined = [left + right for left, right in zip(parts, parts[1:], strict=False)]
        options = [(-scores[word], at) for at, word in enumerate(joined) if word in scores]
        if not options:
            return parts
        at = min(options)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(
    st.dictionaries(st.text("ab▁c", min_size=2, max_size=5), st.integers(-50, 0), min_size=1, max_size=25),
    st.lists(st.text("abc ", max_size=20), min_size=1, max_size=5),
)
@settings(max_examples=150)
def test_spm_merges_reproduce_the_scores(words: dict[str, int], texts: list[str]) -> None:
    # equal scores are told apart by id: there llama.cpp's leftmost rule and Hugging Face's order differ
    scores = {word: score - number / 1000 for number, (word, score) in enumerate(words.items())}
    scores |= {char: -1000.0 - number for number, char in enumerate("▁abc")}
    tokenizer = from_gguf(spm_metadata(scores, add_space_prefix=False))
    for text in texts:
        expected = naive_spm(text.replace(" ", "▁"), scores)
        assert [tokenizer.id_to_token(index) for index in tokenizer.encode(text)] == expected
        assert tokenizer.decode(tokenizer.encode(text)) == text


WORDS = {"▁": -9.0, "h": -9.1, "i": -9.2, "hi": -1.0, "▁hi": -0.5, "[": -9.3, "]": -9.4, "\n": -9.5, "x": -9.6}


def shown(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.id_to_token(index) for index in ids]


def test_spm_puts_a_space_before_text_and_takes_it_away() -> None:
    tokenizer = from_gguf(spm_metadata(WORDS))
    assert tokenizer.add_bos
    assert (tokenizer.bos_token_id, tokenizer.named_tokens["unk_token"]) == (1, "<unk>")
    assert shown(tokenizer, tokenizer.encode("hi")) == ["▁hi"]
    assert shown(tokenizer, tokenizer.encode("<s>hi</s>hi", special=True)) == ["<s>", "▁hi", "</s>", "▁hi"]
    ids = tokenizer.encode("hi hi")
    assert (tokenizer.decode(ids), tokenizer.decode(ids, continuing=True)) == ("hi hi", " hi hi")
    assert shown(tokenizer, tokenizer.encode("é")) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é🙂")) == "é🙂"


def test_spm_mistral_3_writes_its_spaces_itself() -> None:
    tokenizer = from_gguf(spm_metadata(WORDS, control=("[INST]", "[/INST]")))
    ids = tokenizer.encode("<s>[INST] hi[/INST]", special=True)
    assert shown(tokenizer, ids) == ["<s>", "[INST]", "▁hi", "[/INST]"]


@pytest.mark.parametrize("more", [{}, {"add_space_prefix": False}])
@pytest.mark.parametrize("control", [(), ("[INST]", "[/INST]")])
def test_encode_mixed_is_encode_where_nothing_is_marked(control: tuple[str, ...], more: dict[str, Any]) -> None:
    tokenizer = from_gguf(spm_metadata(WORDS, control, **more))
    for text in ("<s>hi hi</s>", "hi<s> hi", " hi", "<s></s>", "hi", "", "<s>\n hi</s>\n"):
        assert tokenizer.encode_mixed(text, [(len(text), len(text))]) == tokenizer.encode(text, special=True), text
    plain = tokenizer.encode_mixed("<s>hi</s>x<s>", [(5, 9)])
    assert shown(tokenizer, plain).count("<s>") == 2
    assert tokenizer.decode(plain, skip_special=False) in ("<s>hi</s>x<s>", "<s> hi</s>x<s>")


def test_merges_that_build_a_control_token_are_cut() -> None:
    """A hostile or careless vocabulary whose plain merges end in a control token."""
    words = {"x": -5.0, "y": -5.1, "xy": -1.0}
    metadata = spm_metadata(words, add_space_prefix=False)
    metadata["tokenizer.ggml.eot_token_id"] = metadata["tokenizer.ggml.tokens"].index("xy")
    tokenizer = from_gguf(metadata)
    eot = tokenizer.token_to_id("xy")
    assert eot in tokenizer.special_ids & tokenizer.eos_token_ids
    assert tokenizer.encode("xyxy", special=True) == [eot, eot]
    assert shown(tokenizer, tokenizer.encode("xyxy")) == ["x", "y", "x", "y"]
    assert shown(tokenizer, tokenizer.encode_mixed("xyxy", [(2, 4)])) == ["xy", "x", "y"]


# --- the cache -------------------------------------------------------------------------------------------------------


DAMAGES = ["", "{", "[]", "\xff\xfe", '{"version":0,"merges":[]}', '{"version":1,"merges":["a","b"]}']
DAMAGES += [f'{{"version":1,"merges":[{merges}]}}' for merges in ("1", "-1,5", "0,99999999", "1.5,2")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(damage: str, empty_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = from_gguf(spm_metadata(WORDS)).encode("hi x")
    (path,) = (cache_dir() / "tokenizers").iterdir()
    good = path.read_bytes()
    path.write_bytes(damage.encode("latin-1"))
    assert from_gguf(spm_metadata(WORDS)).encode("hi x") == ids
    assert path.read_bytes() == good
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert "rebuilding it" in caplog.text


def test_the_cache_is_used_and_keyed_by_the_vocabulary(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_gguf(spm_metadata(WORDS))
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_gguf, "derive_merges", lambda *_: pytest.fail("the cache was not used"))
        from_gguf(spm_metadata(WORDS))
    from_gguf(spm_metadata({**WORDS, "hi": -8.0}))
    assert len(list((cache_dir() / "tokenizers").iterdir())) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(empty_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (empty_home / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert from_gguf(spm_metadata(WORDS)).encode("hi")
    assert "cannot be written" in caplog.text


# --- byte-level BPE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "strips"), [("phi3", True), ("llama", False)])
def test_white_space_vanishes_behind_the_tokens_of_phi_3(architecture: str, strips: bool) -> None:
    metadata = spm_metadata({"▁": -1.0, "▁a": -2.0, "a": -3.0}, ("<|user|>", "<|endoftext|>"))
    tokenizer = from_gguf(metadata | {"general.architecture": architecture})
    ids = tokenizer.encode("<|user|>\n a<|endoftext|> a", special=True)
    found = [tokenizer.id_to_token(index) for index in ids]
    assert found[:2] == ["<|user|>", "▁a" if strips else "▁"]
    assert found[found.index("<|endoftext|>") :] == ["<|endoftext|>", "▁", "▁a"], "this one leaves it"


def bpe_metadata(pre: str, merges: tuple[str, ...] = (), extra: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "", 1) for merge in merges] + [t for t, _ in extra]
    types = [1] * (len(tokens) - len(extra)) + [kind for _, kind in extra]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": list(merges) or ["a b"]}
    if not merges:
        keys["tokens"], keys["token_type"] = [*tokens, "ab"], [*types, 1]
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def pieces(pre: str, text: str) -> list[str]:
    """What the pre-tokenizer cuts the text into."""
    backend = from_gguf(bpe_metadata(pre))._backend
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


SAMPLE = "Hello WORLD's isn't 12345678 x=  y\n\n  é..."


def test_pre_tokenizers_cut_as_published() -> None:
    head = ["Hello", " WORLD", "'s", " isn", "'t", " "]
    tail = [" x", "=", " ", " y", "\n\n"]
    assert pieces("llama-bpe", SAMPLE)[:14] == [*head, "123", "456", "78", *tail]
    assert pieces("qwen2", SAMPLE)[:19] == [*head, *"12345678", *tail]
    assert pieces("gpt-4o", SAMPLE)[:4] == ["Hello", " WORLD's", " isn't", " "]
    assert pieces("kimi-k2", "Es ist日本語 isn't 1234\n") == ["Es", " ist", "日本語", " isn't", " ", "123", "4", "\n"]
    for name in ("bailingmoe", "bailingmoe2", "llada-moe"):
        assert pieces(name, "ISN'T 12\n\n x") == ["ISN", "'T", " ", "1", "2", "\n\n", " x"]
    assert pieces("youtu", "Don't 12 바다ㄱ中文、x") == ["Don't", " ", "1", "2", " ", "바다ㄱ", "中文", "、", "x"]
    assert pieces("minicpm5", "Es isn't 1234\n") == ["Es", " isn", "'t", " ", "123", "4", "\n"]
    assert pieces("smollm", "a  12")[:4] == ["a", "  ", "1", "2"]
    assert pieces("gpt-2", "a  12") == ["a", " ", " 12"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_partitions_text(pre: str) -> None:
    tokenizer = from_gguf(bpe_metadata(pre))
    for text in (SAMPLE, "a\r\nb\t c", "日本語123 ١٢٣", "x==y  ;\n\n\n", "ÄÖ 🙂👍🏽 é!?", "1234567"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_glm_takes_pieces_that_are_tokens_whole() -> None:
    """`abc` is a token that no merges lead to: `ab` is joined first where merges are asked."""
    for pre, expected in (("glm4", ["abc"]), ("dbrx", ["ab", "c"])):
        tokenizer = from_gguf(bpe_metadata(pre, ("a b",), (("bc", 1), ("abc", 1))))
        assert shown(tokenizer, tokenizer.encode("abc")) == expected
        assert not tokenizer.add_bos


def test_qwen_normalises_and_others_do_not() -> None:
    for pre, text in (("qwen2", "é"), ("llama-bpe", "e\u0301")):
        tokenizer = from_gguf(bpe_metadata(pre))
        assert tokenizer.decode(tokenizer.encode("e\u0301")) == text


def test_missing_pre_is_told_from_the_architecture() -> None:
    metadata = bpe_metadata("default") | {"general.architecture": "qwen3"}
    assert from_gguf(metadata).encode("e\u0301") == from_gguf(metadata).encode("é")  # NFC: taken for qwen2


def test_added_and_control_tokens() -> None:
    extra = (("<|im_start|>", 3), ("<|im_end|>", 3), ("<think>", 4), ("[PAD1]", 5), ("日本<é>", 4))
    tokenizer = from_gguf(bpe_metadata("qwen2", ("h i",), extra))
    first = tokenizer.token_to_id("<|im_start|>")
    assert first is not None
    ids = tokenizer.encode("<|im_start|>hi<think>日本<é>", special=True)
    assert ids == [first, tokenizer.token_to_id("hi"), first + 2, first + 4]
    assert tokenizer.decode(ids) == "hi<think>日本<é>"
    assert first not in tokenizer.encode("<|im_start|>")
    assert first + 2 in tokenizer.encode("<think>")
    assert first + 3 not in tokenizer.encode("[PAD1]", special=True)
    assert tokenizer.special_ids == {first, first + 1}
    assert tokenizer.eos_token_ids == {first + 1}
    assert not tokenizer.add_bos
    assert from_gguf(bpe_metadata("llama-bpe") | {"tokenizer.ggml.bos_token_id": 1}).add_bos


def test_gemma4_vocabularies() -> None:
    words = ["▁", "a", "b", "▁a", "\n", "\n\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *words, "  "]
    types = [3, 3, 3, 3, *[6] * 256, *[1] * len(words), 4]
    keys = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": ["▁ a", "\n \n", "▁ ▁"]}
    keys |= {"unknown_token_id": 3, "bos_token_id": 2}
    tokenizer = from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert shown(tokenizer, tokenizer.encode("a a\n\nb  bé")) == [
        "a", "▁a", "\n\n", "b", "▁▁", "b", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("a a\n\nb  bé")) == "a a\n\nb  bé"
    keys["add_bos_token"] = False  # in the first files of Gemma 4
    assert from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()}).add_bos


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        ([("<|end|>", 3)], ["<|end|>"]),
        ([("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)], ["<|call|>", "<|return|>"]),
        ([("</s>", 4)], []),
        ([("</s>", 3)], ["</s>"]),
        ([("</s>", 3), ("<|tool_response>", 3)], ["<|tool_response>"]),
        (
            [("<|im_end|>", 1), ("<|endoftext|>", 4), ("<end_of_turn>", 3)],
            ["<end_of_turn>", "<|endoftext|>", "<|im_end|>"],
        ),
        ([("<｜end▁of▁sentence｜>", 3), ("[EOS]", 4)], ["<｜end▁of▁sentence｜>"]),
        ([("<|user|>", 3), ("<|observation|>", 3)], ["<|observation|>", "<|user|>"]),
        ([("<|user|>", 1)], []),
        ([("<|role_end|>", 3), ("<|endoftext|>", 3)], ["<|endoftext|>", "<|role_end|>"]),
    ],
)
def test_what_ends_a_turn(texts: list[tuple[str, int]], ends: list[str]) -> None:
    tokenizer = from_gguf(bpe_metadata("gpt-2", ("h i",), tuple(texts)))
    assert sorted(filter(None, shown(tokenizer, list(tokenizer.eos_token_ids)))) == ends
    assert tokenizer.special_ids >= tokenizer.eos_token_ids


# --- damaged and refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change", "error", "said"),
    [
        ("gpt2", {"model": "rwkv"}, UnsupportedFormat, "'rwkv' (RWKV)"),
        ("gpt2", {"model": "t5"}, BadModelFile, "scores"),
        ("gpt2", {"model": "bert"}, BadModelFile, "unknown_token_id"),
        ("gpt2", {"model": "no_vocab"}, UnsupportedFormat, "no_vocab"),
        ("gpt2", {"model": None}, BadModelFile, "no tokenizer"),
        ("gpt2", {"pre": "martian"}, UnsupportedFormat, "'martian'"),
        ("gpt2", {"tokens": [], "token_type": None, "merges": None}, BadModelFile, "is empty"),
        ("gpt2", {"tokens": 5}, BadModelFile, "array of strings"),
        ("gpt2", {"tokens": [b"\xff\xfe", b"a"], "token_type": None}, BadModelFile, "UTF-8"),
        ("gpt2", {"tokens": [1, 2]}, BadModelFile, "array of strings"),
        ("gpt2", {"token_type": [1]}, BadModelFile, "1 entries"),
        ("gpt2", {"token_type": "abc"}, BadModelFile, "array of integers"),
        ("gpt2", {"merges": []}, BadModelFile, "has no merges"),
        ("gpt2", {"merges": ["ab"]}, BadModelFile, "'ab'"),
        ("gpt2", {"merges": [""]}, BadModelFile, "not two parts"),
        ("gpt2", {"merges": ["a "]}, BadModelFile, "not two parts"),
        ("gpt2", {"merges": ["a nowhere"]}, BadModelFile, "nowhere"),
        ("gpt2", {"merges": ["a b c"]}, BadModelFile, "usable"),
        ("gpt2", {"bos_token_id": 10**6}, BadModelFile, "1000000"),
        ("gpt2", {"eos_token_id": -5}, BadModelFile, "-5"),
        ("gpt2", {"eos_token_id": "x"}, BadModelFile, "'x' is not in the vocabulary"),
        ("gpt2", {"eos_token_id": True}, BadModelFile, "True is not in the vocabulary"),
        ("llama", {"scores": None}, BadModelFile, "scores"),
        ("llama", {"scores": [1.0]}, BadModelFile, "1 entries"),
        ("llama", {"scores": ["x"]}, BadModelFile, "array of floats"),
        ("llama", {"padding_token_id": 2**40}, BadModelFile, "padding"),
    ],
)
def test_damaged_vocabularies(base: str, change: dict[str, Any], error: type[LocalLLMError], said: str) -> None:
    metadata = bpe_metadata("gpt-2") if base == "gpt2" else spm_metadata(WORDS)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(error) as caught:
        from_gguf(metadata)
    assert type(caught.value) is error
    assert said in caught.value.message
    assert caught.value.hint


def test_odd_but_harmless_vocabularies() -> None:
    metadata = bpe_metadata("gpt-2") | {"tokenizer.ggml.eos_token_id": 3}
    metadata["tokenizer.ggml.padding_token_id"] = 2**32 - 1  # how converters write "none"
    metadata["tokenizer.ggml.tokens"] = [t.encode() for t in [*metadata["tokenizer.ggml.tokens"], "a", "\x00", ""]]
    metadata["tokenizer.ggml.token_type"] = np.array([*metadata["tokenizer.ggml.token_type"], 1, 1, 3], np.int32)
    tokenizer = from_gguf(metadata)
    assert tokenizer.eos_token_ids == {3}
    assert "pad_token" not in tokenizer.named_tokens
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"  # of two equal tokens the first counts


def test_derive_merges_ignores_what_cannot_be_reached() -> None:
    tokens = ["a", "b", "ab", "abz", "", "c"]
    merges = derive_merges(tokens, np.array([1, 1, 1, 1, 1, 1]), np.array([0.0, 0, -1, -2, 0, 0]))
    assert merges == [0, 1]


# --- tokenizer.json --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer.json with a BOS that its post-processor adds, and a config."""
    from tokenizers import processors

    backend = from_gguf(bpe_metadata("llama-bpe", ("h i",), (("<bos>", 3), ("<|eot_id|>", 3), ("<think>", 4))))._backend
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<|eot_id|>", "chat_template": "main"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_says_what_it_says(folder: Path) -> None:
    tokenizer = from_folder(folder)
    assert (*named(tokenizer), tokenizer.add_bos) == ("<bos>", "<|eot_id|>", True)
    assert tokenizer.chat_template == "main"
    assert tokenizer.decode(tokenizer.encode("hi hi hi hi hi hi")) == "hi hi hi hi hi hi"  # no truncation
    assert tokenizer.bos_token_id not in tokenizer.encode("hi")
    eot = tokenizer.token_to_id("<|eot_id|>")
    assert tokenizer.eos_token_ids == {eot}
    assert from_folder(folder, generation_config={"eos_token_id": [5, 6]}).eos_token_ids == {5, 6, eot}
    assert from_folder(folder, config={"eos_token_id": 7}).eos_token_ids == {7, eot}


def test_a_folder_may_switch_bos_off_and_add_tokens(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    size = from_folder(folder).vocab_size
    config |= {"add_bos_token": False, "added_tokens_decoder": {str(size): {"content": "<|new|>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = from_folder(folder)
    assert not tokenizer.add_bos
    assert tokenizer.encode("<|new|>", special=True) == [size]
    assert size in tokenizer.special_ids
    assert tokenizer.vocab_size == size + 1


def test_the_configuration_says_what_tokens_are(folder: Path) -> None:
    """As transformers has it, what tokenizer.json has as mere words, or as added tokens that are no control tokens."""
    document, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config"))
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] == "<think>"]
    document["model"]["vocab"] |= ids
    config |= {
        "added_tokens_decoder": {str(ids["<|eot_id|>"]): {"content": "<|eot_id|>", "special": True, "rstrip": True}}
    }
    config |= {"additional_special_tokens": ["<think>"], "pad_token": "h"}
    for name, value in (("tokenizer", document), ("tokenizer_config", config)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    tokenizer = from_folder(folder)
    found = tokenizer.encode("<bos>h<think>i<|eot_id|> ", special=True)
    assert found == [ids["<bos>"], *tokenizer.encode("h"), ids["<think>"], *tokenizer.encode("i"), ids["<|eot_id|>"]]
    assert tokenizer.special_ids == set(ids.values()), "not the word that stands for padding"
    assert not tokenizer.special_ids & set(tokenizer.encode("<bos>h<think>"))


def test_flags_may_differ_for_many_tokens_in_turns(folder: Path) -> None:
    document, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config"))
    size = len(document["model"]["vocab"])
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    more = [{"id": size + n, "content": f"<|{n}|>", "special": n % 2 == 0, **flags} for n in range(80)]
    document["added_tokens"] += sorted(more, key=lambda token: token["special"])
    document["model"]["vocab"] |= {token["content"]: token["id"] for token in more}
    config["added_tokens_decoder"] = {str(token["id"]): token | {"rstrip": True} for token in more}
    for name, value in (("tokenizer", document), ("tokenizer_config", config)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    assert from_folder(folder).encode("<|7|>  <|8|>", special=True) == [size + 7, size + 8]


def test_mistrals_vocabulary_is_cut_as_it_was_made(tmp_path: Path) -> None:
    """Its tokenizer.json of Mistral Small 3 has a regex which takes digits together, and words of two cases."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    marks = [
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        *"678",
        "[TOOL_CALLS]",
        *"12aB",
        "12",
        "aB",
    ]
    backend = Backend(models.BPE({text: index for index, text in enumerate(marks)}, [("1", "2"), ("a", "B")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer("llama3"), decoders.ByteLevel()
    for tokens, found in ((marks, ["1", "2", "a", "B"]), (["[INST]", *marks], ["12", "aB"])):
        backend.model = models.BPE(
            {text: index for index, text in enumerate(dict.fromkeys(tokens))}, [("1", "2"), ("a", "B")]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = from_folder(tmp_path)
        assert [tokenizer.token_bytes(index).decode() for index in tokenizer.encode("12aB")] == found


def test_special_tokens_map_fills_in(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<bos>", "unk_token": {"content": "h"}}')
    tokenizer = from_folder(folder)
    assert tokenizer.named_tokens == {"bos_token": "<bos>", "unk_token": "h"}
    assert tokenizer.chat_template is None


def test_chat_templates_of_a_folder(folder: Path) -> None:
    listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert (from_folder(folder).chat_template, from_folder(folder).chat_templates["tool_use"]) == ("d", "t")
    (folder / "chat_template.json").write_text('{"chat_template": "j"}')
    assert from_folder(folder).chat_template == "j"
    (folder / "chat_template.jinja").write_text("file {{ x }}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("r")
    tokenizer = from_folder(folder)
    assert tokenizer.chat_template == "file {{ x }}\n"
    assert tokenizer.chat_templates == {"default": "d", "tool_use": "t", "rag": "r"}


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "x\x1b[2J", "a" * 100, None, 5, "/etc/passwd", "..\\x"])
def test_names_lead_nowhere(name: Any, folder: Path) -> None:
    listed = {"chat_template": [{"name": name, "template": "../../x.jinja"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))
    with pytest.raises(BadModelFile) as caught:
        from_folder(folder)
    assert caught.value.message.isprintable()
    metadata = bpe_metadata("gpt-2") | {"tokenizer.chat_templates": [name], f"tokenizer.chat_template.{name}": "x"}
    if isinstance(name, str):
        with pytest.raises(BadModelFile):
            from_gguf(metadata)


def test_a_template_is_text_never_a_path(folder: Path) -> None:
    (folder.parent / "x.jinja").write_text("outside")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "../x.jinja"}')
    assert from_folder(folder).chat_template == "../x.jinja"


def test_links_stay_inside(folder: Path) -> None:
    outside = folder.parent / "secret.jinja"
    outside.write_text("secret")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "x.jinja").symlink_to(outside)
    with pytest.raises(BadModelFile, match="leaves the folder"):
        from_folder(folder)
    (extra / "x.jinja").unlink()
    extra.rmdir()
    extra.symlink_to(folder.parent)
    with pytest.raises(BadModelFile, match="leaves the folder"):
        from_folder(folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json"),
        ("tokenizer.json", "\xff", "tokenizer.json"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "expected an object"),
        ("tokenizer_config.json", "[" * 100_000, "nested deeper"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "list of objects"),
        ("tokenizer_config.json", '{"chat_template": {"default": 5}}', "not text"),
        ("chat_template.jinja", "x" * (1 << 21), "2,097,152"),
        ("chat_template.json", '{"chat_template": ["x"]}', "not text"),
    ],
)
def test_damaged_folders(file: str, content: str, said: str, folder: Path) -> None:
    (folder / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(BadModelFile) as caught:
        from_folder(folder)
    assert said in caught.value.message


def test_unsupported_tokenizers_are_named(folder: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.CTC()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedFormat, match="CTC"):
        from_folder(folder)
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    assert from_folder(folder).decode([0], skip_special=False) == "[UNK]"
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(UnsupportedFormat, match=r"tokenizer\.model"):
        from_folder(folder)
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(UnsupportedFormat, match=r"tekken\.json, which is not supported") as caught:
        from_folder(folder)
    assert "GGUF" in caught.value.hint


def tiktoken_folder(folder: Path, tokens: list[bytes], named: dict[int, str], cls: str = "kimi") -> Path:
    """A folder of Moonshot's, without a tokenizer.json."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    listed = {str(index): {"content": text, "special": True} for index, text in named.items()}
    config = {"added_tokens_decoder": listed, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "x"}
    classes = {"AutoTokenizer": [f"tokenization_{cls}.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"auto_map": classes}))
    return folder


def byte_ranks(text: str, size: int) -> list[bytes]:
    """A vocabulary learned from the text: the most frequent neighbors become tokens, one by one."""
    words = [[bytes([byte]) for byte in word.encode()] for word in text.split(" ")]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < size:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        tokens.append(left + right)
        words = [joined_once(word, left + right, every=True) for word in words]
    return tokens


def joined_once(parts: list[bytes], token: bytes, every: bool = False) -> list[bytes]:
    """The parts with the first (or every) pair of neighbors that make the token joined."""
    for at, (left, right) in enumerate(pairwise(parts)):
        if left + right == token:
            rest = parts[at + 2 :]
            return [*parts[:at], token, *(joined_once(rest, token, every) if every else rest)]
    return parts


def tiktoken_ids(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """As tiktoken: a piece that is a token is one; else the pair of the lowest rank is joined, leftmost first."""
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while found := [ranks[pair] for left, right in pairwise(parts) if (pair := left + right) in ranks]:
        lowest = min(found)
        parts = joined_once(parts, next(token for token, rank in ranks.items() if rank == lowest))
    return [ranks[part] for part in parts]


def test_moonshots_vocabulary_gives_the_ids_of_tiktoken(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()[:4000] + "日本語の日本 Grüße größer Straße aaaa aaaaa"
    tokens = [*byte_ranks(text, 420), b" whole", "本日".encode()]  # the last two are no merges of others
    named = {len(tokens): "[BOS]", len(tokens) + 1: "[EOS]", len(tokens) + 2: "<|im_end|>", len(tokens) + 255: "[PAD]"}
    tokenizer = from_folder(tiktoken_folder(tmp_path, tokens, named))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for part in (text, SAMPLE, " whole wholes 本日 aaaaaaa\n\n  x1234 DON'T", "🙂\x00\x7f\xad é"):
        cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(part)
        wanted = [index for _, (begin, end) in cut for index in tiktoken_ids(part[begin:end].encode(), ranks)]
        assert tokenizer.encode(part) == wanted and tokenizer.decode(wanted) == part
    assert tokenizer.vocab_size == len(tokens) + 256
    assert tokenizer.encode("a<|im_end|>", special=True) == [ord("a"), len(tokens) + 2]
    assert tokenizer.encode("<|im_end|>") != [len(tokens) + 2]
    assert tokenizer.decode([len(tokens) + 7], skip_special=False) == f"<|reserved_token_{len(tokens) + 7}|>"
    assert {len(tokens) + 1, len(tokens) + 2} <= tokenizer.eos_token_ids and not tokenizer.add_bos
    assert from_folder(tmp_path).encode(text) == tokenizer.encode(text)  # with merges from the cache


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has 0 words"),
        ("YQ== 0\nYg==", "has 3 words"),
        ("YQ== 0\n!!!! 1", "not a token in base64"),
        ("YQ== 0\nYg== x", "not a token in base64"),
        ("YQ== 0\nYg== 2", "ranks from 0 to 1"),
        ("YQ== 0\nYQ== 1", "2 different tokens"),
        ("PHxpbV9lbmR8Pg== 0\nYQ== 1", "two tokens have the same text"),
    ],
)
def test_damaged_vocabularies_of_moonshot(content: str, said: str, tmp_path: Path) -> None:
    tiktoken_folder(tmp_path, [b"a"], {2: "<|im_end|>"})
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(BadModelFile) as caught:
        from_folder(tmp_path)
    assert said in caught.value.message and "tiktoken.model" in str(caught.value)


def test_a_vocabulary_of_moonshot_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_model, "MAX_TOKENS", 300)
    tiktoken_folder(tmp_path, [bytes([byte]) for byte in range(256)], {})
    assert from_folder(tmp_path).encode("ab") == [97, 98]
    monkeypatch.setattr(tiktoken_model, "MAX_TOKENS", 255)
    with pytest.raises(BadModelFile, match="at most 255"):
        from_folder(tmp_path)


def test_other_tiktoken_vocabularies_are_refused(tmp_path: Path) -> None:
    """The regex is not in the file."""
    with pytest.raises(UnsupportedFormat, match=r"class 'tokenization_xy\.TikTokenTokenizer'") as caught:
        from_folder(tiktoken_folder(tmp_path, [b"a"], {}, "xy"))
    assert "GGUF" in caught.value.hint
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UnsupportedFormat, match="without a class"):
        from_folder(tmp_path)


# --- odds and ends ---------------------------------------------------------------------------------------------------


def test_lone_surrogates_become_replacements() -> None:
    tokenizer = from_gguf(bpe_metadata("gpt-2"))
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"


def test_bytes_that_are_no_text_become_replacements() -> None:
    tokenizer = from_gguf(bpe_metadata("gpt-2"))
    ids = tokenizer.encode("🙂")
    assert tokenizer.decode(ids[:3]) == "\ufffd"
    assert tokenizer.decode([*ids[:2], *ids]) == "\ufffd🙂"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🙂".encode()


def test_threads_share_a_tokenizer() -> None:
    """The switch between plain and special encoding is never seen half turned."""
    tokenizer = from_gguf(bpe_metadata("gpt-2", ("h i",), (("<s>", 3),)))
    control, wrong = tokenizer.token_to_id("<s>"), []

    def work(special: bool) -> None:
        for _ in range(300):
            if (control in tokenizer.encode("hi <s> hi", special=special)) != special:
                wrong.append(special)

    threads = [threading.Thread(target=work, args=(bool(number % 2),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
