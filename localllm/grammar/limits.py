"""What a grammar may cost: sizes checked before anything is compiled, and llguidance's own limits while it works.

Of 578 published schemas (SchemaStore) the slowest takes 0.22 s of one core to compile, the 99th percentile 0.04 s.
"""

from __future__ import annotations

from typing import Any

MAX_SCHEMA_BYTES = 512 << 10
MAX_SCHEMA_DEPTH = 96  # llguidance's JSON reader ends at 128
MAX_PATTERN_CHARS = 16 << 10  # of one regular expression: 1 MB of it costs 250 MB and a second for the first token
MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 << 10  # of all choices together

CHECK_CPU_S = 0.5  # processor time of one check in the child
CHECK_WALL_S = 1.1
CHECK_MEMORY_BYTES = 256 << 20
CHECK_STACK_BYTES = 1 << 20  # an eighth of what a thread of this process has: what fits there cannot overflow here

MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, per answer in flight


def parser_limits() -> Any:
    """llguidance's limits, the same in the check and here. Beyond its fuel a mask of one step takes under 20 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
