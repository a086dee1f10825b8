"""From a schedule to what the runner and the sampler are given: one batch of rows, and a `Row` for each token to draw.

This runs at every step, for every sequence, in Python: at 32 sequences of a small model it is the engine's own cost that
counts, so a decoding sequence takes the short way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.cache_manager import KVCacheManager
from whorl.engine.cache.pages import InputBatch
from whorl.engine.sampling.penalties import TokenCounts
from whorl.engine.sampling.sampler import SamplerRow
from whorl.engine.scheduling.scheduler import Schedule
from whorl.engine.sequence import Sequence


def scores_prompt(sequence: Sequence) -> bool:
    """Whether the positions that are read in now are asked for the log-probabilities of the prompt itself."""
    return bool(
        sequence.request.prompt_log_probs
        and sequence.n_computed < sequence.n_prompt - 1
        and not sequence.n_output
    )


def build_batch(
    schedule: Schedule, cache: KVCacheManager, ngram_context: int, device: torch.device
) -> tuple[InputBatch, list[SamplerRow]]:
    """The rows as one batch, those of a single position first (`schedule.rows` is sorted so), and what is to be drawn.

    Args:
        reach: ids before a position that its embedding wants.
    """
    schedule.rows.sort(key=lambda row: row[1] > 1)  # stable: single ones keep their order
    ids: list[int] = []
    positions: list[int] = []
    starts: list[int] = [0]
    lengths: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    rows: list[SamplerRow] = []
    drawn: list[int] = []  # where in `wanted` they stand
    n_single = 0
    for sequence, n in schedule.rows:
        first, begin, have = sequence.n_computed, starts[-1], len(sequence.ids)
        stop = first + n
        starts.append(begin + n)
        lengths.append(stop)
        slots.append(sequence.slot)
        n_single += n == 1
        if n == 1 and stop == have:
            ids.append(sequence.ids[first])
            positions.append(first)
            drawn.append(len(wanted))
            wanted.append(begin)
            rows.append(_sampler_row(sequence, 0))
            continue
        ids += (sequence.ids + sequence.drafts)[first:stop] if sequence.drafts else sequence.ids[first:stop]
        positions += range(first, stop)
        if scores_prompt(sequence):
            wanted += range(begin, begin + n)
            if stop == have:
                drawn.append(len(wanted) - 1)
                rows.append(_sampler_row(sequence, 0))
        elif stop >= have:  # the newest token, and any drafts behind it
            drawn += range(len(wanted), len(wanted) + stop - have + 1)
            wanted += range(begin + n - 1 - (stop - have), begin + n)
            rows += [_sampler_row(sequence, k) for k in range(stop - have + 1)]
    at = np.array(slots)
    longest = -(-max(lengths) // cache.page_size)
    batch = InputBatch(
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        starts,
        lengths,
        slots,
        [table[at, :longest] for table in cache.page_tables],
        torch.tensor(wanted, dtype=torch.long, device=device),
        n_single,
        _previous_ids(schedule, ngram_context, device) if ngram_context else None,
        sample_indices=None if len(drawn) == len(wanted) else drawn,
    )
    return batch, rows


def _previous_ids(schedule: Schedule, ngram_context: int, device: torch.device) -> Tensor:
    """[N, reach] ids before each position, -1 where there are none."""
    out = []
    for sequence, n in schedule.rows:
        first = sequence.n_computed
        known = (
            [-1] * max(0, ngram_context - first)
            + sequence.ids[max(0, first - ngram_context) : first + n]
            + sequence.drafts
        )
        out += [known[k : k + ngram_context] for k in range(n)]
    return torch.tensor(out, device=device)


def _sampler_row(sequence: Sequence, k: int) -> SamplerRow:
    """What the sampler must know to draw the token behind `k` drafts."""
    r = sequence.request
    if r.sampling.has_penalties and sequence.token_counts is None:
        sequence.token_counts = TokenCounts(r.ids)
    return SamplerRow(
        sampling=r.sampling,
        prompt=r.ids,
        output=sequence.ids[sequence.n_prompt :] + sequence.drafts[:k] if r.sampling.has_penalties else (),
        seed=sequence.seed,
        n_drawn=sequence.n_output + k,
        allowed_mask=None if sequence.constraint is None else sequence.constraint.mask(),
        top_log_probs=r.top_log_probs,
        token_counts=sequence.token_counts,
    )
