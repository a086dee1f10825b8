"""The final answer of a completion: where it is stated, and its possible readings.

Forms, from the most explicit to the least. Within a form the last statement counts, since a chain of thought ends with
its result:

    tags      <answer>X</answer>
    mark      #### X                                  (GSM8K, arXiv 2110.14168)
    boxed     \\boxed{X}                               (MATH, arXiv 2103.03874)
    stated    the answer is X; **Answer:** X; X is the correct answer
    bold      **X** in the last line
    line      the last line; a short first line that an explanation follows; the whole text

A statement has several readings, because an answer may contain the characters that end sentences: of "The answer is
Monsters, Inc. It is a comedy." the readings are the rest of the line and its beginning up to the sentence's end. An answer
is right if one reading equals the gold answer (`same_answer`). Readings are parts of one statement, so an answer that lists
all options equals none of them. Two statements that "or" joins are one statement of two answers.

The text after `</think>` counts, and nothing counts if a `<think>` is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from whorl.evals.grading.values import plain_fractions, read_number

Form = Literal["tags", "mark", "boxed", "stated", "bold", "line", "none"]
EXPLICIT: tuple[Form, ...] = ("tags", "mark", "boxed", "stated")

_SPEAKER = r"(?:\s+(?:to|for|of|here|in)\b[^\n.!?:=]{0,80}?)?"
_STATED = re.compile(
    rf"\b(?:answers?|(?:correct|right|best|final)\s+(?:option|choice|statement|result))\b{_SPEAKER}[*_]{{0,3}}\s{{0,4}}"
    r"(?:\b(?:is|are|was|(?:must|would|should|will)\s+be)\b\s{0,4}(?:(?:therefore|thus|hence|then|simply|clearly)\b,?)?"
    r"(?:\s{0,4}[*_]{0,3}\s{0,4}[:=](?:[*_]{2,3}(?=\s|$))?)?(?!\s{0,4}not\b)|[*_]{0,3}\s{0,4}[:=](?:[*_]{2,3}(?=\s|$))?)"
    r"|^\W{0,8}(?:final\s+)?answer\W{0,4}$",
    re.IGNORECASE | re.MULTILINE,
)
_IS_THE_ANSWER = re.compile(r"\s(?:is|was)\s+(?:\w+\s+)?the\s+(?:\w+\s+){0,2}answer\b", re.IGNORECASE)
_CONCLUSION = re.compile(
    r"^(?:and|so|thus|therefore|hence|then|consequently|finally|in\s+conclusion|overall|final)\b[,:]?\s+",
    re.IGNORECASE,
)
_MARK = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[*_\"')\]]{0,4}\s+(?=\S)")
_REASON = re.compile(
    r"[,;(]?\s{1,4}(?:because|since|as\s+the|due\s+to|which|where|so)\b|\s[-–—]{1,3}\s", re.IGNORECASE
)
_TRUTH = re.compile(r"(yes|no|true|false|valid|invalid)\b\s*[,.;:!–—-]", re.IGNORECASE)
_LIST_MARKER = re.compile(r"^\s*(?:[-*•+]|\(?\d{1,3}[.)])\s+", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?!\s)([^*\n]{1,400})\*\*|__(?!\s)([^_\n]{1,400})__")
_PAIRS = ("**", "__", "*", "_", "``", "`", '"', "'", "$$", "$")
_OR = r"\s*\$?[*_]{0,3}\s{0,4}(?:or|and|,|/)\s{0,4}[*_]{0,3}\$?\s*"
_ALTERNATIVE = re.compile(
    r"(?:[^.!?\n]|\.(?=\d)){1,60}?\bor\s+(?:(?:the|that|maybe|perhaps|possibly|final|correct)\s+){0,4}"
)
_ALTERNATIVE_BOX = re.compile(rf"\\boxed\{{([^{{}}]{{1,200}})\}}{_OR}$")
_ALTERNATIVE_TAGS = re.compile(rf"<answer>([^<]{{1,200}})</answer>{_OR}$")
_BRACKETS = frozenset("()[]{}<>")
_QUOTES = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2212": "-", "\xa0": " "}
)


@dataclass(frozen=True)
class FinalAnswer:
    """The final answer of a completion.

    Attributes:
        readings: possible extents of the answer, the longest first; none if the form is "none".
        form: the form in which it was found.
        at_end: it reaches the end of the text without punctuation, so a limit of tokens may have cut it.
    """

    readings: tuple[str, ...]
    form: Form
    at_end: bool = True

    @property
    def explicit(self) -> bool:
        """Whether the text marks the answer."""
        return self.form in EXPLICIT


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, all of a text without thoughts, and "" if the thoughts did not end."""
    _, closed, after = text.rpartition("</think>")
    return "" if not closed and "<think>" in text else after


