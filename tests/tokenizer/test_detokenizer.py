"""Streamed text: chunk invariance of UTF-8 and stop strings, against one-shot decoding and a naive search."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localllm.tokenizer.detokenizer import IncrementalDetokenizer

SPECIAL = b"<|special|>"


@dataclass
class Toy:
    """A vocabulary made of the given tokens: id i is tokens[i], some of them special."""

    tokens: list[bytes]
    special_ids: frozenset[int] = frozenset()
    strips_first_space: bool = False

    def token_bytes(self, index: int) -> bytes:
        return self.tokens[index]

    def data(self) -> list[bytes]:
        return [b"" if i in self.special_ids else token for i, token in enumerate(self.tokens)]


def complete(data: bytes) -> str:
    """The characters of `data` that no further byte can change, read at once."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def naive(toy: Toy, stop: list[str], min_tokens: int, include_stop: bool) -> int | None:
    """What to keep, by looking at the whole text after every token and at every character."""
    data, before = b"", 0
    for number, token in enumerate(toy.data(), 1):
        data += token
        text = complete(data)
        for end in range(before + 1, len(text) + 1):
            hits = [s for s in stop if text[:end].endswith(s)]
            if hits and number >= min_tokens:
                return end if include_stop else end - max(map(len, hits))
        before = len(text)
    return None


ALPHABET = st.sampled_from(
    ["a", "b", "ab", "\n", " ", "STOP", "</s>", "é", "日本", "🙂", "👩‍👩‍👧", "❤️", "e\u0301", "\u200d"]
)
NOISE = st.sampled_from([b"\x80", b"\xff", b"\xf0\x9f", b"\xe3\x81", b"\xc3", b"\xed\xa0\x80"])


@st.composite
def streams(draw: st.DrawFn) -> Toy:
    """Bytes of text and noise, cut anywhere, with special tokens between."""
    parts = draw(st.lists(st.one_of(ALPHABET.map(str.encode), ALPHABET.map(str.encode), NOISE), max_size=14))
    data = b"".join(parts)
    cuts = sorted(draw(st.sets(st.integers(1, max(len(data) - 1, 1)), max_size=len(data))))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    special = []
    for at in sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=2)), reverse=True):
        tokens.insert(at, SPECIAL)
    special = [i for i, token in enumerate(tokens) if token is SPECIAL]
    return Toy(tokens, frozenset(special))


_LETTERS = st.sampled_from(["a", "b", "S", "T", "O", "P", "日", "本", "🙂", "\n", " ", "STOP", "</"])
STOPS = st.lists(st.lists(_LETTERS, min_size=1, max_size=4).map("".join), min_size=1, max_size=4)
CASE = (streams(), STOPS, st.integers(0, 5), st.booleans(), st.lists(st.integers(1, 4), max_size=12))


def check(toy: Toy, stop: list[str], min_tokens: int, include_stop: bool, sizes: list[int]) -> None:
    whole = b"".join(toy.data()).decode("utf-8", "replace")
    ids = range(len(toy.tokens))

    stream = IncrementalDetokenizer(toy)
    deltas = [stream.push([i]) for i in ids] + [stream.take(last=True)]
    assert "".join(deltas) == whole
    data = b""
    for delta, token in zip(deltas, toy.data(), strict=False):
        # U+FFFD only for bytes that nothing after them could have mended
        data += token
        assert delta.count("\ufffd") <= complete(data).count("\ufffd")

    kept = naive(toy, stop, min_tokens, include_stop)
    checker = IncrementalDetokenizer(toy, stop, min_tokens, include_stop).fork()
    num_read = next((i + 1 for i in ids if checker.accept(i)), len(toy.tokens))
    assert (checker.stop_text is None) == (kept is None)
    assert checker.take(last=True) == (whole if kept is None else whole[:kept])

    detokenizer = IncrementalDetokenizer(toy, stop, min_tokens, include_stop)
    shown, at, holdback = "", 0, max(map(len, stop)) - 1
    for size in [*sizes, len(toy.tokens)]:
        shown += detokenizer.push(range(at, min(at + size, num_read)))
        at = min(at + size, num_read)
        text = complete(b"".join(toy.data()[:at]))
        if kept is None or at < num_read:
            assert text.startswith(shown)
            assert len(text) - len(shown) <= holdback
    shown += detokenizer.take(last=True)
    assert shown == (whole if kept is None else whole[:kept])


