"""Tokenizers that are too large, of wrong types, or whose patterns never end: refused when a model is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    ARRAY,
    F32,
    MERGES,
    STRING,
    array,
    assemble,
    tiny_keys,
    tiny_safetensors,
    tiny_tensors,
    tokenizer_json,
    vocabulary,
)

from localllm.tokenizer import trial

from .conftest import Door, quick_and_small, refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_safetensors(tmp_path / "model")


def change(folder: Path, change: Callable[[dict[str, Any]], object], file: str = "tokenizer.json") -> None:
    value = json.loads((folder / file).read_text())
    change(value)
    (folder / file).write_text(json.dumps(value))


def refuse(door: Door, model: Path, *named: str) -> str:
    result = door("run", model, "hi", "--max-tokens", "1")
    quick_and_small(result, 10)  # the first of them brings torch with it
    return refused(result, *named)[0]


@pytest.mark.parametrize(("merge", "count"), [(b'["t","h"],', 1_050_000), (b'"t h",', 10_000_000)])
def test_millions_of_merges(merge: bytes, count: int, door: Door, folder: Path) -> None:
    head, tail = json.dumps(tokenizer_json()).encode().split(b'"merges": [')
    (folder / "tokenizer.json").write_bytes(head + b'"merges": [' + merge * count + tail)
    what = refuse(door, folder, "tokenizer.json")
    assert "strings; the limit is 2,000,000" in what


def test_millions_of_merges_in_a_gguf(door: Door, tmp_path: Path) -> None:
    tokens, path = vocabulary(), tmp_path / "merges.gguf"
    keys = tiny_keys(tokens, layers=1)
    once = array(STRING, MERGES)
    many = once[:4] + (90_000 * len(MERGES)).to_bytes(8, "little") + once[12:] * 90_000
    keys["tokenizer.ggml.merges"] = (ARRAY, many)
    path.write_bytes(assemble(keys, tiny_tensors(len(tokens), "Q8_0", layers=1)))
    result = door("run", path, "hi")
    quick_and_small(result)
    assert "holds 1,080,000 merges; the limit for 271 tokens is 2,168" in refused(result, path.name)[0]


@pytest.mark.parametrize("size", [1 << 40, (128 << 20) + 1])
def test_a_huge_tokenizer_is_not_read(size: int, door: Door, folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", size)
    assert f"is {size:,} bytes long; the limit is 134,217,728" in refuse(door, folder, "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_does_not_block(name: str, door: Door, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "is not a regular file" in refuse(door, folder, name)


def _model(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["model"].update(changes)


def _top(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.update(changes)


BAD_TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "model_missing": lambda value: value.pop("model"),
    "model_number": _top(model=7),
    "model_unknown": _model(type="Telepathy"),
    "vocab_list": _model(vocab=["a", "b"]),
    "vocab_texts": _model(vocab={"a": "0"}),
    "vocab_negative": _model(vocab={"a": -1}),
    "vocab_2e40": _model(vocab={"a": 2**40}),
    "merges_object": _model(merges={"t": "h"}),
    "merges_numbers": _model(merges=[1, 2]),
    "merges_of_three": _model(merges=[["t", "h", "e"]]),
    "merges_of_no_tokens": _model(merges=[["xyz", "zyx"]]),
    "added_text": _top(added_tokens="<s>"),
    "added_without_id": _top(added_tokens=[{"content": "<s>"}]),
    "normalizer_unknown": _top(normalizer={"type": "Nope"}),
    "normalizer_bad_pattern": _top(normalizer={"type": "Replace", "pattern": {"Regex": "(("}, "content": ""}),
    "pre_tokenizer_list": _top(pre_tokenizer=[1]),
    "decoder_missing": lambda value: value.pop("decoder"),
    "decoder_of_words": _top(decoder={"type": "WordPiece", "prefix": 7, "cleanup": True}),
    "post_processor_without_its_tokens": _top(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<nope>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_tokenizers_of_wrong_types(name: str, door: Door, folder: Path) -> None:
    change(folder, BAD_TOKENIZERS[name])
    refuse(door, folder, "tokenizer.json", "model: the tokenizer")


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template": 5},
        {"chat_template": ["x"]},
        {"chat_template": {"default": 5}},
        {"chat_template": [{"name": "../x", "template": "x"}]},
        {"chat_template": "{{ x"},
        {"chat_template": "{% for i in range(99999999) %}{{ messages }}{% endfor %}"},
    ],
    ids=str,
)
def test_settings_of_wrong_types(changes: dict[str, Any], door: Door, folder: Path) -> None:
    change(folder, _top(**changes), "tokenizer_config.json")
    refuse(door, folder, "model: ", "tokenizer_config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"bos_token": 5, "eos_token": [], "unk_token": {"content": 7}},
        {"bos_token": "<nowhere>", "eos_token": "", "add_bos_token": True},
        {"added_tokens_decoder": [1, 2]},
        {"added_tokens_decoder": {"x": {}, "-1": {"content": "a"}, "99999999": {"content": "b"}, "271": 5}},
        {"add_bos_token": "yes", "model_max_length": 10**400},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_passed_over(changes: dict[str, Any], door: Door, folder: Path) -> None:
    change(folder, _top(**changes), "tokenizer_config.json")
    assert door("run", folder, "hi", "--max-tokens", "1").code == 0


def test_tokens_beyond_the_embedding_are_refused(door: Door, folder: Path) -> None:
    """An id without a row would be read from somewhere else in memory."""
    change(folder, lambda value: value["model"]["vocab"].update({"h": 2**20}))
    result = door("run", folder, "hi", "--max-tokens", "1")
    refused(result, codes=(2, 12))


def _cut_by(pattern: str) -> Callable[[dict[str, Any]], object]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _top(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


def test_a_pattern_that_takes_long_on_30_kb(
    door: Door, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 s for 30,000 characters, which nothing can interrupt."""
    from localllm.tokenizer import tokenizer

    monkeypatch.setattr(tokenizer, "LIMIT_S", 0.2)
    monkeypatch.setattr(tokenizer, "CHARS_PER_S", 1_000_000)
    change(folder, _cut_by("a+b"))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a" * 30_000)
    result = door("run", folder, "-f", prompt)
    quick_and_small(result, 10)
    what, hint = refused(result, "model: the tokenizer cannot split a text of 30,")
    assert "shorter text" in hint


