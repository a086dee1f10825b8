"""Positions that are added to x, and positions as a bias. Rotary positions are in `nn/rotary.py`.

- `LearnedPositions`: a table with one vector per position (Gehring et al. 2017, arXiv:1705.03122, sec. 3.1; BERT, GPT-2
  and ViT). A position beyond its last row is an error.
- `SinusoidalPositions`: fixed waves (Vaswani et al. 2017, arXiv:1706.03762, sec. 3.5),

      p[t, 2 i] = sin(t / base^(2 i / d)),   p[t, 2 i + 1] = cos(t / base^(2 i / d)).

  Sine and cosine of one frequency are adjacent, as in the paper. Many programs put all sines first.
- `alibi_slopes`: each head subtracts slope * distance from its scores (Press et al. 2022, arXiv:2108.12409, sec. 3), so
  rows longer than those of training stay usable.

All three are fp32; the caller casts them for a narrower x.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError


class LearnedPositions(nn.Module):
    """Learned position table: positions [..., T] -> [..., T, d], fp32.

    Args:
        n_positions: rows of the table; positions are 0 .. n_positions - 1.
        d: width.
        std: of the normal initial weights (0.02, as BERT and GPT-2).
        generator: of those weights.
    """

    def __init__(
        self, n_positions: int, d: int, *, std: float = 0.02, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        for name, value in (("n_positions", n_positions), ("d", d)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", expected="at least 1")
        self.n_positions = n_positions
        self.weight = nn.Parameter(torch.empty(n_positions, d).normal_(0.0, std, generator=generator))

    def forward(self, positions: Tensor) -> Tensor:
        """Return the vectors of positions [..., T], integers: [..., T, d].

        The check reads the largest position, which makes a GPU synchronize; `between` needs no such read. Compiled
        regions have no check but the kernel's.

        Raises:
            ConfigError: a position is negative or beyond the table.
        """
        if positions.numel() and not torch.compiler.is_compiling():
            low, high = (int(p) for p in torch.aminmax(positions))
            self._check(low if low < 0 else high)
        return nn.functional.embedding(positions, self.weight)

    def between(self, start: int, stop: int) -> Tensor:
        """Return the vectors of positions start .. stop - 1, [stop - start, d].

        Raises:
            ConfigError: as `forward`.
        """
        self._check(start if start < 0 else stop - 1)
        return self.weight[start:stop]

    def _check(self, position: int) -> None:
        if not 0 <= position < self.n_positions:
            raise ConfigError(
                f"position {position} is beyond n_positions = {self.n_positions}",
                expected=f"positions 0 to {self.n_positions - 1}",
                do="shorten the rows, or train with a larger n_positions: a learned table does not extrapolate",
            )


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions: positions [..., T] -> [..., T, d], fp32; no parameters, no limit.

    Args:
        d: width, even.
        base: the longest wave is about 2 pi base positions long.
    """

    def __init__(self, d: int, base: float = 10_000.0) -> None:
        super().__init__()
        if d % 2 or d < 2:
            raise ConfigError(f"d is {d}", expected="an even number: each wave has a sine and a cosine")
        self.d, self.base = d, base

    def forward(self, positions: Tensor) -> Tensor:
        """Return the vectors of positions [..., T], integers: [..., T, d]."""
        index = torch.arange(0, self.d, 2, device=positions.device, dtype=torch.float32)
        angle = positions[..., None].float() * self.base ** (-index / self.d)  # [..., T, d / 2]
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def alibi_slopes(n_heads: int, device: torch.device | None = None) -> Tensor:
    """Return one positive slope per head, [n_heads] fp32, for the bias -slope * (query - key).

    For a power of two, head h of n (from 1) has 2^(-8 h / n). For another count, the paper's authors use the slopes
    of the next lower power of two, then every second slope of the next higher one, the steepest first.

    Raises:
        ConfigError: `n_heads` is less than 1.
    """
    if n_heads < 1:
        raise ConfigError(f"n_heads is {n_heads}", expected="at least 1")
    lower = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / lower) for h in range(1, lower + 1)]
    slopes += [2.0 ** (-4.0 * h / lower) for h in range(1, 2 * lower, 2)][: n_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
