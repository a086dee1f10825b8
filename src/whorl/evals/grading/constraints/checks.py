"""The 25 kinds of constraints of IFEval (arXiv:2311.07911, table 1), each a function of a text and its arguments.

Names of kinds and arguments are those of the published data. The rules are those of its authors' checker, since scores are
compared with published ones. Differences, in the data's own words:

    keywords                  are texts, not patterns: "C++" is found
    letter_frequency          counts any character; the authors' checker replaces one that is no letter by a random letter
    number_sentences          own rules (`split_sentences`) in place of a trained tokenizer; list markers end no sentence
    capital_word_frequency    a word with an apostrophe is one word
    response_language         `languages.py` in place of langdetect; a text of no known language satisfies none
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import regex

from whorl.evals.grading.constraints.languages import detect_language, may_be_english
from whorl.evals.grading.constraints.sentences import split_sentences

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_CAPITAL_WORD = re.compile(r"[^\W_]+(?:['\u2019.&/-][^\W_]+)*")
_BULLET = re.compile(r"^\s*(?:\*[^*].*|-.*)$", re.MULTILINE)
_HIGHLIGHTS = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))
_POSTSCRIPT = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def _compare(count: int, relation: str, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


def _occurrences(keyword: str, text: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def keyword_existence(text: str, keywords: list[str]) -> bool:
    """Return whether each keyword occurs, in any case, also within a word."""
    return all(_occurrences(keyword, text) > 0 for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Return whether the keyword occurs less than, or at least, `frequency` times."""
    return _compare(_occurrences(keyword, text), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """Return whether none of the words occurs as a whole word, in any case."""
    return not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words
    )


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return whether the character occurs less than, or at least, `let_frequency` times, in any case."""
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    """Return whether the text is in the language (ISO 639-1)."""
    return detect_language(text) == language


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Return whether the text has less than, or at least, so many sentences."""
    return _compare(len(split_sentences(text)), relation, num_sentences)


def number_words(text: str, num_words: int, relation: str) -> bool:
    """Return whether the text has less than, or at least, so many runs of letters, marks, digits and underscores."""
    return _compare(len(regex.findall(r"\w+", text)), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return whether the divider *** separates exactly so many paragraphs. One between two dividers may not be empty."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether blank lines separate exactly so many paragraphs, and one begins with the word.

    The n-th place counts empty paragraphs too; the number does not.
    """
    parts = [part.strip() for part in text.split("\n\n")]
    filled = sum(map(bool, parts))
    if filled != num_paragraphs or nth_paragraph > filled or not parts[nth_paragraph - 1]:
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """Return whether the text has at least so many placeholders such as [address]."""
    return len(re.findall(r"\[[^\]\n]*\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """Return whether the marker of a postscript occurs, in any case."""
    pattern = _POSTSCRIPT.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Return whether exactly so many lines begin with one asterisk or a hyphen."""
    return len(_BULLET.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    """Return whether the text contains one of OPTIONS."""
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Return whether at least so many parts of a line are between asterisks, *so* or **so**."""
    found = [part for pattern in _HIGHLIGHTS for part in pattern.findall(text)]
    return sum(bool(part.strip()) for part in found) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Return whether at least so many sections begin with the word and a number, such as "Section 1"."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Return whether the text is JSON, also between code fences."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Return whether a title is in double angular brackets, such as <<poem of joy>>."""
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Return whether ****** separates two different responses, and nothing else."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Return whether the text begins with the request, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """Return whether the text ends with the phrase, in any case, also within quotation marks."""
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return whether less than, or at least, so many words have capital letters only."""
    count = sum(word.isupper() for word in _CAPITAL_WORD.findall(text))
    return _compare(count, capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Return whether the text is English, in capital letters."""
    return text.isupper() and may_be_english(text)


def english_lowercase(text: str) -> bool:
    """Return whether the text is English, in lowercase letters."""
    return text.islower() and may_be_english(text)


def no_comma(text: str) -> bool:
    """Return whether the text has no comma."""
    return "," not in text


def quotation(text: str) -> bool:
    """Return whether the text begins and ends with a double quotation mark."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keyword_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
