"""Feedback as preferences: pairs of answers to one prompt, and single answers with a label.

    edit            the edited text over the original                       pair
    better          the better of two answers, by the votes of all raters   pair
    like, dislike   a liked answer over a disliked one of the same prompt   pair
                    other answers with thumbs                               label

Records have the fields of `Preference` and `UnpairedPreference` (align/data/formats.py), and the logged token ids, which
training uses unchanged. `source` is the model that made the answer. Votes are joined by `raters.py`; an answer or a pair
whose raters disagree is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import expit

from whorl.loop.raters import RaterLabels, RaterVote, rate

Row = Mapping[str, Any]  # as in `FrozenEvents`


@dataclass
class FeedbackExamples:
    """The examples of each split.

    Attributes:
        pairs: split -> records of pairs. labels: split -> all rated answers, each with a label; singles: those without a
            pair. kinds: source of pairs -> number. left_out: reason -> number. ratings: of comparisons, and of thumbs.
    """

    pairs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "test": []})
    labels: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "test": []})
    singles: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    ratings: dict[str, RaterLabels] = field(default_factory=dict)

    @property
    def votes(self) -> dict[str, int]:
        """Return rater -> votes of both kinds."""
        return dict(sum((Counter(found.votes) for found in self.ratings.values()), Counter[str]()))


@dataclass(frozen=True)
class _RatedAnswer:
    """An answer with its prompt. key: COMPLETION/CHOICE."""

    key: str
    row: Row
    choice: Row

    @property
    def text(self) -> str:
        return str(self.choice["text"])

    @property
    def prompt(self) -> str:
        """Return the prompt as a text to compare."""
        return json.dumps(self.row["prompt"])

    @property
    def forced(self) -> list[int]:
        """Return the ids that repeat the end of the prompt."""
        return list(self.choice["ids"][: self.choice["forced"]])

    def asked(self, forced: Sequence[int]) -> dict[str, Any]:
        """Return the fields of the prompt; forced: ids of the answers that belong to it."""
        given = self.row["prompt"]
        prompt = given if isinstance(given, str) else tuple(given)
        return {
            "prompt": prompt,
            "prompt_ids": (*self.row["prompt_ids"], *forced),
            "source": self.row["digest"],
        }

    def side(self, name: str, forced: Sequence[int], text: str | None = None) -> dict[str, Any]:
        """Return the fields of an answer; text: in place of the logged answer, without ids."""
        content = self.text if text is None else text
        chat = not isinstance(self.row["prompt"], str)
        shown: Any = ({"role": "assistant", "content": content},) if chat else content
        return (
            {name: shown}
            if text is not None
            else {name: shown, f"{name}_ids": tuple(self.choice["ids"][len(forced) :])}
        )


def feedback_examples(
    completions: Sequence[Row], feedback: Sequence[Row], min_confidence: float = 0.6
) -> FeedbackExamples:
    """Return the examples of completions and the feedback on them (see the top of this file).

    min_confidence: probability of a label, or of the direction of a pair, from which on it is used.
    """
    found = FeedbackExamples()
    answers = {
        key: _RatedAnswer(key, row, choice)
        for row in completions
        for number, choice in enumerate(row["choices"])
        for key in [f"{row['id']}/{number}"]
    }
    votes: dict[str, list[RaterVote]] = {"comparisons": [], "thumbs": []}
    for row in feedback:
        key, other = f"{row['completion']}/{row['choice']}", f"{row['over']}/{row['over_choice']}"
        if key not in answers or (row["over"] and other not in answers):
            found.left_out["on an answer that does not exist"] += 1
        elif row["kind"] == "tie":
            found.left_out["tie"] += 1
        elif row["kind"] == "edit":
            _add_pair(found, answers[key], answers[key], "edit", row["text"])
        elif row["kind"] == "better":
            first, second = sorted((key, other))
            side = {"left": 1, "right": -1}.get(answers[first].row["side"], 0)
            votes["comparisons"].append(
                RaterVote(row["actor"], f"{first} {second}", 1 if key == first else -1, side)
            )
        else:
            votes["thumbs"].append(RaterVote(row["actor"], key, 1 if row["kind"] == "like" else -1))
    found.ratings = {name: rate(own) for name, own in votes.items()}
    for item, log_odds in found.ratings["comparisons"].log_odds.items():
        one, two = (answers[key] for key in item.split(" "))
        if one.prompt != two.prompt or one.row["prompt_ids"] != two.row["prompt_ids"]:
            found.left_out["two answers to different prompts"] += 1
        elif expit(abs(log_odds)) < min_confidence:
            found.left_out["raters disagree"] += 1
        else:
            _add_pair(found, *((one, two) if log_odds > 0 else (two, one)), "better")
    _add_thumbs(found, answers, min_confidence)
    return found


def _add_pair(
    found: FeedbackExamples, chosen: _RatedAnswer, rejected: _RatedAnswer, kind: str, text: str | None = None
) -> None:
    if (chosen.text if text is None else text) == rejected.text:
        found.left_out["equal texts"] += 1
        return
    split, forced = chosen.row["split"], chosen.forced
    if forced != rejected.forced:  # other tokens for the same text: they stay in the loss
        forced = []
    sides = chosen.side("chosen", forced, text) | rejected.side("rejected", forced)
    found.pairs[split].append({**chosen.asked(forced), **sides, "id": rejected.key})
    found.kinds[kind] += 1
    _add_label(found, chosen, True, text)
    _add_label(found, rejected, False)


def _add_label(found: FeedbackExamples, answer: _RatedAnswer, label: bool, text: str | None = None) -> None:
    record = answer.side("completion", answer.forced, text) | {"label": label, "id": answer.key}
    found.labels[answer.row["split"]].append(answer.asked(answer.forced) | record)


def _add_thumbs(found: FeedbackExamples, answers: Mapping[str, _RatedAnswer], min_confidence: float) -> None:
    """Pair liked with disliked answers of one prompt and model, the surest first; the others are single."""
    groups: dict[Any, dict[bool, list[_RatedAnswer]]] = {}
    thumbs = found.ratings["thumbs"].log_odds
    for key in sorted(thumbs, key=lambda key: (-abs(thumbs[key]), key)):
        if expit(abs(thumbs[key])) < min_confidence:
            found.left_out["raters disagree"] += 1
        else:
            sides = groups.setdefault(
                (answers[key].row["digest"], answers[key].prompt), {True: [], False: []}
            )
            sides[thumbs[key] > 0].append(answers[key])
    for sides in groups.values():
        n = min(len(sides[True]), len(sides[False]))
        for liked, disliked in zip(sides[True], sides[False], strict=False):
            _add_pair(found, liked, disliked, "liked over disliked")
        for label, rest in ((label, one) for label, own in sides.items() for one in own[n:]):
            _add_label(found, rest, label)
            found.singles += 1
