"""The loss that a shape reaches after so much text, fitted on real runs.

    bits per byte = E + A / N^alpha + B / D^beta + C |ln(V / V*(N))|^2

N: weights in the blocks' matrices; D: bytes of text seen; V: vocabulary, V* its best size for N. The form is
Hoffmann et al. 2022 (Training Compute-Optimal Large Language Models, arXiv:2203.15556, eq. 2) with a term for the
vocabulary: a larger one puts more text into a token, but a small model spends its products on the head (Tao et al.
2024, Scaling Laws with Vocabulary, arXiv:2407.13623, find the same direction). The constants are fitted on the sweep in
`bench/plan/scaling_sweep.py`, on Python source; another kind of text shifts E most, which does not change the choice.
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
    optimal_vocab: float  # at a million matrix weights; grows with N^0.5


@cache
def fitted_law() -> ScalingLaw:
    """The constants that ship with the package."""
    text = resources.files("whorl.plan").joinpath("scaling_law.json").read_text()
    return ScalingLaw(**json.loads(text)["law"])


def expected_bits_per_byte(
    block_params: float, n_bytes: float, vocab_size: int, law: ScalingLaw | None = None
) -> float:
    """Expected held-out bits per byte of a model with `matrices` block weights after `n_bytes` of text."""
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
    """Bytes of source code in a token; measured at 1,024, 2,048 and 4,096 by the sweep, straight in the logarithm."""
    return 2.6 + 0.45 * math.log2(vocab_size / 1024)
