"""Constraints of the output, and tool calls: forced by a grammar, or parsed from the output.

tool_choice "required" or a function name: the output is constrained to the JSON of a call, so it is a valid call for any
model. "auto": the chat template lists the tools, and the model may write calls (`tokens/chat/tool_calls.py`).

The subtle point is a schema with references: `#/$defs/Place` points into the tool's own schema, which becomes a part of a
larger one. So each schema gets an address (`$id`), against which references of every form are resolved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

import orjson

from whorl.engine.request import Grammar
from whorl.serve.api.protocol import ChatRequest, GenerationRequest, Tool, ToolChoice
from whorl.serve.errors import ApiError


def output_grammar(body: GenerationRequest) -> Grammar | None:
    """Return the grammar that constrains the output, or None.

    Raises:
        ApiError: two fields set a grammar.
    """
    grammars: dict[str, Grammar] = {}
    if body.regex is not None:
        grammars["regex"] = Grammar(regex=body.regex)
    if body.grammar is not None:
        grammars["grammar"] = Grammar(lark=body.grammar)
    form = body.response_format if isinstance(body, ChatRequest) else None
    if form is not None and form.type == "json_object":
        grammars["response_format"] = Grammar(json_schema='{"type":"object"}')
    if form is not None and form.json_schema is not None:
        grammars["response_format"] = Grammar(json_schema=orjson.dumps(form.json_schema.schema_).decode())
    if (given := body.structured_outputs) is not None:
        schema = given.json_ if isinstance(given.json_, str | None) else orjson.dumps(given.json_).decode()
        lark = given.grammar
        if given.choice is not None:
            lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in given.choice)
        grammars["structured_outputs"] = Grammar(json_schema=schema, regex=given.regex, lark=lark)
    if len(grammars) > 1:
        raise ApiError(400, f"{' and '.join(grammars)}: give one of them", param=next(iter(grammars)))
    return next(iter(grammars.values()), None)


def tool_choice_grammar(tools: Sequence[Tool], choice: str | ToolChoice | None) -> Grammar | None:
    """Return the grammar of a forced call, or None if no call is forced."""
    if isinstance(choice, ToolChoice):
        allowed = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice == "required":
        allowed = list(tools)
    else:
        return None
    forms: list[dict[str, Any]] = []
    addresses: set[str] = set()
    for tool in allowed:
        arguments = {
            k: v for k, v in (tool.function.parameters or {"type": "object"}).items() if k != "$schema"
        }
        base = f"http://tool{len(forms)}.invalid/"  # relative addresses of two tools stay apart
        own = str(arguments.get("$id", arguments.get("id", "")))  # draft 4 writes "id"
        address = urljoin(base, own) if "[" not in own else base  # "http://[" is no address
        address = base if address in addresses else address
        addresses.add(address)
        forms.append({
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {**arguments, "$id": address}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return Grammar(json_schema=orjson.dumps(schema).decode())
