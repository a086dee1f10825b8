"""Speculative decoding: cheap draft tokens, verified by the model several at a time.

A decode step reads all weights to make one token; a few more positions of the same row cost little more (Leviathan et al.
2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). The engine's proposers are:

- `PromptLookup`: the tokens that followed the last occurrence of the newest n-gram in this sequence (Saxena 2023).
- `DraftModel`: a smaller model with the same vocabulary.
- `MultiTokenDraft`: heads trained to predict several tokens ahead (`models/multi_token.py`, arXiv:2404.19737).

The engine verifies: each position's token is sampled from the model's own distribution with the random number of that
position, and a draft is kept if it equals the sampled token. For a deterministic draft x this is the papers' rule: x is
accepted with probability p(x), and otherwise the token follows p without x. The output is also bit-identical to the same
seed without speculation. `DraftModel` samples with the same random numbers, so similar distributions give equal tokens.

The subtle point is the draft length: each draft costs a position of the step. `AdaptiveDraftLength` doubles or halves it by
the acceptance of each sequence, and pauses after drafts fail.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whorl.engine.cache.block_pool import BlockPool
from whorl.engine.cache.cache_manager import KVCacheGroup, KVCacheManager
from whorl.engine.model.batch_builder import build_batch
from whorl.engine.model.runner import ModelRunner, layer_windows
from whorl.engine.sampling.sampler import Sampler
from whorl.engine.scheduling.scheduler import Schedule
from whorl.engine.sequence import Sequence, SequenceStatus
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.models.multi_token import MultiTokenPrediction
from whorl.nn.attention.state import KeyValueState

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
            n_drafts = min(index.draft_length.next_length(sequence.n_output), _max_useful_drafts(sequence))
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


def _max_useful_drafts(sequence: Sequence) -> int:
    """Return the number of drafts that still fit before the end of the output."""
    return sequence.request.max_tokens - sequence.n_output - 1


class DraftModel:
    """Proposes drafts by a smaller model with the same vocabulary.

    Args:
        model: in its compute dtype.
        max_drafts: drafts per step.
        max_num_seqs, max_model_len, page_size: as the engine's.
        banned_ids: ids that are never sampled.

    Raises:
        ConfigError: the model has windows or recurrent states, which cannot be rolled back by a position.
    """

    needs_hidden_states = False

    def __init__(
        self,
        model: LanguageModel,
        max_drafts: int = 4,
        *,
        max_num_seqs: int = 32,
        max_model_len: int = 2048,
        page_size: int = 32,
        banned_ids: SequenceABC[int] = (),
    ) -> None:
        if any(w is not None for w in layer_windows(model)):
            raise ConfigError(
                "the draft model has windows or states of fixed size", expected="full attention"
            )
        pages = max_num_seqs * -(-(max_model_len + max_drafts) // page_size)
        self.model, self.max_drafts = model, max_drafts
        self.runner = ModelRunner(model, {None: pages}, page_size, max_num_seqs, max_model_len + max_drafts)
        group = KVCacheGroup(None, BlockPool(pages, page_size))
        self.cache = KVCacheManager(
            [group], max_num_seqs, max_model_len + max_drafts, max_model_len, enable_prefix_caching=False
        )
        self.sampler = Sampler(model.config.vocab_size, banned_ids, str(model.embedding.device))
        self._free_slots = list(range(max_num_seqs))
        self._draft_sequences: dict[int, Sequence] = {}
        self._draft_lengths: dict[int, AdaptiveDraftLength] = {}

    def propose(self, sequences: SequenceABC[Sequence]) -> None:
        drafting: list[tuple[Sequence, Sequence, int]] = []
        for sequence in sequences:
            draft_length = self._draft_lengths.setdefault(
                sequence.arrival_index, AdaptiveDraftLength(self.max_drafts)
            )
            n_drafts = min(draft_length.next_length(sequence.n_output), _max_useful_drafts(sequence))
            if n_drafts > 0 and (draft := self._draft_sequence(sequence)) is not None:
                drafting.append((sequence, draft, n_drafts))
            sequence.drafts = []
        for k in range(max((n_drafts for _, _, n_drafts in drafting), default=0)):
            rows = [(s, draft) for s, draft, n_drafts in drafting if k < n_drafts]
            for (sequence, draft), token in zip(rows, self._draft_tokens([t for _, t in rows]), strict=True):
                sequence.drafts.append(token)
                draft.ids.append(token)
        for sequence, draft, _ in drafting:
            self._draft_lengths[sequence.arrival_index].n_proposed = len(sequence.drafts)
            # The next call keeps the positions whose drafts were accepted.
            draft.n_computed = min(draft.n_computed, len(sequence.ids))

    def _draft_sequence(self, sequence: Sequence) -> Sequence | None:
        """Return the draft model's copy of the sequence, with the target's ids, or None without a free slot."""
        draft = self._draft_sequences.get(sequence.arrival_index)
        if draft is None:
            if not self._free_slots:
                return None
            draft = Sequence(sequence.request, sequence.arrival_index, [], sequence.seed)
            draft.status, draft.slot, draft.pages = SequenceStatus.RUNNING, self._free_slots.pop(), [[]]
            self._draft_sequences[sequence.arrival_index] = draft
        unchanged = 0  # leading positions whose ids are unchanged since they were computed
        limit = min(draft.n_computed, len(sequence.ids) - 1)
        start = max(0, limit - self.max_drafts - 1)  # only drafts can have changed
        unchanged = start
        while unchanged < limit and draft.ids[unchanged] == sequence.ids[unchanged]:
            unchanged += 1
        draft.n_computed, draft.ids = unchanged, list(sequence.ids)
        return draft

    def _draft_tokens(self, draft_sequences: list[Sequence]) -> list[int]:
        schedule = Schedule([(t, t.n_uncomputed) for t in draft_sequences])
        order = {id(t): n for n, t in enumerate(draft_sequences)}
        for t in draft_sequences:
            self.cache.allocate_slots(t, len(t.ids))
        batch, rows = build_batch(
            schedule, self.cache, self.runner.ngram_context, self.model.embedding.device
        )
        sampled = self.sampler(self.runner.run(batch), rows)
        out = [0] * len(draft_sequences)
        for (draft, _), token in zip(schedule.rows, sampled, strict=True):
            draft.n_computed = len(draft.ids)
            out[order[id(draft)]] = token.id
        return out

    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Do nothing: only the ids are needed."""

    def release(self, sequence: Sequence) -> None:
        self._draft_lengths.pop(sequence.arrival_index, None)
        draft = self._draft_sequences.pop(sequence.arrival_index, None)
        if draft is not None:
            self.cache.release(draft)
            self._free_slots.append(draft.slot)


