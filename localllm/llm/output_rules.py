"""Rules for a request's output: `OutputRules.spec` builds them for the facade and the server.

Combines the chat template's reasoning and tool formats, the request's `Constraint` and `ToolUse`, and the vocabulary
into a token mask for the engine and a splitter for the text. Compiling can take two seconds: never call `spec` with a
constraint or tools in an event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from localllm.chat.parser import ChainedParser, ReasoningParser, Splitter, reasoning_tags
from localllm.chat.tools.calls import called_tools
from localllm.chat.tools.formats import GENERIC, ToolFormat, find_format
from localllm.chat.tools.messages import plain_messages, template_messages, template_tools
from localllm.chat.tools.parser import answer_parser
from localllm.chat.tools.roundtrip import NO_TEMPLATE, ToolSupport, check_tools
from localllm.chat.turns import Turns
from localllm.errors import InvalidRequest
from localllm.llm.outputs import OutputSpec
from localllm.request import Constraint, TokenMask, ToolUse
from localllm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.chat.template import ChatTemplate
    from localllm.grammar import Compiler, Reasoning

log = logging.getLogger(__name__)

_TAIL_TOKENS = 16  # last tokens of the prompt that are searched for an opening reasoning tag


class OutputRules:
    """The output rules of one model. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, width: int) -> None:
        """Build nothing yet. `width` is the number of logits."""
        self._tokenizer = tokenizer
        self._template = template
        self._width = width

    # --- what the model supports -------------------------------------------------------------------------------------

    @cached_property
    def support(self) -> ToolSupport:
        """The chat template's tool support; probed on first access, which takes about 50 ms."""
        return NO_TEMPLATE if self._template is None else check_tools(self._template, self._tokenizer)

    @property
    def tool_format(self) -> ToolFormat:
        if self._template is None or not self.support.native:
            return GENERIC
        return find_format(self._template.chosen([]))

    @cached_property
    def _turns(self) -> Turns | None:
        return None if self._template is None else Turns(self._template)

    @cached_property
    def compiler(self) -> Compiler:
        """The grammar compiler. Two threads that race for the first access may get one each, with equal masks."""
        from localllm.grammar import Compiler

        return Compiler(self._tokenizer, self._width, "" if self._template is None else self._template.chosen([]))

    def prepare(self) -> None:
        """Build in advance what the first constrained request needs; servers call this while loading."""
        _ = self.support
        self.compiler.prepare()

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Convert messages and tools to the form the template expects."""
        has_calls = any("tool_calls" in message or message.get("role") in ("tool", "function") for message in messages)
        is_plain = not tools and not has_calls
        if not is_plain and not self.support.native:
            messages, is_plain = plain_messages(messages, tools or ()), True
        messages = messages if self._turns is None else self._turns.fitted(messages)
        if is_plain:
            return messages, None
        shaped = template_messages(messages, self.tool_format, as_text=self.support.as_text)
        return shaped, template_tools(tools) if tools else None

    # --- one request -------------------------------------------------------------------------------------------------

    def spec(
        self,
        prompt_token_ids: Sequence[int],
        *,
        chat: bool,
        constraint: Constraint | None = None,
        tool_use: ToolUse | None = None,
    ) -> OutputSpec:
        """Build the output rules of one request.

        chat   the prompt is a rendered conversation, so the answer may contain reasoning and tool calls

        Raises InvalidConstraint, with the request field as `param`, for a constraint that cannot be enforced, and
        InvalidRequest for tools that this model cannot use.
        """
        if not chat or self._template is None:
            if tool_use is not None:
                raise InvalidRequest("tools need a chat template, and this is a base model", "leave out the tools")
            if constraint is None:
                return OutputSpec(continuing=not chat)
            from localllm.grammar import source_of

            return OutputSpec(self.compiler.mask(source_of(constraint)), continuing=not chat)
        tools = self._usable(tool_use)
        tool_format = self.tool_format if tools is not None else GENERIC
        own = find_format(self._template.chosen([]))
        tail = self._tokenizer.decode(list(prompt_token_ids)[-_TAIL_TOKENS:], skip_special=False)
        tags = None if own.final else reasoning_tags(self._template.template, tail)
        opening = tool_format.opening(tail)
        mask, is_kept = self._mask(constraint, tools, tool_format, self._reasoning(tags, tail, own.final), opening)
        reads = own if own.final or own.hidden and tools is None else tool_format
        seen = [*(tags or ()), *(reads.shown if tools or reads is own else ())]
        ids = frozenset(index for text in seen for _, _, index in self._tokenizer.control_text.find(text))
        return OutputSpec(mask, self._splitter(tags, tail, tools, reads, is_kept), keep_ids=ids)

    def _usable(self, tool_use: ToolUse | None) -> ToolUse | None:
        if tool_use is None or tool_use.choice == "none" or not tool_use.tools:
            return None
        if not self.support.works:
            why = f"this model cannot use tools: {self.support.note}"
            raise InvalidRequest(why, "leave out the tools", param="tools")
        return tool_use

    def _reasoning(self, tags: tuple[str, str] | None, tail: str, final: str) -> Reasoning | None:
        """The reasoning that precedes a constrained answer, or None."""
        from localllm.grammar import Reasoning

        if final:
            return Reasoning("", final, must=True)
        if tags is None or tail.rstrip().endswith(tags[1]):  # the prompt has already closed the reasoning
            return None
        open_id = self._tokenizer.token_to_id(tags[0])
        return Reasoning(*tags, opened=tail.rstrip().endswith(tags[0]), open_id=open_id)

    def _splitter(
        self, tags: tuple[str, str] | None, tail: str, tools: ToolUse | None, reads: ToolFormat, is_kept: bool
    ) -> Callable[[], Splitter] | None:
        called = [] if tools is None else [tool for _, tool in called_tools(tools)]
        most = 1 if tools is not None and not tools.parallel else None
        opening = reads.opening(tail)

        def content() -> Splitter:
            return answer_parser(reads, called, streams=is_kept, most_calls=most, opening=opening)

        if reads.final:
            return content
        if tags is None:
            return content if tools is not None or reads.hidden else None
        opened = tail.rstrip().endswith(tags[0])

        def both() -> Splitter:
            reasoning = ReasoningParser(*tags, opened=opened)
            if tools is None:
                return ChainedParser(reasoning, content()) if reads.hidden else reasoning
            return ChainedParser(
                reasoning, content(), answer_parser(replace(reads, hidden=()), called, most_calls=most)
            )

        return both

    # --- masks -------------------------------------------------------------------------------------------------------

    def _mask(
        self,
        constraint: Constraint | None,
        tools: ToolUse | None,
        tool_format: ToolFormat,
        reasoning: Reasoning | None,
        opening: str,
    ) -> tuple[TokenMask | None, bool]:
        """Return the token mask, and whether it guarantees valid tool calls."""
        if constraint is None and tools is None:
            return None, False
        from localllm.grammar import AfterReasoning, ToolTriggers
        from localllm.grammar.tools import begun_call, whole_answer

        compiler = self.compiler
        if tools is not None and constraint is None and tools.choice == "auto":
            begun = begun_call(compiler, tool_format, tools)
            if begun is None:
                return None, False
            call, trigger = begun
            only_one = tool_format.one_call or not tools.parallel
            before = None if tool_format.final else reasoning
            bytes_of = self._tokenizer.token_bytes
            return ToolTriggers(call, trigger, bytes_of, tags=before, only_one=only_one), True
        inner = whole_answer(compiler, tool_format, tools, constraint, opening)
        if reasoning is None or (tools is not None and tool_format.final):
            return inner, tools is not None
        return AfterReasoning(inner, compiler.vocabulary, self._tokenizer.token_bytes, reasoning), tools is not None
