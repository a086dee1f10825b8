"""Preference objectives: learn from pairs of completions, or from single labelled ones, without a reward model.

log pi(y|x) is summed over the tokens of completion y. A frozen reference gives ref(y|x). With h = log pi(y) / ref(y)
the implicit reward is beta h. D = h(chosen) - h(rejected), and sigma is the logistic function:

    DPO     - log sigma(beta D)                                          Rafailov et al. 2023, arXiv:2305.18290, eq. 7
            (1 - e) of that, and e of it with -D                         labels wrong with probability e (same page)
    IPO     (D - 1 / (2 beta))^2                                         Azar et al. 2023, arXiv:2310.12036, eq. 17
    SimPO   - log sigma(beta (log pi(c) / |c| - log pi(r) / |r|) - gamma)        Meng et al. 2024, arXiv:2405.14734, eq. 6
    ORPO    - log P(c) - weight log sigma(log odds(c) - log odds(r))     Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7
            with P = pi^(1/|y|), odds = P / (1 - P)                      no reference; the first term is the SFT loss
    KTO     w_d (1 - sigma(beta (h - z)))  of a desirable completion,    Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8
            w_u (1 - sigma(beta (z - h)))  of an undesirable one,        z = KL(pi || ref), held fixed

DPO increases D without limit; IPO moves it to one value. As printed, over summed log-probabilities, IPO's target does
not depend on length. Its authors' experiments and TRL's code use means over tokens: `length_normalized` selects them.
KTO's z is estimated on prompts paired with completions of other prompts. It belongs to the whole batch, so it is an
argument and micro-batches do not change it.

Log-probabilities are fp32 sums from `log_probs.py`. All arguments are [P], one per pair. Metrics are sums over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss

MAX_LOG_PROB = -1e-6  # upper bound of a mean log-probability: the odds diverge at 0


@dataclass(frozen=True)
class PairLogProbs:
    """P pairs of completions; each field is [P].

    chosen, rejected: summed log-probabilities under the policy, with gradient.
    reference_chosen, reference_rejected: the same under the reference (DPO, IPO).
    chosen_length, rejected_length: number of summed tokens (SimPO, ORPO, length-normalized IPO).
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
                    f"{name} is {list(value.shape)} but chosen is {list(self.chosen.shape)}",
                    expected="[P], one per pair",
                )

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return h of the chosen and of the rejected completions.

        Raises:
            ConfigError: there is no reference.
        """
        if self.reference_chosen is None or self.reference_rejected is None:
            raise ConfigError(
                "the pairs have no reference log-probabilities", do="score them with the reference first"
            )
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def length_normalized(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Return both divided by their lengths; a completion without tokens gives 0.

        Raises:
            ConfigError: there are no lengths.
        """
        if self.chosen_length is None or self.rejected_length is None:
            raise ConfigError("the pairs have no lengths", do="give chosen_length and rejected_length")
        return chosen / self.chosen_length.clamp(min=1), rejected / self.rejected_length.clamp(min=1)


@dataclass(frozen=True)
class PreferenceObjective:
    """A preference objective, by name in a configuration (`align/config.py`).

    pair_loss: (pairs, beta, options) -> Loss; `options` has further settings as attributes. None: KTO, whose items are
    single completions. beta: the default. needs_reference: `pairs` have the reference's log-probabilities.
    """

    pair_loss: Callable[[PairLogProbs, float, Any], Loss] | None
    beta: float = 0.1
    needs_reference: bool = True


