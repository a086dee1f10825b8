"""Bits per byte and perplexity of a text under a model, with each document scored independently.

    bits per byte = - sum over tokens log2 p(token | earlier tokens of its document) / bytes of the text
    perplexity    = exp(- mean over tokens log p(token | earlier tokens of its document))

Every token except bos counts, including eos: like a compressor, the model must encode the document's end. Bits per byte
do not depend on the vocabulary, so models with different tokenizers and compressors are comparable. Perplexity compares
models of one tokenizer only.

A document longer than a window is scored in windows that overlap by half. Each token is scored once, in the first
window that contains it, with at least half a window of context (except near the start).

A batch holds either windows within the trained length or longer ones, because a decoder treats longer rows differently
(`models/transformer.py`). So a document's score does not depend on its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whorl.evals.model.windows import strided_windows
from whorl.models import LanguageModel

BATCH_TOKENS = 4096  # temporaries of larger batches leave the CPU cache: a third more time on two cores, in a new process


@dataclass(frozen=True)
class ScoringWindow:
    """ids[start : start + length + 1] of a document; the first `skip` targets are scored in an earlier window."""

    document: int
    ids: NDArray[np.int64]
    skip: int


def scoring_windows(documents: Iterable[NDArray[Any]], length: int) -> Iterable[ScoringWindow]:
    """Cut documents (bos first) into windows of at most `length` inputs; each target is scored in exactly one."""
    for number, ids in enumerate(documents):
        for window in strided_windows(len(ids), length, max(1, length // 2), fill_last=False):
            inputs = np.asarray(ids[window.start : window.stop], np.int64)
            yield ScoringWindow(number, inputs, window.first - window.start - 1)


@torch.inference_mode()
def document_nats(
    model: LanguageModel,
    documents: Iterable[NDArray[Any]],
    length: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Return the nats of each document, in order. A model whose rows are not independent gets batches of one.

    Args:
        documents: ids with bos first and eos last.
        length: tokens per window.
        on_progress: called with the number of tokens scored.
    """
    nats: dict[int, float] = {}
    trained = getattr(model.config, "trained_length", None) or 0
    batches: dict[bool, list[ScoringWindow]] = {
        False: [],
        True: [],
    }  # rows within and beyond the trained length
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
        )  # the rest is padding, which earlier positions do not attend to
    rows = rows.to(model.embedding.device)
    logits = model.logits(model(rows[:, :-1]))
    chosen = logits.gather(-1, rows[:, 1:, None]).squeeze(-1)
    losses = logits.logsumexp(dim=-1) - chosen
    for loss, window in zip(losses, batch, strict=True):
        total = loss[window.skip : len(window.ids) - 1].double().sum().item()
        nats[window.document] = nats.get(window.document, 0.0) + total


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Convert the nats of a text of `n_bytes` bytes to bits per byte."""
    return nats / math.log(2) / max(1, n_bytes)


def perplexity(nats: float, n_tokens: int) -> float:
    """Convert the nats of `n_tokens` scored tokens to perplexity per token; inf where a float cannot hold it."""
    try:
        return math.exp(nats / max(1, n_tokens))
    except OverflowError:
        return math.inf
