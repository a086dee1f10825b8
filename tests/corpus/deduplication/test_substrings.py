"""Substring deduplication equals a reference that compares every window, and cuts between characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.corpus.repeats import deduplicate_substrings

from whorl.corpus.deduplication import substrings
from whorl.corpus.deduplication.substrings import repeated_spans
from whorl.errors import ConfigError, DataError

TEXTS = st.lists(st.text("abé字", max_size=40), max_size=5)


def reference(texts: list[str], n: int) -> list[str]:
    """Mark windows of a dictionary of first occurrences, byte by byte."""
    encoded = [text.encode() for text in texts]
    first: dict[bytes, tuple[int, int]] = {}
    stays, goes = set[tuple[int, int]](), set[tuple[int, int]]()
    for d, text in enumerate(encoded):
        for p in range(len(text) - n + 1):
            at = first.setdefault(text[p : p + n], (d, p))
            if at != (d, p):
                stays |= {(at[0], at[1] + i) for i in range(n)}
                goes |= {(d, p + i) for i in range(n)}
    out = []
    for d, chars in enumerate(texts):
        kept, at = "", 0
        for char in chars:
            own = {(d, at + i) for i in range(len(char.encode()))}
            kept += "" if own <= goes - stays else char
            at += len(own)
        out.append(kept)
    return out


@given(TEXTS, st.integers(1, 40))
def test_substrings_equal_reference(texts: list[str], n: int) -> None:
    assert deduplicate_substrings(texts, n)[0] == reference(texts, n)


@given(TEXTS, st.integers(1, 20))
def test_spans_name_equal_bytes_that_stay(texts: list[str], n: int) -> None:
    got, spans = deduplicate_substrings(texts, n)
    removed = [bytearray(len(text.encode())) for text in texts]
    for d, a, b in zip(spans.document.tolist(), spans.start.tolist(), spans.end.tolist(), strict=True):
        assert 0 <= a < b <= len(removed[d]) and not any(removed[d][a:b])
        removed[d][a:b] = b"\1" * (b - a)
    assert spans.n_bytes == sum(map(sum, removed))
    assert spans.n_bytes == sum(len(t.encode()) for t in texts) - sum(len(t.encode()) for t in got)
    for i in range(len(spans)):
        own = texts[int(spans.document[i])].encode()[int(spans.start[i])]
        there, at = int(spans.matched_document[i]), int(spans.matched_start[i])
        assert texts[there].encode()[at] == own and not removed[there][at]


@given(TEXTS, st.integers(1, 20))
def test_every_window_of_the_input_still_occurs(texts: list[str], n: int) -> None:
    got = [text.encode() for text in deduplicate_substrings(texts, n)[0]]
    for text in texts:
        content = text.encode()
        for p in range(len(content) - n + 1):
            if sum(window_count(other.encode(), content[p : p + n]) for other in texts) > 1:
                assert any(content[p : p + n] in other for other in got)


def window_count(text: bytes, window: bytes) -> int:
    return sum(text.startswith(window, p) for p in range(len(text)))


def test_a_million_equal_bytes_leave_one_window() -> None:
    assert deduplicate_substrings(["a" * 1_000_000], 50)[0] == ["a" * 50]


def test_substrings_refuse_wrong_length_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="min_bytes is 0"):
        repeated_spans(["a"], 0)
    monkeypatch.setattr(substrings, "MAX_BYTES", 3)
    with pytest.raises(DataError, match="4 bytes"):
        repeated_spans(["ab", "cd"])
