"""Tool calls in the text of a reply: found in any pieces, and never by a tag inside of a string."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.tokens.chat.tool_calls import (
    CLOSE_TAG,
    CLOSE_THINK,
    OPEN_TAG,
    OPEN_THINK,
    ParsedToolCall,
    ToolCallParser,
    parse_tool_call,
)

CALL = f'{OPEN_TAG}{{"name": "up", "arguments": {{"x": 1}}}}{CLOSE_TAG}'
QUOTED = f'{OPEN_TAG}{{"name": "say", "arguments": {{"text": "{CLOSE_TAG} \\" {OPEN_TAG}{{"}}}}{CLOSE_TAG}'
PIECES = [
    CALL, QUOTED, f"{OPEN_TAG}no{CLOSE_TAG}", "a <", "tool", " b\n", "\n", OPEN_TAG, CLOSE_TAG, "é", "{", '"', "}",
    OPEN_THINK, CLOSE_THINK,
]  # fmt: skip


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


QUOTED_CALL = ("say", json.dumps({"text": f'{CLOSE_TAG} " {OPEN_TAG}{{'}, separators=(",", ":")))
THOUGHT = f"{OPEN_THINK}shall I write {CALL}?{CLOSE_THINK}"
NO_CALL, CUT_OFF = f"{OPEN_TAG}nothing{CLOSE_TAG} a <tool", f'{OPEN_TAG}{{"name": "up"'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"so: {CALL}\n{CALL}end", "so: end", [("up", '{"x":1}')] * 2),
        (NO_CALL, NO_CALL, []),
        (CUT_OFF + "}", "", [("up", "{}")]),  # truncated before the closing tag
        (CUT_OFF, CUT_OFF, []),
        (QUOTED, "", [QUOTED_CALL]),
        (f"{QUOTED}\n{CALL}", "", [QUOTED_CALL, ("up", '{"x":1}')]),
        (
            f"the tag {OPEN_TAG} starts a call: {CALL}",
            f"the tag {OPEN_TAG} starts a call: ",
            [("up", '{"x":1}')],
        ),
        (CUT_OFF + CALL, CUT_OFF, [("up", '{"x":1}')]),
        (f"{OPEN_TAG}[{CALL}", f"{OPEN_TAG}[", [("up", '{"x":1}')]),
        (f"{OPEN_TAG}{{'name': 'up'}}{CLOSE_TAG}", f"{OPEN_TAG}{{'name': 'up'}}{CLOSE_TAG}", []),
        (f"{THOUGHT}{CALL}", THOUGHT, [("up", '{"x":1}')]),
        (THOUGHT[:-1], THOUGHT[:-1], []),
    ],
)
def test_parser_extracts_calls_and_keeps_other_text(text: str, shown: str, calls: Any) -> None:
    assert parse_parts([text]) == (shown, calls)


def test_line_between_two_calls_is_no_content() -> None:
    assert parse_parts([*f"{CALL}\n{QUOTED}\n"])[0] == parse_parts([f"{CALL}\n{QUOTED}\n"])[0] == ""


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": 3}', '{"name": ""}', "1"])
def test_parse_tool_call_rejects_other_json(text: str) -> None:
    assert parse_tool_call(text) is None


@pytest.mark.parametrize(
    "piece", [OPEN_TAG + "{", OPEN_TAG + '{"', OPEN_TAG + '{"a": [', OPEN_TAG + '{"\\"', "[" * 40]
)
def test_parse_time_is_linear_in_broken_calls(piece: str) -> None:
    text = OPEN_TAG + '{"a": ' + piece * 20_000
    began = time.process_time()
    shown, calls = parse_parts([text[i : i + 40] for i in range(0, len(text), 40)])
    assert (shown, calls) == (text, []) and time.process_time() - began < 5
