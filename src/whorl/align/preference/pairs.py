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

from whorl.align.config import PreferenceStageConfig
from whorl.align.data.formats import Preference, TextOrMessages, UnpairedPreference
from whorl.align.model.batch import pack, pad
from whorl.align.model.example import ExampleTokenizer, LengthFilter, TokenizedExample, concat
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import DataError
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import numpy_rng

MAX_SCORED_EXAMPLES = 4096  # that are laid out at a time where nothing is learnt


@dataclass(frozen=True)
class PreferencePair:
    """Two texts that begin with the same prompt, the first the better."""

    chosen: TokenizedExample
    rejected: TokenizedExample


@dataclass(frozen=True)
class UnpairedExample:
    """A text, and whether its answer is good."""

    example: TokenizedExample
    label: bool


def tokenize_completion(
    example_tokenizer: ExampleTokenizer, prompt: TextOrMessages, completion: TextOrMessages
) -> TokenizedExample:
    """A prompt with an answer, both texts or both messages, of which the answer alone is learnt.

    Raises:
        DataError: the template cannot write it; texts and messages are mixed; the answer is nobody's.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        return example_tokenizer.prompt_completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise DataError("a prompt and its answer mix texts and messages", expected="one or the other")
    before, whole = example_tokenizer.prompt(prompt), example_tokenizer.conversation([*prompt, *completion])
    # Each turn of the assistant is a run of the mask; the first that is no part of the prompt begins the answer.
    begins = np.flatnonzero(np.diff(whole.loss_mask.astype(np.int8)) == 1) + 1
    turns = sum(message["role"] == "assistant" for message in prompt)
    if len(begins) <= turns:
        raise DataError("no message of the answer is the assistant's", expected="one at least")
    start = int(begins[turns])
    text = concat(before, whole.ids[start:].tolist())
    text.loss_mask[len(before) :] = whole.loss_mask[start:]
    return text


def tokenize_pairs(
    example_tokenizer: ExampleTokenizer, preferences: Iterable[Preference], length_filter: LengthFilter
) -> list[PreferencePair]:
    """Pairs as texts; `room` counts what is left out, and why."""
    made = []
    for one in preferences:
        try:
            made.append(
                PreferencePair(
                    tokenize_completion(example_tokenizer, one.prompt, one.chosen),
                    tokenize_completion(example_tokenizer, one.prompt, one.rejected),
                )
            )
        except DataError as error:
            length_filter.reject(error)
    return valid_pairs(example_tokenizer, made, length_filter)


def valid_pairs(
    example_tokenizer: ExampleTokenizer, pairs: Iterable[PreferencePair], length_filter: LengthFilter
) -> list[PreferencePair]:
    """Those of some pairs that teach something: for answers that a model sampled, which come as ids."""
    found = []
    for one in pairs:
        if np.array_equal(one.chosen.ids, one.rejected.ids):
            length_filter.reject("chosen and rejected are the same ids")
        elif not (
            is_nonempty(example_tokenizer, one.chosen) and is_nonempty(example_tokenizer, one.rejected)
        ):
            length_filter.reject("an answer says nothing")
        elif length_filter.accepts(one.chosen, one.rejected):
            found.append(one)
    return found


def tokenize_unpaired(
    example_tokenizer: ExampleTokenizer,
    preferences: Iterable[UnpairedPreference],
    length_filter: LengthFilter,
) -> list[UnpairedExample]:
    """Judged answers as texts; `room` counts what is left out, and why."""
    found = []
    for one in preferences:
        try:
            text = tokenize_completion(example_tokenizer, one.prompt, one.completion)
        except DataError as error:
            length_filter.reject(error)
            continue
        if not is_nonempty(example_tokenizer, text):
            length_filter.reject("an answer says nothing")
        elif length_filter.accepts(text):
            found.append(UnpairedExample(text, one.label))
    return found


def is_nonempty(example_tokenizer: ExampleTokenizer, example: TokenizedExample) -> bool:
    """Whether what is learnt in it is more than its end and white space."""
    return bool(example_tokenizer.decode(example.ids[example.loss_mask].tolist()).strip())


class PairBatches:
    """The micro-batches of each step, by its number: every epoch in an order of its own.

    Args:
        texts: of all units, one after another.
        each: texts a unit: 2 for pairs.
        name: of the stage, for its random stream.

    steps: of all epochs; positions: of a step, at most.
    """

    def __init__(
        self,
        examples: Sequence[TokenizedExample],
        examples_per_unit: int,
        config: PreferenceStageConfig,
        pad_id: int,
        name: str,
    ) -> None:
        self.examples, self.examples_per_unit, self.config, self.pad_id, self.name = (
            examples,
            examples_per_unit,
            config,
            pad_id,
            name,
        )
        self.n_units = len(examples) // examples_per_unit
        self.sizes = np.array([len(text) - 1 for text in examples]).reshape(self.n_units, examples_per_unit)
        self.batch_size = min(config.batch_size, self.n_units)
        self.steps = max(1, math.ceil(config.epochs * self.n_units / self.batch_size))
        self.positions = self.batch_size * examples_per_unit * self._row_length(int(self.sizes.max()))
        self._order_cache: tuple[int, Any] | None = None

    def step_units(self, step: int) -> list[int]:
        """The units of a step."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        return [
            int(self._epoch_order(int(epoch))[place])
            for epoch, place in zip(*divmod(places, self.n_units), strict=True)
        ]

    def shard(self, units: Sequence[int], group: ProcessGroup) -> list[int]:
        """Those of some units that fall to this replica: each has short ones and long ones."""
        if group.size == 1:
            return list(units)
        return sorted(units, key=lambda unit: int(self.sizes[unit].max()))[group.rank :: group.size]

    def micro_batches(
        self, units: Sequence[int], streams: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of some units. A part has the fields of `rows.py`, length [S] (targets of each of its S texts that
        are learnt) and of each stream, which has a number for every text, those of its texts [S]."""
        for group in self._unit_groups(units):
            numbers = [
                unit * self.examples_per_unit + i for unit in group for i in range(self.examples_per_unit)
            ]
            texts = [self.examples[number] for number in numbers]
            if self.config.packing:
                part = pack(texts, self._row_length(max(len(text) - 1 for text in texts)), self.pad_id)
            else:
                part = pad(texts, self.pad_id)
            part["length"] = torch.tensor([int(text.loss_mask.sum()) for text in texts])
            yield part | {name: stream[torch.tensor(numbers)] for name, stream in streams.items()}

    def _unit_groups(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Units that are learnt together, from short to long."""
        group: list[int] = []
        used = 0
        for unit in sorted(units, key=lambda unit: int(self.sizes[unit].max())):
            longest = self.examples_per_unit * _round_up_8(int(self.sizes[unit].max()))
            if self.config.packing:
                used += int(self.sizes[unit].sum())
            else:
                used = (len(group) + 1) * longest  # all are as long as the last
            if group and used > self.config.micro_batch_tokens:
                yield group
                group, used = [], int(self.sizes[unit].sum()) if self.config.packing else longest
            group.append(unit)
        if group:
            yield group

    def _row_length(self, longest: int) -> int:
        """Of a row, in positions."""
        return max(self.config.seq_len, longest) if self.config.packing else _round_up_8(longest)

    def _epoch_order(self, epoch: int) -> Any:
        if self._order_cache is None or self._order_cache[0] != epoch:
            rng = numpy_rng(self.config.seed, self.name, "order", epoch)
            self._order_cache = epoch, rng.permutation(self.n_units)
        return self._order_cache[1]


def _round_up_8(n: int) -> int:
    return max(8, -(-n // 8) * 8)


def sequence_log_probs(network: PolicyModel, texts: Sequence[TokenizedExample], pad_id: int) -> Tensor:
    """[S] what `network` says of each text: its log-probability, summed over what is learnt of it. No gradients."""
    found = torch.zeros(len(texts))
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for i in range(0, len(order), MAX_SCORED_EXAMPLES):
        some = order[i : i + MAX_SCORED_EXAMPLES]
        found[some] = network.score(pad([texts[n] for n in some], pad_id))["log_prob"].sum(1)
    return found
