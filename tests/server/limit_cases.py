"""Requests outside the limits, with the status and the field that the refusal must name.

One list, run against the application in process and against a server under `python -O`.
"""

from __future__ import annotations

from typing import Any

from .conftest import CHAT, MESSAGES, RESPONSES, TEXT, ask

HUGE = 10**9
MEGABYTE = "x" * (1 << 20)


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "max_tokens": 4, **fields}


def after(**item: Any) -> dict[str, Any]:
    """A wrong item behind instructions, which become a message before it."""
    return {"instructions": "Be short.", "input": [{"role": "user", **item}]}


def called(call: dict[str, Any]) -> dict[str, Any]:
    """A conversation with this call of a tool in it."""
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    return ask(messages=[*said, {"role": "tool", "content": "x", "tool_call_id": "1"}])


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return ask(messages=[{"role": "user", "content": content, **fields}])


def image(url: str) -> dict[str, Any]:
    return said([{"type": "image_url", "image_url": {"url": url}}])


def _each(id_: str, param: str, *values: Any) -> list[tuple[str, str, Any, int, str | None]]:
    return [(id_, CHAT, ask(**{param: value}), 400, param) for value in values]


ELSEWHERE: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "x"},
    MESSAGES: {"max_tokens": 4, **said("x")},
    "/v1/messages/count_tokens": said("x"),
    "/tokenize": said("x"),
    "/api/chat": said("x"),
    "/api/generate": {"model": "tiny", "prompt": "x"},
}
"""whose fields for what binds an answer are those of a chat request, whatever else they have"""
BINDING: dict[str, Any] = {
    "chat_template": "x", "chat_template_kwargs": {"tokenize": True}, "allowed_token_ids": [5], "bad_words": ["x"],
    "grammar": 5, "json_schema": 5, "guided_json": 5, "guided_json_object": 5, "functions": 5,
    "thinking_token_budget": 1, "structured_outputs": {"structural_tag": "x"},
    "response_format": {"type": "xml"}, "documents": [{"text": "x"}],
}  # fmt: skip
"""fields that cannot be had, or not so"""

