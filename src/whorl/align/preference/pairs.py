"""Preference data as training examples, and the micro-batches of each step.

    PreferencePair    chosen, rejected: two texts with one prompt      DPO, IPO, SimPO, ORPO, reward models
    UnpairedExample   a text, and whether its completion is good       KTO; a pair is two of them

A prompt is encoded exactly as for sampling, and each completion alone. So both texts start with the same ids, and only
the last turn is in the loss; earlier assistant turns belong to the prompt. Logged ids (`prompt_ids`) are used unchanged.

`LengthFilter` rejects and counts completions with equal ids, texts that are too long, and empty completions. The first
have no gradient and would bias every mean.

The subtle point is the micro-batch. A pair is one unit and is never split. Units are sorted by length and grouped while
they fit into `micro_batch_tokens` positions. The loss is summed and divided once, so grouping and packing change only
rounding (tested).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import PreferenceStageConfig
from whorl.align.data.formats import Preference, TextOrMessages, UnpairedPreference
from whorl.align.model.batch import pack, pad, round_up_8
from whorl.align.model.policy_model import PolicyModel
from whorl.data.epoch_order import EpochOrder, StepOrder
from whorl.data.record_fields import Messages
from whorl.errors import DataError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.token_encoder import LengthFilter, TokenEncoder, TokenizedExample, concat

MAX_SCORED_EXAMPLES = 4096  # examples laid out at a time when scoring


@dataclass(frozen=True)
class PreferencePair:
    """Two texts with the same prompt; `chosen` is preferred."""

    chosen: TokenizedExample
    rejected: TokenizedExample


@dataclass(frozen=True)
class UnpairedExample:
    """A text, and whether its completion is good."""

    example: TokenizedExample
    label: bool


def tokenize_completion(
    encoder: TokenEncoder,
    prompt: TextOrMessages,
    completion: TextOrMessages,
    tools: Messages = (),
    variables: Mapping[str, Any] | None = None,
) -> TokenizedExample:
    """Return a prompt with a completion in the loss; both are strings, or both are messages.

    tools, variables: of the chat template.

    Raises:
        DataError: the template cannot render it, strings and messages are mixed, or no message is the assistant's.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        return encoder.prompt_completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise DataError("prompt and completion mix strings and messages", expected="one kind")
    prompt_ids = encoder.prompt(prompt, tools, variables)
    conversation = encoder.conversation([*prompt, *completion], tools, variables)
    # Each assistant turn is a run of the mask. The completion starts at the first run after those of the prompt.
    run_starts = np.flatnonzero(np.diff(conversation.loss_mask.astype(np.int8)) == 1) + 1
    turns = sum(message["role"] == "assistant" for message in prompt)
    if len(run_starts) <= turns:
        raise DataError("no message of the completion is from the assistant", expected="at least one")
    start = int(run_starts[turns])
    example = concat(prompt_ids, conversation.ids[start:].tolist())
    example.loss_mask[len(prompt_ids) :] = conversation.loss_mask[start:]
    return example


def _example(
    encoder: TokenEncoder,
    item: Preference | UnpairedPreference,
    completion: TextOrMessages,
    ids: Sequence[int],
) -> TokenizedExample:
    """Return the prompt of an item with a completion in the loss; of ids where it has them.

    Raises:
        DataError: as `tokenize_completion`; an id is outside the vocabulary.
    """
    if not ids:
        text = tokenize_completion(encoder, item.prompt, completion, item.tools, item.chat_template_kwargs)
        if not item.prompt_ids:
            return text
        ids = text.ids[text.prompt_length :].tolist()  # an edit of a logged answer
    if (largest := max(*item.prompt_ids, *ids)) >= encoder.tokenizer.vocab_size:
        raise DataError(
            f"the id {largest} is outside the vocabulary", expected="ids of the model's tokenizer"
        )
    return concat(item.prompt_ids, ids)


def tokenize_pairs(
    encoder: TokenEncoder, preferences: Iterable[Preference], length_filter: LengthFilter
) -> list[PreferencePair]:
    """Return pairs as examples; `length_filter` counts the rejected ones by reason."""
    pairs = []
    for preference in preferences:
        sides = (preference.chosen, preference.chosen_ids), (preference.rejected, preference.rejected_ids)
        try:
            pairs.append(PreferencePair(*(_example(encoder, preference, *side) for side in sides)))
        except DataError as error:
            length_filter.reject(error)
    return valid_pairs(encoder, pairs, length_filter)


