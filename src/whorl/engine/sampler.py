"""From logits to a token: temperature, top-k, top-p, in that order, from a generator passed in.

What comes out beside the token is its log-probability under the distribution that was *sampled from* (after
temperature and cuts) and under the model's own (`raw`): two numbers that are often confused, under two names.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class Sampling(BaseModel):
    """How to choose the next token. The defaults sample the model's own distribution, slightly sharpened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=0.8, ge=0, description="0 takes the likeliest token")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest; 0 keeps all")
    top_p: float = Field(default=0.95, gt=0, le=1, description="keep the likeliest that together reach p")


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits: [B, V] fp32 -> probabilities [B, V] that are sampled from (one-hot at temperature 0)."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    probability = (logits / sampling.temperature).softmax(dim=-1)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        least = probability.topk(sampling.top_k, dim=-1).values[:, -1:]
        probability = probability.where(probability >= least, 0)
        probability = probability / probability.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1:
        ordered, order = probability.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of those likelier: the first is always kept
        ordered = ordered.where(before < sampling.top_p, 0)
        probability = torch.zeros_like(probability).scatter(-1, order, ordered)
        probability = probability / probability.sum(dim=-1, keepdim=True)
    return probability


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [B, V] -> (token [B], log-probability sampled from [B], raw log-probability [B])."""
    probability = distribution(logits, sampling)
    token = (
        probability.argmax(dim=-1)
        if sampling.temperature == 0
        else torch.multinomial(probability, 1, generator=generator).squeeze(-1)
    )
    chosen = token[:, None]
    sampled = probability.gather(-1, chosen).squeeze(-1).log()
    raw = logits.log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)
    return token, sampled, raw
