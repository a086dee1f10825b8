"""The pace: how much of a prompt may be read in beside sequences that decode.

A step that reads n positions in beside decoding rows takes about

    seconds = decode(rows) + n * per_token

and every decoding sequence waits for all of it: that is its time per output token. So the piece is chosen to keep the step
within `stretch` times a step that decodes alone, or within the time per token that was promised (`slo_tpot`), whichever
is longer. Both terms are learnt from the steps themselves, since they depend on model, machine and load; the first for
each number of rows, up to a power of 2. Where nobody decodes, nobody waits, and the whole budget is spent.

The subtle part is noise. A machine that does something else for a moment makes single steps many times longer, and a mean
would take that for the cost of decoding and let prompts take as long. So an average falls at once and rises slowly. And
there is a floor: `LEAST` positions go in, however slow the machine, or a prompt would never end.
"""

from __future__ import annotations

LEAST = 8
DOWN, UP = 0.5, 0.05  # of the newest measurement in a running average, by which way it pulls


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

    def took(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step of so many decoding rows and positions of prompts is over."""
        if n_prefill == 0 and n_decode:
            size = (n_decode - 1).bit_length()
            self.decode[size] = _mean(self.decode.get(size), seconds)
        elif n_prefill >= LEAST:
            alone = self._alone(n_decode) or 0.0
            self.per_token = _mean(self.per_token, max(0.1 * seconds, seconds - alone) / n_prefill)

    def prefill_budget(self, n_decode: int, most: int) -> int:
        """Positions of prompts that the next step may read in beside `n_decode` decoding rows, `most` at most."""
        if not n_decode:
            return most
        alone = self._alone(n_decode)
        if alone is None or not self.per_token:
            return min(most, LEAST)
        spare = max(alone * (self.stretch - 1), (self.slo_tpot or 0.0) - alone)
        return max(min(most, LEAST), min(most, int(spare / self.per_token)))

    def _alone(self, n_decode: int) -> float | None:
        """Seconds of a step that decodes so many rows alone, by the nearest size that was seen."""
        if not n_decode or not self.decode:
            return None
        size = (n_decode - 1).bit_length()
        return self.decode[min(self.decode, key=lambda known: abs(known - size))]


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + (DOWN if new < old else UP) * (new - old)