def valid_pairs(
    encoder: TokenEncoder, pairs: Iterable[PreferencePair], length_filter: LengthFilter
) -> list[PreferencePair]:
    """Return the pairs with a learning signal; also for sampled completions, which arrive as ids."""
    valid = []
    for pair in pairs:
        if np.array_equal(pair.chosen.ids, pair.rejected.ids):
            length_filter.reject("chosen and rejected are the same ids")
        elif not (is_nonempty(encoder, pair.chosen) and is_nonempty(encoder, pair.rejected)):
            length_filter.reject("a completion is empty")
        elif length_filter.accepts(pair.chosen, pair.rejected):
            valid.append(pair)
    return valid


def tokenize_unpaired(
    encoder: TokenEncoder,
    preferences: Iterable[UnpairedPreference],
    length_filter: LengthFilter,
) -> list[UnpairedExample]:
    """Return labelled completions as examples; `length_filter` counts the rejected ones by reason."""
    examples = []
    for preference in preferences:
        try:
            example = _example(encoder, preference, preference.completion, preference.completion_ids)
        except DataError as error:
            length_filter.reject(error)
            continue
        if not is_nonempty(encoder, example):
            length_filter.reject("a completion is empty")
        elif length_filter.accepts(example):
            examples.append(UnpairedExample(example, preference.label))
    return examples


def is_nonempty(encoder: TokenEncoder, example: TokenizedExample) -> bool:
    """Return whether the completion has more than its end and white space."""
    return bool(encoder.decode(example.ids[example.loss_mask].tolist()).strip())


class PairBatches:
    """Micro-batches of each step, by step number; every epoch has its own order.

    Args:
        examples: of all units, one after another.
        examples_per_unit: 2 for pairs.
        name: of the stage, for its random stream.

    steps: of all epochs. positions: of a step, at most. batch_size: units of a step, at most.

    Raises:
        DataError: from `steps` and the rest, a unit has more than `config.data.batch_tokens` tokens.
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

    @cached_property
    def order(self) -> StepOrder:
        """Units of each step. Scoring needs none, so that the budget applies to training only."""
        config = self.config
        return StepOrder(
            EpochOrder(config.seed, self.name, "order", n=self.n_units), epochs=config.data.epochs,
            batch_size=min(config.data.batch_size, self.n_units), batch_tokens=config.data.batch_tokens,
            sizes=self.sizes.sum(1),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return self.order.steps

    @property
    def batch_size(self) -> int:
        return self.order.largest

    @property
    def positions(self) -> int:
        return self.batch_size * self.examples_per_unit * self._row_length(int(self.sizes.max()))

    def step_units(self, step: int) -> list[int]:
        """Return the units of a step."""
        return self.order[step]

    def shard(self, units: Sequence[int], group: ProcessGroup) -> list[int]:
        """Return this replica's units; each replica gets short and long ones."""
        if group.size == 1:
            return list(units)
        return sorted(units, key=lambda unit: int(self.sizes[unit].max()))[group.rank :: group.size]

    def micro_batches(
        self, units: Sequence[int], streams: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield micro-batches of some units.

        A batch has the fields of `model/batch.py`, length [S] (targets in the loss of each text), and of each stream
        the values [S] of its texts.
        """
        for group in self._unit_groups(units):
            numbers = [
                unit * self.examples_per_unit + i for unit in group for i in range(self.examples_per_unit)
            ]
            texts = [self.examples[number] for number in numbers]
            if self.config.data.packing:
                part = pack(texts, self._row_length(max(len(text) - 1 for text in texts)), self.pad_id)
            else:
                part = pad(texts, self.pad_id)
            part["length"] = torch.tensor([int(text.loss_mask.sum()) for text in texts])
            yield part | {name: stream[torch.tensor(numbers)] for name, stream in streams.items()}

    def _unit_groups(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Yield groups of units that share a micro-batch, from short to long."""
        group: list[int] = []
        used = 0
        for unit in sorted(units, key=lambda unit: int(self.sizes[unit].max())):
            longest = self.examples_per_unit * round_up_8(int(self.sizes[unit].max()))
            if self.config.data.packing:
                used += int(self.sizes[unit].sum())
            else:
                used = (len(group) + 1) * longest  # all rows are as long as the last
            if group and used > self.config.train.micro_batch_tokens:
                yield group
                group, used = [], int(self.sizes[unit].sum()) if self.config.data.packing else longest
            group.append(unit)
        if group:
            yield group

    def _row_length(self, longest: int) -> int:
        """Return the length of a row in positions."""
        return max(self.config.data.seq_len, longest) if self.config.data.packing else round_up_8(longest)


def sequence_log_probs(network: PolicyModel, texts: Sequence[TokenizedExample], pad_id: int) -> Tensor:
    """Return [S] summed log-probabilities over the targets in the loss of each text, without gradients."""
    found = torch.zeros(len(texts))
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for i in range(0, len(order), MAX_SCORED_EXAMPLES):
        some = order[i : i + MAX_SCORED_EXAMPLES]
        found[some] = network.score(pad([texts[n] for n in some], pad_id))["log_prob"].sum(1)
    return found
