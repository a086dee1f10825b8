"""Forgetting: the cost of a stage on text of the pretraining distribution.

    cost = bits per byte after / bits per byte before - 1            on held-out text, by `evals/likelihood.py`

A stage trains on a few narrow texts, and its loss does not measure the rest (McCloskey and Cohen 1989; for fine-tuning:
Kirkpatrick et al. 2017, arXiv:1612.00796). Bits per byte is more sensitive than task accuracy: it shows drift long
before an answer changes. Remedies are a lower rate, rows of pretraining data (`data.replay_fraction` of SFT), and
possibly a low-rank adapter, which loses less of both old and new knowledge (Biderman et al. 2024, arXiv:2405.09673).

The subtle point: both values use the same documents and windows, each without other context. An adapter that is not
merged counts as part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from whorl.errors import DataError
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.models import LanguageModel
from whorl.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Forgetting:
    """before, after: bits per byte of the held-out text."""

    before: float
    after: float

    @property
    def cost(self) -> float:
        """Return the relative cost; 0.02 is two per cent more bits."""
        return self.after / self.before - 1


def held_out_bits(
    model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str | bytes], window: int | None = None
) -> float:
    """Return bits per byte of whole documents under the current weights, including an adapter.

    Args:
        window: maximum context; default: that of the model.

    Raises:
        DataError: there is no text.
    """
    n_bytes = sum(len(t.encode() if isinstance(t, str) else t) for t in texts)
    if not n_bytes:
        raise DataError("there is no held-out text", expected="at least one document")
    documents = [np.asarray(tokenizer.encode_document(text), np.int64) for text in texts]
    training = model.training
    model.eval()
    try:
        nats = document_nats(model, documents, window or model.eval_window)
    finally:
        model.train(training)
    return bits_per_byte(sum(nats), n_bytes)


def forgetting(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str | bytes],
    stage: Callable[[], object],
    window: int | None = None,
) -> Forgetting:
    """Return the cost of `stage`, which trains the model in place, on `texts`.

    Raises:
        DataError: there is no text.
    """
    before = held_out_bits(model, tokenizer, texts, window)
    stage()
    return Forgetting(before, held_out_bits(model, tokenizer, texts, window))
