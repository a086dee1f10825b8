"""Sampling in C++ (`sampling.h`), of rows without masks, biases and penalties: one step's, or several steps at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.engine.cpu import build, layout
from whorl.engine.cpu.step import NativeStep
from whorl.engine.sampling.cpu_sampler import (
    Doubles,
    DrawPlain,
    Floats,
    Ids,
    clamped_temperature,
    top_p_bound,
)
from whorl.engine.sampling_params import SamplingParams


class Draws:
    """The settings of the rows of a step, and up to `most` tokens drawn from each.

    A call fills ids [R, most] (-1 where nothing can be drawn), their log_probs and raw, and counts [R] of tokens.

    Args:
        u: [R, most] fp64 in [0, 1). settings: of each row. limits: [R] tokens of each row, 1 to `most`.
        banned: [V] ids that are never drawn. stops: [V] ids that end a row.
        until_ended: rows that end before all others stop; 0 lets each row run to its end.
    """

    def __init__(
        self,
        u: Doubles,
        settings: Sequence[SamplingParams],
        limits: Ids,
        banned: NDArray[np.bool_],
        stops: NDArray[np.bool_],
        until_ended: int = 0,
    ) -> None:
        rows, most = u.shape
        self.ids, self.counts = np.empty((rows, most), np.int64), np.zeros(rows, np.int64)
        self.log_probs, self.raw = np.empty((rows, most)), np.empty((rows, most), np.float32)
        self.limits = limits
        columns = (
            np.array([clamped_temperature(s) if s.temperature > 0 else 0 for s in settings], np.float32),
            np.array([s.top_k for s in settings], np.int64),
            np.array([top_p_bound(s) for s in settings], np.float64),
            np.array([s.min_p for s in settings], np.float32),
        )
        self._kept = [np.ascontiguousarray(array) for array in (u, *columns, limits, banned, stops)]
        out = (array.ctypes.data for array in (self.ids, self.log_probs, self.raw, self.counts))
        addresses = (array.ctypes.data for array in self._kept)
        self.struct = layout.Sampling(most, *addresses, until_ended, *out)

    @property
    def address(self) -> Any:
        """The structure, as an argument."""
        return ctypes.byref(self.struct)


def row_sampler(step: NativeStep | None, banned: NDArray[np.bool_]) -> DrawPlain | None:
    """Return the function of the library; None if it has not been compiled yet, or is not used.

    step: whose threads it uses. banned: [V].
    """
    if step is None or not build.is_compiled() or (library := build.library()) is None:
        return None
    nothing = np.zeros(len(banned), np.bool_)

    def sample(logits: Floats, u: Doubles, settings: Sequence[SamplingParams]) -> tuple[Ids, Doubles, Floats]:
        """Return ids, log-probabilities and raw log-probabilities [W] of rows of logits [W, V] fp32."""
        logits = np.ascontiguousarray(logits, np.float32)
        limits = np.ones(len(u), np.int64)
        draws = Draws(u[:, None], settings, limits, banned, nothing)
        status = library.whorl_sample(
            step.handle, logits.ctypes.data, *logits.shape, draws.address, step.threads
        )
        if status:
            raise MemoryError("sampling has no memory for the weights of its rows")
        return draws.ids[:, 0], draws.log_probs[:, 0], draws.raw[:, 0]

    return sample


def decode(step: NativeStep, batch: Any, layers: Any, group_of: Sequence[int], draws: Draws) -> None:
    """Run decode steps of a batch of rows of one position until each row ends; fills `draws`.

    The page tables of the batch must hold the positions of all steps. Its arrays are overwritten.

    Raises:
        ConfigError: as `NativeStep.run`.
    """
    longest = int((np.array(batch.lengths) + draws.limits - 1).max())
    with step.prepared(batch, layers, group_of, longest) as c_batch:
        logits = np.empty((len(batch.lengths), step.vocab_size), np.float32)
        status = step.library.whorl_decode(
            step.handle, ctypes.byref(step.weights.struct), ctypes.byref(c_batch), draws.address,
            logits.ctypes.data, step.threads,
        )  # fmt: skip
    step.check(status)