def gold_answer(gold: str) -> str:
    """Return the part of a gold answer that counts: in the last tags, or after the last ####, or all of it."""
    inside = _tags(gold)
    return (gold.rpartition("####")[2] if inside is None else inside).strip()


def find_final_answer(text: str) -> FinalAnswer:
    """Return the final answer of a completion; see the top of this file."""
    text = after_thinking(text)
    if not text.strip():
        return FinalAnswer((), "none")
    finders: dict[Form, Callable[[str], str | None]] = {
        "tags": _tags,
        "mark": _mark,
        "boxed": _boxed,
        "stated": _stated,
    }
    for form, finder in finders.items():
        if (inside := finder(text)) is not None:
            readings = _inner_readings(inside) if form == "tags" else statement_readings(inside)
            if readings:
                at_end = text.rstrip().endswith(readings[-1]) and readings[-1][-1] not in ".!?*"
                return FinalAnswer(readings, form, at_end)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if bold := [a or b for a, b in _BOLD.findall(lines[-1])]:
        return FinalAnswer(_unique([*line_readings(lines), bold[-1]]), "bold")
    return FinalAnswer(_unique(line_readings(lines)), "line")


def same_answer(gold: str, answer: str) -> bool:
    """Return whether two answers are equal except for markup, case, white space, quotes and final punctuation.

    Numbers are equal as values, also `.5`, `1/2` and `\\frac{1}{2}`. A single option's letter equals the one in parentheses.
    """
    return not _gold_keys(gold).isdisjoint(_keys(answer))


def plain_answer(answer: str) -> str:
    """Return an answer without markup, surrounding quotes and final punctuation."""
    return _strip(re.sub(r"\\([%$])", r"\1", plain_fractions(answer.translate(_QUOTES))))


def statement_readings(statement: str) -> tuple[str, ...]:
    """Return the readings of a statement's text: its line, up to the end of a sentence, and up to a reason."""
    line = next((line for line in statement.splitlines() if line.strip(" \t*_:=.")), "").strip()
    line = line.lstrip(":= ").strip()
    readings = [line]
    readings += [line[: match.start()] for match in _SENTENCE_END.finditer(line)][::-1][:8]
    shortest = readings[-1]
    if reason := _REASON.search(shortest):
        readings.append(shortest[: reason.start()])
    if truth := _TRUTH.match(line.lstrip("*_(\"'")):
        readings.append(truth[1])
    if bold := _BOLD.match(line):
        readings.append(bold[1] or bold[2])
    return _unique(readings)


def line_readings(lines: list[str]) -> Iterator[str]:
    """Yield the readings of an unmarked answer: the last line, a short first line, and all lines as one list."""
    last, first = lines[-1], lines[0]
    if len(lines) > 1:
        yield _LIST_MARKER.sub("", "\n".join(lines)).replace("\n", " ")
    for line in dict.fromkeys((last, first) if len(first.split()) <= 3 < len(last.split()) else (last,)):
        rest = _CONCLUSION.sub("", line)
        for part in dict.fromkeys((line, rest)):
            yield from statement_readings(part)
        head, colon, tail = line.rpartition(": ")
        if colon and len(head.split()) > 1:
            yield from statement_readings(tail)


