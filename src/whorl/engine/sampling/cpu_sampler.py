"""Sample from a batch of logits on a CPU: `sampler.distribution` without its sort.

    every row             log-sum-exp of the logits, for the model's own log-probability
    greedy rows           argmax
    sampled rows          weights exp((z - max z) / T) in id order; weights below a threshold become 0
    threshold             min-p: itself, as the largest weight is 1. Top-k, top-p: the smallest kept weight, found by
                          sorting the largest few hundred weights; if they do not reach p, eight times as many

Sampling inverts the cumulative distribution in id order: the first id whose cumulative weight exceeds u times the sum.
The running sum is the slowest operation, so weights are summed in blocks of 128, and only one block is searched.

The subtle point is batch invariance, bit for bit. Every operation is elementwise, or a reduction along a row whose order
depends on the row's length alone: numpy's max, subtract, divide, exp, cumsum, partition and sort. No sum goes through a
matrix product or is split among threads. The number of sorted weights depends on the batch; their running sum up to the
threshold does not.

numpy instead of torch: its exp, partition and sort use the widest vectors of the CPU on one core, for any number of rows.
Torch splits a single long row among threads, which changes the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from whorl.engine.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
# Logits [W, V] -> index of the largest [W], log-sum-exp [W].
Summarize = Callable[[Floats], tuple[Ids, Floats]]
# Logits [W, V], u [W], settings [W] -> ids (-1: none), log-probabilities, raw log-probabilities.
DrawPlain = Callable[[Floats, Doubles, Sequence[SamplingParams]], tuple[Ids, Doubles, Floats]]

BLOCK = 128
PARTIAL_SORT_SIZE = 512  # weights in the first partial sort
# Limits: beyond them, fp32 would give 0 and infinity.
MIN_TEMPERATURE, MAX_TEMPERATURE = (1e-30, 1e30)


def clamped_temperature(sampling: SamplingParams) -> float:
    """Return the divisor of the logits."""
    return min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def top_p_bound(sampling: SamplingParams) -> float:
    """Bound on the mass of more likely ids below which an id is kept. At top_p = 1 it is 2, so rounding drops none."""
    return sampling.top_p if sampling.top_p < 1 else 2.0


class CPUSampler:
    """Samples batches of rows; keeps its buffer between steps.

    Args:
        vocab_size: V.
        banned_ids: ids of weight 0 in every row.
        summarize: a faster way to `argmax` and `logsumexp`, or None.
    """

    def __init__(self, vocab_size: int, banned_ids: Ids, summarize: Summarize | None = None) -> None:
        self.vocab_size, self.banned_ids, self.partial_sort_size = vocab_size, banned_ids, PARTIAL_SORT_SIZE
        self._summarize = summarize
        self.is_banned = np.zeros(vocab_size, np.bool_)
        self.is_banned[banned_ids] = True
        # Rows are padded to whole blocks; the padding is never written and stays 0.
        self._buffer = np.zeros((0, -(-vocab_size // BLOCK) * BLOCK), np.float32)
        # The (logits, max_logits) whose unscaled weights the buffer holds.
        self._buffer_source: tuple[Floats, Floats] | None = None

    def _exp_weights(self, z: Floats, max_logits: Floats, temperature: Floats | None = None) -> Floats:
        """exp((z - max_logits) / temperature), padded with zeros: [n, whole blocks]; overwritten by the next call."""
        scaled, cached = temperature is not None and bool((temperature != 1).any()), self._buffer_source
        if cached is not None and not scaled and cached[0] is z and (cached[1] == max_logits).all():
            return self._buffer[: len(z)]
        self._buffer_source = None
        if len(z) > len(self._buffer):
            self._buffer = np.zeros((len(z), self._buffer.shape[1]), np.float32)
        weights = self._buffer[: len(z)]
        real = weights[:, : self.vocab_size]
        np.subtract(z, max_logits[:, None], out=real)
        if scaled and temperature is not None:
            np.divide(real, temperature[:, None], out=real)
        with np.errstate(over="ignore"):  # a banned id may lie far above the largest other logit
            np.exp(real, out=real)
        return weights

    def logsumexp(self, logits: Floats) -> Floats:
        """Log-sum-exp of every row of `logits` [W, V]: [W]; not finite where a logit is NaN or infinite."""
        max_logits = logits.max(axis=1)
        with np.errstate(invalid="ignore"):
            sums = _block_sums(self._exp_weights(logits, max_logits)).sum(axis=1)
            self._buffer_source = logits, max_logits
            return np.asarray(max_logits + np.log(sums), np.float32)

    def summarize(self, logits: Floats) -> tuple[Ids, Floats]:
        """`argmax` and `logsumexp` of the same logits."""
        if self._summarize is None:
            return self.argmax(logits), self.logsumexp(logits)
        largest, log_sums = self._summarize(logits)
        return self._without_banned(logits, largest), log_sums

    def argmax(self, z: Floats) -> Ids:
        """Most likely id of every row of z [W, V] that is not banned, the first of equal ones: [W]."""
        return self._without_banned(z, np.asarray(z.argmax(axis=1), np.int64))

    def _without_banned(self, z: Floats, found: Ids) -> Ids:
        for row in np.flatnonzero(self.is_banned[found]):  # rare
            found[row] = np.where(self.is_banned, -np.inf, z[row]).argmax()
        return found

    def weights(self, z: Floats, max_logits: Floats, settings: Sequence[SamplingParams]) -> Floats:
        """Weights of the sampling distribution: [n, whole blocks] in id order, 0 for cut ids, not normalized.

        The next call overwrites the array.

        Args:
            z: [n, V], processed logits of rows with a temperature.
            max_logits: [n], the largest logit of each row that is not banned.
            settings: of each row.
        """
        temperature = np.array([clamped_temperature(s) for s in settings], np.float32)
        weights = self._exp_weights(z, max_logits, temperature)
        self._buffer_source = None  # the code below changes the weights
        weights[:, self.banned_ids] = 0
        threshold = np.array([s.min_p for s in settings], np.float32)
        cut = np.array([n for n, s in enumerate(settings) if s.top_k > 0 or s.top_p < 1], np.int64)
        if len(cut):
            partial_weights = weights if len(cut) == len(weights) else weights[cut]
            partial_settings = [settings[n] for n in cut.tolist()]
            k = np.array([s.top_k or self.vocab_size for s in partial_settings])
            top_p = np.array([top_p_bound(s) for s in partial_settings])
            threshold_weight, n_equal_kept = self._smallest_kept_weight(
                partial_weights, k, top_p, self.partial_sort_size
            )
            # Of equal weights at the threshold, the first ids are kept.
            for row in np.flatnonzero(n_equal_kept):
                equal = np.flatnonzero(partial_weights[row] == threshold_weight[row])
                weights[cut[row], equal[n_equal_kept[row] :]] = 0
            threshold[cut] = np.maximum(threshold[cut], threshold_weight)
        if threshold.any():
            np.multiply(weights, weights >= threshold[:, None], out=weights)
        return weights

    def _smallest_kept_weight(
        self, weights: Floats, k: Ids, top_p: Doubles, n_sorted: int
    ) -> tuple[Floats, Ids]:
        """Smallest weight that top-k and top-p keep [n], and how many of equal weight are kept (0: all of them).

        Args:
            weights: [n, whole blocks].
            k: [n], V for all.
            top_p: [n], see `top_p_bound`.
            n_sorted: weights to sort at first.
        """
        rows, size = np.arange(len(weights)), self.vocab_size
        # One more, to compare with the last kept one.
        n_sorted_now = min(max(n_sorted, int(k[k < size].max(initial=0))) + 1, size)
        largest = np.partition(weights[:, :size], size - n_sorted_now, axis=1)[:, size - n_sorted_now :]
        largest = np.ascontiguousarray(np.sort(largest, axis=1)[:, ::-1])
        top_weights = largest * (np.arange(n_sorted_now) < k[:, None])
        cumulative = top_weights.cumsum(axis=1, dtype=np.float64)
        total = np.where(k < size, cumulative[:, -1], _block_sums(weights).sum(axis=1, dtype=np.float64))
        kept = ((cumulative - top_weights < (top_p * total)[:, None]) & (top_weights > 0)).sum(axis=1)
        threshold_weight = largest[rows, kept - 1]
        unresolved = np.flatnonzero(kept == n_sorted_now) if n_sorted_now < size else rows[:0]
        ties = largest[rows, np.minimum(kept, n_sorted_now - 1)] == threshold_weight
        ties &= kept < n_sorted_now
        n_equal_kept = np.where(ties, kept - (largest > threshold_weight[:, None]).sum(axis=1), 0)
        if len(unresolved):
            threshold_weight[unresolved], n_equal_kept[unresolved] = self._smallest_kept_weight(
                weights[unresolved], k[unresolved], top_p[unresolved], 8 * n_sorted_now
            )
        return threshold_weight, n_equal_kept


def sample_inverse_cdf(weights: Floats, u: Doubles) -> tuple[Ids, Doubles]:
    """Sample one id per row of weights [n, whole blocks] with u [n] in [0, 1); returns (ids [n], probabilities [n])."""
    rows = np.arange(len(weights))
    cumulative = _block_sums(weights).cumsum(axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    target = u * total
    block = _first_index_above(cumulative, target)
    target -= np.where(block > 0, cumulative[rows, block - 1], 0.0)
    inside = weights.reshape(len(weights), -1, BLOCK)[rows, block].cumsum(axis=1, dtype=np.float64)
    # The block's sum is rounded: at its very end, the target could lie above its last id.
    ids = block * BLOCK + _first_index_above(inside, np.minimum(target, inside[:, -1] * (1 - 1e-9)))
    return ids, weights[rows, ids] / total


def normalize(weights: Floats) -> Floats:
    """Divide the weights of every row by their sum: [n, whole blocks]."""
    return np.asarray(weights / _block_sums(weights).sum(axis=1, dtype=np.float64)[:, None], np.float32)


def _first_index_above(cumulative: Doubles, target: Doubles) -> Ids:
    """First index in each row of running sums [n, m] that exceeds target [n]; never an index that adds nothing."""
    return np.asarray((cumulative <= target[:, None]).sum(axis=1), np.int64)


def _block_sums(weights: Floats) -> Floats:
    """Sums of blocks: [n, whole blocks] -> [n, blocks] fp32."""
    return np.asarray(weights.reshape(len(weights), -1, BLOCK).sum(axis=-1))
