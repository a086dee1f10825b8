"""Answers of which one was preferred, as texts; and the micro-batches that they are learnt from.

    Choice     chosen, rejected: two texts with one prompt             DPO, IPO, SimPO, ORPO, reward models
    Opinion    a text, and whether its answer is good                  KTO; a choice is two of them

A prompt is encoded once, as it is when something is sampled after it, and each answer by itself; so both texts begin with
the same ids, and only their last turn is learnt: earlier turns of the assistant are the prompt's.

Left out, and counted by reason (`Room`): answers that are the same once they are ids, texts longer than the room, answers
that say nothing. The first teach nothing, and would count in every mean.

The subtle part is the micro-batch. A pair is one example, so it is never split: units are sorted by length and taken
together while they fit into `micro_tokens` positions. As the loss is summed and divided once, how a step was cut, and
whether its texts share rows, changes nothing but rounding (a test).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import ChoiceConfig
from whorl.align.data.formats import Judged, Preference, Turns
from whorl.align.model.batch import lay, pack
from whorl.align.model.example import Room, Scribe, Text, joined
from whorl.align.model.policy_model import Network
from whorl.errors import DataError
from whorl.parallel.process_group import World
from whorl.tracking.seeds import numpy_rng

SCORED_TEXTS = 4096  # that are laid out at a time where nothing is learnt


@dataclass(frozen=True)
class Choice:
    """Two texts that begin with the same prompt, the first the better."""

    chosen: Text
    rejected: Text


@dataclass(frozen=True)
class Opinion:
    """A text, and whether its answer is good."""

    text: Text
    good: bool


def answered(scribe: Scribe, prompt: Turns, answer: Turns) -> Text:
    """A prompt with an answer, both texts or both messages, of which the answer alone is learnt.

    Raises:
        DataError: the template cannot write it; texts and messages are mixed; the answer is nobody's.
    """
    if isinstance(prompt, str) and isinstance(answer, str):
        return scribe.answered(prompt, answer)
    if isinstance(prompt, str) or isinstance(answer, str):
        raise DataError("a prompt and its answer mix texts and messages", expected="one or the other")
    before, whole = scribe.prompt(prompt), scribe.conversation([*prompt, *answer])
    # Each turn of the assistant is a run of the mask; the first that is no part of the prompt begins the answer.
    begins = np.flatnonzero(np.diff(whole.mask.astype(np.int8)) == 1) + 1
    turns = sum(message["role"] == "assistant" for message in prompt)
    if len(begins) <= turns:
        raise DataError("no message of the answer is the assistant's", expected="one at least")
    start = int(begins[turns])
    text = joined(before, whole.ids[start:].tolist())
    text.mask[len(before) :] = whole.mask[start:]
    return text


def choices(scribe: Scribe, preferences: Iterable[Preference], room: Room) -> list[Choice]:
    """Pairs as texts; `room` counts what is left out, and why."""
    made = []
    for one in preferences:
        try:
            made.append(
                Choice(answered(scribe, one.prompt, one.chosen), answered(scribe, one.prompt, one.rejected))
            )
        except DataError as error:
            room.refuse(error)
    return sound(scribe, made, room)


def sound(scribe: Scribe, made: Iterable[Choice], room: Room) -> list[Choice]:
    """Those of some pairs that teach something: for answers that a model sampled, which come as ids."""
    found = []
    for one in made:
        if np.array_equal(one.chosen.ids, one.rejected.ids):
            room.refuse("chosen and rejected are the same ids")
        elif not (says(scribe, one.chosen) and says(scribe, one.rejected)):
            room.refuse("an answer says nothing")
        elif room.admits(one.chosen, one.rejected):
            found.append(one)
    return found


def opinions(scribe: Scribe, judged: Iterable[Judged], room: Room) -> list[Opinion]:
    """Judged answers as texts; `room` counts what is left out, and why."""
    found = []
    for one in judged:
        try:
            text = answered(scribe, one.prompt, one.answer)
        except DataError as error:
            room.refuse(error)
            continue
        if not says(scribe, text):
            room.refuse("an answer says nothing")
        elif room.admits(text):
            found.append(Opinion(text, one.good))
    return found


def says(scribe: Scribe, text: Text) -> bool:
    """Whether what is learnt in it is more than its end and white space."""
    return bool(scribe.words(text.ids[text.mask].tolist()).strip())


class Units:
    """The micro-batches of each step, by its number: every epoch in an order of its own.

    Args:
        texts: of all units, one after another.
        each: texts a unit: 2 for pairs.
        name: of the stage, for its random stream.

    steps: of all epochs; positions: of a step, at most.
    """

    def __init__(
        self, texts: Sequence[Text], each: int, config: ChoiceConfig, pad_id: int, name: str
    ) -> None:
        self.texts, self.each, self.config, self.pad_id, self.name = texts, each, config, pad_id, name
        self.n = len(texts) // each
        self.sizes = np.array([len(text) - 1 for text in texts]).reshape(self.n, each)
        self.batch = min(config.batch, self.n)
        self.steps = max(1, math.ceil(config.epochs * self.n / self.batch))
        self.positions = self.batch * each * self._width(int(self.sizes.max()))
        self._epoch: tuple[int, Any] | None = None

    def of(self, step: int) -> list[int]:
        """The units of a step."""
        places = np.arange(step * self.batch, (step + 1) * self.batch)
        return [
            int(self._order(int(epoch))[place]) for epoch, place in zip(*divmod(places, self.n), strict=True)
        ]

    def share(self, units: Sequence[int], world: World) -> list[int]:
        """Those of some units that fall to this replica: each has short ones and long ones."""
        if world.size == 1:
            return list(units)
        return sorted(units, key=lambda unit: int(self.sizes[unit].max()))[world.rank :: world.size]

    def parts(self, units: Sequence[int], streams: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of some units. A part has the fields of `rows.py`, length [S] (targets of each of its S texts that
        are learnt) and of each stream, which has a number for every text, those of its texts [S]."""
        for group in self._groups(units):
            numbers = [unit * self.each + i for unit in group for i in range(self.each)]
            texts = [self.texts[number] for number in numbers]
            if self.config.packing:
                part = pack(texts, self._width(max(len(text) - 1 for text in texts)), self.pad_id)
            else:
                part = lay(texts, self.pad_id)
            part["length"] = torch.tensor([int(text.mask.sum()) for text in texts])
            yield part | {name: stream[torch.tensor(numbers)] for name, stream in streams.items()}

    def _groups(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Units that are learnt together, from short to long."""
        group: list[int] = []
        used = 0
        for unit in sorted(units, key=lambda unit: int(self.sizes[unit].max())):
            longest = self.each * _eights(int(self.sizes[unit].max()))
            if self.config.packing:
                used += int(self.sizes[unit].sum())
            else:
                used = (len(group) + 1) * longest  # all are as long as the last
            if group and used > self.config.micro_tokens:
                yield group
                group, used = [], int(self.sizes[unit].sum()) if self.config.packing else longest
            group.append(unit)
        if group:
            yield group

    def _width(self, longest: int) -> int:
        """Of a row, in positions."""
        return max(self.config.length, longest) if self.config.packing else _eights(longest)

    def _order(self, epoch: int) -> Any:
        if self._epoch is None or self._epoch[0] != epoch:
            rng = numpy_rng(self.config.seed, self.name, "order", epoch)
            self._epoch = epoch, rng.permutation(self.n)
        return self._epoch[1]


def _eights(n: int) -> int:
    return max(8, -(-n // 8) * 8)


def summed(network: Network, texts: Sequence[Text], pad_id: int) -> Tensor:
    """[S] what `network` says of each text: its log-probability, summed over what is learnt of it. No gradients."""
    found = torch.zeros(len(texts))
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for i in range(0, len(order), SCORED_TEXTS):
        some = order[i : i + SCORED_TEXTS]
        found[some] = network.score(lay([texts[n] for n in some], pad_id))["log_prob"].sum(1)
    return found
