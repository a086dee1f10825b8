"""Each kind of constraint accepts texts that satisfy it and rejects texts that violate it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import DataError
from whorl.evals.grading import grade_all
from whorl.evals.grading.constraints import CHECKS, constraints, read_constraints, satisfies
from whorl.evals.grading.constraints.languages import detect_language
from whorl.evals.grading.constraints.sentences import split_sentences

LONG = "The sea is calm today, and the boats are in the harbor. "
# kind, arguments, texts that satisfy it, texts that violate it
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["sea", "C++"]}, ["Sea and c++.", "seaside C++"], ["sea", "C+ sea", "c++"]),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, ["Sea, sea", "seasea"],
     ["sea"]),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, ["sea", "x"], ["sea SEA"]),
    ("keywords:forbidden_words", {"forbidden_words": ["sea", "a.b"]}, ["seaside", "axb"], ["The SEA.", "an a.b c"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"}, ["eE"],
     ["e", "x"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": "at least"}, ["# a"], ["a"]),
    ("language:response_language", {"language": "de"},
     ["Das ist nicht der Hund, und die Katze ist auch nicht da."], [LONG, "42"]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     [LONG * 3, "Why? Go! Now."], [LONG * 2, "Dr. J. Smith came at 3.5 p.m. with e.g. tea."]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, [LONG * 2], [LONG * 3]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***\na *** b\n***"],
     ["a\n\nb", "a***b***c", "a******b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one, two."], ["a b c"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
     ["A b.\n\nSo, it is.", 'A\n\n"so"'], ["A.\n\nSomehow.", "So.\n\nA.", "A\n\nso\n\nb", "so"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b c]"], ["[a]", "[a\n] [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Hi.\nP.S. Yes", "p. s. x"],
     ["Hi PS", "P.P.S"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Hi.\nP.P.S Yes", "p.p. s."], ["P.S. a"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n  - b"],
     ["* a", "**a**\n* b", "* a\n* b\n- c"]),
    ("detectable_format:constrained_response", {}, ["My answer is maybe.", " So: My answer is no. "],
     ["yes", "My answer is yes"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* b **c d**"],
     ["*a*", "** **a", "*a\nb* *c*", "****"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb"], ["Section 1", "section 1 section 2", "Section a Section b"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1]\n```', "5"], ["{a: 1}", "so: {}", "```"]),
    ("detectable_format:title", {}, ["<<joy>>\nx", "a <<b c>>"], ["<joy>", "<<>>", "<< >>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["a******b", "******a\n******\nb"],
     ["a", "a******a", "a******b******c", "a************b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a Poem"}, ["write a poem\nRoses"],
     ["Sure: write a poem", "Write"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["x the END.", '"x. The end."\n'],
     ["The end. x", "The end"]),
    ("startend:quotation", {}, ['"a"', ' "" '], ['"', 'a"', '"a". b']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["A BIG dog", "I SAW-it IT'S"], ["BIG dog", "Big Dog"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 0, "capital_relation": "at least"}, ["a"], []),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, ["BIG dog"],
     ["A BIG dog"]),
    ("change_case:english_capital", {}, [LONG.upper(), "HELLO WORLD"],
     [LONG, "DAS IST NICHT DER HUND UND AUCH DIE KATZE NICHT", "42"]),
    ("change_case:english_lowercase", {}, [LONG.lower(), "hello"],
     [LONG, "das ist nicht der hund und auch die katze nicht", "привет"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
]  # fmt: skip
LANGUAGE_TEXTS = {
    "en": LONG, "fr": "Le chat est sur la table et il ne veut pas manger.",
    "es": "El perro está en la casa y no quiere comer.",
    "it": "Il cane è nella casa e non vuole mangiare della carne.",
    "pt": "O cão está em casa e não quer comer a sua comida.",
    "ru": "Он не хочет есть и спит на столе.", "uk": "Він не хоче їсти і що з ним, я не знаю.",
    "bg": "Той не иска да яде и се е скрил на масата.",
    "hi": "यह एक अच्छा दिन है और हम खुश हैं।", "mr": "हा एक चांगला दिवस आहे आणि आम्ही आनंदी आहोत.",
    "ne": "यो एक राम्रो दिन हो र हामी खुसी छौं।",
    "ar": "هذا يوم جميل ونحن سعداء", "fa": "این یک روز خوب است و ما چیزی نمی‌خواهیم",
    "ur": "یہ ایک اچھا دن ہے اور ہم خوش ہیں",
    "pa": "ਇਹ ਇੱਕ ਚੰਗਾ ਦਿਨ ਹੈ", "gu": "આ એક સારો દિવસ છે", "kn": "ಇದು ಒಳ್ಳೆಯ ದಿನ", "ml": "ഇത് ഒരു നല്ല ദിവസമാണ്",
    "te": "ఇది మంచి రోజు",
    "ta": "இது ஒரு நல்ல நாள்", "bn": "এটি একটি ভালো দিন", "th": "วันนี้เป็นวันที่ดี", "ko": "오늘은 좋은 날입니다",
    "ja": "今日は良い日です。",
    "zh": "今天是个好日子。", "vi": "Hôm nay là một ngày đẹp và tôi không có việc.",
    "sw": "Leo ni siku nzuri kwa watu wa kijiji na watoto.",
    "fi": "Hän ei ole täällä, mutta se on hyvä päivä.", "pl": "To jest dobry dzień i nie ma go w domu.",
    "he": "היום הוא יום טוב",
}  # fmt: skip


def one(kind: str, arguments: dict[str, Any]) -> Any:
    return read_constraints([{"kind": kind, **arguments}])[0]


def test_cases_cover_the_25_kinds() -> None:
    assert len(CHECKS) == 25 and {kind for kind, *_ in CASES} == set(CHECKS)


@pytest.mark.parametrize(
    ("kind", "arguments", "good", "bad"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_satisfying_and_violating(
    kind: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert satisfies(one(kind, arguments), text), text
    for text in [*bad, "", " \n\t"]:
        assert not satisfies(one(kind, arguments), text), text
        assert text.strip() or not satisfies(one(kind, arguments), text, loose=True)


@pytest.mark.parametrize("language", LANGUAGE_TEXTS)
def test_language_is_detected(language: str) -> None:
    assert detect_language(LANGUAGE_TEXTS[language]) == language
    assert detect_language(LANGUAGE_TEXTS[language].upper()) == language


def test_strict_loose_weights_and_outcomes() -> None:
    gold = {
        "instruction_id_list": ["detectable_format:json_format", "punctuation:no_comma"],
        "kwargs": [{"num_words": None}, None],
    }
    graded = constraints(gold, 'Sure, here it is:\n{"a": 1}')
    assert graded.scores == {
        "constraints_strict": 0, "constraints_loose": 1, "instructions_strict": 0, "instructions_loose": 1,
    }  # fmt: skip
    assert graded.outcome == "wrong" and graded.weights["instructions_strict"] == 2
    assert "json_format" in graded.reason
    texts = ["{}", "", "I'm sorry, I can't do that.", "{"]
    assert [constraints(gold, t).outcome for t in texts] == ["right", "not_found", "refused", "wrong"]
    assert constraints(gold, "{", finish="length").outcome == "truncated"
    assert (
        constraints([{"kind": "startend:end_checker", "end_phrase": "Bye"}], "**Bye**").scores[
            "constraints_loose"
        ]
        == 1
    )


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ([{"kind": "keywords:existance", "keywords": ["a"]}],
         r"unknown kind(.|\n)*did you mean 'keywords:existence'"),
        ([{"kind": "detectable_format:title", "words": 5}], "has no argument 'words'"),
        ([{"kind": "keywords:existence"}], "lacks the argument 'keywords'"),
        ([{"kind": "keywords:existence", "keywords": "abc"}], "keywords is 'abc'"),
        ([{"kind": "length_constraints:number_words", "num_words": 5, "relation": "at most"}],
         "relation is 'at most'"),
        ([{"kind": "length_constraints:number_words", "num_words": 2.5, "relation": "at least"}], "whole number"),
        ([{"kind": "language:response_language", "language": "tlh"}], "'tlh' cannot be checked"),
        ([{"kind": "keywords:letter_frequency", "letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
         "one character"),
        ([{"kind": "length_constraints:nth_paragraph_first_word", "num_paragraphs": 2, "nth_paragraph": 3,
           "first_word": "a"}], "paragraph 3 of 2"),
        ([], "no constraint"), (5, "constraints are int"), ({"instruction_id_list": ["a"], "kwargs": []},
         "same length"),
    ],
)  # fmt: skip
def test_bad_constraints_are_errors(gold: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        constraints(gold, "text")
    if not isinstance(gold, list) or gold:
        assert grade_all("constraints", [gold], ["text"])[0].outcome == "error"


def test_sentences() -> None:
    cases = {
        "Mr. Smith paid $3.50. He left!": 2, "1. First\n2. Second": 1, 'He said "Go." Then he went.': 2,
        "Wait... what?": 1,
        "See fig. 3 (a). Done": 2, "你好。再见！": 2, "No stop": 1, "": 0, "...": 0, "No. I do not.": 2,
        "J. R. R. Tolkien wrote it.": 1,
        "It is I. You know.": 2, "apples, pears, etc. Then more.": 2,
    }  # fmt: skip
    for text, count in cases.items():
        assert len(split_sentences(text)) == count, text


@given(st.text())
def test_checks_accept_any_text(text: str) -> None:
    for kind, arguments, *_ in CASES:
        held = satisfies(one(kind, arguments), text)
        assert satisfies(one(kind, arguments), text, loose=True) or not held


def test_checks_take_linear_time() -> None:
    began = time.process_time()
    for part in ("* ", "\n\n", "[", "<<", ". ", "P. ", "***", " \n", "A.", '"'):
        for kind, arguments, *_ in CASES:
            satisfies(one(kind, arguments), part * 10_000)
    assert time.process_time() - began < 10
