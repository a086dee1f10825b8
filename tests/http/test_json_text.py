"""Bounds on JSON text: structural characters outside of strings are counted, whatever the strings contain."""

from __future__ import annotations

import json

import pytest

from whorl.http.json_text import MAX_CONTAINERS, MAX_FIELDS, MAX_ITEMS, MAX_STRINGS, json_text_problem

BAIT = '[{:,"\\'


@pytest.mark.parametrize(
    "text", [BAIT * 60_000, "\\" * 70_001, '"' * 70_000, '\\\\"[' * 60_000, "é😀[" * 60_000]
)
def test_characters_within_strings_do_not_count(text: str) -> None:
    for ascii_only in (True, False):
        assert json_text_problem(json.dumps({"a": [text, text[1:]]}, ensure_ascii=ascii_only).encode()) == ""


@pytest.mark.parametrize(
    ("body", "n", "words"),
    [
        (b"[%s]", MAX_CONTAINERS, "lists and objects"),
        (b"{%s}", MAX_FIELDS, "fields"),
        (b"[%s]", MAX_STRINGS, "strings"),
        (b"[%s]", MAX_ITEMS, "values"),
    ],
)
def test_each_bound_is_exact(body: bytes, n: int, words: str) -> None:
    item = {"lists and objects": b"[]", "fields": b'"":1', "strings": b'","', "values": b"1"}[words]
    n_inside = (
        n - (words == "lists and objects") + (words == "values")
    )  # the outer list; commas between the values
    assert json_text_problem(body % b",".join([item] * n_inside)) == ""
    assert words in json_text_problem(body % b",".join([item] * (n_inside + 1)))
