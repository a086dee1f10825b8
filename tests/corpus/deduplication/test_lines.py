"""Line-level deduplication equals a reference that counts lines in a dictionary."""

from __future__ import annotations

import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.corpus.repeats import deduplicate_lines

from whorl.corpus.deduplication import lines
from whorl.corpus.deduplication.lines import LineConfig, line_hashes

TEXTS = st.lists(st.text("aAﬁé字 \t\r\n\n", max_size=30), max_size=5)
CONFIGS = st.builds(
    LineConfig,
    keep=st.sampled_from(["first", "none"]),
    normalization=st.sampled_from(["none", "lower", "nfkc_lower"]),
    min_characters=st.integers(1, 3),
)


def reference(texts: list[str], config: LineConfig) -> tuple[list[str], list[int]]:
    def key(line: str) -> str | None:
        if config.normalization == "nfkc_lower":
            line = unicodedata.normalize("NFKC", line)
        words = (line if config.normalization == "none" else line.lower()).split()
        return " ".join(words) if len("".join(words)) >= config.min_characters else None

    counts = Counter(key(line) for text in texts for line in text.split("\n"))
    seen, out, removed = set[str | None](), [], []
    for text in texts:
        kept = []
        for line in text.split("\n"):
            name = key(line)
            if name is None or counts[name] == 1 or (config.keep == "first" and name not in seen):
                kept.append(line)
            seen.add(name)
        out.append("\n".join(kept))
        removed.append(text.count("\n") + 1 - len(kept))
    return out, removed


@given(TEXTS, CONFIGS)
def test_lines_equal_reference_with_counts(texts: list[str], config: LineConfig) -> None:
    want, counts = reference(texts, config)
    got, n_removed, n_bytes = deduplicate_lines(texts, config)
    assert got == want and n_removed == counts
    assert len(line_hashes(texts, config)[0]) == sum(text.count("\n") + 1 for text in texts)
    assert n_bytes == sum(len(t.encode()) for t in texts) - sum(len(t.encode()) for t in want)


def test_line_blocks_are_equal_and_long_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x" * 90, "ab\ncd\nab", "x" * 90, "cd\nzz"]
    assert deduplicate_lines(texts)[0] == ["x" * 90, "ab\ncd", "", "zz"]
    whole = lines.TextBlock.blocks
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)
    monkeypatch.setattr(lines.TextBlock, "blocks", lambda self: whole(self, 64))
    assert deduplicate_lines(texts)[0] == ["x" * 90, "ab\ncd", "x" * 90, "zz"]