def _inner_readings(inside: str) -> tuple[str, ...]:
    inner = find_final_answer(inside)
    return _unique([inside.strip(), *inner.readings])


def _tags(text: str) -> str | None:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    if begin < 0:
        return None
    inside = text[begin + len("<answer>") : end]
    before = _ALTERNATIVE_TAGS.search(text[max(0, begin - 400) : begin])
    return f"{before[1]} or {inside}" if before else inside


def _mark(text: str) -> str | None:
    """Return the rest of the last line that begins with ####, unless it is a Markdown heading of a later text."""
    end, found = len(text.rstrip()), None
    for match in _MARK.finditer(text):
        if read_number(match[1]) is not None or match.end() >= end:
            found = match[1]
    return found


def _boxed(text: str) -> str | None:
    begin = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if begin < 0:
        return None
    before = _ALTERNATIVE_BOX.search(text[max(0, begin - 400) : begin])
    other = f"{before[1]} or " if before else ""
    start, depth = text.index("{", begin) + 1, 1
    for i, character in enumerate(text[start : start + 2000], start):
        if text[i - 1] != "\\":
            depth += (character == "{") - (character == "}")
        if depth == 0:
            inside = re.sub(r"\\([{}%$&#_])", r"\1", text[start:i].strip())
            inner = re.fullmatch(r"\\(?:text|mathrm|mathbf|textbf)\{(.*)\}", inside, re.DOTALL)
            return other + (inner[1] if inner else inside)
    return None


def _stated(text: str) -> str | None:
    found, end, begin = None, 0, 0
    for match in _STATED.finditer(text):
        rest = text[match.end() : match.end() + 4000]
        if rest.strip(" \t\n*_:=."):
            begin = begin if found and _ALTERNATIVE.fullmatch(text, end, match.start()) else match.end()
            found, end = text[begin : match.end() + 4000], match.end()
    for match in _IS_THE_ANSWER.finditer(text):
        if found is None or match.start() > end:
            line = text[max(0, match.start() - 400) : match.start()].rpartition("\n")[2]
            sentence = _CONCLUSION.sub("", _SENTENCE_END.split(line)[-1].strip())
            if sentence:
                found, end = sentence, match.end()
    return found


@lru_cache(1024)  # a gold answer is compared with the readings of many texts
def _gold_keys(gold: str) -> set[str]:
    return _keys(gold)


def _keys(answer: str) -> set[str]:
    """Return normal forms of an answer: without markup, and also without parentheses around all of it."""
    plain = plain_answer(answer)
    keys = {_normalize(plain)}
    inner = re.fullmatch(r"\(\s*(\S(?:.*\S)?)\s*\)", plain, re.DOTALL)
    if inner:
        keys.add(_normalize(_strip(inner[1])))
    keys.discard("")
    return keys


def _strip(text: str) -> str:
    """Return the text without surrounding white space, pairs of markup or quotes, and final punctuation."""
    for _ in range(8):
        before = text
        text = text.strip()
        text = text.rstrip(".,;:!") or text
        text = re.sub(r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", lambda m: m[1] or m[2] or "", text, flags=re.DOTALL)
        for mark in _PAIRS:
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        if text == before:
            break
    return text


def _normalize(text: str) -> str:
    if text and set(text) <= _BRACKETS | {" "}:
        return text.replace(" ", "")
    if (value := read_number(text)) is not None:
        return str(value) + ("%" if text.endswith("%") else "")
    text = re.sub(r"(?<=[(\[{])\s+|\s+(?=[)\]}])", "", re.sub(r"\s*[,;]\s*", " ", text))
    return " ".join(text.casefold().split())


def _unique(readings: Iterator[str] | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.strip() for r in readings if r.strip()))
