"""C4's rules of lines against a plain reference, against the measure that counts the lines, and over files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.corpus.test_rewriting import make_documents, run

from whorl.corpus.deduplication.lines import LineConfig
from whorl.corpus.measures.measure import measure_texts
from whorl.corpus.provenance.explain import explain
from whorl.corpus.rewrite import RewriteConfig
from whorl.corpus.rewrite_stages import C4LineConfig, bad_line, without_bad_lines

PIECES = (
    "word", "a", "naïve", "日本", "JavaScript", "Use cookies", "privacy policy", "x" * 1001, "[1]", "[citation needed]",
    ".", "?", "!", '"', "'", "...", "…", " ", "  ", "\t", "\n", "\n\n", "\r\n", "\u2028",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map(lambda parts: " ".join(parts).replace(" .", "."))


@given(TEXTS)
def test_kept_lines_are_those_that_the_measure_counts(text: str) -> None:
    kept, gone = without_bad_lines(text, C4LineConfig())
    assert len(kept.splitlines()) == measure_texts("rules", [text])[0]["c4_lines"]
    assert without_bad_lines(kept, C4LineConfig()) == (kept, {})
    assert sorted(kept.splitlines(True) + [line for some in gone.values() for line in some]) == sorted(
        text.splitlines(True)
    )


def reference(line: str, config: C4LineConfig) -> bool:
    """Return whether a line without marks of citations stays."""
    end, lower = line.rstrip()[-1:], line.lower()
    phrases = (
        "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
    )  # fmt: skip
    of_words = (
        len(line.split()) >= config.min_words
        and all(len(word) <= config.max_word_characters for word in line.split())
        and (not config.terminal_punctuation or (end in set(".?!\"'") and not line.rstrip().endswith("...")))
    )
    no_spaces = sum(c in "日本" for c in line.strip()) > 0.3 * len(line.strip())
    return (
        (of_words or (no_spaces and bool(line.strip())))
        and not (config.javascript and "javascript" in lower)
        and not (config.policies and any(phrase in lower for phrase in phrases))
    )


@given(
    st.lists(st.sampled_from([p for p in PIECES if "[" not in p and "\n" not in p]), max_size=9).map(" ".join),
    st.builds(
        C4LineConfig, terminal_punctuation=st.booleans(), min_words=st.integers(1, 5), javascript=st.booleans(),
        policies=st.booleans(), max_word_characters=st.sampled_from([4, 1000]),
    ),
)  # fmt: skip
def test_each_rule_equals_reference(line: str, config: C4LineConfig) -> None:
    if len(line.splitlines()) <= 1:
        assert (bad_line(line, config) == "") == reference(line, config)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("A sentence of five words.", ""), ('He said: "It is so."', ""), ("A claim with its source.[12]", ""),
        (" \t", "blank"), ("Home | Shop | Contact", "no_terminal_punctuation"),
        ("Read more about this...", "no_terminal_punctuation"),
        ("Read more about this…", "no_terminal_punctuation"), ("Add now!", "few_words"),
        ("Please enable JavaScript to continue.", "javascript"),
        ("By staying you accept our Terms of Use.", "policy"),
        ("See " + "w" * 1001 + " for more.", "long_word"),
    ],
)  # fmt: skip
def test_first_rule_that_applies_is_named(line: str, rule: str) -> None:
    assert bad_line(line, C4LineConfig()) == rule


def test_line_ends_stay_and_settings_are_checked() -> None:
    text = "First line of text.\r\nMenu\nLast line of text."
    assert without_bad_lines(text, C4LineConfig())[0] == "First line of text.\r\nLast line of text."
    assert without_bad_lines(text, C4LineConfig(terminal_punctuation=False, min_words=1)) == (text, {})
    with pytest.raises(ValidationError, match="min_words"):
        C4LineConfig(min_words=0)


def test_counts_over_files_and_why(tmp_path: Path) -> None:
    body = "Ann wrote this line of text."
    texts = [
        f"Menu\n{body}\nGo!\n\nPlease enable Javascript now.", body, f"{body}\nWe use cookies on this page.",
    ]  # fmt: skip
    files = make_documents(tmp_path, texts)
    config = RewriteConfig(c4_lines=C4LineConfig(), lines=LineConfig())
    results: list[tuple[list[str], dict[str, Any]]] = [run(tmp_path, files, config, n) for n in (1, 2)]
    assert results[0] == results[1]
    found, made = results[0]
    assert [text.strip() for text in found] == [body, "", ""]  # of equal lines, the first stays
    assert {kind: (n["documents"], n["count"]) for kind, n in made["edits"].items()} == {
        "c4_blank": (1, 1), "c4_few_words": (1, 1), "c4_javascript": (1, 1),
        "c4_no_terminal_punctuation": (1, 1), "c4_policy": (1, 1), "line": (2, 2),
    }  # fmt: skip
    assert made["edits"]["c4_policy"]["bytes"] == len("We use cookies on this page.")
    name = pq.read_table(files[0])["id"].to_pylist()[0]
    assert {e["kind"] for e in explain(name, tmp_path / "out1").edits} == {
        "c4_blank", "c4_few_words", "c4_javascript", "c4_no_terminal_punctuation",
    }  # fmt: skip
