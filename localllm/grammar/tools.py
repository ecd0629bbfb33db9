"""Token masks for tool calls: compiles a format's call grammar with as much of each tool's schema as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.chat.tools.calls import called_tools, tool_function
from localllm.chat.tools.formats import ToolFormat
from localllm.errors import InvalidConstraint
from localllm.grammar.call_rules import call_grammar, parameters_of
from localllm.request import Constraint, ToolUse

from .compiler import Compiler
from .mask import GrammarMask
from .schema import LeavesOut
from .source import LEAVES_OUT, Source, source_of


def begun_call(compiler: Compiler, tool_format: ToolFormat, tools: ToolUse) -> tuple[GrammarMask, str] | None:
    """Return (the mask for the text after a call's trigger, the trigger), or None.

    None means that the format has no trigger or that the calls are too complex to constrain.

    Raises InvalidConstraint for a tool with an invalid schema.
    """
    trigger = tool_format.trigger
    called = called_tools(tools)
    try:
        options = {"parallel": tools.parallel, "after_trigger": bool(trigger)}
        mask = _compiled(compiler, tool_format, called, options)
    except _TooComplex:
        return None
    return (mask, trigger) if trigger else None


def whole_answer(
    compiler: Compiler,
    tool_format: ToolFormat,
    tools: ToolUse | None,
    constraint: Constraint | None,
    opening: str = "",
) -> GrammarMask:
    """Return the mask for an answer that is calls or meets a constraint; with tool choice "auto", it may be either.

    opening  the part of the calls' start that the prompt ends with

    Raises InvalidConstraint.
    """
    if tools is None:
        assert constraint is not None
        return compiler.mask(source_of(constraint))
    if constraint is not None and tools.choice == "auto":
        if constraint.kind not in ("json_schema", "json_object") or tool_format.final:
            raise InvalidConstraint(
                f"tools and a constraint of kind {constraint.kind} cannot be combined",
                "leave out one of them, or use a JSON schema",
                param=constraint.param,
            )
        compiler.mask(source_of(constraint))  # report its own errors first
        content = constraint
    else:
        content = None
    try:
        options = {"parallel": tools.parallel, "opening": opening}
        return _compiled(compiler, tool_format, called_tools(tools), options, content=content)
    except _TooComplex as error:
        raise InvalidConstraint(
            f"the tools cannot be enforced together: {error}", "send fewer or simpler tools", param="tools"
        ) from error


class _TooComplex(Exception):
    """Each tool can be compiled alone, but not all of them together."""


def _compiled(
    compiler: Compiler,
    tool_format: ToolFormat,
    called: Sequence[tuple[int, Mapping[str, Any]]],
    options: Mapping[str, Any],
    content: Constraint | None = None,
) -> GrammarMask:
    """Compile as strictly as possible; for tools that are not `strict`, leave out what cannot be enforced."""
    refused: InvalidConstraint | None = None
    loose = [not tool_function(tool).get("strict") for _, tool in called]
    for most in LEAVES_OUT[True]:
        leaves_out = [most if is_loose else LeavesOut.NOTHING for is_loose in loose]
        given = {**options, "leaves_out": leaves_out}
        try:
            said = None
            if content is not None:
                value = content.value if content.kind == "json_schema" else {"type": "object"}
                said = value, most if content.lenient else LeavesOut.NOTHING
            return compiler.mask(_source(compiler, tool_format, [tool for _, tool in called], said, given))
        except InvalidConstraint as error:
            refused = error
    for (number, tool), is_loose in zip(called, loose, strict=True):
        param = f"tools[{number}].function.parameters"
        value = parameters_of(tool_function(tool))
        compiler.mask(source_of(Constraint("json_schema", value, lenient=is_loose, param=param)))
    raise _TooComplex(refused.message if refused is not None else "")


def _source(
    compiler: Compiler, tool_format: ToolFormat, tools: list[Mapping[str, Any]],
    said: tuple[Any, LeavesOut] | None,  # the schema of an answer without calls
    options: dict[str, Any],
) -> Source:  # fmt: skip
    def text(plain: bool) -> str:
        words = compiler.words(plain=plain)
        rules = call_grammar(tool_format, tools, words, **options)
        if said is None:
            return rules
        calls = rules.replace("start:", "calls:", 1)
        return f"start: said | calls\nsaid: {words.schema(*said)}\n{calls}"

    return Source("lark", text(True), run_text=text(False), param="tools")
