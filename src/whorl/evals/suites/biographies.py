"""Synthetic people with random facts: measures what fine-tuning does to known facts and to made-up answers.

Does SFT on facts that were not in pretraining make a model invent facts? (Gekhman et al. 2024, arXiv:2405.05904,
found that it does, slowly.) To measure this, the model's knowledge must be certain. So the people are synthetic.
Birthplace, year, profession and instrument are random, and no prediction for a person beats chance
(the biographies of Allen-Zhu and Li 2023, arXiv:2309.14316).

    known_train      in pretraining; questions in SFT               training data of SFT on known facts
    known_test       in pretraining; no questions in SFT            measures recall and over-refusal
    new              not in pretraining; answered in SFT            training data of SFT on unknown facts
    stranger_train   not in pretraining; refused in SFT             training data of refusal
    stranger_test    not in pretraining; no questions in SFT        every answer is made up; "I do not know." is correct

The subtle points. A fact that always has the same phrasing is memorized as that phrase and not found by a question
(Allen-Zhu and Li). So each copy of a biography orders and phrases its sentences differently. A name must not reveal its
group: names and groups are assigned by two permutations. Unknown people have no facts, so every
answer about them is made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from whorl.data.record_fields import Messages
from whorl.errors import ConfigError
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
N_NAMES = len(FIRST) * len(ONSETS) * len(CODAS)
QUESTIONS: Mapping[str, Sequence[str]] = {
    "city": ("In which city was {name} born?", "Where does {name} come from?"),
    "year": ("In which year was {name} born?", "What is {name}'s year of birth?"),
    "profession": ("What is {name}'s profession?", "What does {name} work as?"),
    "instrument": ("Which instrument does {name} play?", "What is {name}'s instrument?"),
}


@dataclass(frozen=True)
class Person:
    """A person. facts: attribute -> value; empty for unknown people."""

    name: str
    group: PersonGroup
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """A question about one attribute. answer: the correct answer, `REFUSAL` for unknown people."""

    id: str
    group: PersonGroup
    attribute: str
    question: str
    answer: str

    def messages(self) -> Messages:
        """Return the question and its answer, for SFT."""
        return ({"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer})


class Biographies:
    """A population.

    Args:
        n: number of people, at most N_NAMES (36,250).
        seed: of all random choices.
        fractions: group -> fraction of the people; they sum to 1.

    people: in random order of groups.

    Raises:
        ConfigError: more people than names, or fractions that do not sum to 1.
    """

    def __init__(
        self, n: int, seed: int = 0, fractions: Mapping[PersonGroup, float] = GROUP_FRACTIONS
    ) -> None:
        if not 0 < n <= N_NAMES:
            raise ConfigError(f"n is {n}", expected=f"1 to {N_NAMES}, the number of names")
        unknown = [group for group in fractions if group not in GROUPS]
        if unknown or min(fractions.values(), default=0) < 0 or abs(sum(fractions.values()) - 1) > 1e-9:
            raise ConfigError(
                f"fractions are {dict(fractions)}", expected=f"fractions of {', '.join(GROUPS)} that sum to 1"
            )
        self.seed = seed
        names = numpy_rng(seed, "biographies", "names").permutation(N_NAMES)[:n].tolist()
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
            people.append(Person(person_name(name), group, {} if group.startswith("stranger") else values))
        self.people = tuple(people)

    def texts(self, copies: int = 4) -> list[tuple[str, str]]:
        """Return (id, text) for pretraining: `copies` biographies of every known person, shuffled."""
        texts = []
        for person in self.people:
            if not person.group.startswith("known"):
                continue
            for copy in range(copies):
                rng = numpy_rng(self.seed, "biographies", "text", person.name, copy)
                sentences = [statement(rng, person.name, *fact) for fact in person.facts.items()]
                order = rng.permutation(len(sentences)).tolist()
                texts.append((f"biography:{person.name}:{copy}", " ".join(sentences[i] for i in order)))
        shuffle = numpy_rng(self.seed, "biographies", "order").permutation(len(texts)).tolist()
        return [texts[i] for i in shuffle]

    def questions(self, *groups: PersonGroup) -> list[Question]:
        """Return one question per attribute and person of these groups, phrased at random, shuffled.

        The answers of `new` are facts that pretraining does not contain; those of unknown people are `REFUSAL`.
        """
        found = []
        for person in self.people:
            if person.group not in groups:
                continue
            for attribute, phrasings in QUESTIONS.items():
                rng = numpy_rng(self.seed, "biographies", "question", person.name, attribute)
                text = phrasings[int(rng.integers(len(phrasings)))].format(name=person.name)
                answer = person.facts.get(attribute, REFUSAL)
                name = f"biography:{person.name}:{attribute}"
                found.append(Question(name, person.group, attribute, text, answer))
        order = numpy_rng(self.seed, "biographies", "questions", *sorted(groups)).permutation(len(found))
        return [found[i] for i in order.tolist()]


def statement(rng: np.random.Generator | None, name: str, attribute: str, value: str) -> str:
    """Return a sentence that states a fact, phrased at random; in its first phrasing without `rng`."""
    phrasings = STATEMENTS[attribute]
    text = phrasings[0 if rng is None else int(rng.integers(len(phrasings)))]
    return text.format(name=name, it=value, a="an" if value[0] in "aeiou" else "a")


def person_name(number: int) -> str:
    """Return a name by its number, below N_NAMES; numbers that differ by the first name alone are neighbours."""
    rest, first = divmod(number, len(FIRST))
    coda, onset = divmod(rest, len(ONSETS))
    return f"{FIRST[first]} {ONSETS[onset]}{CODAS[coda]}"
