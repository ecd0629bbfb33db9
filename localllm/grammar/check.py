"""The child process that tries grammars first (`python -P -m localllm.grammar.check`).

Sources are untrusted: a schema of ten thousand references overflows the compiler's stack, and two dozen intersected
patterns keep it busy for minutes. Such a grammar hangs or crashes only the child. The parent's side is `compiler.py`;
messages are JSON (`child_loop`).
"""

from __future__ import annotations

import json
import resource
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from localllm.sandbox.child_loop import confine, serve

from .limits import CHECK_CPU_S, CHECK_MEMORY_BYTES, CHECK_STACK_BYTES, parser_limits

ALARM_S = 5
STEPS = 8  # tokens accepted on trial: most grammars that overflow do so within these


def check(kind: str, text: str, options: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """Return `{"grammar": text to compile, "bytes": its size}` or `{"error": reason}`."""
    before = _resident_bytes()
    try:
        grammar = _grammar(kind, text, options)
    except Exception as error:  # the converters raise anything on malformed text
        return {"error": f"it cannot be read: {error}" if str(error) else "it cannot be read"}
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        _walk(matcher, tokenizer)
    if matcher.is_error():
        why = matcher.get_error()
        return {"error": "nothing satisfies it" if why.startswith("NoExtension") else why}
    return {"grammar": grammar, "bytes": _resident_bytes() - before}


def _grammar(kind: str, text: str, options: dict[str, Any]) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(any_to_lark(text) if kind == "grammar" else text)


def _walk(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Accept a few tokens, each the middle one of those allowed; errors stay in the matcher."""
    row = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    for _ in range(STEPS):
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            return
        matcher.consume_token(int(allowed[len(allowed) // 2]))


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Set the limits and serve requests."""
    tokenizer = LLTokenizer("byte")
    check("json_schema", "true", {}, tokenizer)  # one-time allocations must not count for the first request
    confine(CHECK_MEMORY_BYTES, CHECK_STACK_BYTES)

    def answer(request: bytes) -> bytes:
        body = json.loads(request)
        return json.dumps(check(body["kind"], body["text"], body["options"], tokenizer)).encode()

    serve(answer, alarm_s=ALARM_S, cpu_s=CHECK_CPU_S)


if __name__ == "__main__":
    main()
