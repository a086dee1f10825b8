"""The scaling law: expected loss of a shape after an amount of text, fitted on training runs.

    bits per byte = E + A / N^alpha + B / D^beta + C |ln(V / V*(N))|^2

N: weights in the blocks' matrices; D: bytes of text seen; V: vocabulary; V*: its best size for N. The form is eq. 2 of
Hoffmann et al. 2022 (Training Compute-Optimal Large Language Models, arXiv:2203.15556) with a term for the vocabulary. A
larger vocabulary puts more text into a token, but the head takes a larger share of a small model (Tao et al. 2024, Scaling
Laws with Vocabulary, arXiv:2407.13623). The constants are fitted on the runs of `bench/plan/scaling_sweep.py`, on Python
source. Another text changes the loss of every shape, which hardly affects the choice, but the expected loss does not hold
for it. A factor from the entropy of a sample under a compressor did not help reliably (LOG.md).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class ScalingLaw:
    """The fitted constants."""

    irreducible: float
    size_coef: float
    size_exponent: float
    data_coef: float
    data_exponent: float
    vocab_coef: float
    optimal_vocab: float  # for a million matrix weights; grows with N^0.5


@cache
def fitted_law() -> ScalingLaw:
    """Return the constants that ship with the package."""
    text = resources.files("whorl.plan").joinpath("scaling_law.json").read_text()
    return ScalingLaw(**json.loads(text)["law"])


def expected_bits_per_byte(
    block_params: float, n_bytes: float, vocab_size: int, law: ScalingLaw | None = None
) -> float:
    """Return the expected held-out bits per byte of a model with `block_params` weights after `n_bytes` of text."""
    law = law or fitted_law()
    best = law.optimal_vocab * (block_params / 1e6) ** 0.5
    expected: float = (
        law.irreducible
        + law.size_coef / (block_params / 1e6) ** law.size_exponent
        + law.data_coef / (n_bytes / 1e6) ** law.data_exponent
        + law.vocab_coef * math.log(vocab_size / best) ** 2
    )
    return expected


def bytes_per_token(vocab_size: int) -> float:
    """Return the bytes of source code per token: linear in log(vocabulary), fitted at 1,024, 2,048 and 4,096."""
    return 2.6 + 0.45 * math.log2(vocab_size / 1024)


def effective_bytes(seen: float, corpus_bytes: int) -> float:
    """Return how many bytes read once are worth `seen` bytes of repeated epochs (arXiv:2305.16264, eq. 5; R* = 15.4)."""
    if seen <= corpus_bytes:
        return seen
    repeats = seen / corpus_bytes - 1
    return corpus_bytes * (1 + 15.4 * (1 - math.exp(-repeats / 15.4)))
