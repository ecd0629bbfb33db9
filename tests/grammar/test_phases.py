"""Masks that change: reasoning before a grammar, calls begun in free text; forks and rollbacks in every phase."""

from __future__ import annotations

import json
import random

import pytest
from grammar_walks import allowed, mask_of, walk

from localllm.errors import ConstraintUnmet
from localllm.grammar import AfterReasoning, Compiler, Reasoning, ToolTriggers
from localllm.request import TokenMask

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
ANSWER = '{"a": true}'
TAGS = Reasoning("<think>", "</think>")
OPENED = Reasoning("<think>", "</think>", opened=True)


def after(compiler: Compiler, tags: Reasoning) -> AfterReasoning:
    inner = mask_of(compiler, "json_schema", SCHEMA)
    return AfterReasoning(inner, compiler.vocabulary, compiler.tokenizer.token_bytes, tags)


def triggers(compiler: Compiler, **options: object) -> ToolTriggers:
    call = mask_of(compiler, "regex", "[0-9]{2}!")
    return ToolTriggers(call, "<call>", compiler.tokenizer.token_bytes, **options)  # type: ignore[arg-type]


def say(compiler: Compiler, mask: TokenMask, text: str) -> list[int]:
    """Every token of a text, each of which must be allowed."""
    ids = compiler.tokenizer.encode_inside(text)
    for index in ids:
        assert index in set(allowed(compiler, mask)), repr(compiler.tokenizer.decode([index]))
        mask.accept(index)
    return ids


@pytest.mark.parametrize("vocabulary", ["smollm2", "spm"])
def test_reasoning_is_free_but_must_end(vocabulary: str, request: pytest.FixtureRequest) -> None:
    compiler: Compiler = request.getfixturevalue(vocabulary)
    mask = after(compiler, OPENED)
    assert not compiler.vocabulary.end_ids & set(allowed(compiler, mask))
    assert not mask.jump_forward() and not mask.is_done
    say(compiler, mask, "hm the {a} thing </thin </think>")
    assert not mask.is_done
    say(compiler, mask, "\n\n")
    say(compiler, mask, ANSWER)
    assert mask.is_done


def test_line_ends_after_the_tag_are_few(smollm2: Compiler) -> None:
    mask = after(smollm2, OPENED)
    say(smollm2, mask, "x</think>")
    newline = smollm2.tokenizer.encode("\n")[0]
    for _ in range(4):
        assert newline in allowed(smollm2, mask)
        mask.accept(newline)
    assert newline not in allowed(smollm2, mask)
    assert smollm2.tokenizer.decode(walk(smollm2, mask, 0)[0]) in (ANSWER, '{"a": false}')


@pytest.mark.parametrize(("pattern", "taken"), [("[a-z]+!", True), ("[0-9]+", False)])
def test_a_tag_that_ends_inside_a_token(pattern: str, taken: bool, smollm2: Compiler) -> None:
    """What follows it in the token counts when the grammar takes it; else the reasoning goes on."""
    (about,) = smollm2.tokenizer.encode(" about")
    inner = mask_of(smollm2, "regex", pattern)
    tags = Reasoning("", " ab", must=True)
    mask = AfterReasoning(inner, smollm2.vocabulary, smollm2.tokenizer.token_bytes, tags)
    mask.accept(about)
    assert (len(allowed(smollm2, mask)) < 40_000) == taken
    mask.rollback(1)
    mask.accept(about)
    if taken:
        say(smollm2, mask, "x!")
        assert mask.is_done
    else:
        say(smollm2, mask, " ab")
        say(smollm2, mask, "12")


def test_where_nothing_opens_the_reasoning_may_begin_or_not(spm: Compiler) -> None:
    opens = spm.tokenizer.token_to_id("<x>")
    assert opens is not None
    tags = Reasoning("<x>", "</s>", open_id=opens)
    mask = after(spm, tags)
    assert opens in allowed(spm, mask)
    mask.accept(opens)
    assert len(allowed(spm, mask)) > 200
    say(spm, mask, "abc</s>" + ANSWER)
    assert mask.is_done
    mask = after(spm, tags)
    say(spm, mask, ANSWER)
    assert mask.is_done
    mask = after(spm, TAGS)  # many tokens open: no reasoning unless the prompt opened it
    say(spm, mask, ANSWER)
    assert mask.is_done


