"""The pace: how much of a prompt may be read in beside sequences that decode.

A step that reads n positions in beside decoding ones takes about

    seconds = decode(rows) + n * per_token

and every decoding sequence waits for all of it: that is its time per output token. So the piece is chosen to keep the step
within `stretch` times a step that decodes alone, or within the time per token that was promised (`slo_tpot`), whichever
is longer. Both terms are learnt from the steps themselves, as running averages, since they depend on model, machine and
load. Where nobody decodes, nobody waits, and the whole budget is spent.

The subtle part is the floor: at least `LEAST` positions go in, however slow the machine, or a prompt would never end.
"""

from __future__ import annotations

LEAST = 16
SHARE = 0.2  # of the newest measurement in a running average


class Pace:
    """Learns from `took`, answers `prefill_budget`.

    Args:
        stretch: how much longer than decoding alone a step may take.
        slo_tpot: seconds per output token that were promised, or None.
    """

    def __init__(self, stretch: float = 1.6, slo_tpot: float | None = None) -> None:
        self.stretch, self.slo_tpot = stretch, slo_tpot
        self.decode: float | None = None  # seconds of a step that only decodes
        self.per_token: float | None = None  # seconds of a position that is read in

    def took(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step of so many decoding rows and positions of prompts is over."""
        if n_prefill == 0 and n_decode:
            self.decode = _mean(self.decode, seconds)
        elif n_prefill >= LEAST:
            alone = (self.decode or 0.0) if n_decode else 0.0
            self.per_token = _mean(self.per_token, max(0.0, seconds - alone) / n_prefill)

    def prefill_budget(self, n_decode: int, most: int) -> int:
        """Positions of prompts that the next step may read in beside `n_decode` decoding rows, `most` at most."""
        if not n_decode:
            return most
        if self.decode is None or not self.per_token:
            return min(most, 4 * LEAST)
        spare = max(self.decode * (self.stretch - 1), (self.slo_tpot or 0.0) - self.decode)
        return max(min(most, LEAST), min(most, int(spare / self.per_token)))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SHARE * (new - old)
