"""Forgetting: what a stage costs on the text that the model came from.

    cost = bits per byte after / bits per byte before - 1            on held-out text, by `evals/likelihood.py`

A stage moves the weights for a few narrow texts, and nothing in its loss says what became of the rest (McCloskey and Cohen
1989; of fine-tuning: Kirkpatrick et al. 2017, arXiv:1612.00796). Bits per byte is a sharper eye than a score of tasks: it
sees a drift long before an answer changes. Against it help a lower rate, pretraining's own rows in the batch
(`SFTConfig.replay`) and, it is said, an adapter of low rank: it learns less and forgets less (Biderman et al. 2024,
arXiv:2405.09673).

The subtle part is that both figures must be of the same documents, cut into the same windows, each scored with no context
but itself; and that an adapter that is not yet merged is part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from whorl.align.model.policy_model import PolicyModel
from whorl.errors import DataError
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Forgetting:
    """before, after: bits per byte of the held-out text."""

    before: float
    after: float

    @property
    def cost(self) -> float:
        """0.02: two per cent more bits than before."""
        return self.after / self.before - 1


def held_out_bits(
    network: PolicyModel, tokenizer: Tokenizer, texts: Sequence[str | bytes], window: int | None = None
) -> float:
    """Bits per byte of whole documents under the network as it is now, its adapter included.

    Args:
        window: ids of context at most; default what the model reads well.

    Raises:
        DataError: there is no text.
    """
    n_bytes = sum(len(t.encode() if isinstance(t, str) else t) for t in texts)
    if not n_bytes:
        raise DataError("there is no held-out text to score", expected="one document at least")
    documents = [np.asarray(tokenizer.encode_document(text), np.int64) for text in texts]
    training = network.training
    network.eval()
    try:
        nats = document_nats(network.model, documents, window or network.model.eval_window)
    finally:
        network.train(training)
    return bits_per_byte(sum(nats), n_bytes)


def forgetting(
    network: PolicyModel,
    tokenizer: Tokenizer,
    texts: Sequence[str | bytes],
    stage: Callable[[PolicyModel], object],
    window: int | None = None,
) -> Forgetting:
    """What `stage`, which trains the network in place, costs on `texts`.

    Raises:
        DataError: there is no text.
    """
    before = held_out_bits(network, tokenizer, texts, window)
    stage(network)
    return Forgetting(before, held_out_bits(network, tokenizer, texts, window))
