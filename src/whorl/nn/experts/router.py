"""MoE routing: three published methods, and one record of their decisions.

For tokens x_n and a router matrix W [E, d], logits are z = x W^T and scores s = softmax(z) or sigmoid(z), in fp32.

- "token_choice": each token takes its `top_k` best experts (Shazeer et al. 2017, arXiv:1701.06538; GShard, Lepikhin et
  al. 2020, arXiv:2006.16668, algorithm 1; Switch, Fedus et al. 2021, arXiv:2101.03961, eq. 3). An expert holds at most
  C = ceil(capacity_factor N top_k / E) tokens. All first choices are placed
  before any second choice; within one rank, earlier positions have priority. A token whose expert is full gets its
  next choice (overflow="next"), or loses that choice (overflow="drop", as in Switch).
- "dropless": the same choice without a limit (MegaBlocks, Gale et al. 2022, arXiv:2211.15841).
- "expert_choice": each expert takes its C = ceil(N top_k / E) best tokens (Zhou et al. 2022, arXiv:2202.09368, section
  3.2, top_k replaces their capacity factor c). Loads are equal; a token may have no expert, or many.

The weight of a chosen expert is its score, divided by the sum over the token's experts if `norm_topk_prob`, times `scale`.

DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) adds two options. Groups: a token may choose only within its `top_groups`
best of `n_groups` groups, where a group's score is the sum of its two best experts. Balancing without a loss (Wang et al.
2024, arXiv:2408.15664, algorithm 1): a bias per expert is added to the scores *for choosing only*;
`update_balance_bias` moves it against the sign of the load error. It is a buffer without a gradient.

The subtle part: only "dropless" routes a token independently of the batch, so models that generate one token at a
time should be trained dropless. Apart from the two dropouts, training and evaluation route equally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError, one_of
from whorl.nn.experts.hashed_uniform import hashed_uniform

RoutingMethod = Literal["token_choice", "dropless", "expert_choice"]
Scoring = Literal["softmax", "sigmoid"]
Overflow = Literal["next", "drop"]


@dataclass(frozen=True)
class Routing:
    """Routing of N tokens to E experts: A assignments, sorted by expert, then by token.

    logits, scores: [N, E] fp32, with their graph (for `objectives/routing.py`).
    tokens: [A] token indices; weights: [A] fp32 with their graph: factors of the expert's outputs.
    counts: [E] assignments of each expert (they sum to A).
    requested: [E] assignments without a limit, for a balancing loss or bias.
    """

    logits: Tensor
    scores: Tensor
    tokens: Tensor
    weights: Tensor
    counts: Tensor
    requested: Tensor
    top_k: int

    @property
    def experts(self) -> Tensor:
        """Expert index of each assignment, [A]."""
        return torch.repeat_interleave(self.counts)

    @property
    def chosen(self) -> Tensor:
        """[N, E] bool: True where the token is routed to the expert."""
        chosen = torch.zeros_like(self.scores, dtype=torch.bool)
        chosen[self.tokens, self.experts] = True
        return chosen


def top_k_mask(preference: Tensor, top_k: int) -> Tensor:
    """Return a mask of each token's `top_k` best experts, bool [N, E]. preference: [N, E]."""
    wanted = torch.zeros_like(preference, dtype=torch.bool)
    return wanted.scatter_(1, preference.topk(top_k, dim=1).indices, True)


def assign_with_capacity(
    preference: Tensor, top_k: int, capacity: int, overflow: Overflow = "next"
) -> Tensor:
    """Return token choice under a limit, bool [N, E]: assigned rank by rank, in each rank by position.

    preference: [N, E]; -inf where a token may not go. The result has at most `top_k` True per row and at most
    `capacity` per column.
    """
    n_experts = preference.shape[1]
    ranked = preference.argsort(dim=1, descending=True, stable=True)  # [N, E]
    allowed = preference != float("-inf")  # not isfinite, because NaN should propagate to the output
    placed = torch.zeros_like(preference, dtype=torch.bool)
    for rank in range(top_k if overflow == "drop" else n_experts):
        unplaced = placed.sum(dim=1) < top_k  # [N]: tokens that still need an expert
        if not bool(unplaced.any()):
            break
        requests = F.one_hot(ranked[:, rank], n_experts) * unplaced[:, None]  # [N, E]
        requests = requests * allowed
        queue = placed.sum(dim=0) + requests.cumsum(dim=0)  # [N, E]: position in the expert's queue, from 1
        placed |= (requests > 0) & (queue <= capacity)
    return placed


