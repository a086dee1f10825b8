"""The values that the rules of C4, Gopher and FineWeb compare with thresholds, from one pass over the characters.

Sources: Raffel et al. 2020 (C4), Rae et al. 2021 (Gopher, appendix A1), Penedo et al. 2024 (FineWeb). A word is a run of
characters that are not white space. In scripts that write no spaces between words (Chinese, Japanese, Thai, ...) the values
of words and line ends mean little, so filters skip their rules for such texts (`filters.py`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.measures import repetition
from whorl.corpus.measures.measure import Columns, Measure, Texts
from whorl.corpus.measures.scan import LETTER, TERMINAL, WORDLIKE, Ints, Scan, scans, word_hash

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
POLICIES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
MAX_WORD_CHARACTERS, MIN_LINE_WORDS, SHORT_LINE_CHARACTERS = 1000, 3, 30
MAX_UNSPACED = 0.3  # of the characters of a text, or a line, to which rules of words and line ends apply
COLUMNS = {
    "unspaced_fraction": "float64",  # characters of scripts without spaces between words
    "n_words": "int64",
    "n_wordlike": "int64",  # words with a character that is no punctuation
    "mean_word_length": "float64",  # characters, of these words
    "hash_ratio": "float64",  # number signs per word
    "ellipsis_ratio": "float64",  # per word
    "bullet_line_fraction": "float64",
    "ellipsis_line_fraction": "float64",
    "letter_word_fraction": "float64",  # words with a letter
    "stop_words": "int64",  # how many of STOP_WORDS occur
    "c4_lines": "int64",  # lines that C4 keeps
    "c4_sentences": "int64",  # in these lines
    "c4_lorem_ipsum": "bool",
    "c4_curly_bracket": "bool",
    "terminal_line_fraction": "float64",  # non-blank lines that end with the end of a sentence
    "short_line_fraction": "float64",  # non-blank lines of at most 30 characters
    "line_feeds_per_word": "float64",
    **repetition.COLUMNS,
}


def measure_rules(batch: Texts) -> Columns:
    """Return `COLUMNS` of a batch."""
    out = {name: np.zeros(len(batch), bool if kind == "bool" else kind) for name, kind in COLUMNS.items()}
    for indices, scan in scans(batch):
        found = {
            "unspaced_fraction": scan.unspaced(scan.begin, scan.end),
            **_gopher(scan),
            **_c4(scan),
            **_fineweb(scan),
            **repetition.repetition(scan),
        }
        for name, values in found.items():
            out[name][indices] = values
    return out


def _gopher(scan: Scan) -> dict[str, NDArray[Any]]:
    texts, n_words = scan.texts, np.diff(scan.first_word)
    at_least_one = np.maximum(n_words, 1)
    wordlike = (scan.word_classes & WORDLIKE) != 0
    n_wordlike = scan.sum_words(wordlike)
    characters = scan.sum_words((scan.word_end - scan.word_begin) * wordlike)
    n_lines = np.maximum([len(text.splitlines()) for text in texts], 1)
    first = scan.codes[scan.word_begin]
    bullets = scan.starts_line & ((first == ord("-")) | (first == ord("•")))
    ends = np.flatnonzero(scan.ends_line)
    ellipses = np.zeros(len(first), bool)
    ellipses[ends] = _ends_with_ellipsis(scan, scan.word_end[ends])
    stop_words = np.zeros(len(texts), np.int64)
    for word in _stop_words():
        stop_words[np.unique(scan.word_text[scan.words == word])] += 1
    n_ellipses = np.array([text.count("...") + text.count("…") for text in texts])
    return {
        "n_words": n_words,
        "n_wordlike": n_wordlike,
        "mean_word_length": characters / np.maximum(n_wordlike, 1),
        "hash_ratio": np.array([text.count("#") for text in texts]) / at_least_one,
        "ellipsis_ratio": n_ellipses / at_least_one,
        "bullet_line_fraction": scan.sum_words(bullets) / n_lines,
        "ellipsis_line_fraction": scan.sum_words(ellipses) / n_lines,
        "letter_word_fraction": scan.sum_words((scan.word_classes & LETTER) != 0) / at_least_one,
        "stop_words": stop_words,
    }


@cache
def _stop_words() -> tuple[np.uint64, ...]:
    return tuple(np.uint64(word_hash(word)) for word in STOP_WORDS)


def _ends_with_ellipsis(scan: Scan, end: Ints) -> NDArray[np.bool_]:
    codes = scan.codes
    dots = (codes[end - 1] == 46) & (codes[end - 2] == 46) & (codes[end - 3] == 46)
    found: NDArray[np.bool_] = (dots & (end >= 3)) | (codes[end - 1] == 0x2026)
    return found


def _c4(scan: Scan) -> dict[str, NDArray[Any]]:
    """Lines that end a sentence and have three words or more, or whose script writes no spaces.

    Lines of policies and of Javascript are left out.
    """
    codes, texts = scan.codes, scan.texts
    last = np.flatnonzero(scan.ends_line)  # word at the end of each non-blank line
    first = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    begin, end = scan.word_begin[first], scan.word_end[last]
    text = scan.word_text[last]
    final = codes[end - 1]
    kept = np.isin(final, [ord(c) for c in ".?!\"'"])
    kept &= (final != 46) | ~_ends_with_ellipsis(scan, end)
    for i in np.flatnonzero(final == ord("]")).tolist():
        line = texts[text[i]][begin[i] - scan.begin[text[i]] : end[i] - scan.begin[text[i]]]
        line = CITATION.sub("", line)
        kept[i] = line.endswith((".", "?", "!", '"', "'")) and not line.endswith("...")
    kept &= last - first + 1 >= MIN_LINE_WORDS
    long = scan.word_end - scan.word_begin > MAX_WORD_CHARACTERS
    if long.any():
        kept &= ~np.logical_or.reduceat(long, first)
    kept |= scan.unspaced(begin, end) > MAX_UNSPACED
    flags = {"lorem ipsum": np.zeros(len(texts), bool), "{": np.zeros(len(texts), bool)}
    for i, original in enumerate(texts):
        lower = original.lower()
        listed = [p for p in (*POLICIES, "javascript") if p in lower] if _may_match(lower) else []
        listed += [p for p in flags if p in lower]
        if listed:  # rare in prose
            _check_lines(original, scan, i, (text == i).nonzero()[0], begin, end, kept, listed, flags)
    sentence = (scan.classes[scan.word_end - 1] & TERMINAL) != 0
    quoted = np.isin(codes[scan.word_end - 1], [ord(c) for c in "\"')]”’»"])
    sentence |= quoted & ((scan.classes[np.maximum(scan.word_end - 2, 0)] & TERMINAL) != 0)
    sentence[last] = True
    sentences = np.add.reduceat(sentence.astype(np.int64), first) if len(first) else first
    return {
        "c4_lines": np.bincount(text, kept, minlength=len(texts)),
        "c4_sentences": np.bincount(text, sentences * kept, minlength=len(texts)),
        "c4_lorem_ipsum": flags["lorem ipsum"],
        "c4_curly_bracket": flags["{"],
    }


def _may_match(lower: str) -> bool:
    return "cookie" in lower or "javascript" in lower or "terms of use" in lower or "privacy policy" in lower


def _check_lines(
    original: str, scan: Scan, i: int, lines: Ints, begin: Ints, end: Ints, kept: NDArray[np.bool_],
    listed: list[str], flags: dict[str, NDArray[np.bool_]],
) -> None:  # fmt: skip
    """Apply the rules of words in lines to the text `i`, as far as its lines are kept."""
    for k in lines[kept[lines]].tolist():
        line = original[begin[k] - scan.begin[i] : end[k] - scan.begin[i]].lower()
        if not any(p in line for p in listed):
            continue
        if "lorem ipsum" in line:
            flags["lorem ipsum"][i] = True
            return
        if "javascript" in line:
            kept[k] = False
        elif "{" in line:
            flags["{"][i] = True
            return
        elif any(p in line for p in POLICIES):
            kept[k] = False


def _fineweb(scan: Scan) -> dict[str, NDArray[Any]]:
    feeds, n_texts = scan.line_feeds, len(scan.texts)
    begin = np.concatenate([[0], feeds[:-1] + 1])
    filled = np.diff(np.searchsorted(scan.word_begin, np.append(begin, len(scan.codes)))) > 0
    begin, end = begin[filled], feeds[filled]
    text = np.searchsorted(scan.end, begin, side="right")
    n_lines = np.maximum(np.bincount(text, minlength=n_texts), 1)
    terminal = (scan.classes[end - 1] & TERMINAL) != 0
    n_feeds = np.bincount(np.searchsorted(scan.end, feeds), minlength=n_texts) - 1
    return {
        "terminal_line_fraction": np.bincount(text, terminal, minlength=n_texts) / n_lines,
        "short_line_fraction": np.bincount(text, end - begin <= SHORT_LINE_CHARACTERS, minlength=n_texts)
        / n_lines,
        "line_feeds_per_word": n_feeds / np.maximum(np.diff(scan.first_word), 1),
    }


RULES = Measure(
    "rules",
    2,
    "Raffel et al. 2020, C4; Rae et al. 2021, Gopher, appendix A1; Penedo et al. 2024, FineWeb",
    COLUMNS,
    lambda: measure_rules,
)
