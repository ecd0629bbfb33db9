"""A conversation with tools through every family's chat template: rendered, constrained, read back, cached."""

# ruff: noqa: E501 - templates stand here as they are published
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "grammar"))

from grammar_walks import allowed, controlled_tokenizer, walk

from localllm.chat.render_child import RenderChild
from localllm.chat.template import ChatTemplate, encode_chat
from localllm.chat.tools.formats import BY_NAME, FORMATS
from localllm.chat.tools.messages import plain_messages, template_messages, template_tools
from localllm.chat.tools.roundtrip import check_tools
from localllm.errors import InvalidConstraint, InvalidRequest
from localllm.llm.output_rules import OutputRules
from localllm.llm.outputs import CompletionOutput, OutputProcessor, OutputSpec, RequestOutput
from localllm.request import Constraint, FinishReason, TokenEvent, ToolUse, Usage
from localllm.tokenizer.tokenizer import Tokenizer

HERE = Path(__file__).parent
FAMILIES = {
    "templates/qwen3": "hermes",
    "templates/llama3": "llama3",
    "templates/mistral": "mistral",
    "templates/chatml": "generic",
    "templates/gemma3": "generic",
    "tool_templates/qwen_coder": "qwen-coder",
    "tool_templates/glm": "glm",
    "tool_templates/ling": "ling",
    "tool_templates/kimi": "kimi-k2",
    "tool_templates/mistral_named": "mistral-named",
    "tool_templates/gemma4": "gemma",
    "tool_templates/function_gemma": "function-gemma",
    "tool_templates/deepseek": "deepseek",
    "tool_templates/deepseek_fenced": "deepseek-fenced",
    "tool_templates/deepseek_tags": "deepseek-tags",
    "tool_templates/phi": "phi",
    "tool_templates/harmony": "harmony",
}
FRAME = """{% if tools %}<|im_start|>system
The functions are {{ tools | tojson }}. WORDS<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}CALLS<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
LIST = "{% if not loop.last %}, {% endif %}"
# what a family's template tells the model, what stands before its calls, each call, and what stands after: in the words
# of the published templates, cut short
SHORT = {
    "kimi-k2": ("", "<|tool_calls_section_begin|>", "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
                "{{ f.arguments | tojson }}<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "kimi-k3": ("{{ '<|open|>' + 'call' }} {{ '<|close|>' + 'argument' }}",
                "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
                '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in f.arguments.items() %}<|open|>'
                'argument key="{{ k }}" type="{{ "string" if v is string else "number" }}"<|sep|>{{ v }}<|close|>argument<|sep|>'
                "{% endfor %}<|close|>call<|sep|>", "<|close|>tools<|sep|><|close|>message<|sep|>"),
    "minimax-m3": ("{# to_xml #}{% set ns = ']<]minimax[>[' %}", "{{ ns }}<tool_call>\n",
                   '{{ ns }}<invoke name="{{ f.name }}">{% for k, v in f.arguments.items() %}{{ ns }}<{{ k }}>{{ v }}{{ ns }}'
                   "</{{ k }}>{% endfor %}{{ ns }}</invoke>\n", "{{ ns }}</tool_call>"),
    "minimax-m2": ("{% set begin = '<minimax:tool_call>' %}", "{{ begin }}\n",
                   '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">{{ v }}'
                   "</parameter>\n{% endfor %}</invoke>\n", "</minimax:tool_call>"),
    "lfm2": ("List of tools: [", "<|tool_call_start|>[", "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
             "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}" + LIST + "{% endfor %})" + LIST, "]<|tool_call_end|>"),
    "deepseek-tags": ("{% set t = '｜DSML｜' %}{{ '<' + t + 'function_calls>' }}", "<{{ t }}function_calls>\n",
                      '<{{ t }}invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<{{ t }}parameter name="{{ k }}" '
                      'string="{{ "true" if v is string else "false" }}">{{ v }}</{{ t }}parameter>\n{% endfor %}</{{ t }}invoke>'
                      "\n", "</{{ t }}function_calls>"),
    "deepseek-v4": ("{% set t = '｜DSML｜' %}{{ '<' + t + 'tool_calls>' }}", "<{{ t }}tool_calls>\n",
                    '<{{ t }}invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<{{ t }}parameter name="{{ k }}" '
                    'string="{{ "true" if v is string else "false" }}">{{ v }}</{{ t }}parameter>\n{% endfor %}</{{ t }}invoke>'
                    "\n", "</{{ t }}tool_calls>"),
    "seed": ("", "", "<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>{{ v }}"
             "</parameter>\n{% endfor %}</function>\n</seed:tool_call>", ""),
    "command-a": ("", "<|START_ACTION|>[\n", '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
                  "{{ f.arguments | tojson }}}{% if not loop.last %},{% endif %}\n\n", "]<|END_ACTION|>"),
    "apertus": ("", "<|tools_prefix|>[", '{"{{ f.name }}": {{ f.arguments | tojson }}}' + LIST, "]<|tools_suffix|>"),
    "gigachat": ("", "<|function_call|>", JSON, ""),
    "gigachat-message": ("{# <|role_sep|> #}", "<|message_sep|>\n\nfunction call<|role_sep|>\n", JSON, ""),
    "functionary": ("{# '<function=' '</function>' #}", "",
                    "<function={{ f.name }}>{{ f.arguments | tojson }}</function>", ""),
    "hunyuan-3": ("{% set k = ':opensource' %}{{ '<tool_sep{}>'.format(k) }}", "<tool_calls{{ k }}>\n",
                  "<tool_call{{ k }}>{{ f.name }}<tool_sep{{ k }}>\n{% for n, v in f.arguments.items() %}<arg_key{{ k }}>{{ n }}"
                  "</arg_key{{ k }}>\n<arg_value{{ k }}>{{ v }}</arg_value{{ k }}>\n{% endfor %}</tool_call{{ k }}>\n",
                  "</tool_calls{{ k }}>"),
    "muse": ("<|start|> <|message|> <atem:function_calls>", "", ' to={{ f.name }}<|message|><atem:function_calls>\n<atem:invoke name='
             '"{{ f.name }}">\n{% for k, v in f.arguments.items() %}<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>\n'
             "{% endfor %}</atem:invoke>\n</atem:function_calls>{% if not loop.last %}<|eom|><|start|>assistant{% endif %}", ""),
    "ifm": ("", "<ifm|tool_calls>\n", "<ifm|tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<ifm|arg_key>{{ k }}"
            "</ifm|arg_key>\n<ifm|arg_value>{{ v }}</ifm|arg_value>\n{% endfor %}</ifm|tool_call>\n", "</ifm|tool_calls>"),
    "minicpm": ("", "", '<function name="{{ f.name }}">{% for k, v in f.arguments.items() %}<param name="{{ k }}">{{ v }}</param>'
                "{% endfor %}</function>", ""),
    "apriel": ("", "<tool_calls>[", JSON + LIST, "]</tool_calls>"),
    "nemotron": ("", "<TOOLCALL>[", JSON + LIST, "]</TOOLCALL>"),
    "firefunction": ("", "functools[", JSON + LIST, "]"),
    "glm-inline": ("<tool_call>{function-name}<arg_key>", "", "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>"
                   "{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>", ""),
}  # fmt: skip
# templates that explain how to call, and leave the calls of a conversation out
WITHOUT_CALLS = {
    "lfm2": "List of tools: [",
    "granite": "Answer with <|tool_call|> followed by a JSON list of tools.",
    "hermes": "Return a JSON object within <tool_call></tool_call> tags.",
}
LOSES_PREFIX = {"templates/mistral"}  # it writes the ids of calls, which no model does
MARKS = (
    "<|im_start|> <|im_end|> <|user|> <|assistant|> <|system|> <|observation|> <think> </think> [INST] [/INST] <|end|> "
    "<|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> <|turn> <turn|> <｜User｜> "
    "<｜Assistant｜> <|role_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|>"
)
Family = tuple[str, ChatTemplate, OutputRules]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find things",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 99}},
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
QUESTION = {"role": "user", "content": "what is it"}
CALL = {"id": "abc123def", "type": "function",
        "function": {"name": "search", "arguments": json.dumps({"city": "oslo", "days": 2})}}  # fmt: skip
TURNS = [{"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "abc123def", "name": "search", "content": "rain"}]  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return controlled_tokenizer(sorted({text for one in FORMATS for text in one.shown} | set(MARKS.split())))


def short_template(name: str) -> str:
    words, before, call, after = SHORT[name]
    each = "{% for c in m.tool_calls %}{% set f = c.function %}" + call + "{% endfor %}"
    calls = "{% if m.tool_calls %}" + before + each + after + "{% endif %}"
    return FRAME.replace("WORDS", words).replace("CALLS", calls)


@pytest.fixture(params=[*FAMILIES, *SHORT], scope="module")
def family(request: pytest.FixtureRequest, tokenizer: Tokenizer, child: RenderChild) -> Family:
    name = request.param
    text = short_template(name) if name in SHORT else (HERE / f"{name}.jinja").read_text()
    template = ChatTemplate(tokenizer, text, child=child)
    return name, template, OutputRules(tokenizer, template, tokenizer.vocab_size)


def prompt_of(template: ChatTemplate, rules: OutputRules, tokenizer: Tokenizer, messages: list[Any]) -> list[int]:
    shaped, tools = rules.conversation(messages, TOOLS)
    return encode_chat(tokenizer, template.render(shaped, tools=tools))


def told(tokenizer: Tokenizer, spec: OutputSpec, ids: list[int]) -> CompletionOutput:
    """The answer that these ids make."""
    text = OutputProcessor(tokenizer, spec)
    answer = RequestOutput([])
    for index in ids:
        answer.take(text.take(TokenEvent("r", 0, [index])))
    answer.take(text.take(TokenEvent("r", 0, [], finish_reason=FinishReason.STOP, usage=Usage())))
    return answer.completions[0]


def test_the_verdict(family: Family, tokenizer: Tokenizer) -> None:
    name, template, rules = family
    verdict = check_tools(template, tokenizer)
    assert verdict == rules.support
    assert verdict.works, verdict.note
    expected = FAMILIES.get(name, name)
    assert (verdict.format, verdict.native) == (expected, expected != "generic")
    assert rules.tool_format.name == expected and not verdict.as_text
    if name in LOSES_PREFIX:
        assert (
            verdict.line
            == "mistral format, cached prefix lost: the template renders a call differently from how models write it"
        )
        return
    assert verdict.keeps_prefix, verdict.note
    assert verdict.line == (
        f"{verdict.format} format, cached prefix kept"
        if verdict.native
        else "described in the system message, cached prefix kept"
    )


@pytest.mark.parametrize("name", WITHOUT_CALLS)
def test_calls_that_a_template_leaves_out_become_text(name: str, tokenizer: Tokenizer, child: RenderChild) -> None:
    """In which the format's marks are control tokens, and those that arguments hold are not."""
    template = ChatTemplate(tokenizer, FRAME.replace("WORDS", WITHOUT_CALLS[name]).replace("CALLS", ""), child=child)
    rules = OutputRules(tokenizer, template, tokenizer.vocab_size)
    assert rules.support.works and rules.support.native and rules.support.as_text and rules.support.keeps_prefix
    assert rules.tool_format.name == name
    mark = tokenizer.token_to_id(rules.tool_format.shown[0])
    sly = {"city": rules.tool_format.shown[0]}
    call = {"id": "b", "type": "function", "function": {"name": "search", "arguments": sly}}
    turns = [{"role": "assistant", "content": "So.", "tool_calls": [CALL, call]}, *TURNS[1:]]
    text = template.render(rules.conversation([QUESTION, *turns], TOOLS)[0])
    calls = [("search", {"city": "oslo", "days": 2}), ("search", sly)]
    written = "".join(text for text, _ in rules.tool_format.pieces(calls))
    assert f"So.{written}<|im_end|>" in text
    assert encode_chat(tokenizer, text).count(mark) == written.count(rules.tool_format.shown[0]) - 1


