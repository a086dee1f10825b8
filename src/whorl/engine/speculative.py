"""Speculation: cheap guesses at what follows, verified by the model several at a time.

A step of decoding reads all weights to make one token. A few more positions of the same row cost hardly more (Leviathan et
al. 2023, Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318):
so guesses that often come true are tokens for nothing. Who guesses is a `Proposer` of the engine:

- `Lookup`: what followed the last time that the newest few ids stood in this text (prompt look-up, Saxena 2023; in code and
  in answers that quote, much is said again). Costs a dictionary.
- `DraftModel`: a smaller model with the same ids.
- `Ahead`: heads that were trained to predict several tokens on (`models/multi_token.py`, arXiv:2404.19737).

How a guess is verified is the engine's business, and simpler than in the papers: every position's token is drawn from the
model's own distribution with the random number of its place, and a guess is kept if it is what was drawn. For a guess x that
is certain of itself this *is* the papers' rule: it is accepted with probability p(x), and what comes instead follows p
without x. It is lossless in a stronger sense than theirs: not only the distribution, the very tokens are those of the same
seed without speculation. `DraftModel` wins back what the papers gain by drafting from a distribution: it draws with the same
random numbers, so where both distributions are alike, both draw the same.

The subtle part is when not to guess: a guess costs a position of the step. `Patience` follows, for each sequence, how many
of its guesses came true, and doubles or halves how far it looks; one whose guesses fail is asked again only now and then.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
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

MAX_NGRAM, MIN_NGRAM = 4, 2  # ids that `Lookup` looks for
COOLDOWN_TOKENS = 16  # tokens without guesses after they failed


@dataclass
class AdaptiveDraftLength:
    """How far to guess for one sequence: 1 .. most, or 0 while it rests."""

    max_length: int
    length: int = 0
    cooldown: int = 0
    last_n_output: int = 0  # tokens of the sequence when it was last looked at
    n_proposed: int = 0

    def next_length(self, n_output: int) -> int:
        """Guesses that are worth making now, `n_output` tokens having been written."""
        written, self.last_n_output = n_output - self.last_n_output, n_output
        if self.n_proposed:  # the last guesses: all but the last of what was written then came true
            right = min(written - 1, self.n_proposed)
            if right == self.n_proposed:
                self.length = min(self.max_length, 2 * self.length)
            elif right * 2 < self.n_proposed:
                self.length = self.length // 2
            self.cooldown = 0 if self.length else COOLDOWN_TOKENS
            self.n_proposed = 0
        elif self.cooldown:
            self.cooldown = max(0, self.cooldown - written)
        if not self.cooldown and not self.length:
            self.length = min(2, self.max_length)
        return 0 if self.cooldown else self.length


@dataclass
class _NgramIndex:
    """Where each run of ids ended last: (ids) -> position behind it; how many positions were entered."""

    draft_length: AdaptiveDraftLength
    end_of_ngram: dict[tuple[int, ...], int] = field(default_factory=dict)
    n_indexed: int = 0


class PromptLookup:
    """Guesses from the sequence's own text.

    Args:
        most: guesses a step.
    """

    needs_hidden_states = False

    def __init__(self, max_drafts: int = 8) -> None:
        self.max_drafts = max_drafts
        self._indexes: dict[int, _NgramIndex] = {}

    def propose(self, sequences: Many[Sequence]) -> None:
        for sequence in sequences:
            known = self._indexes.setdefault(
                sequence.arrival_index, _NgramIndex(AdaptiveDraftLength(self.max_drafts))
            )
            far = min(known.draft_length.next_length(sequence.n_output), _max_useful_drafts(sequence))
            sequence.drafts = self._find(known, sequence.ids, far) if far > 0 else []
            known.draft_length.n_proposed = len(sequence.drafts)

    def _find(self, index: _NgramIndex, ids: list[int], n_drafts: int) -> list[int]:
        # The newest position is not entered yet: it would find itself.
        for stop in range(max(index.n_indexed, 1), len(ids)):
            for n in range(MIN_NGRAM, MAX_NGRAM + 1):
                if stop >= n:
                    index.end_of_ngram[tuple(ids[stop - n : stop])] = stop
        index.n_indexed = max(index.n_indexed, len(ids))
        for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            at = index.end_of_ngram.get(tuple(ids[-n:])) if len(ids) >= n else None
            if at is not None:
                found = ids[at : at + n_drafts]
                while 0 < len(found) < n_drafts:  # it repeats itself: and so do we
                    found += found[: n_drafts - len(found)]
                return found
        return []

    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Nothing to learn from."""

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.arrival_index, None)


def _max_useful_drafts(sequence: Sequence) -> int:
    """Guesses that could still be of use before the output's end."""
    return sequence.request.max_tokens - sequence.n_output - 1


