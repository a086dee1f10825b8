"""What came before makes a token less likely now: three penalties on the logits z of ids that were seen.

    repetition r (CTRL, arXiv:1909.05858, section 4.1)    z / r where z > 0, z r where z < 0; seen in prompt or output
    frequency  f (OpenAI's API)                           z - f n, n times in the output
    presence   p (OpenAI's API)                           z - p where n > 0

in this order. CTRL's quotient assumes that logits are positive; dividing a negative one would make it likelier, so it is
multiplied instead, as everyone does. The prompt does not count for the other two: they are about what is being said.

Only seen ids change, so only they are looked at, those of all rows of a batch together: a gather and a scatter whatever the
batch, and rows without penalties are not touched, bit for bit. `Seen` keeps the counts of a sequence, and
follows its output as it grows or, when speculation is taken back, shrinks.
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
    """Which ids a prompt holds, and how often each is in the output so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        size = max(prompt, default=-1) + 1
        self.in_prompt = np.zeros(size, np.bool_)
        self.in_prompt[np.asarray(prompt, np.int64)] = True
        self.counts = np.zeros(size, np.int32)
        self.output: list[int] = []

    def update(self, output: Sequence[int]) -> None:
        """Counts `output`, all of it; only what is different from the last time costs anything."""
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
        """(ids [n] that are penalised, each once; what their logit is divided by [n]; what is taken off [n])."""
        said = self.counts > 0
        ids = np.flatnonzero(said | self.in_prompt if sampling.repetition_penalty != 1 else said)
        counts = self.counts[ids]
        off = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return ids, np.full(len(ids), sampling.repetition_penalty, np.float32), off.astype(np.float32)


def apply_logit_bias(
    logits: Any, biases: Sequence[tuple[int, int, float]], to_backend: ToBackend = np.asarray
) -> None:
    """Adds to logits [W, V], in place: biases (row, id, what is added), each (row, id) once.

    lift: where logits are a tensor, makes one beside it of an array.
    """
    rows, ids, values = (np.array(part) for part in zip(*biases, strict=True))
    logits[to_backend(rows), to_backend(ids)] += to_backend(values.astype(np.float32))


def apply_penalties(
    logits: Any, penalties: Sequence[tuple[int, Penalties]], to_backend: ToBackend = np.asarray
) -> None:
    """Penalises logits [W, V], in place: (row, what `Seen.penalties` says of it), each row once."""
    rows = np.concatenate([np.full(len(found[0]), row) for row, found in penalties])
    ids, divisor, off = (np.concatenate(part) for part in zip(*(f for _, f in penalties), strict=True))
    at = to_backend(rows), to_backend(ids)
    z, divisor = logits[at], to_backend(divisor)
    # -inf stays -inf: its positive part is 0
    logits[at] = z.clip(0, None) / divisor + z.clip(None, 0) * divisor - to_backend(off)
