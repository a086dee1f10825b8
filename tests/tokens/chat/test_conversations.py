"""What a template leaves out is refused, and one form of messages and tools is rendered everywhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from whorl.errors import DataError
from whorl.tokens.chat import IM_END, IM_START, ChatTemplate
from whorl.tokens.template_source import compile_template
from whorl.tokens.tokenizer import Tokenizer

BYTES = [bytes([i]) for i in range(256)]
TOKENIZER = Tokenizer(BYTES, (IM_START, IM_END, "<|end_of_turn|>"))
SYSTEM, USER = {"role": "system", "content": " be kind "}, {"role": "user", "content": "hi"}
DEVELOPER = {"role": "developer", "content": "be short"}
REPLY = {"role": "assistant", "content": "<think>\nshort\n</think>\n\n hello "}
CALLING = {
    "role": "assistant",
    "content": "let me look",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "up", "arguments": {"x": 1}}}
    ],
}
RESULT = {"role": "tool", "content": '{"y": "é"}', "tool_call_id": "abcdefghi"}
TOOL = {"type": "function", "function": {"name": "up", "parameters": {"type": "object"}}}

# The ways of published families, in short.
QWEN = """{% if messages[0].role == "system" %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{% for m in messages %}
{% if m.role == "user" or (m.role == "system" and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == "assistant" %}<|im_start|>assistant
{{ (m.content.split("</think>")[-1] if not loop.last else m.content).lstrip("\n") }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == "tool" %}
{% if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>{{ m.content }}</tool_response>
{% if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ bos_token }}{% set system = "" %}{% set rest = messages %}
{% if messages[0]["role"] == "system" %}
{% set system = messages[0]["content"] | trim %}{% set rest = messages[1:] %}{% endif %}
<|im_start|>system {{ system }}<|end_of_turn|>
{% for m in rest %}
{% if not (m.role == "ipython" or m.role == "tool" or "tool_calls" in m) %}<|im_start|>{{ m.role }} {{ m.content | trim }}
<|end_of_turn|>{% elif "tool_calls" in m %}<|im_start|>assistant
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
<|end_of_turn|>{% else %}<|im_start|>ipython
{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}
<|end_of_turn|>{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{% for m in messages %}
{% if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("must alternate") }}{% endif %}
<|im_start|>{{ "model" if m.role == "assistant" else m.role }}
{{ m.content | trim }}<|end_of_turn|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
MISTRAL = """{{ bos_token }}{% set rest = messages %}{% if messages[0].role == "system" %}
{% set system = messages[0].content %}{% set rest = messages[1:] %}{% endif %}
{% for m in rest %}{% if m.role == "user" %}[INST] {% if loop.last and system is defined %}{{ system }}

{% endif %}{{ m.content }}[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS] [
{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]{{ eos_token }}
{% elif m.role == "assistant" %} {{ m.content }}{{ eos_token }}
{% elif m.role == "tool" %}[TOOL_RESULTS] {"content": {{ m.content }}}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{% if m.role == "assistant" and m.content is none %}{% for call in m.tool_calls %}
{{ "<|im_start|>" + call.function.name + "\\n```json\\n" + call.function.arguments + "\\n```" }}{% endfor %}
{% else %}{{ m.role + ": " + m.content + "<|end_of_turn|>" }}{% endif %}{% endfor %}"""
CHATML, TRANSCRIPT = None, "transcript"
TALK = [USER, REPLY, USER]
TOOLS_TALK = [USER, CALLING, RESULT, RESULT, REPLY, USER]


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(Tokenizer(BYTES)) if source == TRANSCRIPT else ChatTemplate(TOKENIZER, source)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (QWEN, [SYSTEM, *TOOLS_TALK]), (QWEN, [SYSTEM, USER, {**CALLING, "content": ""}, RESULT]),
        (QWEN, [USER, SYSTEM, USER]),
        (QWEN, [USER, {"role": "assistant", "content": "<think>only</think>"}, {**USER, "content": " \n"}]),
        (LLAMA, [SYSTEM, *TOOLS_TALK]), (LLAMA, [DEVELOPER, *TALK]), (GEMMA, TALK),
        (MISTRAL, [SYSTEM, *TALK]), (MISTRAL, TOOLS_TALK), (CHATML, [SYSTEM, *TOOLS_TALK]),
        (CHATML, [DEVELOPER, *TALK]), (TRANSCRIPT, [SYSTEM, *TOOLS_TALK]),
    ],
)  # fmt: skip
def test_templates_that_write_every_message_accept_it(source: str | None, messages: list[Any]) -> None:
    """They trim contents, drop the reasoning of earlier turns, quote results, and leave out texts next to calls."""
    ids = template(source).encode_prompt(messages, [TOOL])
    assert ids and all(i < TOKENIZER.vocab_size for i in ids)


