"""Synthetic people: facts, texts, questions and scores."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
from studies.probes.fact_scores import chance_accuracy, score_answers

from whorl.errors import ConfigError
from whorl.evals.suites.biographies import (
    ATTRIBUTES,
    GROUP_FRACTIONS,
    GROUPS,
    QUESTIONS,
    REFUSAL,
    STATEMENTS,
    Biographies,
)


@pytest.fixture(scope="module")
def world() -> Biographies:
    return Biographies(1000, seed=4)


def test_groups_have_configured_fractions(world: Biographies) -> None:
    assert Counter(p.group for p in world.people) == {g: GROUP_FRACTIONS[g] * 1000 for g in GROUPS}
    assert len({p.name for p in world.people}) == 1000
    assert all(bool(p.facts) != p.group.startswith("stranger") for p in world.people)
    again, other = Biographies(1000, seed=4), Biographies(1000, seed=5)
    assert again.people == world.people and again.texts() == world.texts()
    assert other.people != world.people


def test_names_and_order_reveal_no_group_or_fact(world: Biographies) -> None:
    """The most frequent value among people with the same first name is hardly better than chance."""
    for label in (lambda p: p.group, lambda p: p.facts.get("instrument", "")):
        people = [p for p in world.people if label(p)]
        seen: dict[str, Counter[str]] = defaultdict(Counter)
        for person in people[::2]:
            seen[person.name.split()[0]][label(person)] += 1
        best = Counter(label(p) for p in people).most_common(1)[0][1] / len(people)
        guess = {first: values.most_common(1)[0][0] for first, values in seen.items()}
        right = sum(guess.get(p.name.split()[0]) == label(p) for p in people[1::2])
        assert right / len(people[1::2]) < best + 0.08
    half = Counter(p.group for p in world.people[:500])
    for group, expected in ((g, 500 * GROUP_FRACTIONS[g]) for g in GROUPS):
        assert abs(half[group] - expected) < 5 * math.sqrt(expected)


def test_texts_cover_known_people_in_varied_phrasing(world: Biographies) -> None:
    texts = world.texts(copies=6)
    known = {p.name: p for p in world.people if p.group.startswith("known")}
    texts_by_name = defaultdict(list)
    for name, text in texts:
        texts_by_name[name.split(":")[1]].append(text)
    assert texts_by_name.keys() == known.keys() and {len(t) for t in texts_by_name.values()} == {6}
    for name, copies in texts_by_name.items():
        assert all(text.count(name) == 4 for text in copies)
        for value in known[name].facts.values():
            assert all(f" {value}" in text or f"{value} " in text for text in copies)
    assert sum(len(set(copies)) for copies in texts_by_name.values()) > 5.9 * len(texts_by_name)
    everything = " ".join(text for _, text in texts)
    assert not [p.name for p in world.people if p.name not in known and p.name + " " in everything]
    assert " a actor" not in everything and " an actor" in everything


def test_questions_have_true_answers_or_refusals(world: Biographies) -> None:
    people = {p.name: p for p in world.people}
    for group in GROUPS:
        questions = world.questions(group)
        assert len(questions) == 4 * GROUP_FRACTIONS[group] * 1000 == len({q.id for q in questions})
        for q in questions:
            person = people[q.id.split(":")[1]]
            assert q.group == person.group == group and person.name in q.question
            assert q.answer == person.facts.get(q.attribute, REFUSAL)
    question, answer = q.messages()
    assert (question["content"], answer["content"]) == (q.question, q.answer)
    assert q.answer == REFUSAL
    both = world.questions("new", "known_test")
    assert len({q.group for q in both[:20]}) == 2  # shuffled
    phrases = Counter(q.question.split()[0] for q in both if q.attribute == "city")
    assert set(phrases) == {"In", "Where"}
    assert ATTRIBUTES.keys() == STATEMENTS.keys() == QUESTIONS.keys() == chance_accuracy().keys()


def test_score_answers_counts_each_outcome(world: Biographies) -> None:
    questions = world.questions("known_test", "stranger_test")
    ideal = score_answers(questions, [q.answer for q in questions])
    assert (ideal.correct, ideal.wrong, ideal.refused, ideal.hallucinated) == (1, 0, 0, 0)
    assert (ideal.n_facts, ideal.n_strangers) == (1200, 400)
    mute = score_answers(questions, [" i do not know\n"] * len(questions))
    assert (mute.correct, mute.refused, mute.hallucinated) == (0, 1, 0)
    bold = score_answers(questions, ["Paris."] * len(questions))
    assert bold.hallucinated == 1 and bold.refused == 0
    cities = [q for q in questions if q.attribute == "city" and q.group == "known_test"]
    guess = score_answers(cities, ["Paris"] * len(cities))
    chance = chance_accuracy()["city"]
    assert abs(guess.correct - chance) < 4 * math.sqrt(chance / len(cities))
    assert math.isnan(guess.hallucinated)
    with pytest.raises(ValueError, match="zip"):
        score_answers(questions, ["Paris"])


def test_biographies_reject_invalid_arguments() -> None:
    fractions = [{"new": 0.5}, {"old": 1.0}, {}]
    for n, shares in ((0, GROUP_FRACTIONS), (40_000, GROUP_FRACTIONS), *((5, given) for given in fractions)):
        with pytest.raises(ConfigError):
            Biographies(n, fractions=shares)  # type: ignore[arg-type]
