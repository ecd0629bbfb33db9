"""Tool calls: how each family of models writes them, and how they are read, asked for and kept valid.

`find_format(template)` finds the family; `ToolFormat.parser` reads an answer.
"""

from .formats import FORMATS, GENERIC, ToolFormat, find_format

__all__ = ["FORMATS", "GENERIC", "ToolFormat", "find_format"]
