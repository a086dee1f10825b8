"""What came before makes a token less likely now: three penalties on the logits z of ids that were seen.

    repetition r (CTRL, arXiv:1909.05858, section 4.1)    z / r where z > 0, z r where z < 0; seen in prompt or output
    frequency  f (OpenAI's API)                           z - f n, n times in the output
    presence   p (OpenAI's API)                           z - p where n > 0

in this order. CTRL's quotient assumes that logits are positive; dividing a negative one would make it likelier, so it is
multiplied instead, as everyone does. The prompt does not count for the other two: they are about what is being said.

Only seen ids change, so the change is told sparsely (`Edits`), all rows of a batch in one: two gathers and two scatters
whatever the batch, and rows without penalties are not touched, bit for bit. `Seen` keeps the counts of a sequence, and
follows its output as it grows or, when speculation is taken back, shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.engine.sampling import Sampling

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class Seen:
    """Which ids a prompt holds, and how often each is in the output so far."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self.in_prompt = np.zeros(vocab_size, np.bool_)
        self.in_prompt[np.asarray(prompt, np.int64)] = True
        self.counts = np.zeros(vocab_size, np.int32)
        self.output: list[int] = []

    def follow(self, output: Sequence[int]) -> None:
        """Counts `output` [n], all of it; cheap where it continues what was counted last."""
        known = len(self.output)
        if list(output[:known]) != self.output:
            self.counts[:], self.output, known = 0, [], 0
        new = list(output[known:])
        np.add.at(self.counts, new, 1) if new else None
        self.output += new

    def penalties(self, sampling: Sampling) -> tuple[Ids, Floats, Floats]:
        """(ids [n] that are penalised, each once; what their logit is divided by [n]; what is taken off [n])."""
        seen = self.counts > 0
        if sampling.repetition_penalty != 1:
            seen |= self.in_prompt
        ids = np.flatnonzero(seen)
        counts = self.counts[ids]
        off = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return ids, np.full(len(ids), sampling.repetition_penalty, np.float32), off.astype(np.float32)


@dataclass
class Edits:
    """Changes of single logits of a batch: (rows, ids) of what is biased, then of what is penalised."""

    bias_rows: Ids
    bias_ids: Ids
    bias: Floats
    rows: Ids
    ids: Ids
    divisor: Floats
    off: Floats

    @classmethod
    def of(cls, settings: Sequence[Sampling], seen: Sequence[Seen | None]) -> Edits | None:
        """Those of a batch: settings [W], seen [W] (needed where a row is penalised); None where nothing changes."""
        biased = [(r, i, b) for r, s in enumerate(settings) for i, b in s.logit_bias.items()]
        found = [
            (r, *past.penalties(s))
            for r, (s, past) in enumerate(zip(settings, seen, strict=True))
            if past is not None and s.penalised
        ]
        if not biased and not found:
            return None
        bias_rows, bias_ids, bias = zip(*biased, strict=True) if biased else ((), (), ())
        rows = [np.full(len(ids), r) for r, ids, _, _ in found]
        none: list[Any] = [np.zeros(0, np.int64)]
        return cls(
            np.asarray(bias_rows, np.int64),
            np.asarray(bias_ids, np.int64),
            np.asarray(bias, np.float32),
            np.concatenate(none + rows),
            np.concatenate(none + [ids for _, ids, _, _ in found]),
            np.concatenate([np.zeros(0, np.float32), *(d for _, _, d, _ in found)]),
            np.concatenate([np.zeros(0, np.float32), *(o for _, _, _, o in found)]),
        )

    def apply(self, logits: Any, lift: Callable[[Any], Any] = np.asarray) -> None:
        """logits: [W, V], changed in place: an array, or a tensor with `lift` making tensors beside it of arrays."""
        if len(self.bias):
            logits[lift(self.bias_rows), lift(self.bias_ids)] += lift(self.bias)
        if len(self.ids):
            at = lift(self.rows), lift(self.ids)
            z, divisor = logits[at], lift(self.divisor)
            # -inf stays -inf: its positive part is 0
            logits[at] = z.clip(0, None) / divisor + z.clip(None, 0) * divisor - lift(self.off)
