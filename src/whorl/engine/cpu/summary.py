"""Argmax and log-sum-exp of rows of logits in C++ (`summary.h`): two readings of a row instead of six passes in numpy."""

from __future__ import annotations

import numpy as np

from whorl.engine.cpu import build
from whorl.engine.cpu.step import NativeStep
from whorl.engine.sampling.cpu_sampler import Floats, Ids, Summarize

MIN_SHARED = 1 << 15  # logits; with fewer, waking a thread takes longer than the work


def row_summary(step: NativeStep | None = None) -> Summarize | None:
    """Return the function of the library; None if it has not been compiled yet, or is not used.

    step: whose threads it uses; None for the calling thread.
    """
    if not build.is_compiled() or (library := build.library()) is None:
        return None

    def summarize(logits: Floats) -> tuple[Ids, Floats]:
        """Return the index of the largest logit, and the log-sum-exp, of each row: [W, V] fp32 -> [W], [W]."""
        rows, size = logits.shape
        if logits.dtype != np.float32 or logits.strides != (4 * size, 4):
            logits = np.ascontiguousarray(logits, np.float32)
        largest, log_sums = np.empty(rows, np.int64), np.empty(rows, np.float32)
        threads = step.threads if step is not None and rows * size >= MIN_SHARED else 1
        library.whorl_summarize(
            None if step is None else step.handle, logits.ctypes.data, rows, size, size,
            largest.ctypes.data, log_sums.ctypes.data, threads,
        )  # fmt: skip
        return largest, log_sums

    return summarize
