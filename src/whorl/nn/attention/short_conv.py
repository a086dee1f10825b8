"""Short causal mixing: each position takes in a few of its predecessors, before or next to attention.

Attention finds positions by content only, and needs a full layer to learn "the previous position". Two remedies:

- `Smear`: each key is mixed with its predecessor, by one learned share per head (Olsson et al. 2022, In-context Learning
  and Induction Heads, "smeared keys"):  y[t] = x[t] + sigmoid(share) (x[t-1] - x[t]).
- `ShortConvolution`: each feature has separate weights over its last `width` values, y[t] = sum_i w[i] x[t-i]. This is
  the convolution of Mamba (Gu & Dao 2023, arXiv:2312.00752, sec. 3.4) and, with `residual=True`, the Canon layer
  (Allen-Zhu 2025, Physics of Language Models 4.1).

The subtle part is a document border in a packed row: no information crosses it. The first positions of a document
have no predecessor. Smear leaves them unchanged; the convolution counts missing values as 0. Both use `predecessors`,
so training, packed rows and decoding share one definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.paged import PagedState


@dataclass
class ShortConvState:
    """The newest n positions of each row.

    past: [B, n, ...] features, newest last, of which min(length, n) are valid; segments: [B, n].
    """

    past: Tensor
    segments: Tensor
    length: int = 0

    @classmethod
    def empty(
        cls,
        batch: int,
        n: int,
        features: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ShortConvState:
        """Return an empty state of `batch` rows and n positions of [*features]."""
        past = torch.zeros(batch, n, *features, dtype=dtype, device=device)
        return cls(past, torch.zeros(batch, n, dtype=torch.long, device=device))

    @property
    def n_bytes(self) -> int:
        """Bytes of the stored positions and segments."""
        return self.past.nbytes + self.segments.nbytes


def predecessors(
    x: Tensor, n: int, segments: Tensor | None = None, state: ShortConvState | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return the values 1, 2, ... n positions before each position.

    x: [B, T, ...]; segments: [B, T] or None (a state continues its last document).
    Returns n pairs: [B, T, ...] the earlier features, 0 where they do not exist; [B or 1, T] bool, whether they exist.
    The state advances by T positions. Its contents carry no gradient.
    """
    batch, length = x.shape[:2]
    if n == 0:
        if state is not None:
            state.length += length
        return []
    if state is None:
        held = 0
        past = x.new_zeros(batch, n, *x.shape[2:])
        ids = None if segments is None else torch.cat([segments[:, :1].expand(-1, n), segments], dim=1)
    else:
        if state.past.shape[0] != batch:
            raise ConfigError(
                f"the state is of {state.past.shape[0]} rows and x of {batch}",
                expected="the same number of rows",
            )
        held = min(state.length, n)
        past = state.past.to(x.dtype)
        if segments is None:
            segments = state.segments[:, -1:].expand(-1, length)
        ids = torch.cat([state.segments, segments], dim=1)
    full = torch.cat([past, x], dim=1)  # [B, n + T, ...]
    at = torch.arange(length, device=x.device)
    pairs = []
    for i in range(1, n + 1):
        there = (at - i >= -held)[None]
        if ids is not None:
            there = there & (ids[:, n - i : n - i + length] == ids[:, n:])
        earlier = full[:, n - i : n - i + length]
        wide = there.reshape(*there.shape, *(1,) * (x.dim() - 2))
        pairs.append((torch.where(wide, earlier, 0.0), there))
    if state is not None:
        assert ids is not None
        state.past = full[:, length:].detach().to(state.past.dtype).clone()
        state.segments = ids[:, length:].to(state.segments.dtype).clone()
        state.length += length
    return pairs


class Smear(nn.Module):
    """Smeared keys: x [B, T, n_heads, d] -> the same shape, each position mixed with its predecessor.

    Parameter `share` [n_heads, 1]: sigmoid(share) is the predecessor's part, 1/2 at first.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(n_heads, 1))

    def forward(
        self, x: Tensor, segments: Tensor | None = None, state: ShortConvState | PagedState | None = None
    ) -> Tensor:
        """Return x mixed with its predecessors. segments: [B, T] or None; state: of 1 position, [n_heads, d] each."""
        share = torch.sigmoid(self.share).to(x.dtype)
        there: Tensor | None = (
            None  # [B or 1, T], whether a position has a predecessor; None: all take `previous`
        )
        if isinstance(state, PagedState):
            previous = state.predecessors(x)
        elif state is not None:
            ((previous, there),) = predecessors(x, 1, segments, state)
        else:  # without the copies of `predecessors`
            previous = torch.cat([x[:, :1], x[:, :-1]], dim=1)
            if segments is not None:
                there = F.pad(segments[:, 1:] == segments[:, :-1], (1, 0), value=False)
        mixed = x + share * (previous - x)
        return mixed if there is None else torch.where(there[:, :, None, None], mixed, x)

    def new_state(
        self,
        batch: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ShortConvState:
        """Return an empty state of `batch` rows of heads of `head_dim` features."""
        return ShortConvState.empty(batch, 1, (self.share.shape[0], head_dim), dtype=dtype, device=device)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution: y[t, f] = sum_i weight[f, i] x[t - i, f]  (+ bias, + x). x: [B, T, n_features].

    Args:
        n_features: features, each with separate weights.
        width: positions that a result depends on, including the current one.
        bias: one number per feature, 0 at first.
        residual: x is added to the result.
        generator: of the initial weights, uniform within +- width^-0.5.

    Raises:
        ConfigError: `width` or `n_features` below 1.
    """

    def __init__(
        self,
        n_features: int,
        width: int = 4,
        *,
        bias: bool = False,
        residual: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("n_features", n_features), ("width", width)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", expected="at least 1")
        bound = width**-0.5
        weight = (torch.rand(n_features, width, generator=generator) * 2 - 1) * bound
        self.weight = nn.Parameter(weight)  # [n_features, width], the newest position first
        self.bias = nn.Parameter(torch.zeros(n_features)) if bias else None
        self.residual = residual

    @property
    def width(self) -> int:
        """Positions that a result depends on."""
        return self.weight.shape[1]

    def forward(
        self, x: Tensor, segments: Tensor | None = None, state: ShortConvState | None = None
    ) -> Tensor:
        """Return the convolution of x. segments: [B, T] or None; state: from `new_state`.

        Raises:
            ConfigError: x has another number of features.
        """
        if x.dim() != 3 or x.shape[-1] != self.weight.shape[0]:
            raise ConfigError(f"x has the shape {list(x.shape)}", expected=f"[B, T, {self.weight.shape[0]}]")
        weight = self.weight.to(x.dtype)
        y = x * weight[:, 0]
        for i, (earlier, _) in enumerate(predecessors(x, self.width - 1, segments, state), start=1):
            y = y + earlier * weight[:, i]
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return x + y if self.residual else y

    def new_state(
        self, batch: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> ShortConvState:
        """Return an empty state of `batch` rows."""
        return ShortConvState.empty(
            batch, self.width - 1, (self.weight.shape[0],), dtype=dtype, device=device
        )
