"""Speculative decoding: cheap draft tokens, verified by the model several at a time.

A decode step reads all weights to make one token; a few more positions of the same row cost little more (Leviathan et al.
2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). The engine's proposers are:

- `PromptLookup` (`prompt_lookup.py`): the tokens that followed the last occurrence of the newest n-gram in this
  sequence (Saxena 2023).
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

import torch
from torch import Tensor

from whorl.engine.cache.block_pool import BlockPool
from whorl.engine.cache.cache_manager import KVCacheGroup, KVCacheManager
from whorl.engine.cpu.runner import make_runner
from whorl.engine.model.batch_builder import build_batch
from whorl.engine.sampling.sampler import Sampler
from whorl.engine.scheduler import Schedule
from whorl.engine.sequence import Sequence, SequenceStatus
from whorl.engine.speculation.prompt_lookup import COOLDOWN_TOKENS, AdaptiveDraftLength, max_useful_drafts
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.models.multi_token import MultiTokenPrediction
from whorl.nn.attention.state import KeyValueState


class DraftModel:
    """Proposes drafts by a smaller model with the same vocabulary.

    It runs by the faster of the torch and the native step, as the engine's model. A sequence without pages, or longer than
    the draft model allows, decodes without drafts.

    Args:
        model: in its compute dtype.
        max_drafts: drafts per step.
        max_num_seqs, max_model_len, page_size: as the engine's.
        kv_cache_tokens: positions in the cache; default: all sequences at full length.
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
        kv_cache_tokens: int | None = None,
        banned_ids: SequenceABC[int] = (),
    ) -> None:
        if not all(mixer.cache_spec().rolls_back for mixer in model.layer_mixers()):
            raise ConfigError(
                "the draft model has windows or states of fixed size", expected="full attention"
            )
        self.model, self.max_drafts = model, max_drafts
        self.max_length = min(max_model_len + max_drafts, model.max_positions or max_model_len + max_drafts)
        pages = max_num_seqs * -(-self.max_length // page_size)
        if kv_cache_tokens is not None:
            pages = min(pages, max(1, kv_cache_tokens // page_size))
        self.runner = make_runner(model, {None: pages}, page_size, max_num_seqs, self.max_length)
        group = KVCacheGroup(None, BlockPool(pages, page_size))
        self.cache = KVCacheManager(
            [group], max_num_seqs, self.max_length, self.max_length, enable_prefix_caching=False
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
            room = min(max_useful_drafts(sequence), self.max_length - len(sequence.ids))
            n_drafts = min(draft_length.next_length(sequence.n_output), room)
            if n_drafts > 0:
                draft = self._draft_sequence(sequence)
                if draft is not None and self.cache.allocate_slots(draft, len(draft.ids) + n_drafts):
                    drafting.append((sequence, draft, n_drafts))
                else:  # no free slot or page
                    self._release_draft(sequence)
                    draft_length.cooldown = COOLDOWN_TOKENS
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
        batch, rows = build_batch(schedule, self.cache, self.runner.ngram_context)
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
        self._release_draft(sequence)

    def _release_draft(self, sequence: Sequence) -> None:
        draft = self._draft_sequences.pop(sequence.arrival_index, None)
        if draft is not None:
            self.cache.release(draft)
            self._free_slots.append(draft.slot)


class MultiTokenDraft:
    """Proposes drafts by heads that predict several tokens ahead from the trunk's hidden states.

    The heads see the positions that this engine computed: not a cached prefix, nor a prompt of another process. They
    then draft from fewer positions, with a lower acceptance rate.

    Args:
        heads: trained with the model; the first predicts the next token, as the model does; the others make drafts.
        output_weight: [vocab, d_model], the model's output matrix.
        max_model_len: maximum positions of one sequence.
        max_drafts: drafts per step, at most one for each head after the first; default: all.
    """

    needs_hidden_states = True

    def __init__(
        self,
        heads: MultiTokenPrediction,
        output_weight: Tensor,
        max_model_len: int = 2048,
        max_drafts: int | None = None,
    ) -> None:
        if heads.n < 2:
            raise ConfigError("heads look 1 token ahead, as the model does", expected="at least 2")
        self.heads, self.output_weight, self.max_model_len = heads, output_weight, max_model_len
        self.max_drafts = min(max_drafts or heads.n, heads.n - 1)
        self._states: dict[int, list[KeyValueState]] = {}
        self._next_position: dict[int, int] = {}
        self._drafts: dict[int, list[int]] = {}
        self._draft_lengths: dict[int, AdaptiveDraftLength] = {}

    def propose(self, sequences: SequenceABC[Sequence]) -> None:
        for sequence in sequences:
            draft_length = self._draft_lengths.setdefault(
                sequence.arrival_index, AdaptiveDraftLength(self.max_drafts)
            )
            n_drafts = min(draft_length.next_length(sequence.n_output), max_useful_drafts(sequence))
            sequence.drafts = self._drafts.get(sequence.arrival_index, [])[: max(0, n_drafts)]
            draft_length.n_proposed = len(sequence.drafts)

    @torch.inference_mode()
    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Compute drafts from the hidden states [n, d_model] of the newest computed positions, without rejected drafts."""
        index, stop = sequence.arrival_index, sequence.n_computed
        start = stop - len(hidden)
        states = self._states.get(index)
        if states is None or self._next_position[index] != start:  # new, or preempted and computed again
            capacity = min(self.max_model_len, sequence.n_prompt + sequence.request.max_tokens)
            states = self.heads.new_state(
                1, capacity + self.heads.n, dtype=self.heads.dtype, device=str(hidden.device)
            )
            self._states[index] = states
        positions = torch.arange(start, stop, device=hidden.device)[None]
        # The first head predicts the token that the model itself has sampled.
        drafts = self.heads.draft(
            hidden[None].to(self.heads.dtype), self.output_weight, positions, states, first=2
        )
        self._drafts[index] = drafts[0].tolist()
        self._next_position[index] = stop

    def release(self, sequence: Sequence) -> None:
        for per_sequence in (self._states, self._next_position, self._drafts, self._draft_lengths):
            per_sequence.pop(sequence.arrival_index, None)
