"""Tool calls: forced by a grammar, or extracted from streamed text."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.align.rl.environments.tool_calls import (
    CLOSE_TAG,
    OPEN_TAG,
    ParsedToolCall,
    ToolCallParser,
    parse_tool_call,
)


def closed_object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with exactly these properties."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


UP, DOWN = ({"name": name, "parameters": closed_object(x={"enum": [1, 2, 3]})} for name in ("up", "down"))
TOOLS = [{"type": "function", "function": function} for function in (UP, DOWN)]
MESSAGES = [{"role": "user", "content": "go"}]
CALL = f'{OPEN_TAG}{{"name": "up", "arguments": {{"x": 1}}}}{CLOSE_TAG}'
PIECES = [CALL, f"{OPEN_TAG}no{CLOSE_TAG}", "a <", "tool", " b\n", OPEN_TAG, CLOSE_TAG, "é"]


def parse_parts(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    calls = ToolCallParser()
    text, found = "", list[ParsedToolCall]()
    for part in parts:
        shown, some = calls.feed(part)
        text, found = text + shown, found + some
    shown, some = calls.finish()
    return text + shown, [(c.name, c.arguments) for c in found + some]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.data())
def test_parser_is_independent_of_chunk_boundaries(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse_parts(parts) == parse_parts([text])


NO_CALL, CUT_OFF = f"{OPEN_TAG}nothing{CLOSE_TAG} a <tool", f'{OPEN_TAG}{{"name": "up"'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"so: {CALL}\n{CALL}end", "so: end", [("up", '{"x":1}')] * 2),
        (NO_CALL, NO_CALL, []),
        (CUT_OFF + "}", "", [("up", "{}")]),  # truncated before the closing tag
        (CUT_OFF, CUT_OFF, []),
    ],
)
def test_parser_extracts_calls_and_keeps_other_text(text: str, shown: str, calls: Any) -> None:
    assert parse_parts([text]) == (shown, calls)


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": 3}', '{"name": ""}', "1"])
def test_parse_tool_call_rejects_other_json(text: str) -> None:
    assert parse_tool_call(text) is None


ONLY_DOWN = {"type": "function", "function": {"name": "down"}}


@pytest.mark.parametrize(("choice", "names"), [("required", {"up", "down"}), (ONLY_DOWN, {"down"})])
def test_tool_choice_forces_a_valid_call(server: Any, choice: Any, names: set[str]) -> None:
    fields: Any = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    ask = partial(server.client().chat.completions.create, model="tiny", **fields)
    for seed in range(3):
        whole = ask(seed=seed).choices[0]
        if whole.finish_reason == "length":  # random weights may generate white space up to the limit
            continue
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == "tool_calls" and call.type == "function" and call.function.name in names
        assert json.loads(call.function.arguments)["x"] in (1, 2, 3)
        deltas = [part.choices[0] for part in ask(seed=seed, stream=True)]
        (streamed,) = [d.delta.tool_calls[0] for d in deltas if d.delta.tool_calls]
        assert streamed.function.arguments == call.function.arguments
        assert deltas[-1].finish_reason == "tool_calls"
        return
    raise AssertionError("no seed finished")


def test_output_follows_json_schema_regex_and_grammar(server: Any) -> None:
    def complete(**grammar: str) -> Any:
        create = server.client().completions.create
        return create(model="tiny", prompt="x", extra_body=grammar).choices[0]

    schema = {"name": "a", "schema": closed_object(ok={"type": "boolean"})}
    fields: Any = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": schema}}
    ask = partial(server.client().chat.completions.create, model="tiny", max_tokens=150, seed=1, **fields)
    choice = ask().choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content)["ok"], bool)
    assert re.fullmatch("[ab]{3}[0-9]", complete(regex="[ab]{3}[0-9]").text)
    lark = complete(grammar='start: "yes" | "no"')
    assert lark.text in ("yes", "no") and lark.finish_reason == "stop"
    for wrong in ({"regex": "("}, {"grammar": "start: nothing"}, {"regex": "a", "grammar": "b"}):
        with pytest.raises(openai.BadRequestError):
            complete(**wrong)
    with pytest.raises(openai.BadRequestError) as both:
        ask(tools=TOOLS, tool_choice="required")
    assert both.value.param == "tool_choice"
