"""Drafts from the sequence's own text, and the number of drafts that are worth a step (`proposers.py`)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from torch import Tensor

from whorl.engine.sequence import Sequence

MAX_NGRAM, MIN_NGRAM = 4, 2  # n-gram lengths of `PromptLookup`
COOLDOWN_TOKENS = 16  # tokens without drafts after all drafts failed


@dataclass
class AdaptiveDraftLength:
    """Draft length of one sequence: 1 .. max_length, or 0 during the cooldown."""

    max_length: int
    length: int = 0
    cooldown: int = 0
    last_n_output: int = 0  # output length at the last call
    n_proposed: int = 0

    def next_length(self, n_output: int) -> int:
        """Return the number of drafts to make now, after `n_output` output tokens."""
        n_new, self.last_n_output = n_output - self.last_n_output, n_output
        if self.n_proposed:  # of the last drafts, all but the newest output token were accepted
            n_accepted = min(n_new - 1, self.n_proposed)
            if n_accepted == self.n_proposed:
                self.length = min(self.max_length, 2 * self.length)
            elif n_accepted * 2 < self.n_proposed:
                self.length = self.length // 2
            self.cooldown = 0 if self.length else COOLDOWN_TOKENS
            self.n_proposed = 0
        elif self.cooldown:
            self.cooldown = max(0, self.cooldown - n_new)
        if not self.cooldown and not self.length:
            self.length = min(2, self.max_length)
        return 0 if self.cooldown else self.length


@dataclass
class _NgramIndex:
    """End position of the last occurrence of each n-gram, and the number of positions indexed."""

    draft_length: AdaptiveDraftLength
    end_of_ngram: dict[tuple[int, ...], int] = field(default_factory=dict)
    n_indexed: int = 0


class PromptLookup:
    """Proposes drafts from the sequence's own text.

    Args:
        max_drafts: drafts per step.
    """

    needs_hidden_states = False

    def __init__(self, max_drafts: int = 8) -> None:
        self.max_drafts = max_drafts
        self._indexes: dict[int, _NgramIndex] = {}

    def propose(self, sequences: SequenceABC[Sequence]) -> None:
        for sequence in sequences:
            index = self._indexes.setdefault(
                sequence.arrival_index, _NgramIndex(AdaptiveDraftLength(self.max_drafts))
            )
            n_drafts = min(index.draft_length.next_length(sequence.n_output), max_useful_drafts(sequence))
            sequence.drafts = self._find(index, sequence.ids, n_drafts) if n_drafts > 0 else []
            index.draft_length.n_proposed = len(sequence.drafts)

    def _find(self, index: _NgramIndex, ids: list[int], n_drafts: int) -> list[int]:
        # The newest position is not indexed yet, or the search would find it.
        for stop in range(max(index.n_indexed, 1), len(ids)):
            for n in range(MIN_NGRAM, MAX_NGRAM + 1):
                if stop >= n:
                    index.end_of_ngram[tuple(ids[stop - n : stop])] = stop
        index.n_indexed = max(index.n_indexed, len(ids))
        for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            at = index.end_of_ngram.get(tuple(ids[-n:])) if len(ids) >= n else None
            if at is not None:
                found = ids[at : at + n_drafts]
                while 0 < len(found) < n_drafts:  # the match runs into the end: repeat it
                    found += found[: n_drafts - len(found)]
                return found
        return []

    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Do nothing: only the ids are needed."""

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.arrival_index, None)


def max_useful_drafts(sequence: Sequence) -> int:
    """Return the number of drafts that still fit before the end of the output."""
    return sequence.n_remaining - 1
