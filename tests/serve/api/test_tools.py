"""Tool calls that a grammar forces, and other constraints of the output."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.serve.live_server import make_tokenizer

from whorl.align.data.dataset_files import (
    read_conversations,
    read_preferences,
    read_unpaired,
    write_dataset,
)
from whorl.align.data.formats import to_conversation, to_preference, to_unpaired_preference
from whorl.align.preference.pairs import tokenize_pairs, tokenize_unpaired
from whorl.align.stage.io import read_tasks
from whorl.engine.request import Grammar
from whorl.engine.sampling.grammar import GrammarCompiler
from whorl.errors import DataError
from whorl.evals.grading.read import to_task
from whorl.serve.api.protocol import Tool, ToolChoice
from whorl.serve.api.tools import tool_choice_grammar
from whorl.tokens.token_encoder import LengthFilter, TokenEncoder


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


WEATHER = {
    "name": "up",
    "description": "go up",
    "parameters": closed_object(x={"enum": [1, None]}, y={"type": "number"}),
}
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "go"},
    {"content": "", "role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": '{"y": 1}', "name": "up"}}]},
    {"role": "tool", "content": "gone", "tool_call_id": "c"},
    {"role": "assistant", "content": "done"},
]  # fmt: skip
RECORDS = [
    {"messages": TALK, "tools": [{"type": "function", "function": WEATHER}]},
    {"messages": TALK, "tools": [dict(reversed(WEATHER.items()))]},
    {"messages": TALK, "tools": json.dumps([WEATHER])},
    {
        "messages": TALK,
        "tools": [json.dumps({"function": {**WEATHER, "parameters": json.dumps(WEATHER["parameters"])}})],
    },
]


@pytest.mark.parametrize("record", RECORDS)
def test_training_ids_equal_ids_of_tokenize(server: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    """SFT, preferences, KTO and tasks of one conversation, through files, against the server's own template."""
    tokenize = TokenEncoder(make_tokenizer())

    def served(messages: Any, prompt: bool) -> list[int]:
        body = {"messages": messages, "tools": RECORDS[0]["tools"], "add_generation_prompt": prompt}
        return list(server.post("/tokenize", json=body).json()["tokens"])

    whole, prompt = served(TALK, False), served(TALK[:-1], True)
    assert b"go up" in make_tokenizer().decode(prompt)
    answers = {"chosen": TALK[-1:], "rejected": [{"role": "assistant", "content": "no"}]}
    beside = {"prompt": TALK[:-1], "tools": record["tools"]}
    kept = {
        "conversations": [to_conversation(record)],
        "preferences": [to_preference({**beside, **answers})],
        "unpaired": [to_unpaired_preference({**beside, "completion": TALK[-1:], "label": True})],
        "tasks": [to_task({**beside, "verifier": "exact", "answer": "done"})],
    }
    for name, items in kept.items():
        write_dataset(tmp_path, name, "train", items)
    (c,) = read_conversations(tmp_path, "train")
    assert tokenize.conversation(c.messages, c.tools, c.chat_template_kwargs).ids.tolist() == whole
    limit = LengthFilter(10_000)
    (pair,) = tokenize_pairs(tokenize, read_preferences(tmp_path, "train"), limit)
    (labelled,) = tokenize_unpaired(tokenize, read_unpaired(tmp_path, "train"), limit)
    (task,) = read_tasks(tmp_path, "train")
    assert pair.chosen.ids.tolist() == labelled.example.ids.tolist() == whole
    assert pair.rejected.ids[: len(prompt)].tolist() == prompt == tokenize.task_prompt(task)


NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"next": {"$ref": "#node"}, "x": NUMBER},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("reference", "definitions", "good"),
    [
        ("#/$defs/Place", {"$defs": {"Place": NUMBER}}, 1),
        ("#/definitions/Place", {"definitions": {"Place": NUMBER}}, 1),
        ("#/$defs/A", {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": NUMBER}}, 1),
        ("#", {}, {}),
        ("#/properties/b", {"properties": {"b": NUMBER}}, 1),
        ("#node", {"$defs": {"any": {"$anchor": "node", **TREE}}}, {"next": {"next": {"x": 1}}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": NUMBER}}, 1),
        ("#/$defs/a~0b", {"$defs": {"a~b": NUMBER}}, 1),
        ("#/$defs/a%25b", {"$defs": {"a%b": NUMBER}}, 1),
        ("#/$defs/Café au lait", {"$defs": {"Café au lait": NUMBER}}, 1),
        ("place", {"$defs": {"any": {"$id": "place", **NUMBER}}}, 1),
        ("own.json#/$defs/A", {"$id": "own.json", "$defs": {"A": NUMBER}}, 1),
        (
            "#/definitions/A",
            {"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"A": NUMBER}},
            1,
        ),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_forced_call_follows_references_of_its_tool(
    reference: str, definitions: Any, good: Any, choice: Any
) -> None:
    """Another tool has equal names for other schemas; each reference is resolved in its own tool's schema."""

    def parameters(**rest: Any) -> dict[str, Any]:
        made = {
            **rest,
            "properties": {**rest.get("properties", {}), "a": {"$ref": reference}},
            "type": "object",
        }
        return {**made, "additionalProperties": False}

    texts = json.loads(json.dumps(definitions).replace("integer", "string"))
    tools = [
        Tool.model_validate(
            {"type": "function", "function": {"name": name, "parameters": parameters(**rest)}}
        )
        for name, rest in (("other", texts), ("go", definitions))
    ]
    chosen = choice if isinstance(choice, str) else ToolChoice.model_validate(choice)
    grammar = tool_choice_grammar(tools, chosen)
    assert grammar is not None and accepts(grammar, {"name": "go", "arguments": {"a": good}})
    assert not accepts(grammar, {"name": "go", "arguments": {"a": "text"}})
    assert not accepts(grammar, {"name": "go", "arguments": {"a": True}})


COMPILER = GrammarCompiler([*(bytes([i]) for i in range(256)), b""], [256])


def accepts(grammar: Grammar, value: Any) -> bool:
    matcher = COMPILER.compile(grammar)
    try:
        for byte in [*json.dumps(value).encode(), 256]:
            matcher.advance(byte)
    except DataError:
        return False
    return True


def test_response_format_accepts_unescaped_reference() -> None:
    schema = {"type": "array", "items": {"$ref": "#/$defs/Café"}, "$defs": {"Café": NUMBER}}
    assert accepts(Grammar(json_schema=json.dumps(schema)), [1])
    assert not accepts(Grammar(json_schema=json.dumps(schema)), ["a"])


CALL = '<tool_call>{"name": "up", "arguments": {"x": "</tool_call> <tool_call>"}}</tool_call>'


def test_argument_with_closing_tag_stays_in_its_call(server: Any) -> None:
    """The pattern makes the model write exactly this call."""
    fields: Any = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 200,
        "extra_body": {"regex": re.escape(CALL)},
    }
    ask = partial(server.client().chat.completions.create, model="tiny", **fields)
    whole = ask().choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls
    deltas = [part.choices[0] for part in ask(stream=True)]
    (streamed,) = [d.delta.tool_calls[0] for d in deltas if d.delta.tool_calls]
    assert not any(d.delta.content for d in deltas) and deltas[-1].finish_reason == "tool_calls"
    for one in (call, streamed):
        assert one.function.name == "up"
        assert json.loads(one.function.arguments) == {"x": "</tool_call> <tool_call>"}


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
