"""Repetition and variety equal their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.evals.grading.repetition import (
    MAX_PERIOD,
    compression_ratio,
    distinct_n,
    loop_share,
    repeated_lines,
    repetition,
    words_of,
)  # fmt: skip


def test_distinct_n_equals_the_definition() -> None:
    words = words_of("The cat the cat sat")
    assert distinct_n(words, 1) == 3 / 5 and distinct_n(words, 2) == 3 / 4 and distinct_n(words, 9) == 1
    assert words_of("我是 cat") == ["我", "是", "cat"] and words_of("a b c", 2) == ["a", "b"]
    with pytest.raises(ConfigError, match="n of 1 or more"):
        distinct_n(words, 0)


@given(st.lists(st.sampled_from("ab"), max_size=14))
def test_loop_share_equals_brute_force(words: list[str]) -> None:
    longest = 0
    for i in range(len(words)):
        for j in range(i + 1, len(words) + 1):
            part = words[i:j]
            for p in range(1, min(MAX_PERIOD, len(part) // 3) + 1):
                if all(part[k] == part[k + p] for k in range(len(part) - p)):
                    longest = max(longest, len(part))
    assert loop_share(words) == (longest / len(words) if words else 0)


def test_outcomes_and_lines() -> None:
    text = "It was a dark night and the rain fell in torrents."
    assert repetition("", text).outcome == "right"
    assert repetition("", text + " I am. I am. I am." * 20).outcome == "wrong"
    assert repetition("", " ").outcome == "not_found"
    assert repeated_lines("a\n\nb\na\na") == 0.5 and repeated_lines("") == 0
    assert compression_ratio("ab" * 500) > 20 and compression_ratio("") == 0
    assert repetition("", "a b " * 300, limit=0).scores["loop"] == 1
