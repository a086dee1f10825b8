"""Function calls: asked for by grammar, or found in what the model wrote.

tool_choice "required", or one function by name: the output is constrained to the JSON of a call (`forced`), so it is
one whatever the model is. "auto": the model was shown the tools by its chat template and may write calls as Hermes
models do,

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

which `Calls` takes out of the text as it streams. What may be the beginning of a tag is held back until it is known;
what turns out to be no call, for it is no JSON or names nothing, is text again: nothing that a model wrote is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from whorl.engine.request import Grammar
from whorl.serve.api.protocol import Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A function with its arguments, as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def said(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def forced(tools: Sequence[Tool], choice: str | ToolChoice | None) -> Grammar | None:
    """The grammar of a call that must come, or None where none must."""
    if isinstance(choice, ToolChoice):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice == "required":
        wanted = list(tools)
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
        for tool in wanted
    ]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return Grammar(json_schema=orjson.dumps(schema).decode())


def read(text: str) -> Call | None:
    """The call that `text` is, if it is one."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return Call(found["name"], arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode())


class Calls:
    """Takes calls out of a text that comes in pieces.

    whole: the text as such is a call (it was forced).
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole, self._held = whole, ""

    def add(self, text: str) -> tuple[str, list[Call]]:
        """(text that can be shown, calls that are complete)."""
        self._held += text
        if self.whole:
            return "", []
        shown = ""
        calls: list[Call] = []
        while (at := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, at)
            if end < 0:
                shown += self._held[:at]
                self._held = self._held[at:]
                return shown, calls
            call = read(self._held[at + len(OPEN) : end])
            rest = end + len(CLOSE)
            shown += self._held[:at] if call else self._held[:rest]
            calls += [call] if call else []
            self._held = self._held[rest:].lstrip("\n") if call else self._held[rest:]
        keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
        cut = len(self._held) - keep
        shown, self._held = shown + self._held[:cut], self._held[cut:]
        return shown, calls

    def end(self) -> tuple[str, list[Call]]:
        """The rest, once nothing more comes: a call that lacks its closing tag is one if it is whole."""
        held, self._held = self._held, ""
        call = read(held if self.whole else held.removeprefix(OPEN)) if held else None
        return ("", [call]) if call else (held, [])