def group_limited_scores(preference: Tensor, n_groups: int, top_groups: int) -> Tensor:
    """Return preference [N, E] with -inf outside each token's best groups."""
    grouped = preference.view(len(preference), n_groups, preference.shape[1] // n_groups)  # [N, G, E / G]
    group_score = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)  # [N, G]
    outside = ~top_k_mask(group_score, top_groups)[:, :, None]
    return grouped.masked_fill(outside, float("-inf")).view_as(preference)


class MoERouter(nn.Module):
    """Router: x [N, d] -> `Routing`, by the methods at the top of this file.

    Args:
        groups: (n_groups, top_groups), or None to choose among all experts.
        bias_balance: keep a bias per expert for `update_balance_bias`.
        expert_dropout: in training, each expert is left out of a whole batch with this probability (at least top_k
            stay). Switch uses this name for the dropout inside an expert's hidden layer.
        token_dropout: in training, a token skips its experts with this probability.

    Raises:
        ConfigError: an option is unknown, out of range, or has no effect with another one.
    """

    balance_bias: Tensor | None

    def __init__(
        self,
        d: int,
        n_experts: int,
        top_k: int,
        *,
        routing: RoutingMethod = "dropless",
        scoring: Scoring = "softmax",
        norm_topk_prob: bool = True,
        capacity_factor: float = 1.25,
        overflow: Overflow = "next",
        scale: float = 1.0,
        groups: tuple[int, int] | None = None,
        bias_balance: bool = False,
        expert_dropout: float = 0.0,
        token_dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for field, value, allowed in (
            ("routing", routing, get_args(RoutingMethod)),
            ("scoring", scoring, get_args(Scoring)),
            ("overflow", overflow, get_args(Overflow)),
        ):
            if value not in allowed:
                raise ConfigError(f"{field} is {value!r}", expected=one_of(value, allowed))
        if n_experts < 1:
            raise ConfigError(f"n_experts is {n_experts}", expected="at least 1")
        if not 1 <= top_k <= n_experts:
            raise ConfigError(
                f"top_k is {top_k} with n_experts {n_experts}",
                expected=f"from 1 to {n_experts}",
                do="lower top_k or add experts",
            )
        if not (math.isfinite(capacity_factor) and capacity_factor > 0):
            raise ConfigError(f"capacity_factor is {capacity_factor}", expected="a number above 0")
        for field, share in (("expert_dropout", expert_dropout), ("token_dropout", token_dropout)):
            if not 0 <= share < 1:
                raise ConfigError(f"{field} is {share}", expected="at least 0 and below 1")
        if routing == "expert_choice" and (groups is not None or bias_balance):
            raise ConfigError(
                f"routing 'expert_choice' with {'groups' if groups is not None else 'bias_balance'}",
                expected="without it: expert choice has equal loads",
                do="leave it out, or route by 'dropless' or 'token_choice'",
            )
        if routing != "expert_choice" and norm_topk_prob and top_k == 1 and n_experts > 1:
            raise ConfigError(
                "norm_topk_prob is True with top_k 1: every weight would be 1, and the router would not be trained",
                expected="norm_topk_prob=False (as in Switch)",
                do="pass norm_topk_prob=False, or a larger top_k",
            )
        if groups is not None:
            n_groups, top_groups = groups
            if n_groups < 1 or n_experts % n_groups or not 1 <= top_groups <= n_groups:
                raise ConfigError(
                    f"groups is {groups} with n_experts {n_experts}",
                    expected="(n_groups, top_groups): n_groups divides n_experts, top_groups from 1 to n_groups",
                )
            if top_k > top_groups * (n_experts // n_groups):
                raise ConfigError(
                    f"top_k is {top_k}, but groups {groups} leave {top_groups * (n_experts // n_groups)} experts",
                    expected="at most that many",
                    do="raise top_groups or lower top_k",
                )
        self.n_experts, self.top_k = n_experts, top_k
        self.routing, self.scoring, self.overflow = routing, scoring, overflow
        self.norm_topk_prob, self.scale, self.capacity_factor = norm_topk_prob, scale, capacity_factor
        self.groups, self.expert_dropout, self.token_dropout = groups, expert_dropout, token_dropout
        # Small, so that scores begin nearly equal and first choices spread over all experts (Switch, section 2.4).
        self.weight = nn.Parameter(torch.randn(n_experts, d, generator=generator) * 0.3 * d**-0.5)
        self.register_buffer("balance_bias", torch.zeros(n_experts) if bias_balance else None)
        self.seed, self.rows = 0, None  # of dropout: see `draw_rows`

    rows: Tensor | None

    def draw_rows(self, seed: int, rows: Tensor | None) -> None:
        """Draw the dropout of the next tokens by row, so that masks are those of any split of the batch.

        seed: of the step and the layer. rows: [R] numbers in the whole batch, of R rows of equal length; None: torch's
        generator draws, as by default.
        """
        self.seed, self.rows = seed, rows

    def capacity(self, n_tokens: int) -> int:
        """Return the maximum number of tokens of one expert."""
        if self.routing == "dropless":
            return n_tokens
        factor = self.capacity_factor if self.routing == "token_choice" else 1.0
        return min(n_tokens, math.ceil(factor * n_tokens * self.top_k / self.n_experts))

    def forward(self, x: Tensor) -> Routing:
        logits = F.linear(x.float(), self.weight)  # [N, E]: near ties are common, so always fp32
        scores = logits.softmax(dim=-1) if self.scoring == "softmax" else logits.sigmoid()
        with torch.no_grad():
            chosen, requested = self._choose(scores.detach())
            experts, tokens = chosen.t().nonzero(as_tuple=True)  # sorted by expert, then by token
            counts = chosen.sum(dim=0)
        if self.norm_topk_prob and self.routing != "expert_choice":
            total = (scores * chosen).sum(dim=1)
            # 1e-20: all sigmoids of a token may underflow together.
            weights = scores[tokens, experts] / (total[tokens] + 1e-20)
        else:
            weights = scores[tokens, experts]
        return Routing(logits, scores, tokens, weights * self.scale, counts, requested, self.top_k)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [N, E] bool and the requested loads [E]. scores: [N, E]."""
        preference = scores if self.balance_bias is None else scores + self.balance_bias
        if self.groups is not None:
            preference = group_limited_scores(preference, *self.groups)
        if self.training and self.expert_dropout:
            preference = preference.masked_fill(self._dropped_experts(preference), float("-inf"))
        capacity = self.capacity(len(scores))
        if self.routing == "expert_choice":
            chosen = torch.zeros_like(scores, dtype=torch.bool)
            chosen.scatter_(0, preference.topk(capacity, dim=0).indices, True)
            chosen &= preference != float("-inf")  # a dropped expert takes no token
            requested = chosen.sum(dim=0)
        else:
            wanted = top_k_mask(preference, self.top_k) & (preference != float("-inf"))
            requested = wanted.sum(dim=0)
            if self.routing == "dropless" or capacity >= len(scores):
                chosen = wanted
            else:
                chosen = assign_with_capacity(preference, self.top_k, capacity, self.overflow)
        if self.training and self.token_dropout:
            if self.rows is None:
                draw = torch.rand(len(scores), device=scores.device)
            else:
                positions = torch.arange(len(scores) // len(self.rows), device=scores.device)
                rows = self.rows.to(scores.device)[:, None]
                draw = hashed_uniform(self.seed, 1 + rows, positions).flatten()
            chosen = chosen & (draw >= self.token_dropout)[:, None]
        return chosen, requested

    def _dropped_experts(self, preference: Tensor) -> Tensor:
        """Return [E] bool: experts dropped for this batch. At least `top_k` stay, in every group if groups exist."""
        draw = torch.rand(self.n_experts, device=preference.device)
        if self.rows is not None:  # the same for all rows of the step
            draw = hashed_uniform(self.seed, torch.arange(self.n_experts, device=preference.device))
        dropped = draw < self.expert_dropout
        pools = draw.view(self.groups[0], -1) if self.groups is not None else draw[None]
        # A token may choose any `top_groups` groups, so each group keeps enough experts.
        keep = min(self.top_k, pools.shape[1])
        safe = torch.zeros_like(pools, dtype=torch.bool).scatter_(1, pools.topk(keep, dim=1).indices, True)
        return dropped & ~safe.flatten()

    @torch.no_grad()
    def update_balance_bias(self, loads: Tensor, rate: float = 1e-3) -> None:
        """Update the balance bias by one step: bias += rate * sign(mean load - load).

        loads: [E], `requested` of a training batch, summed over micro-batches and ranks. The training loop calls it once
        per step, after the optimizer.

        Raises:
            ConfigError: the router has no `bias_balance`.
        """
        if self.balance_bias is None:
            raise ConfigError("this router has no balance bias", expected="bias_balance=True at construction")
        loads = loads.to(self.balance_bias)
        self.balance_bias.add_((loads.mean() - loads).sign(), alpha=rate)
