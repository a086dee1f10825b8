"""Log-probabilities of given ids from hidden states, without the logits of a whole step in memory.

    log p(target) = logit[target] - log sum exp(logits)

A step may score thousands of positions, and its logits with their softmax take gigabytes for a large vocabulary. So the head
runs on `CHUNK_ROWS` positions at a time, and only three numbers of each are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.pages import InputBatch
from whorl.engine.sampling.cpu_sampler import Summarize

CHUNK_ROWS = 128  # logits of a vocabulary of 8,192 take 4 MB then, which the softmax finds in the cache


@dataclass(frozen=True)
class TokenScores:
    """Scores of [S] ids.

    log_probs: [S] fp32. greedy: [S], whether the id has the largest logit, the first one among equals.
    top_ids, top_log_probs: [S, k] of the most likely ids.
    """

    log_probs: Tensor
    greedy: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    @classmethod
    def cat(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """Return the scores of all parts, in order."""
        names = ("log_probs", "greedy", "top_ids", "top_log_probs")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def cpu(self) -> TokenScores:
        """Return a copy in the CPU's memory."""
        return TokenScores(*(t.cpu() for t in vars(self).values()))


def score_tokens(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: InputBatch,
    summarize: Summarize | None = None,
) -> TokenScores | None:
    """Return the scores at `score_indices` of a step, or None if it scores nothing.

    Args:
        logits_of: from hidden states [n, d_model] to logits [n, vocab] fp32.
        hidden: [N, d_model] of all positions of the step.
        summarize: see `score_logits`.
    """
    if batch.score_indices is None or batch.score_targets is None:
        return None
    where, targets = (
        torch.split(t.to(hidden.device), CHUNK_ROWS) for t in (batch.score_indices, batch.score_targets)
    )
    parts = [
        score_logits(logits_of(hidden[rows]), ids, batch.n_alternatives, summarize)
        for rows, ids in zip(where, targets, strict=True)
    ]
    return TokenScores.cat(parts)


def score_logits(
    logits: Tensor, targets: Tensor, n_alternatives: int, summarize: Summarize | None = None
) -> TokenScores:
    """Return the scores of `targets` [n] by logits [n, vocab] fp32.

    summarize: returns the index of the largest logit and the log-sum-exp of each row, on a CPU; None uses torch.
    """
    k = min(n_alternatives, logits.shape[-1])
    none = logits[:, :0], targets[:, None][:, :0]  # without alternatives topk would still read all logits
    if summarize is not None:
        rows, ids = logits.numpy(), targets.numpy()
        largest, log_sums = summarize(rows)
        log_probs = torch.from_numpy(rows[np.arange(len(ids)), ids] - log_sums)
        top, top_ids = logits.topk(k) if k else none
        top = top - torch.from_numpy(log_sums)[:, None]
        return TokenScores(log_probs, torch.from_numpy(largest == ids), top_ids, top)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    greedy = chosen == logits.amax(-1)
    ties = greedy.nonzero()[:, 0]
    greedy[ties] = logits[ties].argmax(-1) == targets[ties]  # a maximum's index costs more than its value
    of_all = logits.log_softmax(-1)
    top, top_ids = of_all.topk(k) if k else none
    return TokenScores(of_all.gather(-1, targets[:, None])[:, 0], greedy, top_ids, top)
