"""Tool calls: forced by a grammar, or extracted from streamed text."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.serve.api.tools import CLOSE_TAG, OPEN_TAG, ParsedToolCall, ToolCallParser, parse_tool_call

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2, 3]}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("up", "down")
]
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS}
pieces = st.sampled_from(
    [
        f'{OPEN_TAG}\n{{"name": "up", "arguments": {{"x": 1}}}}\n{CLOSE_TAG}',
        f"{OPEN_TAG}no{CLOSE_TAG}",
        "a <",
        "tool",
        " b\n",
        OPEN_TAG,
        CLOSE_TAG,
        "é",
    ]
)


def parse_parts(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    calls = ToolCallParser()
    text, found = "", list[ParsedToolCall]()
    for part in parts:
        shown, some = calls.feed(part)
        text, found = text + shown, found + some
    shown, some = calls.finish()
    return text + shown, [(c.name, c.arguments) for c in found + some]


@given(st.lists(pieces, max_size=6).map("".join), st.data())
def test_parser_is_independent_of_chunk_boundaries(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse_parts(parts) == parse_parts([text])


def test_parser_extracts_calls_and_keeps_other_text() -> None:
    call = f'{OPEN_TAG}{{"name": "up", "arguments": {{"x": 1}}}}{CLOSE_TAG}'
    assert parse_parts([f"so: {call}\n{call}end"]) == ("so: end", [("up", '{"x":1}')] * 2)
    assert parse_parts([f"{OPEN_TAG}nothing{CLOSE_TAG} a <tool"]) == (
        f"{OPEN_TAG}nothing{CLOSE_TAG} a <tool",
        [],
    )
    assert parse_parts([f'{OPEN_TAG}{{"name": "up"}}']) == (
        "",
        [("up", "{}")],
    )  # truncated before the closing tag
    assert parse_parts([f'{OPEN_TAG}{{"name": "up"']) == (f'{OPEN_TAG}{{"name": "up"', [])
    for no_call in ("[]", "{}", '{"name": 3}', '{"name": ""}', "1"):
        assert parse_tool_call(no_call) is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "down"}}])
def test_tool_choice_forces_a_valid_call(server: Any, choice: Any) -> None:
    client = server.client()
    for seed in range(3):
        whole = client.chat.completions.create(**ASK, tool_choice=choice, seed=seed, max_tokens=200).choices[
            0
        ]
        if whole.finish_reason == "length":  # random weights may generate white space up to the limit
            continue
        assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
        (call,) = whole.message.tool_calls
        assert call.type == "function" and call.function.name in (
            {"up", "down"} if choice == "required" else {"down"}
        )
        assert json.loads(call.function.arguments)["x"] in (1, 2, 3)
        parts = client.chat.completions.create(
            **ASK, tool_choice=choice, seed=seed, max_tokens=200, stream=True
        )
        deltas = [c.choices[0] for c in parts]
        (told,) = [d.delta.tool_calls[0] for d in deltas if d.delta.tool_calls]
        assert told.function is not None and told.function.arguments == call.function.arguments
        assert deltas[-1].finish_reason == "tool_calls"
        return
    raise AssertionError("no seed finished")


def test_output_follows_json_schema_regex_and_grammar(server: Any) -> None:
    client = server.client()
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ask: Any = {"model": "tiny", "messages": ASK["messages"], "max_tokens": 150, "seed": 1}
    choice = client.chat.completions.create(**ask, response_format=form).choices[0]
    assert choice.finish_reason == "length" or isinstance(
        json.loads(choice.message.content or "")["ok"], bool
    )
    text = (
        client.completions.create(model="tiny", prompt="x", extra_body={"regex": "[ab]{3}[0-9]"})
        .choices[0]
        .text
    )
    assert len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3].isdigit()
    lark = client.completions.create(model="tiny", prompt="x", extra_body={"grammar": 'start: "yes" | "no"'})
    assert lark.choices[0].text in ("yes", "no") and lark.choices[0].finish_reason == "stop"
    for wrong in ({"regex": "("}, {"grammar": "start: nothing"}, {"regex": "a", "grammar": "b"}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="x", extra_body=wrong)
    with pytest.raises(openai.BadRequestError) as both:
        client.chat.completions.create(**ask, response_format=form, tools=TOOLS, tool_choice="required")
    assert both.value.param == "tool_choice"
