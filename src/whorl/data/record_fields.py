"""Fields of records from JSON and Parquet: texts, messages, names. A wrong field raises `BadRecordError` with its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from whorl.data.quarantine import BadRecordError

Message = Mapping[str, Any]
Messages = tuple[Message, ...]

ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


def has_field(record: Mapping[str, Any], field: str) -> bool:
    """Return whether a record has a field with a value."""
    return record.get(field) is not None  # a Parquet column holds null where a record has no such field


def type_name(value: object) -> str:
    """Return the type of a value, for messages."""
    return {"NoneType": "missing", "str": "a text", "list": "a list", "dict": "an object"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


def source_and_id(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fields `source` and `id` as texts."""
    source, name = record.get("source"), record.get("id")
    return ("" if source is None else str(source)), ("" if name is None else str(name))


def encodable_text(text: str, field: str) -> str:
    """Return the text. Raises BadRecordError: it has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError("invalid_utf8", field, f"lone surrogate at character {error.start}") from None
    return text


def text_field(record: Mapping[str, Any], field: str) -> str:
    """Return a text that is not empty. Raises BadRecordError."""
    value = record.get(field)
    if not isinstance(value, str):
        raise BadRecordError("bad_field", field, f"is {type_name(value)}, not a text")
    if not value.strip():
        raise BadRecordError("empty", field, "only white space")
    return encodable_text(value, field)


def label_field(record: Mapping[str, Any], field: str) -> str:
    """Return a class, given as a text or a whole number. Raises BadRecordError."""
    value = record.get(field)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadRecordError("bad_field", field, f"is {type_name(value)}, not a text or a number")
    return str(value)


def number_field(record: Mapping[str, Any], field: str) -> float:
    """Return a number, also one written as a text (a cell of a table); 0 if it is missing. Raises BadRecordError."""
    value = record.get(field) or 0.0
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadRecordError("bad_field", field, f"is {type_name(value)}, not a number") from None


def messages_of(value: object, field: str) -> Messages:
    """Return messages of (role, content) or (from, value) with the keys of the former; null fields are dropped.

    They may be a JSON text, as in a cell of a table.
    """
    value = _from_json(value, field)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRecordError("bad_field", field, f"is {type_name(value)}, not a list of messages")
    if not value:
        raise BadRecordError("empty", field, "no message")
    return tuple(_message(m, f"{field}[{i}]") for i, m in enumerate(value))


def check_turns(messages: Messages, field: str, start: int = 0) -> None:
    """Check the order of turns.

    Args:
        start: number of messages that are in front of those of the field.

    Raises:
        BadRecordError: the assistant begins, or user or assistant has two turns in a row: no question and answer.
    """
    last, is_asked = "", False
    for i, role in enumerate(message["role"] for message in messages):
        is_asked = is_asked or role in ("user", "tool")
        detail = ""
        if role in ("user", "assistant") and role == last:
            detail = f"a second {role} message in a row; expected the other role: join the two, or remove one"
        elif role == "assistant" and not is_asked:
            detail = "the assistant begins; expected a user message before: add the question, or remove this"
        if detail:
            raise BadRecordError("bad_role", f"{field}[{i - start}].role", detail)
        last = role


def template_fields(record: Mapping[str, Any], is_text: bool = False) -> dict[str, Any]:
    """Return what a template renders in addition to the messages: `tools` and `chat_template_kwargs`, if a record has them.

    Both may be JSON texts; a tool and its `parameters`, too. is_text: the record has texts instead of messages.

    Raises:
        BadRecordError: a tool has no name, a field has the wrong type, or no template renders it.
    """
    found: dict[str, Any] = {}
    tools = _from_json(record.get("tools"), "tools")
    if tools is not None and not isinstance(tools, list | tuple):
        raise BadRecordError("bad_field", "tools", f"is {type_name(tools)}, not a list of tools")
    if tools:
        found["tools"] = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    variables = _from_json(record.get("chat_template_kwargs"), "chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise BadRecordError("bad_field", "chat_template_kwargs", f"is {type_name(variables)}, not an object")
    found |= {"chat_template_kwargs": dict(variables)} if variables else {}
    if found and is_text:
        raise BadRecordError(
            "bad_field", next(iter(found)), "is given with a text, and only messages are rendered"
        )
    return found


def _tool(value: object, field: str) -> Message:
    tool = _from_json(value, field)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRecordError("bad_field", field, f"is {type_name(tool)} without the name of a function")
    parameters = _from_json(function.get("parameters"), f"{field}.parameters")
    if not isinstance(parameters, Mapping):
        detail = f"is {type_name(parameters)}, not a JSON schema; of a function without arguments it is {{}}"
        raise BadRecordError("bad_field", f"{field}.parameters", detail)
    function = {**function, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _from_json(value: Any, field: str) -> Any:
    """Return the value of a JSON text, and any other value unchanged."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRecordError("bad_field", field, f"is a text that is not JSON: {error}") from None


def _message(value: object, field: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadRecordError("bad_field", field, f"is {type_name(value)}, not a message")
    role_key, content_key = ("role", "content") if has_field(value, "role") else ("from", "value")
    role = value.get(role_key)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRecordError("bad_role", f"{field}.{role_key}", f"{role!r} is not one of {', '.join(ROLES)}")
    rest = {k: v for k, v in value.items() if v is not None and k not in (role_key, content_key)}
    content = value.get(content_key)
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(p.get("text") or "") for p in content)
    if content is None and rest.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadRecordError("bad_field", f"{field}.{content_key}", f"is {type_name(content)}, not a text")
    known_role = ROLES[role.lower()]
    # A tool may return nothing; an empty user or assistant message is an error.
    if not content.strip() and known_role in ("user", "assistant") and not rest.get("tool_calls"):
        raise BadRecordError("empty", f"{field}.{content_key}", "only white space")
    return {"role": known_role, "content": encodable_text(content, f"{field}.{content_key}"), **rest}