class MultiTokenDraft:
    """Proposes drafts by heads that predict several tokens ahead from the trunk's hidden states.

    Args:
        heads: trained with the model; the first predicts the next token, as the model does; the others make drafts.
        output_weight: [vocab, d_model], the model's output matrix.
        max_model_len: maximum positions of one sequence.
    """

    needs_hidden_states = True

    def __init__(self, heads: MultiTokenPrediction, output_weight: Tensor, max_model_len: int = 2048) -> None:
        if heads.n < 2:
            raise ConfigError("heads look 1 token ahead, as the model does", expected="at least 2")
        self.heads, self.output_weight, self.max_model_len = heads, output_weight, max_model_len
        self._states: dict[int, list[KeyValueState]] = {}
        self._drafts: dict[int, list[int]] = {}
        self._draft_lengths: dict[int, AdaptiveDraftLength] = {}

    def propose(self, sequences: SequenceABC[Sequence]) -> None:
        for sequence in sequences:
            draft_length = self._draft_lengths.setdefault(
                sequence.arrival_index, AdaptiveDraftLength(self.heads.n - 1)
            )
            n_drafts = min(draft_length.next_length(sequence.n_output), _max_useful_drafts(sequence))
            sequence.drafts = self._drafts.get(sequence.arrival_index, [])[: max(0, n_drafts)]
            draft_length.n_proposed = len(sequence.drafts)

    @torch.inference_mode()
    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Compute drafts from the hidden states [n, d_model] of the newest computed positions, without rejected drafts."""
        n, stop = len(hidden), sequence.n_computed
        states = self._states.get(sequence.arrival_index)
        if states is None or states[0].length + n > states[0].capacity:
            device = str(hidden.device)
            states = self.heads.new_state(1, self.max_model_len, dtype=self.heads.dtype, device=device)
            self._states[sequence.arrival_index] = states
        positions = torch.arange(stop - n, stop, device=hidden.device)[None]
        drafts = self.heads.draft(hidden[None].to(self.heads.dtype), self.output_weight, positions, states)
        # The first head predicts the token that the model itself has sampled.
        self._drafts[sequence.arrival_index] = drafts[0, 1:].tolist()

    def release(self, sequence: Sequence) -> None:
        for per_sequence in (self._states, self._drafts, self._draft_lengths):
            per_sequence.pop(sequence.arrival_index, None)
