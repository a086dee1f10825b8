"""Bits per byte: what a text costs under a model, each document scored with no context but itself.

    bits per byte = - sum over tokens log2 p(token | those before it in its document) / bytes of the text

Every token but bos counts, eos too: as with a compressor, the reader must learn where the document ends. The measure
does not depend on the vocabulary, so models with different tokenizers, and compressors, can be set side by side.

A document longer than a window is read in windows that overlap by half; each token is scored once, in the first window
that has it, so it sees at least half a window of context (all of it near the start).

Windows share a batch with others of their kind alone: a decoder reads rows longer than those of its training in another
way (`models/decoder.py`), and what a document costs must not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whorl.models import LanguageModel

BATCH_TOKENS = 8192


@dataclass(frozen=True)
class ScoringWindow:
    """ids[start : start + length + 1] of a document; its first `skip` targets were scored before."""

    document: int
    ids: NDArray[np.int64]
    skip: int


def scoring_windows(documents: Iterable[NDArray[Any]], length: int) -> Iterable[ScoringWindow]:
    """Cuts documents (bos first) into windows of at most `length` inputs, each target new in exactly one."""
    stride = max(1, length // 2)
    for number, ids in enumerate(documents):
        start, scored = 0, 1  # ids[0] is bos: known
        while scored < len(ids):
            stop = min(start + length + 1, len(ids))
            yield ScoringWindow(number, np.asarray(ids[start:stop], np.int64), scored - start - 1)
            scored = stop
            start += stride


@torch.inference_mode()
def document_nats(
    model: LanguageModel,
    documents: Iterable[NDArray[Any]],
    length: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Nats of each document, in order. A model whose rows depend on each other is given one at a time.

    Args:
        documents: ids with bos first and eos last.
        length: tokens a window.
        advance: told the number of tokens scored, for a progress bar.
    """
    nats: dict[int, float] = {}
    trained = getattr(model.config, "trained_length", None) or 0
    batches: dict[bool, list[ScoringWindow]] = {
        False: [],
        True: [],
    }  # rows within the trained length, and beyond it
    for window in scoring_windows(documents, length):
        batch = batches[len(window.ids) - 1 > trained]
        batch.append(window)
        if len(batch) * length >= BATCH_TOKENS or not model.batch_independent:
            _score_batch(model, batch, nats)
            on_progress(sum(len(w.ids) - 1 - w.skip for w in batch))
            batch.clear()
    for batch in batches.values():
        if batch:
            _score_batch(model, batch, nats)
            on_progress(sum(len(w.ids) - 1 - w.skip for w in batch))
    return [nats.get(number, 0.0) for number in range(max(nats, default=-1) + 1)]


def _score_batch(model: LanguageModel, batch: list[ScoringWindow], nats: dict[int, float]) -> None:
    longest = max(len(window.ids) for window in batch)
    rows = torch.zeros(len(batch), longest, dtype=torch.int64)
    for row, window in zip(rows, batch, strict=True):
        row[: len(window.ids)] = torch.from_numpy(
            window.ids
        )  # what follows is padding, which nothing before it sees
    rows = rows.to(model.embedding.device)
    logits = model.logits(model(rows[:, :-1]))
    chosen = logits.gather(-1, rows[:, 1:, None]).squeeze(-1)
    losses = logits.logsumexp(dim=-1) - chosen
    for loss, window in zip(losses, batch, strict=True):
        total = loss[window.skip : len(window.ids) - 1].double().sum().item()
        nats[window.document] = nats.get(window.document, 0.0) + total


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """nats of a text of `n_bytes` bytes -> bits per byte."""
    return nats / math.log(2) / max(1, n_bytes)
