"""Tool calls that a grammar forces, and other constraints of the output."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import openai
import pytest


def closed_object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with exactly these properties."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


UP, DOWN = ({"name": name, "parameters": closed_object(x={"enum": [1, 2, 3]})} for name in ("up", "down"))
TOOLS = [{"type": "function", "function": function} for function in (UP, DOWN)]
MESSAGES = [{"role": "user", "content": "go"}]
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