@given(*CASE)
@settings(max_examples=200)
@example(Toy([b"ST", b"OP"]), ["STOP", "OP"], 0, False, [1])
@example(Toy([b"aab"]), ["aab", "ab"], 0, False, [1])
@example(Toy(["🙂".encode()[:2], "🙂".encode()[2:]]), ["🙂"], 0, True, [1])
@example(Toy([b"STOP", b"STOP"]), ["STOP"], 2, False, [1])
@example(Toy(["🙂".encode()[:3]]), ["x"], 0, False, [1])
def test_chunk_invariance(toy: Toy, stop: list[str], least: int, include: bool, sizes: list[int]) -> None:
    check(toy, stop, least, include, sizes)


@pytest.mark.slow
@given(*CASE)
@settings(max_examples=20_000)
def test_chunk_invariance_in_full(toy: Toy, stop: list[str], least: int, include: bool, sizes: list[int]) -> None:
    check(toy, stop, least, include, sizes)


def deltas_of(detokenizer: IncrementalDetokenizer, count: int) -> list[str]:
    return [detokenizer.push([i]) for i in range(count)]


def test_a_character_waits_for_its_last_byte() -> None:
    toy = Toy([bytes([byte]) for byte in "a👩‍👩‍👧é".encode()])
    detokenizer = IncrementalDetokenizer(toy)
    deltas = deltas_of(detokenizer, len(toy.tokens))
    assert "".join(deltas) == "a👩‍👩‍👧é"
    assert all(len(delta) <= 1 for delta in deltas)
    assert detokenizer.take(last=True) == ""


def test_a_broken_end_becomes_one_replacement() -> None:
    detokenizer = IncrementalDetokenizer(Toy([b"a", "🙂".encode()[:3]]))
    assert [*deltas_of(detokenizer, 2), detokenizer.take(last=True)] == ["a", "", "\ufffd"]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    toy = Toy([b"x", b"[THINK]", b"</s>"], frozenset({1, 2}))
    assert IncrementalDetokenizer(toy).push(range(3)) == "x"
    assert IncrementalDetokenizer(toy, skip_special=False).push(range(3)) == "x[THINK]</s>"
    assert IncrementalDetokenizer(toy, keep_ids=[1]).push(range(3)) == "x[THINK]"


def test_the_space_before_the_first_word_goes_once() -> None:
    toy = Toy([b"", b" Hello", b" world"], strips_first_space=True)
    assert IncrementalDetokenizer(toy).push(range(3)) == "Hello world"
    assert IncrementalDetokenizer(toy, continuing=True).push(range(3)) == " Hello world"


def test_a_stop_string_names_itself_and_min_tokens_only_delays() -> None:
    toy = Toy([b"one ", b"STO", b"P two ", b"STOP"])
    early = IncrementalDetokenizer(toy, ("STOP", "unused"))
    assert [early.accept(i) for i in range(3)] == [False, False, True]
    assert early.stop_text == "STOP" and early.take(last=True) == "one "
    late = IncrementalDetokenizer(toy, ("STOP",), 4)
    fresh = late.fork()
    assert fresh is not late
    for one in (late, fresh):
        assert [one.accept(i) for i in range(4)] == [False, False, False, True]
        assert one.take(last=True) == "one STOP two "


def test_what_may_become_a_stop_string_waits() -> None:
    toy = Toy([b"foo ST", b"OP bar"])
    assert deltas_of(IncrementalDetokenizer(toy, ("STOP",)), 2) == ["foo ", ""]
    assert deltas_of(IncrementalDetokenizer(toy, ("STOP",), include_stop=True), 2) == ["foo ", "STOP"]
    assert deltas_of(IncrementalDetokenizer(toy), 2) == ["foo ST", "OP bar"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [["\n\nUser:", "aaaaab", "</s>", "STOP"], ["a" * 5000 + "b"]])
def test_64k_tokens_in_a_second(stop: list[str]) -> None:
    toy = Toy([b" the", b"a", "🙂".encode()[:2], "🙂".encode()[2:], b"aaaa", b"\n"])
    ids = [0, 1, 4, 2, 3, 5, 4, 4] * 8192
    detokenizer = IncrementalDetokenizer(toy, stop)
    began = time.process_time()
    for index in ids:
        assert not detokenizer.accept(index)
        detokenizer.take()
    assert time.process_time() - began < 1.0
