"""Constrained decoding with llguidance: token masks for JSON schemas, regular expressions, Lark or GBNF, and choices.

`source_of(constraint)` checks a request's constraint; `Compiler.mask(source)` makes the `TokenMask` for the engine.
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