def test_the_first_part_that_is_always_there(smollm2: Compiler) -> None:
    mask = after(smollm2, Reasoning("", "final:", must=True))
    assert len(allowed(smollm2, mask)) > 40_000
    say(smollm2, mask, "analysis and more final:" + ANSWER)
    assert mask.is_done


def test_calls_are_held_to_their_grammar_once_begun(smollm2: Compiler) -> None:
    mask = triggers(smollm2)
    for _ in range(2):
        say(smollm2, mask, "I might use <cal or <b> or")
        assert not mask.jump_forward() and len(allowed(smollm2, mask)) == smollm2.vocabulary.width
        say(smollm2, mask, "<call>")
        assert len(allowed(smollm2, mask)) < 200
        say(smollm2, mask, "42!")
        assert not mask.is_done
    assert len(allowed(smollm2, mask)) == smollm2.vocabulary.width
    mask = triggers(smollm2, only_one=True)
    say(smollm2, mask, "<call>42!")
    assert mask.is_done


def test_a_call_that_begins_otherwise_is_left_to_the_parser(smollm2: Compiler) -> None:
    (about,) = smollm2.tokenizer.encode(" about")
    mask = ToolTriggers(mask_of(smollm2, "regex", "[0-9]{2}!"), " ab", smollm2.tokenizer.token_bytes)
    mask.accept(about)
    assert len(allowed(smollm2, mask)) == smollm2.vocabulary.width
    say(smollm2, mask, " ab")
    say(smollm2, mask, "42!")


def test_reasoning_hides_the_mark_of_a_call(smollm2: Compiler) -> None:
    mask = triggers(smollm2, tags=OPENED)
    say(smollm2, mask, "I will write <call> now")
    assert len(allowed(smollm2, mask)) == smollm2.vocabulary.width
    say(smollm2, mask, "</think>\n<call>")
    assert len(allowed(smollm2, mask)) < 200
    mask = triggers(smollm2, tags=TAGS)
    say(smollm2, mask, " <think> <call> </think> ")
    assert len(allowed(smollm2, mask)) == smollm2.vocabulary.width
    mask = triggers(smollm2, tags=TAGS)
    say(smollm2, mask, "Yes <call>")
    assert len(allowed(smollm2, mask)) < 200


@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", ["opened", "unopened", "tools", "tools after reasoning"])
@pytest.mark.parametrize("seed", range(4))
def test_any_ids_can_be_taken_back(which: str, seed: int, smollm2: Compiler) -> None:
    """Accept, fork, roll back at random places: what is allowed depends on the ids alone."""
    texts = {
        "opened": "some thought</think>\n" + ANSWER,
        "unopened": ANSWER,
        "tools": "text <call>42! and <call>17!",
        "tools after reasoning": "a <call> b</think>c<call>99!",
    }

    def make() -> TokenMask:
        if which.startswith("tools"):
            return triggers(smollm2, tags=OPENED if "after" in which else None)
        return after(smollm2, OPENED if which == "opened" else TAGS)

    rng = random.Random(seed)
    ids = smollm2.tokenizer.encode(texts[which])
    expected = []
    straight = make()
    for index in ids:
        expected.append(allowed(smollm2, straight))
        straight.accept(index)
    mask, at = make(), 0
    for _ in range(30):
        if at == len(ids) or (at and rng.random() < 0.4):
            back = rng.randint(1, at)
            mask.rollback(back)
            at -= back
        else:
            mask.accept(ids[at])
            at += 1
        if at < len(ids):
            assert allowed(smollm2, mask) == expected[at]
            other = mask.fork()
            other.accept(ids[at])
            assert allowed(smollm2, mask) == expected[at]
            if rng.random() < 0.2:
                mask, at = mask.fork(), at
                while at < len(ids) and rng.random() < 0.5:
                    mask.accept(ids[at])
                    at += 1
                mask = make()
                for index in ids[:at]:
                    mask.accept(index)


def test_what_is_not_allowed_is_refused(smollm2: Compiler) -> None:
    mask = after(smollm2, TAGS)
    with pytest.raises(ConstraintUnmet):
        mask.accept(smollm2.tokenizer.encode("x")[0])
    assert json.loads(ANSWER) == {"a": True}
