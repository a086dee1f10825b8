"""Drawing from a batch of logits on a CPU: what `sampler.distribution` defines, without its sort.

    every row             log-sum-exp of the logits, for the log-probability under the model's own distribution
    greedy rows           the first of the largest logits, and that is all
    sampled rows          weights exp((z - max z) / T) in the order of the ids; those below a threshold are set to 0
    their threshold       min-p: itself, as the likeliest weighs 1. Top-k and top-p: the least weight that is kept, found
                          among the largest few hundred, which alone are sorted; if they do not reach p, among eight times
                          as many

A token is drawn by inverting the cumulative distribution in the order of the ids: the first whose cumulative weight exceeds
u times their sum. A running sum is the slowest of these operations, so weights are summed in blocks of 128, and one block is
looked into.

The subtle part is that a row must not know the batch, bit for bit. Every operation here is element by element, or a
reduction along a row whose order depends on its length alone: numpy's maximum, subtract, divide, exp, add along the last
axis, cumsum along the last axis, partition and sort of values. No sum goes through a matrix product, none is split among
threads. How many weights are sorted does depend on the batch, but not what their running sum is up to the threshold.

numpy and not torch: its exp, partition and sort use the widest vectors that the CPU has, and they run on one core, the same
way however many rows there are (torch divides a lone long row among threads, and sums it in another order).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whorl.engine.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

BLOCK = 128
PARTIAL_SORT_SIZE = 512  # weights that are sorted first
MIN_TEMPERATURE, MAX_TEMPERATURE = (
    1e-30,
    1e30,
)  # temperatures beyond are taken for these: in fp32 they would be 0 and infinite


def clamped_temperature(sampling: SamplingParams) -> float:
    """What logits are divided by."""
    return min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def top_p_bound(sampling: SamplingParams) -> float:
    """An id is kept whose likelier ones have less than this share of the mass; at top_p = 1 rounding drops none."""
    return sampling.top_p if sampling.top_p < 1 else 2.0


class CPUSampler:
    """Room for batches, kept between steps.

    Args:
        vocab_size: V. forbidden: ids that weigh nothing in any row.
    """

    def __init__(self, vocab_size: int, banned_ids: Ids) -> None:
        self.vocab_size, self.banned_ids, self.partial_sort_size = vocab_size, banned_ids, PARTIAL_SORT_SIZE
        self.is_banned = np.zeros(vocab_size, np.bool_)
        self.is_banned[banned_ids] = True
        # Rows are padded to whole blocks; the padding is never written to, and stays 0
        self._buffer = np.zeros((0, -(-vocab_size // BLOCK) * BLOCK), np.float32)
        self._buffer_source: tuple[Floats, Floats] | None = (
            None  # of which logits and highest the raw weights stand there
        )

    def _exp_weights(self, z: Floats, max_logits: Floats, temperature: Floats | None = None) -> Floats:
        """exp((z - highest) / temperature), padded with zeros: [n, whole blocks]; overwritten by the next call."""
        heated, held = temperature is not None and bool((temperature != 1).any()), self._buffer_source
        if held is not None and not heated and held[0] is z and (held[1] == max_logits).all():
            return self._buffer[: len(z)]
        self._buffer_source = None
        if len(z) > len(self._buffer):
            self._buffer = np.zeros((len(z), self._buffer.shape[1]), np.float32)
        weights = self._buffer[: len(z)]
        real = weights[:, : self.vocab_size]
        np.subtract(z, max_logits[:, None], out=real)
        if heated and temperature is not None:
            np.divide(real, temperature[:, None], out=real)
        with np.errstate(over="ignore"):  # a forbidden id may be far above the highest of the others
            np.exp(real, out=real)
        return weights

    def logsumexp(self, logits: Floats) -> Floats:
        """log-sum-exp of every row of `logits` [W, V]: [W]; not finite where a logit is NaN or infinite."""
        highest = logits.max(axis=1)
        with np.errstate(invalid="ignore"):
            sums = _block_sums(self._exp_weights(logits, highest)).sum(axis=1)
            self._buffer_source = logits, highest
            return np.asarray(highest + np.log(sums), np.float32)

    def argmax(self, z: Floats) -> Ids:
        """The likeliest id of every row of z [W, V] that is not forbidden, the first of equal ones: [W]."""
        found = np.asarray(z.argmax(axis=1), np.int64)
        for row in np.flatnonzero(self.is_banned[found]):  # seldom
            found[row] = np.where(self.is_banned, -np.inf, z[row]).argmax()
        return found

    def weights(self, z: Floats, max_logits: Floats, settings: Sequence[SamplingParams]) -> Floats:
        """What rows are sampled from: [n, whole blocks] in the order of the ids, 0 for what was cut, not yet renormalised.

        The array holds until the next call.

        Args:
            z: [n, V], treated, of rows with a temperature; highest: [n], its largest that is not forbidden.
        """
        temperature = np.array([clamped_temperature(s) for s in settings], np.float32)
        weights = self._exp_weights(z, max_logits, temperature)
        self._buffer_source = None  # they are changed from here on
        weights[:, self.banned_ids] = 0
        threshold = np.array([s.min_p for s in settings], np.float32)
        cut = np.array([n for n, s in enumerate(settings) if s.top_k > 0 or s.top_p < 1], np.int64)
        if len(cut):
            mine = weights if len(cut) == len(weights) else weights[cut]
            chosen = [settings[n] for n in cut.tolist()]
            k = np.array([s.top_k or self.vocab_size for s in chosen])
            reach = np.array([top_p_bound(s) for s in chosen])
            least, spare = self._smallest_kept_weight(mine, k, reach, self.partial_sort_size)
            # Of equal weights at the threshold those of the first ids are kept
            for row in np.flatnonzero(spare):
                equal = np.flatnonzero(mine[row] == least[row])
                weights[cut[row], equal[spare[row] :]] = 0
            threshold[cut] = np.maximum(threshold[cut], least)
        if threshold.any():
            np.multiply(weights, weights >= threshold[:, None], out=weights)
        return weights

    def _smallest_kept_weight(
        self, weights: Floats, k: Ids, top_p: Doubles, n_sorted: int
    ) -> tuple[Floats, Ids]:
        """Top-k and top-p: the least weight that is kept [n], and how many that weigh the same (0: all of them).

        Args:
            weights: [n, whole blocks]; k: [n], V for all; reach: [n], as `reach_of` says; few: weights to sort at first.
        """
        rows, size = np.arange(len(weights)), self.vocab_size
        some = min(
            max(n_sorted, int(k[k < size].max(initial=0))) + 1, size
        )  # one more: is it equal to the last one kept?
        largest = np.partition(weights[:, :size], size - some, axis=1)[:, size - some :]
        largest = np.ascontiguousarray(np.sort(largest, axis=1)[:, ::-1])
        within = largest * (np.arange(some) < k[:, None])
        reached = within.cumsum(axis=1, dtype=np.float64)
        total = np.where(k < size, reached[:, -1], _block_sums(weights).sum(axis=1, dtype=np.float64))
        kept = ((reached - within < (top_p * total)[:, None]) & (within > 0)).sum(axis=1)
        least = largest[rows, kept - 1]
        more = np.flatnonzero(kept == some) if some < size else rows[:0]
        straddles = largest[rows, np.minimum(kept, some - 1)] == least
        straddles &= kept < some
        spare = np.where(straddles, kept - (largest > least[:, None]).sum(axis=1), 0)
        if len(more):
            least[more], spare[more] = self._smallest_kept_weight(
                weights[more], k[more], top_p[more], 8 * some
            )
        return least, spare


def sample_inverse_cdf(weights: Floats, u: Doubles) -> tuple[Ids, Doubles]:
    """One draw from each row of weights [n, whole blocks]: u [n] in [0, 1) -> (ids [n], their probabilities [n])."""
    rows = np.arange(len(weights))
    reached = _block_sums(weights).cumsum(axis=1, dtype=np.float64)
    total = reached[:, -1]
    goal = u * total
    block = _first_index_above(reached, goal)
    goal -= np.where(block > 0, reached[rows, block - 1], 0.0)
    inside = weights.reshape(len(weights), -1, BLOCK)[rows, block].cumsum(axis=1, dtype=np.float64)
    # The block's sum was rounded: at its very end a draw could fall behind its last id
    place = block * BLOCK + _first_index_above(inside, np.minimum(goal, inside[:, -1] * (1 - 1e-9)))
    return place, weights[rows, place] / total


def normalize(weights: Floats) -> Floats:
    """The weights of every row divided by their sum: [n, whole blocks]."""
    return np.asarray(weights / _block_sums(weights).sum(axis=1, dtype=np.float64)[:, None], np.float32)


def _first_index_above(cumulative: Doubles, target: Doubles) -> Ids:
    """Of each row of running sums [n, m] the first that exceeds goal [n]: never one that adds nothing."""
    return np.asarray((cumulative <= target[:, None]).sum(axis=1), np.int64)


def _block_sums(weights: Floats) -> Floats:
    """[n, whole blocks] -> [n, blocks] fp32."""
    return np.asarray(weights.reshape(len(weights), -1, BLOCK).sum(axis=-1))
