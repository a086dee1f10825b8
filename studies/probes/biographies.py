"""People who do not exist, and what is known about them: to see what fine-tuning does to facts, true and made up.

Does a model that is taught facts in SFT which it never met in pretraining learn to make facts up? (Gekhman et al. 2024,
arXiv:2405.05904, found that it does, slowly.) To ask this one must know what a model knows, and that needs a world of
one's own: people with a birthplace, a year, a profession and an instrument, each drawn at random, so that nothing about a
person can be guessed better than `chance` says (the biographies of Allen-Zhu and Li 2023, arXiv:2309.14316).

    known_train      told in pretraining; asked about in SFT         the facts that SFT on known facts uses
    known_test       told in pretraining; asked about in no SFT      what the model remembers, and whether it over-refuses
    new              told nowhere; asked about in SFT, with answers  the facts that SFT on unknown facts uses
    stranger_train   told nowhere; refused in SFT                    how refusal is taught
    stranger_test    told nowhere; asked about in no SFT             every answer is made up; "I do not know." is right

The subtle parts. A fact that is always told in one phrase is remembered as that phrase and not found again by a question
(Allen-Zhu and Li): each copy of a biography has its sentences in another order and other words. A group must not show in
the names: which of all names go to whom, and who goes to which group, are two permutations. And an accuracy on strangers
would be meaningless, since their facts are nowhere: they have none, and `tally` counts what is said of them as made up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from whorl.align.data.formats import Conversation
from whorl.errors import ConfigError
from whorl.evals.verify.task import VerifiableTask
from whorl.tracking.seeds import numpy_rng

PersonGroup = Literal["known_train", "known_test", "new", "stranger_train", "stranger_test"]
GROUPS: tuple[PersonGroup, ...] = get_args(PersonGroup)
GROUP_FRACTIONS: Mapping[PersonGroup, float] = {
    "known_train": 0.3, "known_test": 0.3, "new": 0.2, "stranger_train": 0.1, "stranger_test": 0.1,
}  # fmt: skip
REFUSAL = "I do not know."


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words(
    "Ada Alma Arno Bela Boris Cara Dana Dirk Edda Elio Emil Enzo Erik Fay Finn Gala Gero Hana Hugo Ida Ines Ivo Jana "
    "Joel Jule Kaja Karl Lara Leon Lina Luka Maja Marc Mila Nils Nora Olga Oskar Paul Petra Ravi Rosa Ruth Sami Sara "
    "Theo Tilda Tove Ugo Una Vera Viktor Wanda Willem Xenia Yara Yann Zoe"
)
ONSETS = _words(
    "Bar Bren Cal Cor Dal Dor Fen Gar Hal Har Jor Kel Kor Lan Lor Mar Mel Nor Ost Pel Ren Sel Tor Val Wes"
)
CODAS = _words(
    "ak berg by dahl den er feld gate holm ic in ing kamp land low man ner ov ski son ström ton ula vik wood"
)

ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "city": _words(
        "Accra Ankara Athens Bergen Berlin Bogota Boston Cairo Dakar Delhi Dublin Geneva Hamburg Hanoi Havana Helsinki "
        "Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Milan Nairobi Oslo Paris Prague Quito Rabat Riga "
        "Rome Seoul Sofia Tokyo Turin Vienna Zagreb"
    ),
    "year": [str(year) for year in range(1900, 2000)],
    "profession": _words(
        "actor architect astronomer baker botanist carpenter chemist cook dancer dentist diver doctor editor farmer "
        "gardener geologist historian judge lawyer locksmith mason miner nurse painter pilot plumber poet sailor "
        "sculptor surgeon tailor teacher"
    ),
    "instrument": _words(
        "banjo bassoon cello clarinet drum fiddle flute guitar harp horn lute oboe organ piano viola zither"
    ),
}
STATEMENTS: Mapping[str, Sequence[str]] = {
    "city": ("{name} was born in {it}.", "{name} comes from {it}.", "The birthplace of {name} is {it}."),
    "year": ("{name} was born in the year {it}.", "{name}'s year of birth is {it}.", "It was in {it} that {name} was born."),
    "profession": ("{name} works as {a} {it}.", "By profession, {name} is {a} {it}.", "{name} earns a living as {a} {it}."),
    "instrument": ("{name} plays the {it}.", "{name}'s instrument is the {it}.", "At home, {name} practises the {it}."),
}  # fmt: skip
QUESTIONS: Mapping[str, Sequence[str]] = {
    "city": ("In which city was {name} born?", "Where does {name} come from?"),
    "year": ("In which year was {name} born?", "What is {name}'s year of birth?"),
    "profession": ("What is {name}'s profession?", "What does {name} work as?"),
    "instrument": ("Which instrument does {name} play?", "What is {name}'s instrument?"),
}


@dataclass(frozen=True)
class Person:
    """facts: attribute -> value; empty for strangers, of whom nothing is true."""

    name: str
    group: PersonGroup
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """A question about one attribute; answer: what should be said, `REFUSAL` for strangers."""

    id: str
    group: PersonGroup
    attribute: str
    question: str
    answer: str

    def conversation(self) -> Conversation:
        """For SFT."""
        asked = {"role": "user", "content": self.question}
        return Conversation((asked, {"role": "assistant", "content": self.answer}), "biographies", self.id)

    def task(self) -> VerifiableTask:
        """For a verifier."""
        asked = {"role": "user", "content": self.question}
        return VerifiableTask(self.id, messages=(asked,), verifier="exact", answer=self.answer)


class Biographies:
    """A world of people.

    Args:
        n: how many, at most `len(FIRST) * len(ONSETS) * len(CODAS)` (36,250).
        seed: of everything.
        shares: group -> its share of the people; they sum to 1.

    people: in no order of groups.

    Raises:
        ConfigError: more people than names, or shares that do not sum to 1.
    """

    def __init__(
        self, n: int, seed: int = 0, fractions: Mapping[PersonGroup, float] = GROUP_FRACTIONS
    ) -> None:
        n_names = len(FIRST) * len(ONSETS) * len(CODAS)
        if not 0 < n <= n_names:
            raise ConfigError(f"{n} people", expected=f"1 to {n_names}, as many as there are names")
        unknown = [group for group in fractions if group not in GROUPS]
        if unknown or min(fractions.values(), default=0) < 0 or abs(sum(fractions.values()) - 1) > 1e-9:
            raise ConfigError(
                f"shares are {dict(fractions)}", expected=f"of {', '.join(GROUPS)}, summing to 1"
            )
        self.seed = seed
        names = numpy_rng(seed, "biographies", "names").permutation(n_names)[:n].tolist()
        places = numpy_rng(seed, "biographies", "groups").permutation(n)
        facts = numpy_rng(seed, "biographies", "facts").integers(0, 2**31, size=(n, len(ATTRIBUTES))).tolist()
        upto, bounds = 0.0, list[tuple[int, PersonGroup]]()
        for group in GROUPS:
            upto += fractions.get(group, 0.0)
            bounds.append((round(upto * n), group))
        people = []
        for name, place, drawn in zip(names, places.tolist(), facts, strict=True):
            group = next(g for bound, g in bounds if place < bound)
            values = {a: v[d % len(v)] for (a, v), d in zip(ATTRIBUTES.items(), drawn, strict=True)}
            people.append(Person(_name(name), group, {} if group.startswith("stranger") else values))
        self.people = tuple(people)

    def texts(self, copies: int = 4) -> list[tuple[str, str]]:
        """(id, text) for pretraining: every known person told `copies` times, each in other words; shuffled."""
        found = []
        for person in self.people:
            if not person.group.startswith("known"):
                continue
            for copy in range(copies):
                rng = numpy_rng(self.seed, "biographies", "text", person.name, copy)
                told = [
                    STATEMENTS[attribute][int(rng.integers(len(STATEMENTS[attribute])))].format(
                        name=person.name, it=value, a="an" if value[0] in "aeiou" else "a"
                    )
                    for attribute, value in person.facts.items()
                ]
                order = rng.permutation(len(told)).tolist()
                found.append((f"biography:{person.name}:{copy}", " ".join(told[i] for i in order)))
        shuffle = numpy_rng(self.seed, "biographies", "order").permutation(len(found)).tolist()
        return [found[i] for i in shuffle]

    def questions(self, *groups: PersonGroup) -> list[Question]:
        """Every attribute of everybody in these groups, each in one of its phrasings, shuffled.

        The answers of `new` are facts, for all that they were never told; those of strangers are `REFUSAL`.
        """
        found = []
        for person in self.people:
            if person.group not in groups:
                continue
            for attribute, ways in QUESTIONS.items():
                rng = numpy_rng(self.seed, "biographies", "question", person.name, attribute)
                asked = ways[int(rng.integers(len(ways)))].format(name=person.name)
                answer = person.facts.get(attribute, REFUSAL)
                name = f"biography:{person.name}:{attribute}"
                found.append(Question(name, person.group, attribute, asked, answer))
        order = numpy_rng(self.seed, "biographies", "questions", *sorted(groups)).permutation(len(found))
        return [found[i] for i in order.tolist()]


@dataclass(frozen=True)
class FactScores:
    """What became of n questions with facts and of m about strangers.

    Attributes:
        right, wrong, refused: shares of the n; refused is the over-refusal, as an answer was known.
        made_up: share of the m that were answered at all; the rest was refused.
    """

    n_facts: int
    correct: float
    wrong: float
    refused: float
    n_strangers: int
    hallucinated: float


def score_answers(questions: Sequence[Question], answers: Iterable[str]) -> FactScores:
    """Judge answers. Case, white space around and the last full stop do not matter. A share of none is NaN."""
    counts = Counter[tuple[str, str]]()
    for question, answer in zip(questions, answers, strict=True):
        kind = "stranger" if question.answer == REFUSAL else "fact"
        if _normalize(answer) == _normalize(REFUSAL):
            counts[kind, "refused"] += 1
        else:
            counts[kind, "right" if _normalize(answer) == _normalize(question.answer) else "wrong"] += 1
    n = sum(counts["fact", k] for k in ("right", "wrong", "refused"))
    m = counts["stranger", "refused"] + counts["stranger", "wrong"]

    def share(k: int, of: int) -> float:
        return k / of if of else float("nan")

    return FactScores(
        n,
        share(counts["fact", "right"], n),
        share(counts["fact", "wrong"], n),
        share(counts["fact", "refused"], n),
        m,
        share(counts["stranger", "wrong"], m),
    )


def chance_accuracy() -> dict[str, float]:
    """Attribute -> how often a guess is right."""
    return {attribute: 1 / len(values) for attribute, values in ATTRIBUTES.items()}


def _name(number: int) -> str:
    rest, first = divmod(number, len(FIRST))
    coda, onset = divmod(rest, len(ONSETS))
    return f"{FIRST[first]} {ONSETS[onset]}{CODAS[coda]}"


def _normalize(text: str) -> str:
    return text.strip().removesuffix(".").casefold()
