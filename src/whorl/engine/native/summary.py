"""Argmax and log-sum-exp of rows of logits in C++ (`summary.h`): two readings of a row instead of six passes in numpy."""

from __future__ import annotations

import ctypes

import numpy as np

from whorl.engine.native import build
from whorl.engine.sampling.cpu_sampler import Floats, Ids, Summarize


def row_summary() -> Summarize | None:
    """Return the function of the library; None if it has not been compiled yet, or is not used."""
    if not build.is_compiled() or (library := build.library()) is None:
        return None

    def summarize(logits: Floats) -> tuple[Ids, Floats]:
        """Return the index of the largest logit, and the log-sum-exp, of each row: [W, V] fp32 -> [W], [W]."""
        rows, size = logits.shape
        if logits.dtype != np.float32 or logits.strides != (4 * size, 4):
            logits = np.ascontiguousarray(logits, np.float32)
        largest, log_sums = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = (ctypes.c_void_p(x.ctypes.data) for x in (largest, log_sums))
        library.whorl_summarize(logits.ctypes.data, rows, size, size, *arrays)
        return largest, log_sums

    return summarize
