"""Prefill budget: how many prompt positions may run in a step with decoding sequences.

A step that computes n prompt positions together with decoding rows takes about

    seconds = decode(rows) + n * per_token

and every decoding sequence waits for all of it (its time per output token). So n is chosen to keep the step within
`max_decode_slowdown` times a decode-only step, or within `slo_tpot`, whichever is longer. Both terms are measured from the
steps themselves, since they depend on model, machine and load; decode(rows) for each number of rows up to a power of 2.
Without decoding rows the whole budget is used. With an infinite `max_decode_slowdown` it always is: then no step depends on
measured times, and the same requests make the same steps in any engine.

The subtle point is that both terms drift and are noisy: background load slows single steps many times, and longer sequences
cost more. So each is the median of the newest `MEDIAN_WINDOW` measurements. During a long prefill, every
`MAX_CONSECUTIVE_MIXED_STEPS` steps one step only decodes, to be measured. At least one position is always allowed, so that
every prompt finishes.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

INITIAL_PREFILL_TOKENS = 8  # positions, before the first measurement
MAX_CONSECUTIVE_MIXED_STEPS = 16  # mixed steps before a decode-only step
MEDIAN_WINDOW = 7  # measurements


class PrefillBudget:
    """Measures steps with `record_step` and answers `max_prefill_tokens`.

    Args:
        max_decode_slowdown: limit of a step's time, relative to a decode-only step.
        slo_tpot: target seconds per output token, or None.
    """

    def __init__(self, max_decode_slowdown: float = 1.8, slo_tpot: float | None = None) -> None:
        self.max_decode_slowdown, self.slo_tpot = max_decode_slowdown, slo_tpot
        self._decode_samples: dict[
            int, deque[float]
        ] = {}  # seconds of decode-only steps, by rows up to a power of 2
        # Seconds per prefill position.
        self._seconds_per_prefill_token: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._n_mixed_steps = 0  # mixed steps since the last decode-only step

    def record_step(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """Record a finished step with so many decoding rows and prompt positions."""
        if n_prefill:
            self._n_mixed_steps += n_decode > 0
            self._seconds_per_prefill_token.append(
                max(0.1 * seconds, seconds - (self._decode_seconds(n_decode) or 0.0)) / n_prefill
            )
        elif n_decode:
            self._n_mixed_steps = 0
            self._decode_samples.setdefault((n_decode - 1).bit_length(), deque(maxlen=MEDIAN_WINDOW)).append(
                seconds
            )

    def max_prefill_tokens(self, n_decode: int, limit: int) -> int:
        """Return how many prompt positions, at most `limit`, may run in a step with `n_decode` decoding rows."""
        if not n_decode or self.max_decode_slowdown == math.inf:
            return limit
        if self._n_mixed_steps >= MAX_CONSECUTIVE_MIXED_STEPS:
            return 0
        decode_seconds = self._decode_seconds(n_decode)
        if decode_seconds is None or not self._seconds_per_prefill_token:
            return min(limit, INITIAL_PREFILL_TOKENS)
        spare_seconds = max(
            decode_seconds * (self.max_decode_slowdown - 1), (self.slo_tpot or 0.0) - decode_seconds
        )
        return min(limit, max(1, int(spare_seconds / median(self._seconds_per_prefill_token))))

    def _decode_seconds(self, n_decode: int) -> float | None:
        """Seconds of a decode-only step with so many rows, by the nearest measured size."""
        if not n_decode or not self._decode_samples:
            return None
        size = (n_decode - 1).bit_length()
        return median(self._decode_samples[min(self._decode_samples, key=lambda n_rows: abs(n_rows - size))])
