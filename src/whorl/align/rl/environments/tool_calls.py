"""Tool calls in the text of a model, in the format of Hermes models:

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

`ToolCallParser` removes these from streamed text. Text that may be the beginning of a tag is buffered. A block that is
not a valid call is returned as text, so no output is lost.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

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


def find_tool_calls(text: str) -> tuple[list[ParsedToolCall], int]:
    """Return the calls of a whole text, and the number of blocks that are not valid calls."""
    parser = ToolCallParser()
    shown, calls = parser.feed(text)
    rest, more = parser.finish()
    return [*calls, *more], (shown + rest).count(OPEN_TAG)