@pytest.mark.parametrize("name", ["minicpm", "apriel", "glm-inline", "nemotron"])
def test_a_call_that_begins_as_the_thinking_tag_does(name: str, tokenizer: Tokenizer, child: RenderChild) -> None:
    """The prompt ends with `<think>`, and the same turn of the conversation begins with `<tool_call>`."""
    text = short_template(name).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert text.count("<think>") == 1
    verdict = check_tools(ChatTemplate(tokenizer, text, child=child), tokenizer)
    assert verdict.works and verdict.native and verdict.format == name and not verdict.as_text, verdict


@pytest.mark.parametrize(("options", "said"), [({}, ("hm", "")), ({"enable_thinking": False}, ("", "hm"))])
def test_ling_thinks_unless_told_not_to(
    options: dict[str, bool], said: tuple[str, str], tokenizer: Tokenizer, child: RenderChild
) -> None:
    """A call ends its reasoning, closed or not."""
    template = ChatTemplate(tokenizer, (HERE / "tool_templates/ling.jinja").read_text(), child=child)
    rules = OutputRules(tokenizer, template, tokenizer.vocab_size)
    prompt = encode_chat(tokenizer, template.render([QUESTION], tools=TOOLS, **options))
    spec = rules.spec(prompt, chat=True, tool_use=ToolUse(tuple(TOOLS)))
    made = told(tokenizer, spec, tokenizer.encode("hm\n<tool_call>now\n</tool_call>", special=True))
    assert (made.reasoning.strip(), made.text.strip()) == said
    assert [(call["name"], call["arguments"]) for call in made.tool_calls] == [("now", "{}")]


