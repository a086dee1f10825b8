"""Numbered sources in a prompt, under a token budget."""

from __future__ import annotations

from whorl.search.numbered_sources import INSTRUCTION, SourcePassage, with_sources, within_budget

NOTES = [
    SourcePassage("Ada plays the oboe.", "ada.md"),
    SourcePassage("Bela works in Oslo, and plays the lute."),
]


def words(text: str) -> int:
    return len(text.split())


def test_sources_are_numbered_before_the_question() -> None:
    assert with_sources("Who plays?", NOTES) == (
        f"{INSTRUCTION}\n\n[1] ada.md: Ada plays the oboe. [1]\n"
        f"[2] Bela works in Oslo, and plays the lute. [2]\n\nWho plays?"
    )
    assert with_sources("Who plays?", []) == "Who plays?"


def test_budget_cuts_the_last_source_behind_a_word() -> None:
    whole = words(with_sources("", NOTES))
    assert within_budget(NOTES, words, whole) == NOTES
    for budget in range(whole):
        kept = within_budget(NOTES, words, budget)
        assert not kept or words(with_sources("", kept)) == budget or kept == NOTES[:1]
        assert all(given.text.startswith(found.text) for given, found in zip(NOTES, kept, strict=False))
    assert within_budget(NOTES, words, whole - 3)[1].text == "Bela works in Oslo, and"
    assert within_budget(NOTES, words, 5) == []
