"""Limits for grammars: sizes checked before compiling, and llguidance's own limits while it runs.

Of 578 published schemas (SchemaStore), the slowest takes 0.22 s of one core to compile; the 99th percentile is 0.04 s.
"""

from __future__ import annotations

from typing import Any

MAX_SCHEMA_BYTES = 512 << 10
MAX_SCHEMA_DEPTH = 96  # llguidance's JSON parser allows 128
MAX_PATTERN_CHARS = 16 << 10  # per regular expression: one of 1 MB takes 250 MB, and a second for the first token
MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 << 10  # all choices together

CHECK_CPU_S = 0.5  # CPU time per check in the child
CHECK_WALL_S = 1.1
CHECK_MEMORY_BYTES = 256 << 20
CHECK_STACK_BYTES = 1 << 20  # an eighth of a thread's stack here: what fits in the child cannot overflow here

MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, per running answer


def parser_limits() -> Any:
    """llguidance's limits, equal in the child and here. With its default fuel, a mask takes under 20 ms per step."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
