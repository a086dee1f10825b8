"""Stochastic rounding: matrices stored in bf16 without fp32 master weights, two bytes less per weight.

Late in training an update is a thousandth of its weight, and bf16 has three digits. Rounded to nearest, the sum is the
old weight, so training stalls. *Stochastic* rounding picks one of the neighbours a < x < b, the upper with probability
(x - a) / (b - a). It is unbiased (Gupta et al. 2015, arXiv:1502.02551, section 3; bf16: Zamirai et al. 2020,
arXiv:2010.06192) and adds noise of variance (b - x)(x - a) per update.

bf16 is the upper half of an fp32 number. A random 16-bit number is added to the bits and the lower half is cut off. The
carry has exactly the right probability, for both signs.

Only Muon's matrices are stored in bf16: nearly all of a large model. Embedding, head, gains, tables and all moments
stay fp32. The update is computed in fp32, one matrix at a time. Gradients of these matrices are bf16 and are summed
over micro-batches and replicas in fp32.

The random generator is seeded per update from (seed, step, parameter name). So a resumed run continues exactly, and the
result is independent of the replica that owns a matrix.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whorl.tracking.seeds import derive

RoundingMode = Literal["nearest", "stochastic"]
LOW_BITS = 1 << 16


class Rounding:
    """Rounds fp32 results to bf16 weights.

    mode: "nearest" stalls and exists for comparison; seed: of the run.
    """

    def __init__(self, mode: RoundingMode, seed: int) -> None:
        self.mode, self.seed = mode, seed

    @torch.no_grad()
    def write(self, weight: Tensor, value: Tensor, name: str, step: int) -> None:
        """Round `value` (fp32) into `weight`; an fp32 weight is copied."""
        if weight.dtype != torch.bfloat16 or self.mode == "nearest":
            if weight is not value:
                weight.copy_(value)
            return
        generator = torch.Generator(weight.device).manual_seed(derive(self.seed, "rounding", step, name))
        weight.copy_(stochastic_bf16(value, generator))


def stochastic_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round each element to one of its two bf16 neighbours, with E[result] = x; bf16 values are unchanged.

    x: fp32, any shape.
    """
    noise = torch.randint(LOW_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = x.contiguous().view(torch.int32) + noise
    return (bits & -LOW_BITS).view(torch.float32).to(torch.bfloat16)  # exact: the lower half is zero
