"""From logits to a token: temperature, top-k, top-p, in that order, from a generator passed in.

What comes out beside the token is its log-probability under the distribution that was *sampled from* (after
temperature and cuts) and under the model's own (`raw`): two numbers that are often confused, under two names.

The draw inverts the cumulative distribution, along the order in which the cuts sorted it: one random number, one search. A
decoder's step is a few hundred microseconds, and torch's general `multinomial` alone would take a tenth of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.engine.sampling import Sampling


def _kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """(weights [B, V], ids [B, V] or None): what is sampled from, not yet renormalised, 0 where it was cut.

    With a cut the weights are sorted, likeliest first, and ids says whose they are.
    """
    weights = (logits / sampling.temperature).softmax(dim=-1)
    ids = None
    if sampling.top_k or sampling.top_p < 1:
        weights, ids = weights.sort(dim=-1, descending=True)
    if sampling.top_k:
        weights[:, sampling.top_k :] = 0
    if sampling.top_p < 1:
        reached = weights.cumsum(dim=-1)
        before = reached - weights  # mass of those likelier: the first is always kept
        weights = weights * (before < sampling.top_p * reached[:, -1:])
    return weights, ids


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits: [B, V] fp32 -> probabilities [B, V] that are sampled from (one-hot at temperature 0)."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    weights, ids = _kept(logits, sampling)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights if ids is None else torch.zeros_like(weights).scatter(-1, ids, weights)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [B, V] -> (token [B], log-probability sampled from [B], raw log-probability of every id [B, V])."""
    raw = logits.log_softmax(dim=-1)
    if sampling.temperature == 0:
        token = raw.argmax(dim=-1)
        return token, torch.zeros_like(token, dtype=raw.dtype), raw
    weights, ids = _kept(logits, sampling)
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:]
    draw = torch.rand(total.shape, generator=generator, device=generator.device).to(total.device) * total
    # The first whose cumulative weight exceeds the draw: never one that was cut, whose weight is 0.
    place = torch.searchsorted(reached, draw, right=True)
    token = place if ids is None else ids.gather(-1, place)
    return token.squeeze(-1), (weights.gather(-1, place) / total).log().squeeze(-1), raw


from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

from whorl.engine.request import Token  # noqa: E402


@dataclass
class Row:
    sampling: Any
    prompt: Any
    output: Any
    seed: int
    drawn: int
    allowed: Any = None
    top_log_probs: int = 0
    owner: Any = None


class Sampler:
    def __init__(self, vocab_size: int, forbidden: Any = (), device: str = "cpu") -> None:
        self.bias = torch.zeros(vocab_size)
        self.bias[list(forbidden)] = float("-inf")

    def __call__(self, logits: Tensor, rows: Any) -> list[Token]:
        out = []
        for one, row in zip(logits[-len(rows) :] + self.bias, rows, strict=True):
            g = torch.Generator().manual_seed((row.seed * 1000003 + row.drawn) % (1 << 62))
            t, lp, raw = sample(one[None], row.sampling, g)
            out.append(Token(int(t), float(lp), float(raw[0, int(t)])))
        return out
