"""Messages and tools in the form that chat templates expect, from an API request, a training record or an environment.

    content                  text; the texts of a list of parts, joined
    tool_calls               {"id", "type", "function": {"name", "arguments"}}; arguments as an object, also if given as JSON
    tools                    {"type": "function", "function": {"name", "description", "parameters", "strict"}}

Keys have this order, because templates write whole objects as JSON. Other keys follow. Keys without a value are left out.
A template that leaves out or rejects this form may write another (`FORMS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whorl.errors import DataError, shorten

Message = Mapping[str, Any]


def canonical_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect.

    Raises:
        DataError: a message has content that is no text, or a tool call without the name of a function.
    """
    return [_canonical_message(message, number) for number, message in enumerate(messages)]


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates expect; a bare function gets its wrapper."""
    wrapped: list[Mapping[str, Any]] = [
        tool if isinstance(tool.get("function"), Mapping) else {"type": "function", "function": tool}
        for tool in tools
    ]
    names = ("name", "description", "parameters", "strict")
    return [
        _ordered({**tool, "function": _ordered(tool["function"], names)}, ("type", "function"))
        for tool in wrapped
    ]


def _canonical_message(message: Message, number: int) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list | tuple):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise DataError(f"message {number} has content that is no text", expected="text parts")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise DataError(f"message {number} has content of the type {type(content).__name__}", expected="text")
    made = _ordered(message, ("role",)) | {"content": content or ""}
    if calls := message.get("tool_calls"):
        try:
            made["tool_calls"] = [_canonical_call(call) for call in calls]
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"message {number}: tool_calls is {shorten(str(calls))}",
                expected='a list of {"function": {"name": ..., "arguments": ...}}',
            ) from error
    return _ordered(made, ("role", "content", "name", "tool_call_id", "tool_calls"))


def _canonical_call(call: Mapping[str, Any]) -> dict[str, Any]:
    wrapped = call if isinstance(call.get("function"), Mapping) else {"function": call}
    function = {"name": wrapped["function"]["name"], **wrapped["function"]}
    arguments = function.get("arguments") or {}
    function["arguments"] = json_value(arguments) if isinstance(arguments, str) else arguments
    made = {**wrapped, "type": "function", "function": _ordered(function, ("name", "arguments"))}
    return _ordered(made, ("id", "type", "function"))


def json_value(text: str) -> Any:
    """Return the value of JSON, or other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _ordered(value: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """Return the keys with a value: those of `first`, then the others."""
    return {k: value[k] for k in dict.fromkeys((*first, *value)) if value.get(k) is not None}


def _developer_as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _calls_as_text(message: Message) -> Message:
    """Return a message with its calls as DeepSeek's templates write them: arguments as JSON, and no content."""
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False, default=str)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "content": None, "tool_calls": calls} if calls else message


FORMS: tuple[Callable[[Message], Message], ...] = (dict, _developer_as_system, _calls_as_text)
