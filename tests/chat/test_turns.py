"""What agents say in several system messages reaches the model, whatever its template makes of them."""

from pathlib import Path
from typing import Any

import pytest

from localllm.chat.render_child import RenderChild
from localllm.chat.template import ChatTemplate
from localllm.chat.turns import Turns
from localllm.errors import InvalidRequest

from .test_template import TEMPLATES, plain

TOOLS = {path.stem: path.read_text() for path in (Path(__file__).parent / "tool_templates").glob("*.jinja")}
QWEN35 = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def say(*turns: str) -> list[dict[str, Any]]:
    roles = {"S": "system", "U": "user", "A": "assistant"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


@pytest.mark.parametrize(
    "text",
    [TEMPLATES["gemma3"], TEMPLATES["mistral"], TEMPLATES["deepseek_r1"], TOOLS["harmony"], TOOLS["gemma4"], QWEN35],
    ids=["gemma3", "mistral", "deepseek_r1", "harmony", "gemma4", "qwen35"],
)
def test_strict_templates_show_all_that_agents_send(text: str, child: RenderChild) -> None:
    template = plain(text, child)
    codex, claude = say("S1", "S2", "U1", "U2"), say("S1", "U1", "A1", "S2", "U2", "S3")
    for messages in (codex, claude):
        try:
            before = str(template.render(messages))
        except InvalidRequest:
            before = ""
        assert not all(message["content"] in before for message in messages)
        shown = template.render(Turns(template).fitted(messages))
        assert all(message["content"] in shown for message in messages)


def test_other_templates_and_other_conversations_stay_as_they_are(child: RenderChild) -> None:
    lenient: ChatTemplate = plain(TEMPLATES["qwen3"], child)
    for messages in (say("S1", "S2", "U1", "U2"), say("S1", "U1", "A1", "S2", "U2")):
        assert Turns(lenient).fitted(messages) is messages
    strict = Turns(plain(TEMPLATES["gemma3"], child))
    plain_chat = say("S1", "U1", "A1", "U2")
    assert strict.fitted(plain_chat) is plain_chat and not strict.__dict__.keys() - {"_template"}


def test_what_joins_what(child: RenderChild) -> None:
    def contents(*turns: Any) -> list[Any]:
        messages = [turn if isinstance(turn, dict) else say(turn)[0] for turn in turns]
        return [(one["role"][0], one["content"]) for one in Turns(plain(QWEN35, child)).fitted(messages)]

    assert contents("S1", "S2", "U1", "U2") == [("s", "S1\n\nS2"), ("u", "U1"), ("u", "U2")]
    assert contents("U1", "S1", "A1") == [("u", "U1\n\nS1"), ("a", "A1")]
    assert contents("U1", "A1", "S1", "U2") == [("u", "U1"), ("a", "A1"), ("u", "S1\n\nU2")]
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "sun"}
    assert contents("U1", call, result, "S1") == [("u", "U1"), ("a", ""), ("t", "sun"), ("u", "S1")]
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "U1"}]}
    assert contents(picture, "S1")[0][1] == [*picture["content"], {"type": "text", "text": "S1"}]