def dpo(pairs: PairLogProbs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """Return the loss of direct preference optimization. label_smoothing: e above, 0 to below 0.5."""
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing is {label_smoothing}", expected="0 to below 0.5")
    chosen, rejected = pairs.log_ratios()
    margin = beta * (chosen - rejected)
    each = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return pair_loss_of(each, beta * chosen, beta * rejected)


def ipo(pairs: PairLogProbs, *, beta: float = 0.1, length_normalized: bool = False) -> Loss:
    """Return the loss of identity preference optimization.

    beta: the paper's tau. length_normalized: h are means over tokens.
    """
    chosen, rejected = pairs.log_ratios()
    if length_normalized:
        chosen, rejected = pairs.length_normalized(chosen, rejected)
    each = (chosen - rejected - 1 / (2 * beta)).square()
    return pair_loss_of(each, beta * chosen, beta * rejected)


def simpo(pairs: PairLogProbs, *, beta: float = 2.0, gamma: float = 1.0) -> Loss:
    """Return the SimPO loss on mean log-probabilities, without a reference. gamma: the target margin."""
    chosen, rejected = (beta * mean for mean in pairs.length_normalized(pairs.chosen, pairs.rejected))
    return pair_loss_of(-F.logsigmoid(chosen - rejected - gamma), chosen, rejected)


def orpo(pairs: PairLogProbs, *, weight: float = 0.1) -> Loss:
    """Return the SFT loss of the chosen completions plus the odds-ratio term.

    weight: the paper's lambda. Adds the metrics sft and log_odds_ratio.
    """
    chosen, rejected = pairs.length_normalized(pairs.chosen, pairs.rejected)
    odds = _log_odds(chosen) - _log_odds(rejected)
    ratio = -F.logsigmoid(odds)
    loss = pair_loss_of(-chosen + weight * ratio, weight * chosen, weight * rejected)
    return Loss(
        loss.total,
        loss.count,
        {**loss.metrics, "sft": -chosen.detach().sum(), "log_odds_ratio": odds.detach().sum()},
    )


DPO = PreferenceObjective(lambda pairs, beta, o: dpo(pairs, beta=beta, label_smoothing=o.label_smoothing))
IPO = PreferenceObjective(lambda pairs, beta, o: ipo(pairs, beta=beta, length_normalized=o.length_normalized))
SIMPO = PreferenceObjective(
    lambda pairs, beta, o: simpo(pairs, beta=beta, gamma=o.gamma), beta=2.0, needs_reference=False
)
ORPO = PreferenceObjective(lambda pairs, beta, _: orpo(pairs, weight=beta), needs_reference=False)
KTO = PreferenceObjective(None)


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
    """Return the Kahneman-Tversky loss of single completions.

    Args:
        log_prob, reference_log_prob: [S] summed over each completion, the first with gradient.
        desirable: [S] bool.
        kl: z above, of the whole batch (`kto_kl`).
        desirable_weight, undesirable_weight: w_d and w_u, for unequal class sizes.

    Returns:
        Loss with count = S. Metrics: rewards/desirable and rewards/undesirable (sums over each class), desirable and
        undesirable (class sizes), rewards/accuracy (desirable above z, undesirable below), kl (z once per completion).

    Raises:
        ConfigError: shapes do not fit.
    """
    if not log_prob.shape == reference_log_prob.shape == desirable.shape or log_prob.ndim != 1:
        raise ConfigError(
            f"log_prob is {list(log_prob.shape)}, reference_log_prob {list(reference_log_prob.shape)}, "
            f"desirable {list(desirable.shape)}",
            expected="[S] for all",
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
    """Return KTO's z [] (section 4.1): the mean of h over mismatched completions, at least 0.

    log_prob, reference_log_prob: [M] summed over each completion of another prompt, of the whole batch.
    """
    if not len(log_prob):
        return torch.zeros((), device=log_prob.device)
    return (log_prob - reference_log_prob).mean().clamp(min=0)


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log (P / (1 - P)) for log P < 0, by the numerically stable branch (Maechler 2012, "log1mexp")."""
    x = log_p.clamp(max=MAX_LOG_PROB)
    near = x > -math.log(2)
    one_minus = torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
    return x - one_minus


def pair_loss_of(each: Tensor, chosen: Tensor, rejected: Tensor) -> Loss:
    """Return the loss summed over pairs. chosen, rejected: [P] implicit rewards."""
    chosen, rejected = chosen.detach(), rejected.detach()
    total = each.sum()
    metrics = {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margin": (chosen - rejected).sum(),
        "rewards/accuracy": (chosen > rejected).sum(),
        "ties": (chosen == rejected).sum(),  # identical pairs tie, and have no gradient
    }
    return Loss(total, torch.full_like(total.detach(), float(len(each))), metrics)
