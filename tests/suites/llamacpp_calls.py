"""Runs llama.cpp's parser cases: `llamacpp_calls.py CASES TEMPLATES [FILTER]`; see tests/suites.md."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.chat.parser import ChainedParser, ReasoningParser, Splitter, reasoning_tags
from localllm.chat.render_child import shared_child
from localllm.chat.tools.formats import find_format
from localllm.chat.tools.parser import answer_parser
from localllm.errors import LocalLLMError

Call = tuple[str, Any]


def parser_of(case: dict[str, Any], template: str) -> Splitter | None:
    """The parser of the answer to the case's request."""
    tools = [{"function": {"name": name, "parameters": json.loads(p or "{}")}} for name, _, p in case["tools"]]
    messages = [{key: one[key] for key in ("role", "content")} for one in case["messages"]]
    variables = {
        "messages": messages or [{"role": "user", "content": "Hey there!"}],
        "tools": [{"type": "function", **tool} for tool in tools] or None,
        "add_generation_prompt": True,
        "enable_thinking": bool(case["thinking"]),
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    try:
        prompt = shared_child().render(template, variables)
    except LocalLLMError:  # templates that insist on other variables: their calls can still be read
        prompt = ""
    reads = find_format(template)
    tags = None if reads.final else reasoning_tags(template, prompt[-200:])
    content = None
    if tools or reads.hidden or reads.final:
        content = answer_parser(reads, tools, opening=reads.opening(prompt))
    if tags is None:
        return content
    reasoning = ReasoningParser(*tags, opened=prompt.rstrip().endswith(tags[0]))
    if content is None:
        return reasoning
    return ChainedParser(reasoning, content, answer_parser(replace(reads, hidden=()), tools))


def calls_of(parser: Splitter | None, text: str) -> list[Call]:
    """The calls in an answer that comes in pieces of seven characters."""
    calls: dict[int, list[str]] = {}
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    parts = [] if parser is None else [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    for delta in (json.loads(part) for kind, part in parts if kind == "tool_call"):
        call = calls.setdefault(delta["index"], ["", ""])
        call[0] = delta.get("name", call[0])
        call[1] += delta.get("arguments", "")
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def main(cases: str, templates: str, only: str = "") -> None:
    """One line a template, one for each case that differs."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for case in map(json.loads, Path(cases).read_text("utf-8").splitlines()):
        name = case["template"].rpartition("/")[2]
        if only.lower() not in name.lower() or not case["expect"]["calls"] or case["partial"] or case["cont"]:
            continue
        found = calls_of(parser_of(case, Path(templates, name).read_text("utf-8")), case["input"])
        expected = [(call[0], json.loads(call[1])) for call in case["expect"]["calls"]]
        total[name] += 1
        right[name] += found == expected
        if found != expected:
            print(f"{name}: {case['input']!r}\n  expected {expected}\n  found    {found}")
    for name in sorted(total):
        print(f"{right[name]:3} of {total[name]:3}  {name}")
    print(f"{right.total()} of {total.total()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
