"""From a schedule to the input of the runner and the sampler: one `InputBatch`, and a `SamplerRow` per token to sample.

This Python code runs at every step for every sequence. With 32 sequences of a small model it is the engine's main
overhead, so a decoding sequence takes a short path.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.cache_manager import KVCacheManager
from whorl.engine.cache.pages import InputBatch
from whorl.engine.sampling.penalties import TokenCounts
from whorl.engine.sampling.sampler import SamplerRow
from whorl.engine.scheduler import Schedule
from whorl.engine.sequence import Sequence


def build_batch(
    schedule: Schedule, cache: KVCacheManager, ngram_context: int
) -> tuple[InputBatch, list[SamplerRow]]:
    """Return the rows as one batch, rows of one position first (sorts `schedule.rows`), and the sampler rows.

    Args:
        ngram_context: ids before a position that its embedding reads.
    """
    schedule.rows.sort(key=lambda row: row[1] > 1)  # stable: rows of one position keep their order
    ids: list[int] = []
    positions: list[int] = []
    starts: list[int] = [0]
    lengths: list[int] = []
    slots: list[int] = []
    logit_indices: list[int] = []
    rows: list[SamplerRow] = []
    score_indices: list[int] = []
    score_targets: list[int] = []
    n_alternatives = 0
    n_single = 0
    for sequence, n in schedule.rows:
        first, start, n_ids = sequence.n_computed, starts[-1], len(sequence.ids)
        stop = first + n
        starts.append(start + n)
        lengths.append(stop)
        slots.append(sequence.slot)
        n_single += n == 1
        if n == 1 and stop == n_ids and sequence.scores is None:
            ids.append(sequence.ids[first])
            positions.append(first)
            logit_indices.append(start)
            rows.append(_sampler_row(sequence, 0))
            continue
        ids += (sequence.ids + sequence.drafts)[first:stop] if sequence.drafts else sequence.ids[first:stop]
        positions += range(first, stop)
        if scored := sequence.positions_to_score(stop):
            score_indices += range(start + scored.start - first, start + scored.stop - first)
            score_targets += sequence.request.ids[scored.start + 1 : scored.stop + 1]
            n_alternatives = max(n_alternatives, sequence.request.top_log_probs)
        sampled = sequence.positions_to_sample(stop)
        logit_indices += [start + position - first for position in sampled]
        rows += [_sampler_row(sequence, position - n_ids + 1) for position in sampled]
    slot_index = np.array(slots)
    n_pages = -(-max(lengths) // cache.page_size)
    batch = InputBatch(
        torch.tensor(ids),
        torch.tensor(positions),
        starts,
        lengths,
        slots,
        [table[slot_index, :n_pages] for table in cache.page_tables],
        torch.tensor(logit_indices, dtype=torch.long),
        n_single,
        _previous_ids(schedule, ngram_context) if ngram_context else None,
    )
    if score_indices:
        batch.score_indices = torch.tensor(score_indices)
        batch.score_targets = torch.tensor(score_targets)
        batch.n_alternatives = n_alternatives
    return batch, rows


def _previous_ids(schedule: Schedule, ngram_context: int) -> Tensor:
    """[N, ngram_context] ids before each position, -1 where there are none."""
    out = []
    for sequence, n in schedule.rows:
        first = sequence.n_computed
        context = (
            [-1] * max(0, ngram_context - first)
            + sequence.ids[max(0, first - ngram_context) : first + n]
            + sequence.drafts
        )
        out += [context[k : k + ngram_context] for k in range(n)]
    return torch.tensor(out)


def _sampler_row(sequence: Sequence, k: int) -> SamplerRow:
    """Return the sampler input for the token after `k` drafts."""
    request = sequence.request
    penalized, sampling = request.sampling.has_penalties, request.sampling
    if request.min_tokens and sequence.n_output + k - sequence.n_forced < request.min_tokens:
        bias = {**sampling.logit_bias, **dict.fromkeys(request.stop_ids, -math.inf)}
        sampling = sampling.model_copy(update={"logit_bias": bias})
    if penalized and sequence.token_counts is None:
        sequence.token_counts = TokenCounts(request.ids)
    return SamplerRow(
        sampling=sampling,
        prompt=request.ids,
        output=sequence.ids[sequence.n_prompt :] + sequence.drafts[:k] if penalized else (),
        seed=sequence.seed,
        n_drawn=sequence.n_output + k,
        allowed_mask=None if sequence.constraint is None else sequence.constraint.mask(),
        top_log_probs=request.top_log_probs,
        token_counts=sequence.token_counts,
    )