class DraftModel:
    """Guesses by a smaller model with the same vocabulary.

    Args:
        model: in its compute type.
        most: guesses a step.
        max_sequences, max_length, page_size: as the engine's.
        forbidden: ids that are never drawn.

    Raises:
        ConfigError: a model whose layers keep a state of fixed size, which cannot be taken back by a position.
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
        banned_ids: Many[int] = (),
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

    def propose(self, sequences: Many[Sequence]) -> None:
        wanted: list[tuple[Sequence, Sequence, int]] = []
        for sequence in sequences:
            patience = self._draft_lengths.setdefault(
                sequence.arrival_index, AdaptiveDraftLength(self.max_drafts)
            )
            far = min(patience.next_length(sequence.n_output), _max_useful_drafts(sequence))
            if far > 0 and (twin := self._draft_sequence(sequence)) is not None:
                wanted.append((sequence, twin, far))
            sequence.drafts = []
        for k in range(max((far for _, _, far in wanted), default=0)):
            rows = [(s, twin) for s, twin, far in wanted if k < far]
            for (sequence, twin), token in zip(rows, self._draft_tokens([t for _, t in rows]), strict=True):
                sequence.drafts.append(token)
                twin.ids.append(token)
        for sequence, twin, _ in wanted:
            self._draft_lengths[sequence.arrival_index].n_proposed = len(sequence.drafts)
            # What is right of this, the next look will see: up to there the cache stays as it is.
            twin.n_computed = min(twin.n_computed, len(sequence.ids))

    def _draft_sequence(self, sequence: Sequence) -> Sequence | None:
        """The sequence as the draft model knows it, brought up to date."""
        twin = self._draft_sequences.get(sequence.arrival_index)
        if twin is None:
            if not self._free_slots:
                return None
            twin = Sequence(sequence.request, sequence.arrival_index, [], sequence.seed)
            twin.status, twin.slot, twin.pages = SequenceStatus.RUNNING, self._free_slots.pop(), [[]]
            self._draft_sequences[sequence.arrival_index] = twin
        same = 0  # positions whose ids are what they were when they were computed
        most = min(twin.n_computed, len(sequence.ids) - 1)
        start = max(0, most - self.max_drafts - 1)  # only what was a guess can have turned out otherwise
        same = start
        while same < most and twin.ids[same] == sequence.ids[same]:
            same += 1
        twin.n_computed, twin.ids = same, list(sequence.ids)
        return twin

    def _draft_tokens(self, draft_sequences: list[Sequence]) -> list[int]:
        schedule = Schedule([(t, t.n_uncomputed) for t in draft_sequences])
        order = {id(t): n for n, t in enumerate(draft_sequences)}
        for t in draft_sequences:
            self.cache.allocate_slots(t, len(t.ids))
        batch, rows = build_batch(
            schedule, self.cache, self.runner.ngram_context, self.model.embedding.device
        )
        drawn = self.sampler(self.runner.run(batch), rows)
        out = [0] * len(draft_sequences)
        for (twin, _), token in zip(schedule.rows, drawn, strict=True):
            twin.n_computed = len(twin.ids)
            out[order[id(twin)]] = token.id
        return out

    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Nothing to learn from."""

    def release(self, sequence: Sequence) -> None:
        self._draft_lengths.pop(sequence.arrival_index, None)
        twin = self._draft_sequences.pop(sequence.arrival_index, None)
        if twin is not None:
            self.cache.release(twin)
            self._free_slots.append(twin.slot)


class MultiTokenDraft:
    """Guesses by heads that look several tokens on from the trunk's hidden states.

    Args:
        heads: trained with the model; the first predicts what the model itself does, the others guess.
        output: [vocab, d_model], the model's output matrix.
        max_length: positions of one text.
    """

    needs_hidden_states = True

    def __init__(self, heads: MultiTokenPrediction, output_weight: Tensor, max_model_len: int = 2048) -> None:
        if heads.n < 2:
            raise ConfigError("heads look 1 token ahead, as the model does", expected="at least 2")
        self.heads, self.output_weight, self.max_model_len = heads, output_weight, max_model_len
        self._states: dict[int, list[KeyValueState]] = {}
        self._drafts: dict[int, list[int]] = {}
        self._draft_lengths: dict[int, AdaptiveDraftLength] = {}

    def propose(self, sequences: Many[Sequence]) -> None:
        for sequence in sequences:
            patience = self._draft_lengths.setdefault(
                sequence.arrival_index, AdaptiveDraftLength(self.heads.n - 1)
            )
            far = min(patience.next_length(sequence.n_output), _max_useful_drafts(sequence))
            sequence.drafts = self._drafts.get(sequence.arrival_index, [])[: max(0, far)]
            patience.n_proposed = len(sequence.drafts)

    @torch.inference_mode()
    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """hidden: [n, d_model] of the newest computed positions, those of wrong guesses left out."""
        n, stop = len(hidden), sequence.n_computed
        states = self._states.get(sequence.arrival_index)
        if states is None or states[0].length + n > states[0].capacity:
            device = str(hidden.device)
            states = self.heads.new_state(1, self.max_model_len, dtype=self.heads.dtype, device=device)
            self._states[sequence.arrival_index] = states
        positions = torch.arange(stop - n, stop, device=hidden.device)[None]
        drafts = self.heads.draft(hidden[None].to(self.heads.dtype), self.output_weight, positions, states)
        # The first head says again what the model has said with its own head.
        self._drafts[sequence.arrival_index] = drafts[0, 1:].tolist()

    def release(self, sequence: Sequence) -> None:
        for kept in (self._states, self._drafts, self._draft_lengths):
            kept.pop(sequence.arrival_index, None)