@pytest.mark.one_in(2)
def test_required_calls_are_valid_and_read(family: Family, tokenizer: Tokenizer) -> None:
    _, template, rules = family
    prompt = prompt_of(template, rules, tokenizer, [QUESTION])
    finished = 0
    for seed in range(6):
        only = ("now",) if seed == 5 else ()
        use = ToolUse(tuple(TOOLS), "required", only, parallel=seed % 2 == 0)
        spec = rules.spec(prompt, chat=True, tool_use=use)
        assert spec.mask is not None
        ids, ended = walk(rules.compiler, spec.mask.fork(), seed, most=1500)
        if not ended:
            continue
        finished += 1
        made = told(tokenizer, spec, [i for i in ids if i not in tokenizer.eos_token_ids])
        assert made.tool_calls and not made.text
        assert use.parallel or len(made.tool_calls) == 1
        for call in made.tool_calls:
            arguments = json.loads(call["arguments"])
            if call["name"] == "now":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
            assert call["name"] in (only or ("search", "now"))
    assert finished >= 3


@pytest.mark.one_in(2)
def test_what_the_template_writes_is_what_the_mask_allows(family: Family, tokenizer: Tokenizer) -> None:
    """A model that writes calls as its template does is not led elsewhere, and its tokens are found in the cache."""
    name, template, rules = family
    before = prompt_of(template, rules, tokenizer, [QUESTION])
    after = prompt_of(template, rules, tokenizer, [QUESTION, *TURNS])
    assert after[: len(before)] == before
    spec = rules.spec(before, chat=True, tool_use=ToolUse(tuple(TOOLS)))
    mask, taken = spec.mask, []
    row = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    for index in after[len(before) :]:
        if index in tokenizer.eos_token_ids:
            break
        if mask is not None and mask.fill(row):
            if not row[index // 32] >> (index % 32) & 1 and name in LOSES_PREFIX:
                return
            assert row[index // 32] >> (index % 32) & 1, (tokenizer.decode(taken), tokenizer.id_to_token(index))
        if mask is not None:
            mask.accept(index)
        taken.append(index)
        if told(tokenizer, spec, taken).tool_calls and "}" in told(tokenizer, spec, taken).tool_calls[0]["arguments"]:
            break
    made = told(tokenizer, spec, taken)
    assert [(c["name"], json.loads(c["arguments"])) for c in made.tool_calls] == [
        ("search", {"city": "oslo", "days": 2})
    ]


def test_constraints_come_after_the_reasoning(family: Family, tokenizer: Tokenizer) -> None:
    name, template, rules = family
    if name in SHORT:
        return
    prompt = encode_chat(tokenizer, template.render([QUESTION]))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    spec = rules.spec(prompt, chat=True, constraint=Constraint("json_schema", schema))
    assert spec.mask is not None
    thoughts = {
        "templates/qwen3": "<think>\nhm\n</think>\n\n",
        "tool_templates/glm": "<think>hm</think>\n",
        "tool_templates/ling": "hm</think>",
        "tool_templates/harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        "<|channel|>final<|message|>",
    }
    must_think = name in ("tool_templates/harmony", "tool_templates/ling")
    for thought in {thoughts.get(name, ""), thoughts[name] if must_think else ""}:
        mask = spec.mask.fork()
        ids = tokenizer.encode(thought + '{"a": true}', special=True)
        for index in ids:
            assert index in allowed(rules.compiler, mask)
            mask.accept(index)
        assert mask.is_done
        made = told(tokenizer, spec, ids)
        jsonschema.validate(json.loads(made.text), schema)
        assert made.reasoning == ("hm" if thought else "")


def test_tools_or_a_schema(tokenizer: Tokenizer, child: RenderChild) -> None:
    template = ChatTemplate(tokenizer, (HERE / "templates/qwen3.jinja").read_text(), child=child)
    rules = OutputRules(tokenizer, template, tokenizer.vocab_size)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    prompt = prompt_of(template, rules, tokenizer, [QUESTION])
    use = ToolUse(tuple(TOOLS))
    kinds = set()
    for seed in range(12):
        spec = rules.spec(prompt, chat=True, tool_use=use, constraint=Constraint("json_schema", schema))
        assert spec.mask is not None
        mask = spec.mask.fork()
        ids, ended = walk(rules.compiler, mask, seed, most=1500)
        if not ended or tokenizer.token_to_id("<think>") in ids:
            continue
        made = told(tokenizer, spec, ids)
        kinds.add(bool(made.tool_calls))
        assert made.tool_calls or json.loads(made.text)["a"] in (1, 2)
    assert kinds == {True, False}
    with pytest.raises(InvalidConstraint, match="cannot be combined"):
        rules.spec(prompt, chat=True, tool_use=use, constraint=Constraint("regex", "a", param="guided_regex"))


def test_what_cannot_be_asked(tokenizer: Tokenizer, child: RenderChild) -> None:
    base = OutputRules(tokenizer, None, tokenizer.vocab_size)
    assert not base.support.works and base.support.line.startswith("no: the model has no chat template")
    with pytest.raises(InvalidRequest, match="base model"):
        base.spec([1], chat=False, tool_use=ToolUse(tuple(TOOLS)))
    assert base.spec([1], chat=False, constraint=Constraint("choice", ["a"])).mask is not None
    strict = (
        "{% for m in messages %}{% if m.role == 'system' or m.tool_calls %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    refusing = OutputRules(tokenizer, ChatTemplate(tokenizer, strict, child=child), tokenizer.vocab_size)
    assert not refusing.support.works
    with pytest.raises(InvalidRequest, match="cannot use tools") as caught:
        refusing.spec([1], chat=True, tool_use=ToolUse(tuple(TOOLS)))
    assert caught.value.param == "tools"
    assert refusing.spec([1], chat=True, tool_use=ToolUse(tuple(TOOLS), "none")).mask is None
    chatml = ChatTemplate(tokenizer, (HERE / "templates/chatml.jinja").read_text(), child=child)
    rules = OutputRules(tokenizer, chatml, tokenizer.vocab_size)
    bad = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"type": 5}}}}}
    for choice in ("auto", "required"):
        with pytest.raises(InvalidConstraint) as wrong:
            rules.spec([1], chat=True, tool_use=ToolUse((TOOLS[0], bad), choice))
        assert wrong.value.param == "tools[1].function.parameters"