CASES: list[tuple[str, str, Any, int, str | None]] = [
    *_each("sequences", "n", HUGE, 0, -1, 1.5, "2", True),
    ("best-of", TEXT, complete(best_of=10**6), 400, "best_of"),
    ("best-of", TEXT, complete(best_of=1, n=2), 400, "best_of"),
    ("prompts", TEXT, complete(prompt=["x"] * 100_000), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[[1]] * 100_000), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=["x"] * 129), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=["x"] * 100, n=2), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[[[1]]]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[[]]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[""]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[[-1]]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[[HUGE]]), 400, "prompt"),
    ("token-ids", TEXT, complete(prompt=[[2**63]]), 400, "prompt"),
    ("token-ids", TEXT, complete(prompt=[271]), 400, "prompt"),  # the width of the logits
    ("prompts", TEXT, complete(prompt=["a", 1] * 50_000), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[[1, "a"]]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt=[True]), 400, "prompt"),
    ("prompts", TEXT, complete(prompt={"a": 1}), 400, "prompt"),
    ("prompts", TEXT, {"model": "tiny"}, 400, "prompt"),
    *_each("token-ids", "logit_bias", {str(HUGE): 1}, {"-1": 1}, {str(2**63): 1}, {"a": 1}, {"271": 1}),
    ("token-ids", CHAT, ask(logit_bias={"5": 101}), 400, "logit_bias"),
    *_each("token-ids", "stop_token_ids", [271], [-1], [2**63], [5] * 2000),
    *_each("token-ids", "allowed_token_ids", [HUGE], [-1], [2**63], [271]),
    *_each("token-ids", "bad_words", ["x"]),
    ("logprobs", CHAT, ask(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    ("logprobs", CHAT, ask(logprobs=True, top_logprobs=-1), 400, "top_logprobs"),
    ("logprobs", CHAT, ask(logprobs=True, top_logprobs=HUGE), 400, "top_logprobs"),
    ("logprobs", CHAT, ask(top_logprobs=3), 400, "top_logprobs"),
    ("logprobs", TEXT, complete(logprobs=6), 400, "logprobs"),
    ("logprobs", TEXT, complete(logprobs=-1), 400, "logprobs"),
    *_each("logprobs", "prompt_logprobs", 10**6),
    *_each("stops", "stop", ["a"] * 17, ["a"] * 10_000, 10 * MEGABYTE, "", [""]),
    ("stops", CHAT, ask(stop=[None]), 400, "stop[0]"),
    *_each("lengths", "max_tokens", 0, -1, 10**12, 1.5, "8"),
    ("lengths", TEXT, complete(max_tokens=0), 400, "max_tokens"),
    ("lengths", CHAT, said("x" * 3000), 400, "messages"),
    ("lengths", TEXT, complete(prompt="x" * 3000), 400, "prompt"),
    *_each("sampling", "temperature", -1, 3, 1e308, "1", True),
    *_each("sampling", "top_p", 0, 1.1),
    *_each("sampling", "top_k", -5, 2**31),
    *_each("sampling", "min_p", 2),
    *_each("sampling", "repetition_penalty", 0, -1),
    *_each("sampling", "presence_penalty", 5),
    *_each("sampling", "frequency_penalty", -2.1),
    *_each("sampling", "seed", 2**70, "a"),
    ("sampling", RESPONSES, {"input": "x", "temperature": 3}, 400, "temperature"),
    ("sampling", RESPONSES, {"input": "x", "seed": 2**70}, 400, "seed"),
    ("lengths", RESPONSES, {"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
    ("messages", RESPONSES, {"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, 400, "input[0].content[0]"),
    ("messages", RESPONSES, after(content=None), 400, "input[0].content"),
    ("messages", RESPONSES, after(content=[{"type": "input_text"}]), 400, "input[0].content[0].text"),
    ("messages", RESPONSES, after(type="function_call_output", output="x"), 400, "input[0].call_id"),
    ("messages", RESPONSES, {"input": [{"type": "reasoning", "content": [{"text": 1}]}, {}]}, 400, "input[1].role"),
    *_each("sampling", "min_tokens", -1, 9),
    *_each("messages", "messages", [], None),
    ("messages", CHAT, ask(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role"),
    ("messages", CHAT, ask(messages=[1]), 400, "messages[0]"),
    ("messages", CHAT, said(None), 400, "messages[0].content"),
    ("messages", CHAT, said([{"type": "hologram"}]), 400, "messages[0].content[0]"),
    ("messages", CHAT, said([{"type": "text"}]), 400, "messages[0].content[0].text"),
    ("messages", CHAT, said([{"text": "x"}]), 400, "messages[0].content[0].type"),
    ("messages", CHAT, called({"foo": 1}), 400, "messages[1].tool_calls[0]"),
    ("messages", CHAT, called({"id": "1", "function": {"arguments": "{}"}}), 400, "messages[1].tool_calls[0]"),
    ("messages", CHAT, called({"id": "1", "type": "custom", "custom": {}}), 400, "messages[1].tool_calls[0]"),
    ("messages", CHAT, said([{"x": 1}] * 300_000), 400, "messages[0].content[0].type"),
    ("messages", CHAT, ask(messages=[{"role": "user", "content": "x"}] * 100_000), 400, "messages"),
    ("messages", CHAT, ask(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0].tool_call_id"),
    *[
        ("media", CHAT, image(url), 400, "messages[0].content[0]")
        for url in (
            "file:///etc/passwd", "http://169.254.169.254/", "http://127.0.0.1:22", "http://[::ffff:127.0.0.1]",
            "http://2130706433", "data:image/png;base64," + "A" * 1000,
        )
    ],
    ("media", CHAT, said([{"type": "input_audio", "input_audio": {}}]), 400, "messages[0].content[0]"),
    *_each("templates", "chat_template_kwargs", {"tokenize": True}, {"chat_template": "x"}, {"tools": 1}),
    *_each("templates", "chat_template_kwargs", {"messages": []}, {"x": MEGABYTE}, 1),
    *_each("templates", "chat_template", "x", "{{ 1 }}"),
    ("templates", RESPONSES, {"input": "x", "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    ("templates", RESPONSES, {"input": "x", "chat_template": "x"}, 400, "chat_template"),
    ("templates", "/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": 1}},
     400, "chat_template_kwargs"),
    ("templates", "/apply-template", ask(chat_template="x"), 400, "chat_template"),
    *_each("names", "user", MEGABYTE),
    ("names", CHAT, ask(metadata={"k": "v" * 513}), 400, "metadata.k"),
    ("names", CHAT, ask(metadata={str(i): "v" for i in range(17)}), 400, "metadata"),
    *_each("names", "request_id", "x" * 200),
    *_each("names", "cache_salt", "a/b", "a@b", "a\\b", "a\0b", "x" * 129),
    *_each("names", "model", "../../etc/passwd", "/etc/passwd", "\\\\srv\\x", "hf.co/x/y", "a\0b", MEGABYTE),
]  # fmt: skip
CASES = [(id_, route, sent, 404 if param == "model" else status, param) for id_, route, sent, status, param in CASES]

BODIES = [
    b"", b"{", b"[]", b'"x"', b"null", b'{"messages": NaN}', b'{"temperature": Infinity}', b"\xff\xfe{}",
    b"\xef\xbb\xbf{}", b'{"a": "\x00"}', b'{"a": "\xc3"}', b"[" * 10_000, b'{"messages":' * 10_000,
    b'{"metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, b'{"tools": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"response_format": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"n": ' + b"9" * 5000 + b"}", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"n": 1, "n": 2}', b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}",
    b'{"metadata": {"x": 1e400}}', b'{"tools": [{"x": -1e400}]}', b'{"temperature": ' + b"9" * 400 + b".0}",
    *[b'{"x": [' + one * (15_000_000 // len(one)) + b"1]}" for one in (b"[],", b"{},", b"1,", b'"ab",', b'{"a":{}},')],
]  # fmt: skip


def name_of(case: tuple[str, str, Any, int, str | None]) -> str:
    """sequences-n-0: short enough to read."""
    id_, _, sent, _, param = case
    leaf = (param or "").split(".")[0].split("[")[0]
    value = repr(sent.get(leaf) if isinstance(sent, dict) else sent)
    return f"{id_}-{leaf}-{value[:20]}"
