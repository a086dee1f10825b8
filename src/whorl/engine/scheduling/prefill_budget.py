"""The pace: how much of a prompt may be read in beside sequences that decode.

A step that reads n positions in beside decoding rows takes about

    seconds = decode(rows) + n * per_token

and every decoding sequence waits for all of it: that is its time per output token. So the piece is chosen to keep the step
within `stretch` times a step that decodes alone, or within the time per token that was promised (`slo_tpot`), whichever
is longer. Both terms are learnt from the steps themselves, since they depend on model, machine and load; the first for
each number of rows, up to a power of 2. Where nobody decodes, nobody waits, and the whole budget is spent. With an infinite
`stretch` it always is: then no step depends on how long another took, and the same requests make the same steps, in a new
engine as in an old one.

The subtle part is that both terms move and are noisy. A machine that does something else for a moment makes single steps
many times longer; texts grow, and what decoding costs grows with them. So each is the median of the newest `KEPT`
measurements, which a few odd ones do not move; and while a long prompt is read in, every so many steps one is left to
decoding alone, to be measured. One position goes in at least, however slow the machine, or a prompt would never end.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

INITIAL_PREFILL_TOKENS = 8  # positions, before anything is known
MAX_CONSECUTIVE_MIXED_STEPS = 16  # steps that read in, before one that does not
MEDIAN_WINDOW = 7  # measurements


class PrefillBudget:
    """Learns from `took`, answers `prefill_budget`.

    Args:
        stretch: how much longer than decoding alone a step may take.
        slo_tpot: seconds per output token that were promised, or None.
    """

    def __init__(self, max_decode_slowdown: float = 1.8, slo_tpot: float | None = None) -> None:
        self.max_decode_slowdown, self.slo_tpot = max_decode_slowdown, slo_tpot
        self._decode_samples: dict[
            int, deque[float]
        ] = {}  # seconds of steps that only decoded, by rows up to a power of 2
        self._seconds_per_prefill_token: deque[float] = deque(
            maxlen=MEDIAN_WINDOW
        )  # seconds of a position that was read in
        self._n_mixed_steps = 0  # steps of both kinds since one that only decoded

    def record_step(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step of so many decoding rows and positions of prompts is over."""
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
        """Positions of prompts that the next step may read in beside `n_decode` decoding rows, `most` at most."""
        if not n_decode or self.max_decode_slowdown == math.inf:
            return limit
        if self._n_mixed_steps >= MAX_CONSECUTIVE_MIXED_STEPS:
            return 0
        alone = self._decode_seconds(n_decode)
        if alone is None or not self._seconds_per_prefill_token:
            return min(limit, INITIAL_PREFILL_TOKENS)
        spare = max(alone * (self.max_decode_slowdown - 1), (self.slo_tpot or 0.0) - alone)
        return min(limit, max(1, int(spare / median(self._seconds_per_prefill_token))))

    def _decode_seconds(self, n_decode: int) -> float | None:
        """Seconds of a step that decodes so many rows alone, by the nearest size that was seen."""
        if not n_decode or not self._decode_samples:
            return None
        size = (n_decode - 1).bit_length()
        return median(self._decode_samples[min(self._decode_samples, key=lambda known: abs(known - size))])
