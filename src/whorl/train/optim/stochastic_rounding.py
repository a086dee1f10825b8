"""Matrices kept in bf16, without fp32 masters: two bytes a weight less, if the rounding is right.

An update of a weight late in training is a thousandth of it, and bf16 has three digits: rounded to the nearest number, the
sum of both is the weight again, step after step, and learning stalls. Rounded *stochastically* it is one of the two
neighbours a < x < b, the upper with probability (x - a) / (b - a): right in the mean, so what is lost in a step is
not lost in a hundred (Gupta et al. 2015, arXiv:1502.02551, section 3; bf16: Zamirai et al. 2020, arXiv:2010.06192).
The price is noise of variance (b - x)(x - a) at each update.

How: bf16 is the upper half of an fp32 number. A random number of 16 bits is added to its bits and the lower half cut off: it
carries into the upper half exactly as often as it should, for either sign, since signs and magnitudes are kept apart.

What is kept in bf16 is what Muon trains: the matrices of the blocks, which is nearly all of a large model. Embedding,
head, gains, tables and all moments stay fp32. The update itself is computed in fp32, a matrix at a time. Gradients of these
matrices arrive in bf16, as they would anyway from products in bf16, and are summed over micro-batches and replicas in fp32.

The subtle part is where chance comes from: a generator made for each update from (seed, step, the parameter's name). So a
run that was stopped goes on exactly, and whichever replica owns a matrix draws the same for it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whorl.tracking.seeds import derive

RoundingMode = Literal["nearest", "stochastic"]
LOW_BITS = 1 << 16


class Rounding:
    """How an fp32 result becomes a bf16 weight.

    kind: "nearest" stalls, and is there to show it; seed: of the run.
    """

    def __init__(self, mode: RoundingMode, seed: int) -> None:
        self.mode, self.seed = mode, seed

    @torch.no_grad()
    def write(self, weight: Tensor, value: Tensor, name: str, step: int) -> None:
        """Rounds `value` (fp32) into `weight` (bf16; an fp32 one is `value` itself or takes it as it is)."""
        if weight.dtype != torch.bfloat16 or self.mode == "nearest":
            if weight is not value:
                weight.copy_(value)
            return
        generator = torch.Generator(weight.device).manual_seed(derive(self.seed, "rounding", step, name))
        weight.copy_(stochastic_bf16(value, generator))


def stochastic_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """x: fp32, any shape -> bf16, each one of its two neighbours, with E[result] = x. Numbers of bf16 stay as they are."""
    noise = torch.randint(LOW_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = x.contiguous().view(torch.int32) + noise
    return (bits & -LOW_BITS).view(torch.float32).to(torch.bfloat16)  # exact: the lower half is empty