@pytest.mark.parametrize(
    ("source", "messages", "number"),
    [
        (
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
            [USER, RESULT, REPLY],
            1,
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TOOLS_TALK, 1),
        ("{{ messages[-1].content }}", TALK, 0),
    ],
)
def test_message_that_a_template_leaves_out_is_refused(source: str, messages: list[Any], number: int) -> None:
    for encode in (template(source).encode_prompt, template(source).encode_with_mask):
        with pytest.raises(DataError, match=f"leaves out(?s:.*)message {number} is left out"):
            encode(messages)
    with pytest.raises(DataError, match="leaves out"):
        template("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}").encode_after_reply(
            [USER], [RESULT]
        )


@pytest.mark.parametrize("first", [SYSTEM, DEVELOPER])
def test_message_left_out_by_position_is_a_warning(first: Any) -> None:
    """An agent's prompt after a tool's result, and between two tool results."""
    chat = template(MISTRAL)
    with pytest.warns(UserWarning, match=f"leaves out a message of the role '{first['role']}'"):
        assert chat.encode_prompt([first, USER, CALLING, RESULT], [TOOL])
    with pytest.warns(UserWarning, match="leaves out"):
        assert b'{"y"' in TOKENIZER.decode(chat.encode_after_reply([first, USER], [RESULT], [TOOL]))


def test_calls_are_rendered_as_text_where_a_template_needs_it() -> None:
    text = TOKENIZER.decode(template(DEEPSEEK).encode_prompt([SYSTEM, *TOOLS_TALK], [TOOL]))
    assert b'up\n```json\n{"x": 1}\n```' in text


def test_developer_message_is_rendered_as_system_if_left_out() -> None:
    asked = template(QWEN).encode_prompt([DEVELOPER, *TALK])
    assert asked == template(QWEN).encode_prompt([{**DEVELOPER, "role": "system"}, *TALK])
    assert b"be short" in TOKENIZER.decode(asked)
    assert b"developer" in TOKENIZER.decode(template(CHATML).encode_prompt([DEVELOPER, *TALK]))
    with pytest.raises(DataError, match="must alternate"):
        template(GEMMA).encode_prompt([DEVELOPER, *TALK])


def test_equal_conversations_in_other_forms_get_equal_ids() -> None:
    """Order of keys, arguments as JSON, contents as parts, a tool without its wrapper, keys without a value."""
    other = [
        {
            "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            "role": "user",
            "name": None,
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"function": {"arguments": '{"x": 1}', "name": "up"}, "id": "abcdefghi", "type": "function"}
            ],
        },
        RESULT,
    ]
    same = [USER, {**CALLING, "content": ""}, RESULT]
    for source in (CHATML, QWEN, LLAMA, TRANSCRIPT):
        encode = template(source).encode_prompt
        assert encode(other, [{"parameters": {"type": "object"}, "name": "up"}]) == encode(same, [TOOL])


@pytest.mark.parametrize("calls", [["up"], [{}], [{"function": {}}], "up", 3])
def test_tool_call_without_a_name_raises_data_error(calls: Any) -> None:
    with pytest.raises(DataError, match="message 1: tool_calls is"):
        template(CHATML).encode_prompt([USER, {**CALLING, "tool_calls": calls}])


NEEDS_SYSTEM = """{% if messages[0].role != "system" %}{{ raise_exception("no system message") }}{% endif %}\
{% for m in messages %}{{ m.role }}: {{ m.content }}<|end_of_turn|>{% endfor %}"""


@pytest.mark.parametrize("source", [LLAMA, GEMMA, NEEDS_SYSTEM])
def test_token_behind_a_reply_is_a_stop_id(source: str) -> None:
    end = TOKENIZER.special_token_ids["<|end_of_turn|>"]
    chat = template(source)
    assert end in chat.stop_ids
    messages = [{"role": "system", "content": "Be kind."}, USER, {**REPLY, "content": "hello"}]
    ids, mask = chat.encode_with_mask(messages[source is not NEEDS_SYSTEM :])
    assert [i for i, own in zip(ids, mask, strict=True) if own][-1] == end


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "é", "a": 1}'),
        ("(ensure_ascii=False)", '{"b": "é", "a": 1}'),
        ("(ensure_ascii=True, sort_keys=True)", '{"a": 1, "b": "\\u00e9"}'),
        ("(separators=(',', ':'))", '{"b":"é","a":1}'),
    ],
)
def test_tojson_takes_the_options_of_transformers(options: str, text: str) -> None:
    source = "{{ x | tojson" + options + " }}"
    assert compile_template(source).render(x={"b": "é", "a": 1}) == text


def test_tools_that_a_template_leaves_out_are_a_warning() -> None:
    chat = template(GEMMA)
    for encode in (chat.encode_prompt, chat.encode_with_mask):
        with pytest.warns(UserWarning, match="leaves out the tools"):
            encode(TALK, [TOOL])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat.encode_prompt(TALK)
        template(CHATML).encode_prompt(TALK, [TOOL])
