"""Tool calls in the text of a model, in the format of Hermes models:

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

`describe_tools` gives the tools to a model whose prompt has no place for them, and `tool_response` a result.
`ToolCallParser` removes calls from streamed text. Text that may be the beginning of a tag is buffered. A block that is
not a valid call is returned as text, so no output is lost.

The subtle point is the end of a call. An argument may contain the text `</tool_call>`, so the end is found by decoding one
JSON object, and not by searching for the closing tag. An opening tag without an object is text, and the search continues
after it. A tag in the reasoning that starts a reply (`<think> ... </think>`) is text too.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from whorl.tokens.chat.builtin_templates import TOOLS_END, TOOLS_HEAD
from whorl.tokens.chat.messages import canonical_tools

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_int=float)  # `int` refuses numbers of many digits
_LONGEST_ESCAPE = 8  # characters at the end of a text that more text may complete: "\\u00e9", "false"


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


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a system message that describes tools, as the built-in chat templates do."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in canonical_tools(tools))
    return TOOLS_HEAD + lines + TOOLS_END


def tool_response(text: str) -> str:
    """Return the result of a call for a message of the user, as the templates of Hermes models write it."""
    return f"<tool_response>\n{text}\n</tool_response>"


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

    forced: the whole text is one call (the grammar forced it). malformed: number of opening tags that were text.
    """

    def __init__(self, forced: bool = False) -> None:
        self.forced, self.malformed = forced, 0
        self._buffer, self._n_tried = "", 0
        self._part: Literal["start", "thought", "answer", "after call"] = "start"

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Add text. Returns (text to show, complete calls)."""
        self._buffer += text
        # An incomplete object is decoded again only when it may have ended, or has doubled.
        if self.forced or not ({"}", ">"} & set(text) or len(self._buffer) >= 2 * self._n_tried):
            return "", []
        return self._read(is_end=False)

    def finish(self) -> tuple[str, list[ParsedToolCall]]:
        """Return the rest at the end of the stream. A complete call without its closing tag counts as a call."""
        if not self.forced:
            return self._read(is_end=True)
        call = parse_tool_call(self._buffer)
        return ("", [call]) if call else (self._buffer, [])

    def _read(self, is_end: bool) -> tuple[str, list[ParsedToolCall]]:
        shown, calls = self._read_thought(is_end), list[ParsedToolCall]()
        self._n_tried = 0
        while self._part in ("answer", "after call"):
            if self._part == "after call":
                self._buffer = self._buffer.lstrip("\n")
                if not self._buffer:
                    break
                self._part = "answer"
            if (at := self._buffer.find(OPEN_TAG)) < 0:
                return shown + self._take_before(OPEN_TAG, is_end), calls
            found = _read_block(self._buffer, at + len(OPEN_TAG), is_end)
            if found is None:
                shown, self._buffer = shown + self._buffer[:at], self._buffer[at:]
                self._n_tried = len(self._buffer)
                break
            call, end = found
            shown += self._buffer[: at if call else end]
            self._buffer = self._buffer[end:]
            if call is None:
                self.malformed += 1
            else:
                calls.append(call)
                self._part = "after call"
        return shown, calls

    def _read_thought(self, is_end: bool) -> str:
        """Return the text of the reasoning that starts the reply, as far as it is known."""
        begin = self._buffer.lstrip()
        if self._part == "start" and (is_end or begin == OPEN_THINK or not OPEN_THINK.startswith(begin)):
            self._part = "thought" if begin.startswith(OPEN_THINK) else "answer"
        if self._part != "thought":
            return ""
        end = self._buffer.find(CLOSE_THINK)
        if end < 0:
            return self._take_before(CLOSE_THINK, is_end)
        end += len(CLOSE_THINK)
        thought, self._buffer, self._part = self._buffer[:end], self._buffer[end:], "answer"
        return thought

    def _take_before(self, tag: str, is_end: bool) -> str:
        """Take the buffered text, without an end that may be the beginning of `tag`."""
        lengths = () if is_end else range(len(tag) - 1, 0, -1)
        cut = len(self._buffer) - next((n for n in lengths if self._buffer.endswith(tag[:n])), 0)
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text


def _read_block(text: str, start: int, is_end: bool) -> tuple[ParsedToolCall | None, int] | None:
    """Return (call, its end) of the block whose opening tag ends at `start`; (None, start) if it has no call.

    Returns None if more text decides it.
    """
    begin = _end_of_space(text, start)
    try:
        end = _DECODER.raw_decode(text, begin)[1] if text.startswith("{", begin) else begin
    except RecursionError:
        return None, start
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos + _LONGEST_ESCAPE > len(text)
        return None if is_cut and not is_end else (None, start)
    after = _end_of_space(text, end)
    is_closed = text.startswith(CLOSE_TAG, after)
    if not is_closed and not is_end and CLOSE_TAG.startswith(text[after:]):
        return None
    if call := parse_tool_call(text[begin:end]):
        if is_closed:
            return call, after + len(CLOSE_TAG)
        if CLOSE_TAG.startswith(text[after:]):
            return call, len(text)
    return None, start


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


@dataclass(frozen=True)
class ParsedReply:
    """text: the reply without its calls. malformed: number of opening tags without a valid call."""

    text: str
    calls: list[ParsedToolCall]
    malformed: int


def parse_reply(text: str, parser: ToolCallParser | None = None) -> ParsedReply:
    """Return the tool calls of a whole reply, and its other text. parser: a new one."""
    parser = parser or ToolCallParser()
    (shown, calls), (rest, more) = parser.feed(text), parser.finish()
    return ParsedReply(shown + rest, calls + more, parser.malformed)
