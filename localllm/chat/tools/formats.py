"""The ways in which models write tool calls, and which of them a chat template speaks of. The only list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..parser import Splitter
from .calls import new_call_id, short_call_id
from .harmony import CONTROL, HarmonyParser
from .json_calls import JsonCalls, NamedCalls
from .parser import AnswerOptions, Reader, ToolParser
from .tagged_calls import BracedCalls, TaggedCalls

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls."""

    name: str
    reader: Reader | None  # None: harmony, which has channels instead
    triggers: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()  # calls that begin an answer without a trigger
    shown: tuple[str, ...] = ()  # texts of control tokens that the parser must see, where they are control tokens
    writes: str = ""  # which of the grammars of `grammars.py` keeps calls valid
    short_ids: bool = False
    one_call: bool = False  # one call an answer, however many are allowed

    def parser(
        self,
        tools: Tools,
        *,
        streams: bool = False,
        most_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> Splitter:
        """A fresh parser for one answer. `streams`: the model is held to valid calls, arguments need not wait."""
        new_id = new_id or (short_call_id if self.short_ids else new_call_id)
        options = AnswerOptions(tools, streams, most_calls, new_id)
        if self.reader is None:
            return HarmonyParser(options)
        return ToolParser(options, self.reader, self.triggers, self.at_start)


HERMES = ToolFormat(
    "hermes", JsonCalls(end=("</tool_call>",)), ("<tool_call>",), shown=("<tool_call>", "</tool_call>"), writes="hermes"
)
# for templates that know nothing of tools: `messages.py` tells the model how. One call an answer: models that were
# never taught to call repeat themselves
GENERIC = ToolFormat(
    "generic",
    JsonCalls(end=("</tool_call>",)),
    ("<tool_call>",),
    at_start=('{"',),
    writes="hermes",
    one_call=True,
)
QWEN_CODER = ToolFormat(
    "qwen-coder",
    TaggedCalls(
        begin="<function=",
        name_end=(">",),
        key="<parameter=",
        key_end=(">",),
        value_end=("\n</parameter>", "</parameter>"),
        end="</function>",
        close="</tool_call>",
        on_lines=True,
        bare_triggers=("<function=",),
    ),
    ("<tool_call>", "<function="),
    shown=("<tool_call>", "</tool_call>"),
    writes="qwen-coder",
)
GLM = ToolFormat(
    "glm",
    TaggedCalls(
        begin="",
        name_end=("<arg_key>", "</tool_call>"),
        key="<arg_key>",
        key_end=("</arg_key>\n<arg_value>", "</arg_key><arg_value>"),
        value_end=("</arg_value>",),
        end="</tool_call>",
    ),
    ("<tool_call>",),
    shown=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    writes="glm",
)
LLAMA3 = ToolFormat(
    "llama3",
    JsonCalls(end=("<|eom_id|>", "<|eot_id|>"), many=";"),
    ("<|python_tag|>",),
    at_start=('{"', "{ "),
    shown=("<|python_tag|>",),
    writes="llama3",
    one_call=True,
)
MISTRAL = ToolFormat(
    "mistral", JsonCalls(), ("[TOOL_CALLS]",), shown=("[TOOL_CALLS]",), writes="mistral", short_ids=True
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    NamedCalls(("[ARGS]",), again="[TOOL_CALLS]"),
    ("[TOOL_CALLS]",),
    shown=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    writes="mistral-named",
    short_ids=True,
)
GEMMA = ToolFormat(
    "gemma",
    BracedCalls('<|"|>', "<tool_call|>"),
    ("<|tool_call>",),
    shown=("<|tool_call>", "<tool_call|>", '<|"|>'),
    writes="gemma",
)
FUNCTION_GEMMA = ToolFormat(
    "function-gemma",
    BracedCalls("<escape>", "<end_function_call>"),
    ("<start_function_call>",),
    shown=("<start_function_call>", "<end_function_call>", "<escape>"),
    writes="function-gemma",
)
_DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
DEEPSEEK = ToolFormat(
    "deepseek",
    NamedCalls(
        ("<｜tool▁sep｜>",),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        close="<｜tool▁calls▁end｜>",
        fenced=True,
    ),
    ("<｜tool▁calls▁begin｜>",),
    shown=_DEEPSEEK_TOKENS,
    writes="deepseek",
)
DEEPSEEK_FENCED = ToolFormat(
    "deepseek-fenced", DEEPSEEK.reader, DEEPSEEK.triggers, shown=_DEEPSEEK_TOKENS, writes="deepseek-fenced"
)
DEEPSEEK_TAGS = ToolFormat(
    "deepseek-tags",
    TaggedCalls(
        begin='<｜DSML｜invoke name="',
        name_end=('">',),
        key='<｜DSML｜parameter name="',
        key_end=('" string="true">', '" string="false">', '">'),
        value_end=("</｜DSML｜parameter>",),
        end="</｜DSML｜invoke>",
        close="</｜DSML｜function_calls>",
        many=True,
        text_mark='" string="true">',
        json_mark='" string="false">',
    ),
    ("<｜DSML｜function_calls>",),
    writes="deepseek-tags",
)
PHI = ToolFormat(
    "phi",
    JsonCalls(end=("<|/tool_call|>", "</tool_call>")),
    ("<|tool_call|>",),
    shown=("<|tool_call|>", "<|/tool_call|>"),
    writes="phi",
)
HARMONY = ToolFormat("harmony", None, shown=CONTROL, writes="harmony")

FORMATS = (
    HERMES, GENERIC, QWEN_CODER, GLM, LLAMA3, MISTRAL, MISTRAL_NAMED, GEMMA, FUNCTION_GEMMA, DEEPSEEK, DEEPSEEK_FENCED,
    DEEPSEEK_TAGS, PHI, HARMONY,
)  # fmt: skip


def find_format(template: str) -> ToolFormat:
    """The format whose marks a chat template has; GENERIC for a template that has none of them."""
    for marks, found in _MARKS:
        if all(mark in template for mark in marks):
            return found
    return GENERIC


# in order: the first whose marks all stand in the template
_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>", "<|start|>"), HARMONY),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<｜DSML｜invoke",), DEEPSEEK_TAGS),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>", "<function="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    (("<|tool_call|>",), PHI),
    (('"parameters": ', "ipython"), LLAMA3),
)
