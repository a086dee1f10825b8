"""The pace: how much of a prompt may be read in beside sequences that decode.

A step that reads n positions in beside decoding rows takes about

    seconds = decode(rows) + n * per_token

and every decoding sequence waits for all of it: that is its time per output token. So the piece is chosen to keep the step
within `stretch` times a step that decodes alone, or within the time per token that was promised (`slo_tpot`), whichever
is longer. Both terms are learnt from the steps themselves, since they depend on model, machine and load; the first for
each number of rows, up to a power of 2. Where nobody decodes, nobody waits, and the whole budget is spent.

The subtle part is noise. A machine that does something else for a moment makes single steps many times longer, and a mean
would take that for the cost of decoding and let prompts take as long. So the first average falls at once and rises slowly.
And one position goes in, however slow the machine, or a prompt would never end. What decoding costs also grows with the
texts themselves, so while a long prompt is read in, every so many steps one is left to decoding alone, to be measured.
"""

from __future__ import annotations

LEAST = 1
DOWN, UP = 0.5, 0.1  # of the newest measurement in the average of decoding, by which way it pulls
SHARE = 0.2  # in that of reading
FIRST = 8  # positions, before anything is known
LOOK = 16  # steps that read in, before one that does not


class Pace:
    """Learns from `took`, answers `prefill_budget`.

    Args:
        stretch: how much longer than decoding alone a step may take.
        slo_tpot: seconds per output token that were promised, or None.
    """

    def __init__(self, stretch: float = 1.6, slo_tpot: float | None = None) -> None:
        self.stretch, self.slo_tpot = stretch, slo_tpot
        self.decode: dict[int, float] = {}  # seconds of a step that only decodes, by rows up to a power of 2
        self.per_token: float | None = None  # seconds of a position that is read in
        self._mixed = 0  # steps of both kinds since one that only decoded

    def took(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step of so many decoding rows and positions of prompts is over."""
        if n_prefill == 0 and n_decode:
            self._mixed = 0
            size = (n_decode - 1).bit_length()
            old = self.decode.get(size, seconds)
            self.decode[size] = old + (DOWN if seconds < old else UP) * (seconds - old)
        elif n_prefill:
            self._mixed += n_decode > 0
            alone = self._alone(n_decode) or 0.0
            each = max(0.1 * seconds, seconds - alone) / n_prefill
            self.per_token = (
                each if self.per_token is None else self.per_token + SHARE * (each - self.per_token)
            )

    def prefill_budget(self, n_decode: int, most: int) -> int:
        """Positions of prompts that the next step may read in beside `n_decode` decoding rows, `most` at most."""
        if not n_decode:
            return most
        if self._mixed >= LOOK:
            return 0
        alone = self._alone(n_decode)
        if alone is None or not self.per_token:
            return min(most, FIRST)
        spare = max(alone * (self.stretch - 1), (self.slo_tpot or 0.0) - alone)
        return max(min(most, LEAST), min(most, int(spare / self.per_token)))

    def _alone(self, n_decode: int) -> float | None:
        """Seconds of a step that decodes so many rows alone, by the nearest size that was seen."""
        if not n_decode or not self.decode:
            return None
        size = (n_decode - 1).bit_length()
        return self.decode[min(self.decode, key=lambda known: abs(known - size))]
