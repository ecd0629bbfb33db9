"""JSON schema, regular expression, Lark or GBNF, choice -> which tokens may come next, with llguidance.

`source_of(constraint)` checks what was asked, `Compiler.mask(source)` makes the `TokenMask` that the engine calls.
"""

from .compiler import Compiler
from .mask import GrammarMask
from .phases import AfterReasoning, Reasoning, ToolTriggers
from .source import Source, schema_text, source_of

__all__ = [
    "AfterReasoning",
    "Compiler",
    "GrammarMask",
    "Reasoning",
    "Source",
    "ToolTriggers",
    "schema_text",
    "source_of",
]
