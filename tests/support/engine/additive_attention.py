"""A mixer from outside the package: additive attention (Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whorl.nn.attention.token_cache import TokenCacheMixer
from whorl.nn.linear import Linear


class AdditiveAttention(TokenCacheMixer):
    """score_ij = w . tanh(q_i + k_j), which no product of queries and keys expresses.

    It keeps a key of `width` features and a value of d_model features for each token.
    """

    def __init__(
        self,
        d_model: int,
        *,
        width: int = 6,
        window: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__({"key": (width,), "value": (d_model,)}, window)
        std = d_model**-0.5
        self.q, self.k = (Linear(d_model, width, std=std, bias=True, generator=generator) for _ in "qk")
        self.v = Linear(d_model, d_model, std=std, generator=generator)
        self.score = Linear(width, 1, std=1.0, generator=generator)
        self.out = Linear(d_model, d_model, std=0.0)

    def forward(
        self, x: Tensor, *, positions: Any = None, segments: Tensor | None = None, state: Any = None
    ) -> Tensor:
        stored = self.store(state, segments, key=self.k(x), value=self.v(x))
        sums = torch.tanh(self.q(x)[:, :, None] + stored["key"][:, None])  # [B, T, S, width]
        scores = self.score(sums)[..., 0].float().masked_fill(~stored.allowed(), float("-inf"))
        out: Tensor = self.out(scores.softmax(-1).to(x.dtype) @ stored["value"])
        return out
