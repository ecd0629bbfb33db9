"""Which replica gets a request: all of it without Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.server.cluster.affinity import MAX_CUTS, PIECE, Affinity, Prefix, prefix_of, tag_of

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
IDLE = {"a": 0, "b": 0, "c": 0}


def of(path: str, **fields: Any) -> Prefix:
    return prefix_of(path, json.dumps(fields).encode())


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def test_a_conversation_goes_where_it_was() -> None:
    affinity = Affinity(spare=4)
    first = of(CHAT, messages=turns("write a story"))
    affinity.note(first, "b")
    longer = of(CHAT, messages=turns("write a story", "Once upon a time. " * 500, "go on"), temperature=0.5)
    assert affinity.rank(longer, IDLE)[0] == "b"
    assert affinity.rank(longer, {"a": 0, "b": 3})[0] == "b", "a little more to do is no reason to read it again"
    assert affinity.rank(longer, {"a": 0, "b": 4})[0] == "a"
    assert affinity.rank(longer, {"a": 0, "c": 0})[0] in ("a", "c"), "it is not there any more"
    assert sorted(affinity.rank(longer, IDLE)) == ["a", "b", "c"], "the others follow, for when it is full"


def test_the_least_loaded_gets_what_nobody_knows() -> None:
    affinity = Affinity(spare=4)
    asked = of(CHAT, messages=turns("hi"))
    assert affinity.rank(asked, {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    chosen = {affinity.rank(of(CHAT, messages=turns(f"question {n}")), IDLE)[0] for n in range(30)}
    assert chosen == set(IDLE), "ties are broken differently for each conversation"
    assert Affinity(spare=1).rank(asked, IDLE) == affinity.rank(asked, IDLE), "and alike by every door"


def test_a_system_prompt_alone_is_no_conversation() -> None:
    affinity = Affinity(spare=4)
    short = {"role": "system", "content": "Be brief."}
    affinity.note(of(CHAT, messages=[short, *turns("what is a tree? " * 9)]), "b")
    other = of(CHAT, messages=[short, *turns("what is a house? " * 9)])
    assert affinity.rank(other, {"a": 0, "b": 1})[0] == "a"
    long = {"role": "system", "content": "These are the rules. " * 400}
    affinity.note(of(CHAT, messages=[long, *turns("first")]), "b")
    assert affinity.rank(of(CHAT, messages=[long, *turns("second")]), {"a": 0, "b": 1})[0] == "b", "most of it is there"


def test_every_api_says_the_same_of_a_conversation() -> None:
    text, more = "x" * (3 * PIECE), turns("one", "two", "three")
    bodies: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (MESSAGES, {"system": text, "messages": more[:1]}, {"system": text, "messages": more}),
        (RESPONSES, {"instructions": text, "input": more[:1]}, {"instructions": text, "input": more}),
        ("/api/chat", {"messages": more[:1]}, {"messages": more}),
        (TEXT, {"prompt": text}, {"prompt": text + " and more"}),
        (TEXT, {"prompt": list(range(900))}, {"prompt": list(range(1000))}),
    ]
    for path, first, then in bodies:
        affinity = Affinity(spare=4)
        affinity.note(of(path, **first), "c")
        assert affinity.rank(of(path, **then), IDLE)[0] == "c", path
    marked = [{"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]}]
    plain = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    assert of(MESSAGES, messages=marked) == of(MESSAGES, messages=plain), "how it is treated is not what is read"


def test_a_conversation_of_claude_code_goes_where_it_was() -> None:
    """The first line of its prompt is another one in every request; no replica reads it."""
    line, affinity = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch={};", Affinity(spare=4)
    rules = {"type": "text", "text": "You are Claude Code. " * 99}
    asked = [
        of(MESSAGES, system=system, messages=turns("one", "two", "three")[:number])
        for system, number in (
            ([{"type": "text", "text": line.format("fa690")}, rules], 1),
            ([{"type": "text", "text": line.format("0b1c2")}, rules], 3),
            (f"{line.format('d3e4f')}\n{rules['text']}", 3),
        )
    ]
    affinity.note(asked[0], "c")
    assert [affinity.rank(one, {"a": 0, "b": 0, "c": 3})[0] for one in asked] == ["c", "c", "c"]


def test_what_a_replica_keeps_is_asked_of_that_replica() -> None:
    affinity, tag = Affinity(spare=1), tag_of("b")
    busy = {"a": 0, "b": 90, "c": 0}
    reference = {"type": "item_reference", "id": f"msg_{tag}0123456789"}
    consent = {"type": "mcp_approval_response", "approval_request_id": f"mcpr_{tag}0123456789"}
    for prefix in (
        prefix_of(f"/v1/responses/resp_{tag}0123456789", b""),
        prefix_of(f"/v1/responses/resp_{tag}0123456789/input_items", b""),
        of(RESPONSES, input="and then?", previous_response_id=f"resp_{tag}0123456789"),
        of(RESPONSES, input=[*turns("one"), reference]),
        of(RESPONSES, input=[consent]),
    ):
        assert prefix.maker == tag
        assert affinity.rank(prefix, busy) == ["b"], "another one would say that there is none"
        assert affinity.rank(prefix, {"a": 0, "c": 0})[0] in ("a", "c"), "gone: whoever gets it says so"
    assert of(RESPONSES, input="hi", previous_response_id="resp_of-somebody").maker == ""


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[1, 2]", b'{"messages": 7}', b'{"messages": [[[[]]]]}', b"[" * 9999]
)
def test_a_body_that_says_nothing_is_no_reason_to_fail(body: bytes) -> None:
    prefix = prefix_of(CHAT, body)
    assert Affinity(spare=1).rank(prefix, {"a": 1, "b": 0}) == ["b", "a"]


def test_memory_is_bounded() -> None:
    affinity = Affinity(spare=4, max_noted=10)
    asked = [of(CHAT, messages=turns(f"question {n}")) for n in range(50)]
    for prefix in asked:
        affinity.note(prefix, "c")
    known = [prefix for prefix in asked if affinity.rank(prefix, {"a": 0, "c": 1})[0] == "c"]
    assert known == asked[-10:]
    affinity.keep({"a"})
    assert affinity.rank(asked[-1], {"a": 0, "c": 1})[0] == "a"
    assert len(of(CHAT, messages=[{"role": "user", "content": "x"}] * (2 * MAX_CUTS)).cuts) == MAX_CUTS
