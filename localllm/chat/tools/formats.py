"""The ways in which models write tool calls, and which of them a chat template speaks of. The only list."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..parser import Splitter
from .call_reader import JsonCalls, NamedCalls
from .calls import new_call_id, short_call_id
from .harmony import CONTROL, HarmonyParser
from .parser import AnswerOptions, Reader, ToolParser
from .tagged_calls import BracedCalls, TaggedCalls

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Json:
    """What stands around the JSON of the arguments; NAME stands for the name."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the name, and around each argument; KEY stands for its name."""

    begin: str
    end: str
    text: tuple[str, str]  # around an argument that is text
    json: tuple[str, str] | None = None  # around any other; None: the same


@dataclass(frozen=True, slots=True)
class Braces:
    """`call:NAME{key:value}` with strings between quotes of its own."""

    quote: str


@dataclass(frozen=True, slots=True)
class Writing:
    """How a call is written, for grammars (`grammars.py`) and for the way back into a prompt.

    `open call (sep call)* close` when calls share a section, else `open call close (sep open call close)*`.
    """

    open: str
    close: str
    body: Json | Tags | Braces
    sep: str = ""
    shares: bool = False
    spaced: str = ""  # after `open`, perhaps with a space before it


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls, and how they are read."""

    name: str
    reader: Reader | None  # None: harmony, which has channels instead
    triggers: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()  # calls that begin an answer without a trigger
    shown: tuple[str, ...] = ()  # texts of control tokens that the parser must see, where they are control tokens
    short_ids: bool = False
    one_call: bool = False  # one call an answer, however many are allowed
    marks: tuple[str, ...] = ()  # stand in the chat templates of models that write so
    writes: Writing = field(kw_only=True)

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


_HERMES_CALLS = Writing("<tool_call>\n", "\n</tool_call>", Json('{"name": "NAME", "arguments": ', "}"), sep="\n")
HERMES = ToolFormat(
    "hermes",
    JsonCalls(end=("</tool_call>",)),
    ("<tool_call>",),
    shown=("<tool_call>", "</tool_call>"),
    marks=("<tool_call>",),
    writes=_HERMES_CALLS,
)
# for templates that know nothing of tools: `messages.py` tells the model how. One call an answer: models that were
# never taught to call repeat themselves
GENERIC = ToolFormat(
    "generic",
    JsonCalls(end=("</tool_call>",)),
    ("<tool_call>",),
    at_start=('{"',),
    writes=_HERMES_CALLS,
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
    marks=("<tool_call>", "<function="),
    writes=Writing(
        "<tool_call>\n",
        "</tool_call>",
        Tags("<function=NAME>\n", "</function>\n", ("<parameter=KEY>\n", "\n</parameter>\n")),
        sep="\n",
    ),
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
    marks=("<tool_call>", "<arg_key>"),
    writes=Writing(
        "<tool_call>",
        "</tool_call>",
        Tags("NAME\n", "", ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")),
        sep="\n",
    ),
)
LLAMA3 = ToolFormat(
    "llama3",
    JsonCalls(end=("<|eom_id|>", "<|eot_id|>"), many=";"),
    ("<|python_tag|>",),
    at_start=('{"', "{ "),
    shown=("<|python_tag|>",),
    marks=('"parameters": ', "ipython"),
    writes=Writing("", "", Json('{"name": "NAME", "parameters": ', "}")),
    one_call=True,
)
MISTRAL = ToolFormat(
    "mistral",
    JsonCalls(),
    ("[TOOL_CALLS]",),
    shown=("[TOOL_CALLS]",),
    marks=("[TOOL_CALLS]",),
    writes=Writing("[TOOL_CALLS]", "]", Json('{"name": "NAME", "arguments": ', "}"), sep=", ", shares=True, spaced="["),
    short_ids=True,
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    NamedCalls(("[ARGS]",), again="[TOOL_CALLS]"),
    ("[TOOL_CALLS]",),
    shown=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    marks=("[TOOL_CALLS]", "[ARGS]"),
    writes=Writing("[TOOL_CALLS]", "", Json("NAME[ARGS]", "")),
    short_ids=True,
)
GEMMA = ToolFormat(
    "gemma",
    BracedCalls('<|"|>', "<tool_call|>"),
    ("<|tool_call>",),
    shown=("<|tool_call>", "<tool_call|>", '<|"|>'),
    marks=("<|tool_call>", "<tool_call|>"),
    writes=Writing("<|tool_call>", "<tool_call|>", Braces('<|"|>')),
)
FUNCTION_GEMMA = ToolFormat(
    "function-gemma",
    BracedCalls("<escape>", "<end_function_call>"),
    ("<start_function_call>",),
    shown=("<start_function_call>", "<end_function_call>", "<escape>"),
    marks=("<start_function_call>",),
    writes=Writing("<start_function_call>", "<end_function_call>", Braces("<escape>")),
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
    marks=("<｜tool▁calls▁begin｜>",),
    writes=Writing(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        Json("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        shares=True,
    ),
)
DEEPSEEK_FENCED = ToolFormat(
    "deepseek-fenced",
    DEEPSEEK.reader,
    DEEPSEEK.triggers,
    shown=_DEEPSEEK_TOKENS,
    marks=("<｜tool▁calls▁begin｜>", "```json"),
    writes=Writing(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        Json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        sep="\n",
        shares=True,
    ),
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
    marks=("<｜DSML｜invoke",),
    writes=Writing(
        "<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>",
        Tags(
            '<｜DSML｜invoke name="NAME">\n',
            "</｜DSML｜invoke>\n",
            ('<｜DSML｜parameter name="KEY" string="true">', "</｜DSML｜parameter>\n"),
            ('<｜DSML｜parameter name="KEY" string="false">', "</｜DSML｜parameter>\n"),
        ),
        shares=True,
    ),
)
PHI = ToolFormat(
    "phi",
    JsonCalls(end=("<|/tool_call|>", "</tool_call>")),
    ("<|tool_call|>",),
    shown=("<|tool_call|>", "<|/tool_call|>"),
    marks=("<|tool_call|>",),
    writes=Writing(
        "<|tool_call|>[", "]<|/tool_call|>", Json('{"name": "NAME", "arguments": ', "}"), sep=", ", shares=True
    ),
)
HARMONY = ToolFormat(
    "harmony",
    None,
    shown=CONTROL,
    marks=("<|channel|>", "<|message|>", "<|start|>"),
    writes=Writing("<|channel|>commentary to=functions.", "", Json("NAME <|constrain|>json<|message|>", "")),
)

# in the order in which they are looked for: those whose marks stand in the templates of others, too, come last
FORMATS = (
    HARMONY, GEMMA, FUNCTION_GEMMA, MISTRAL_NAMED, MISTRAL, DEEPSEEK_TAGS, DEEPSEEK_FENCED, DEEPSEEK, GLM, QWEN_CODER,
    HERMES, PHI, LLAMA3, GENERIC,
)  # fmt: skip


def find_format(template: str) -> ToolFormat:
    """The first format whose marks all stand in a chat template; GENERIC has none."""
    return next(found for found in FORMATS if all(mark in template for mark in found.marks))


def write_call(tool_format: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    """One call as `grammar/call_rules.py` has a model write it; values are texts and plain JSON values."""
    way, form = tool_format.writes, tool_format.writes.body
    if isinstance(form, Tags):
        body = form.begin.replace("NAME", name)
        for key, value in arguments.items():
            before, after = form.text if isinstance(value, str) else form.json or form.text
            body += before.replace("KEY", key) + (value if isinstance(value, str) else json.dumps(value)) + after
        body += form.end
    elif isinstance(form, Braces):
        quote = form.quote
        written = {k: f"{quote}{v}{quote}" if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        body = f"call:{name}{{{','.join(f'{key}:{written[key]}' for key in sorted(written))}}}"
    else:
        body = form.before.replace("NAME", name) + json.dumps(arguments, ensure_ascii=False) + form.after
    return way.open + way.spaced + body + way.close
