"""Tool calls: forced by a grammar, or parsed from the output.

tool_choice "required" or a function name: the output is constrained to the JSON of a call, so it is a valid call for any
model. "auto": the chat template lists the tools, and the model may write calls in the format of Hermes models:

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

`ToolCallParser` removes these from the streamed text. Text that may be the beginning of a tag is buffered. A block that is
not a valid call is returned as text, so no output is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from whorl.engine.request import Grammar
from whorl.serve.api.protocol import Tool, ToolChoice

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ParsedToolCall:
    """A function name with its arguments as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def tool_choice_grammar(tools: Sequence[Tool], choice: str | ToolChoice | None) -> Grammar | None:
    """Return the grammar of a forced call, or None if no call is forced."""
    if isinstance(choice, ToolChoice):
        allowed = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice == "required":
        allowed = list(tools)
    else:
        return None
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in allowed
    ]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return Grammar(json_schema=orjson.dumps(schema).decode())


def parse_tool_call(text: str) -> ParsedToolCall | None:
    """Return the call that `text` encodes, or None."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ParsedToolCall(
        call["name"], arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    )


class ToolCallParser:
    """Extracts tool calls from streamed text.

    forced: the whole text is one call (the grammar forced it).
    """

    def __init__(self, forced: bool = False) -> None:
        self.forced, self._buffer = forced, ""

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Add text. Returns (text to show, complete calls)."""
        self._buffer += text
        if self.forced:
            return "", []
        shown = ""
        calls: list[ParsedToolCall] = []
        while (at := self._buffer.find(OPEN_TAG)) >= 0:
            end = self._buffer.find(CLOSE_TAG, at)
            if end < 0:
                shown += self._buffer[:at]
                self._buffer = self._buffer[at:]
                return shown, calls
            call = parse_tool_call(self._buffer[at + len(OPEN_TAG) : end])
            rest = end + len(CLOSE_TAG)
            shown += self._buffer[:at] if call else self._buffer[:rest]
            calls += [call] if call else []
            self._buffer = self._buffer[rest:].lstrip("\n") if call else self._buffer[rest:]
        keep = next((n for n in range(len(OPEN_TAG) - 1, 0, -1) if self._buffer.endswith(OPEN_TAG[:n])), 0)
        cut = len(self._buffer) - keep
        shown, self._buffer = shown + self._buffer[:cut], self._buffer[cut:]
        return shown, calls

    def finish(self) -> tuple[str, list[ParsedToolCall]]:
        """Return the rest at the end of the stream. A complete call without its closing tag counts as a call."""
        held, self._buffer = self._buffer, ""
        call = parse_tool_call(held if self.forced else held.removeprefix(OPEN_TAG)) if held else None
        return ("", [call]) if call else (held, [])
