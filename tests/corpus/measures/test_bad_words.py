"""Bad words of a list are counted as whole words, in any case, and inside words only without spaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from whorl.corpus.measures.measure import measure_texts
from whorl.errors import ConfigError


def counts(folder: Path, words: str, texts: list[str]) -> list[int]:
    path = folder / "list.txt"
    path.write_text(words, encoding="utf-8")
    return [row["words"] for row in measure_texts("bad_words", texts, str(path))]


def test_words_and_phrases_are_counted_whole(tmp_path: Path) -> None:
    texts = [
        "A Darn day, DARN!", "darning socks", "what  the\nheck", "the what heck", "naïve", "", "これは馬鹿です",
        "c++ rocks",
    ]  # fmt: skip
    found = counts(tmp_path, "darn\nwhat the heck\n\n馬鹿\nC++\ndarn it\n", texts)
    assert found == [2, 0, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(("content", "message"), [(b" \n\n", "is empty"), (b"\xff\xfe", "cannot be read")])
def test_unusable_list_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        measure_texts("bad_words", ["a"], str(tmp_path / "list.txt"))
    with pytest.raises(ConfigError, match="needs a model"):
        measure_texts("bad_words", ["a"])