# --- what grows or never ends ----------------------------------------------------------------------------------------


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _normalizers(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return _top(normalizer={"type": "Sequence", "normalizers": list(steps)})


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
NESTED: dict[str, Any] = _replace("h", "hh" * 500)
for _ in range(8):
    NESTED = {"type": "Sequence", "normalizers": [NESTED, _replace("h", "hhhh")]}
BOMBS: dict[str, Callable[[dict[str, Any]], object]] = {
    "doubled_forty_times": _normalizers(*[_replace("h", "hh")] * 40),
    "doubled_in_nested_steps": _top(normalizer=NESTED),
    "one_step_of_a_megabyte": _normalizers(_replace("h", "h" * (1 << 20))),
    "doubled_by_compatibility": _normalizers(
        *[_replace("h", "\ufdfa"), {"type": "NFKD"}, _replace("\u0644", "h")] * 12
    ),
    "bytes_of_bytes": _top(pre_tokenizer={"type": "Sequence", "pretokenizers": [LEVEL] * 40}),
    "without_a_type": _top(normalizer={"normalizers": [_replace("h", "hh")] * 40}),
    "nested_repeats": _cut_by("(a+)+b"),
    "ambiguous_choice": _cut_by("(a|aa)+$b"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BOMBS)
def test_what_grows_or_never_ends_is_refused_once_and_for_all(
    name: str, door: Door, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an added token goes through the steps while the file is opened."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(trial, "WALL_S", 15.0)
    added = {"id": 271, "content": "h" * 50, "single_word": False, "lstrip": False, "rstrip": False}
    change(folder, BOMBS[name])
    change(folder, lambda value: value["added_tokens"].append(added | {"normalized": True, "special": False}))
    refuse(door, folder, "tokenizer", "model: the tokenizer")
    monkeypatch.setattr(trial, "_ask", lambda data: pytest.fail("the verdict was known"))
    result = door("run", folder, "hi", "--max-tokens", "1")
    assert result.code == 12 and result.cpu_seconds < 1
    refused(door("show", folder), "tokenizer")


def test_a_tokenizer_stored_in_a_gguf_is_vetted_too(door: Door, tmp_path: Path) -> None:
    tokens, path, stored = vocabulary(), tmp_path / "bomb.gguf", tokenizer_json()
    BOMBS["doubled_forty_times"](stored)
    keys = tiny_keys(tokens, layers=1) | {"tokenizer.huggingface.json": (STRING, json.dumps(stored))}
    path.write_bytes(assemble(keys, tiny_tensors(len(tokens), "Q8_0", layers=1)))
    what = refuse(door, path, path.name)
    assert "turn one byte into up to 4e+12 bytes; the limit is 1,024" in what


def test_a_token_of_a_megabyte_is_not_taken_apart(door: Door, tmp_path: Path) -> None:
    """Its merges would take a trillion steps."""
    tokens, path = vocabulary(), tmp_path / "long.gguf"
    tokens[-1] = "a" * (1 << 20)
    keys = tiny_keys(tokens, layers=1)
    del keys["tokenizer.ggml.merges"]
    scores = {"tokenizer.ggml.scores": (ARRAY, array(F32, [0.0] * len(tokens)))}
    keys |= scores | {"tokenizer.ggml.model": (STRING, "llama")}
    path.write_bytes(assemble(keys, tiny_tensors(len(tokens), "Q8_0", layers=1)))
    assert "tokens of up to 1,048,576 characters" in refuse(door, path, path.name)


def test_thousands_of_configured_tokens_are_added_at_once(door: Door, folder: Path) -> None:
    listed = {str(271 + n): {"content": f"<extra_{n}>", "special": n % 2 == 0} for n in range(5000)}
    change(folder, _top(added_tokens_decoder=listed), "tokenizer_config.json")
    assert "adds 5,000 runs of tokens; the limit is 32" in refuse(door, folder, "model: ")


def test_a_panic_is_an_error_and_prints_nothing_else(
    door: Door, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder, _model(continuing_subword_prefix="zz"))
    refuse(door, folder, "tokenizer.json is not a usable tokenizer")
    assert "panicked" not in capfd.readouterr().err


def test_an_unusual_tokenizer_is_tried_once(
    door: Door, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    asked, ask = [], trial._ask
    monkeypatch.setattr(trial, "_ask", lambda data: asked.append(1) or ask(data))
    change(folder, _cut_by("[a-z]+|[0-9]"))
    for _ in range(2):
        assert door("run", folder, "hi", "--max-tokens", "1").code == 0
    assert asked == [1]


def test_show_and_ls_say_that_a_tokenizer_is_refused(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    models, tokens = tmp_path / "data/models", vocabulary()
    bare = tiny_safetensors(models / "bare")
    (bare / "tokenizer.json").unlink()
    damaged = tiny_safetensors(models / "damaged")
    change(damaged, _model(type="Telepathy"))
    (models / "odd").mkdir()
    keys = tiny_keys(tokens, layers=1) | {"tokenizer.ggml.pre": (STRING, "martian")}
    (models / "odd/odd.gguf").write_bytes(assemble(keys, tiny_tensors(len(tokens), "Q8_0", layers=1)))
    for name in ("bare", "damaged", "odd"):
        assert refused(door("show", name)) == refused(door("run", name, "hi"))
    rows = {row["id"]: row for row in json.loads(door("ls", "--all", "--json").stdout)["models"]}
    assert not rows["bare"]["supported"] and "has no tokenizer.json" in rows["bare"]["reason"]
    assert not rows["odd"]["supported"] and "'martian' is not supported" in rows["odd"]["reason"]
