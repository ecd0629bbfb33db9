"""Events of tokens to text by kind, without a model: a token is a byte."""

from types import SimpleNamespace

from localllm.chat.parser import ReasoningParser
from localllm.llm.outputs import OutputProcessor, OutputSpec
from localllm.request import FinishReason, TokenEvent, Usage

BYTES = SimpleNamespace(token_bytes=lambda index: bytes([index]), special_ids=frozenset(), strips_first_space=False)


def test_tokens_of_half_a_character_count_as_what_it_shows_as():
    thought, said = "é日本".encode(), "ü!".encode()
    answer = OutputProcessor(BYTES, OutputSpec(new_splitter=lambda: ReasoningParser(opened=True)))
    for index in thought + b"</think>" + said:
        answer.take(TokenEvent("r", 0, [index]))
    end = TokenEvent("r", 0, [], finish_reason=FinishReason.STOP, usage=Usage(1, 0, len(thought) + 8 + len(said)))
    usage = answer.take(end).usage
    assert usage is not None and usage.reasoning_tokens == len(thought) == 8
