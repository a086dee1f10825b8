"""Repetition, frequency and presence penalties on the logits z of ids that already occurred.

    repetition r (CTRL, arXiv:1909.05858, section 4.1)    z / r where z > 0, z r where z < 0; ids of prompt and output
    frequency  f (OpenAI's API)                           z - f n, n occurrences in the output
    presence   p (OpenAI's API)                           z - p where n > 0

They apply in this order. CTRL divides, which assumes positive logits; dividing a negative one would make it more likely,
so it is multiplied, as in other implementations.

Only ids that occurred are touched, for all rows of a batch in one gather and one scatter. Rows without penalties keep
their bits. `TokenCounts` holds the counts of a sequence and follows its output, also when speculation shrinks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.engine.sampling_params import SamplingParams

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Penalties = tuple[Ids, Floats, Floats]
ToBackend = Callable[[Any], Any]


class TokenCounts:
    """The set of prompt ids, and the count of each id in the output."""

    def __init__(self, prompt: Sequence[int]) -> None:
        size = max(prompt, default=-1) + 1
        self.in_prompt = np.zeros(size, np.bool_)
        self.in_prompt[np.asarray(prompt, np.int64)] = True
        self.counts = np.zeros(size, np.int32)
        self.output: list[int] = []

    def update(self, output: Sequence[int]) -> None:
        """Update the counts to `output`; costs only the difference from the last call."""
        same = min(len(output), len(self.output))
        if list(output[:same]) != self.output[:same]:
            pairs = zip(output, self.output, strict=False)
            same = next(n for n, (new, old) in enumerate(pairs) if new != old)
        new, old = list(output[same:]), self.output[same:]
        more = max(new, default=-1) + 1 - len(self.counts)
        if more > 0:
            self.counts = np.pad(self.counts, (0, more))
            self.in_prompt = np.pad(self.in_prompt, (0, more))
        for number in new:
            self.counts[number] += 1
        for number in old:
            self.counts[number] -= 1
        self.output[same:] = new

    def penalties(self, sampling: SamplingParams) -> Penalties:
        """Return (ids [n] with a penalty, each once; divisors of their logits [n]; amounts subtracted [n])."""
        occurred = self.counts > 0
        ids = np.flatnonzero(occurred | self.in_prompt if sampling.repetition_penalty != 1 else occurred)
        counts = self.counts[ids]
        off = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return ids, np.full(len(ids), sampling.repetition_penalty, np.float32), off.astype(np.float32)


def apply_logit_bias(
    logits: Any, biases: Sequence[tuple[int, int, float]], to_backend: ToBackend = np.asarray
) -> None:
    """Add to logits [W, V], in place: biases (row, id, amount), each (row, id) once.

    to_backend: turns an array into a tensor on the device of the logits, if they are a tensor.
    """
    rows, ids, values = (np.array(part) for part in zip(*biases, strict=True))
    logits[to_backend(rows), to_backend(ids)] += to_backend(values.astype(np.float32))


def apply_penalties(
    logits: Any, penalties: Sequence[tuple[int, Penalties]], to_backend: ToBackend = np.asarray
) -> None:
    """Apply penalties to logits [W, V], in place: (row, result of `TokenCounts.penalties`), each row once."""
    rows = np.concatenate([np.full(len(found[0]), row) for row, found in penalties])
    ids, divisor, off = (np.concatenate(part) for part in zip(*(f for _, f in penalties), strict=True))
    at = to_backend(rows), to_backend(ids)
    z, divisor = logits[at], to_backend(divisor)
    # -inf stays -inf: its positive part is 0.
    logits[at] = z.clip(0, None) / divisor + z.clip(None, 0) * divisor - to_backend(off)