def test_tools_that_cannot_be_enforced_wholly(tokenizer: Tokenizer, child: RenderChild) -> None:
    """Unless a tool is strict, what its schema has beyond our means is left out."""
    chatml = ChatTemplate(tokenizer, (HERE / "templates/chatml.jinja").read_text(), child=child)
    rules = OutputRules(tokenizer, chatml, tokenizer.vocab_size)
    parameters = {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "x", "parameters": parameters}}
    assert rules.spec([1], chat=True, tool_use=ToolUse((tool,), "required")).mask is not None
    tool["function"]["strict"] = True
    with pytest.raises(InvalidConstraint, match="uniqueItems"):
        rules.spec([1], chat=True, tool_use=ToolUse((tool,), "required"))


def test_messages_for_templates() -> None:
    call = {"id": "call_0123456789", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_0123456789", "content": "x"}]  # fmt: skip
    made = template_messages(messages, BY_NAME["mistral"])
    assert made[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert made[0]["tool_calls"][0]["type"] == "function"
    assert made[0]["tool_calls"][0]["id"] == made[1]["tool_call_id"] and len(made[1]["tool_call_id"]) == 9
    assert messages[0]["tool_calls"][0] is call and call["function"]["arguments"] == '{"a": 1}'
    cut = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}]}
    assert template_messages([cut])[0]["tool_calls"][0]["function"]["arguments"] == '{"a'
    assert template_tools([{"type": "function", "function": {"name": "f", "strict": True}}]) == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ]
    plain = plain_messages([*messages, messages[1], {"role": "user", "content": "u"}], TOOLS)
    assert [m["role"] for m in plain] == ["system", "assistant", "user", "user"]
    assert plain[1]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[2]["content"].count("<tool_response>\nx\n</tool_response>") == 2
    assert '"name": "search"' in plain[0]["content"]
