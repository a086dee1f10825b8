"""Preferences: of two answers to a prompt one was chosen; or of one, whether it was good. No reward model, no sampling.

A policy says of each answer y what it weighs, log pi(y|x), summed over its tokens; a frozen reference says the same. With
    h = log pi(y) / ref(y), the implicit reward is beta h, and  D = h(chosen) - h(rejected), sigma the logistic function:

    DPO     - log sigma(beta D)                                          Rafailov et al. 2023, arXiv:2305.18290, eq. 7
            (1 - e) of that, and e of it with -D                         labels that are wrong with probability e (same page)
    IPO     (D - 1 / (2 beta))^2                                         Azar et al. 2023, arXiv:2310.12036, eq. 17
    SimPO   - log sigma(beta (log pi(c) / |c| - log pi(r) / |r|) - gamma)        Meng et al. 2024, arXiv:2405.14734, eq. 6
    ORPO    - log P(c) - weight log sigma(log odds(c) - log odds(r))     Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7
            with P = pi^(1/|y|), odds = P / (1 - P)                      no reference; the first term is SFT's
    KTO     w_good (1 - sigma(beta (h - z)))  of a good answer,          Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8
            w_bad (1 - sigma(beta (z - h)))   of a bad one,              z = KL(pi || ref), held fixed

The subtle parts. DPO asks for a larger D without end, IPO for one value of it; as printed, over summed log-probs, IPO's aim
is the same for a long answer as for a short one. Its authors' figures, and TRL's code, come from means over tokens:
`per_token` says which. KTO's z is estimated from prompts with the answers of other prompts, and belongs to the whole batch:
it is an argument, so that micro-batches do not change it.

Log-probabilities are fp32 sums from `log_probs.py`; all arguments are [P], one a pair. Metrics are sums over pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss

MAX_LOG_PROB = -1e-6  # of a token's mean log-probability under the odds, which have no end at 0


@dataclass(frozen=True)
class PairLogProbs:
    """P pairs of answers; each field is [P].

    chosen, rejected: summed log-probs under the policy, with gradient; reference_chosen, reference_rejected: under the
    reference (DPO, IPO); chosen_length, rejected_length: how many tokens they were summed over (SimPO, ORPO, IPO per token).
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None
    chosen_length: Tensor | None = None
    rejected_length: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (value.ndim != 1 or value.shape != self.chosen.shape):
                raise ConfigError(
                    f"{name} is {list(value.shape)} beside chosen {list(self.chosen.shape)}",
                    expected="[P], one a pair",
                )

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """h of the chosen and of the rejected.

        Raises:
            ConfigError: there is no reference.
        """
        if self.reference_chosen is None or self.reference_rejected is None:
            raise ConfigError("pairs without a reference's log-probabilities", do="score them with it first")
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def length_normalized(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Both over their lengths; an answer without tokens says 0.

        Raises:
            ConfigError: there are no lengths.
        """
        if self.chosen_length is None or self.rejected_length is None:
            raise ConfigError("pairs without lengths", do="give chosen_length and rejected_length")
        return chosen / self.chosen_length.clamp(min=1), rejected / self.rejected_length.clamp(min=1)


def dpo(pairs: PairLogProbs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """Direct preference optimisation. smoothing: e above, 0 to below 0.5."""
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"smoothing is {label_smoothing}", expected="0 to below 0.5: half is no preference")
    chosen, rejected = pairs.log_ratios()
    margin = beta * (chosen - rejected)
    each = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return _pair_loss(each, beta * chosen, beta * rejected)


def ipo(pairs: PairLogProbs, *, beta: float = 0.1, length_normalized: bool = False) -> Loss:
    """Identity preference optimisation; beta is the paper's tau. per_token: h are means over tokens, see above."""
    chosen, rejected = pairs.log_ratios()
    if length_normalized:
        chosen, rejected = pairs.length_normalized(chosen, rejected)
    each = (chosen - rejected - 1 / (2 * beta)).square()
    return _pair_loss(each, beta * chosen, beta * rejected)


def simpo(pairs: PairLogProbs, *, beta: float = 2.0, gamma: float = 1.0) -> Loss:
    """Preferences by mean log-probability, no reference; gamma: the margin that is asked for."""
    chosen, rejected = (beta * mean for mean in pairs.length_normalized(pairs.chosen, pairs.rejected))
    return _pair_loss(-F.logsigmoid(chosen - rejected - gamma), chosen, rejected)


def orpo(pairs: PairLogProbs, *, weight: float = 0.1) -> Loss:
    """SFT on the chosen, and the odds ratio; metrics sft and odds too. weight: the paper's lambda."""
    chosen, rejected = pairs.length_normalized(pairs.chosen, pairs.rejected)
    odds = _log_odds(chosen) - _log_odds(rejected)
    ratio = -F.logsigmoid(odds)
    loss = _pair_loss(-chosen + weight * ratio, weight * chosen, weight * rejected)
    return Loss(
        loss.total,
        loss.count,
        {**loss.metrics, "sft": -chosen.detach().sum(), "log_odds_ratio": odds.detach().sum()},
    )


def kto(
    log_prob: Tensor,
    reference_log_prob: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Kahneman-Tversky optimisation of single answers.

    Args:
        log_prob, reference_log_prob: [S] summed over each answer, the first with gradient; good: [S] bool.
        divergence: z above, of the whole batch (`kto_divergence`).
        good_weight, bad_weight: to make up for one kind being rarer.

    Returns:
        Loss, count = S; metrics good_reward, bad_reward (sums over those), good, bad (how many), accuracy (good ones above z
        and bad ones below), divergence (z once for each, so that the mean is z).

    Raises:
        ConfigError: shapes that do not fit.
    """
    if not log_prob.shape == reference_log_prob.shape == desirable.shape or log_prob.ndim != 1:
        raise ConfigError(
            f"log_prob is {list(log_prob.shape)}, reference_log_prob {list(reference_log_prob.shape)}, "
            f"good {list(desirable.shape)}",
            expected="[S], all alike",
        )
    z = torch.as_tensor(kl, dtype=log_prob.dtype, device=log_prob.device).detach()
    h = log_prob - reference_log_prob
    sign = torch.where(desirable, 1.0, -1.0).to(h.dtype)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(h.dtype)
    total = (weight * torch.sigmoid(-beta * sign * (h - z))).sum()  # 1 - sigma(x) = sigma(-x)
    reward = beta * h.detach()
    count = torch.full_like(total.detach(), float(len(h)))
    metrics = {
        "rewards/desirable": reward[desirable].sum(),
        "rewards/undesirable": reward[~desirable].sum(),
        "desirable": desirable.sum(),
        "undesirable": (~desirable).sum(),
        "rewards/accuracy": (sign * (h.detach() - z) > 0).sum(),
        "kl": z * count,
    }
    return Loss(total, count, metrics)


@torch.no_grad()
def kto_kl(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """[] the z of KTO (section 4.1): the mean of h over prompts with another prompt's answer, and not below 0.

    log_prob, reference_log_prob: [M] summed over each such answer, of the whole batch.
    """
    if not len(log_prob):
        return torch.zeros((), device=log_prob.device)
    return (log_prob - reference_log_prob).mean().clamp(min=0)


def _log_odds(log_p: Tensor) -> Tensor:
    """log (P / (1 - P)) for log P < 0, by whichever way keeps the digits (Maechler 2012, "log1mexp")."""
    x = log_p.clamp(max=MAX_LOG_PROB)
    near = x > -math.log(2)
    one_minus = torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
    return x - one_minus


def _pair_loss(each: Tensor, chosen: Tensor, rejected: Tensor) -> Loss:
    """Summed over pairs. chosen, rejected: [P] implicit rewards."""
    chosen, rejected = chosen.detach(), rejected.detach()
    total = each.sum()
    metrics = {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margin": (chosen - rejected).sum(),
        "rewards/accuracy": (chosen > rejected).sum(),
        "ties": (chosen == rejected).sum(),  # pairs that are identical are, and teach nothing
    }
    return Loss(total, torch.full_like(total.detach(), float(len(each))), metrics)
