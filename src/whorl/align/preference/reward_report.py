"""Can a reward model be believed? On pairs that it did not learn from: is it right, is it as sure as it should be, and does
it only count words?

    accuracy      share of pairs where r(chosen) > r(rejected); a tie counts half
    calibration   of the pairs where it said 80 %, were 80 % right? (`objectives/reward.py`)
    length bias   longer answers are preferred by people and still more by models of people (Singhal et al. 2023,
                  arXiv:2310.03716): a policy that learns from such a model learns to be long

Length is looked at in three ways, for none is enough. The correlation of reward with the answer's length over all texts
mixes prompts: where a hard prompt asks for a long answer, both move together without any bias. That of the *differences*
inside a pair leaves prompts out. And accuracy apart for pairs where the longer one was chosen, and where it was rejected,
says what the bias costs: a model that only counts has 1 and 0.

The subtle part is what the model is compared with: if 70 % of the chosen answers are longer, a model that finds the
longer one better in 70 % of pairs need not be biased. So the data's share stands beside the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.align.preference.pairs import PreferencePair
from whorl.align.preference.reward_model import RewardModel
from whorl.errors import DataError
from whorl.objectives.reward import Calibration, pair_calibration


@dataclass(frozen=True)
class LengthBias:
    """Lengths are ids of the answer; NaN where there is nothing to say.

    reward: correlation of reward and length over all texts; margin: of their differences inside a pair; longer_chosen, n,
    shorter_chosen, m: accuracy where the chosen one is the longer or the shorter, and how many pairs that are; data: share
    of pairs of different lengths where the longer one was chosen; model: where the model prefers it.
    """

    reward_correlation: float
    margin_correlation: float
    accuracy_longer_chosen: float
    n_longer: int
    accuracy_shorter_chosen: float
    n_shorter: int
    data_longer_fraction: float
    model_longer_fraction: float


@dataclass(frozen=True)
class RewardReport:
    """What a reward model is worth on pairs. accuracy: ties count half; margin: mean of r(chosen) - r(rejected)."""

    pairs: int
    accuracy: float
    margin: float
    calibration: Calibration
    length_bias: LengthBias

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        curve = self.calibration
        names = ("edges", "predicted", "observed", "count")
        return {
            "pairs": self.pairs,
            "accuracy": self.accuracy,
            "margin": self.margin,
            "calibration_error": curve.expected_error,
            "calibration_max_error": curve.max_error,
            "reliability": {name: [round(x, 6) for x in getattr(curve, name).tolist()] for name in names},
            "length": {name: None if x != x else x for name, x in vars(self.length_bias).items()},
        }

    def table(self) -> str:
        """Lines for people: the figures, the reliability curve, the length bias."""
        curve, bias = self.calibration, self.length_bias
        lines = [
            f"{self.pairs:,} pairs, accuracy {self.accuracy:.1%}, margin {self.margin:.3f}, "
            f"calibration error {curve.expected_error:.3f} (largest {curve.max_error:.3f})",
            "  certainty      said    seen    pairs",
        ]
        for i, n in enumerate(curve.count.tolist()):
            if n:
                between = f"{float(curve.edges[i]):.0%} to {float(curve.edges[i + 1]):.0%}"
                lines.append(
                    f"  {between:12} {float(curve.predicted[i]):6.1%}  {float(curve.observed[i]):6.1%}  {n:7,.0f}"
                )
        differ = bias.n_longer + bias.n_shorter
        lines.append(
            f"  length: correlation with reward {_format_or_dash(bias.reward_correlation, '+.2f')}, of the differences in a pair "
            f"{_format_or_dash(bias.margin_correlation, '+.2f')}"
            + ("" if differ else "; no pair has answers of different length")
        )
        if differ:
            lines += [
                f"  right where the longer one was chosen {_format_or_dash(bias.accuracy_longer_chosen, '.1%')} of {bias.n_longer:,}, where "
                f"the shorter one was {_format_or_dash(bias.accuracy_shorter_chosen, '.1%')} of {bias.n_shorter:,}",
                f"  the longer one is preferred by the data in {bias.data_longer_fraction:.1%}, by the model in {bias.model_longer_fraction:.1%}",
            ]
        return "\n".join(lines)


def evaluate_reward_model(
    model: RewardModel, pairs: Sequence[PreferencePair], *, bins: int = 10
) -> RewardReport:
    """Of a model on pairs that it did not learn from.

    Raises:
        DataError: there are none.
    """
    if not pairs:
        raise DataError("there is no pair to report on", expected="one at least", do="hold some back")
    scored = model.score_examples([text for pair in pairs for text in (pair.chosen, pair.rejected)])
    lengths = [[int(t.loss_mask.sum()) for t in (pair.chosen, pair.rejected)] for pair in pairs]
    return make_reward_report(scored.view(-1, 2), torch.tensor(lengths), bins=bins)


def make_reward_report(rewards: Tensor, lengths: Tensor, *, bins: int = 10) -> RewardReport:
    """rewards, lengths: [P, 2], chosen and rejected."""
    margin, apart = rewards[:, 0] - rewards[:, 1], lengths[:, 0] - lengths[:, 1]
    right = torch.where(margin == 0, 0.5, (margin > 0).double())
    longer, shorter = apart > 0, apart < 0
    prefers = torch.cat([right[longer], 1 - right[shorter]])  # the longer one
    differ = int(longer.sum() + shorter.sum())
    bias = LengthBias(
        reward_correlation=correlation(rewards.flatten(), lengths.flatten()),
        margin_correlation=correlation(margin, apart),
        accuracy_longer_chosen=_mean(right[longer]),
        n_longer=int(longer.sum()),
        accuracy_shorter_chosen=_mean(right[shorter]),
        n_shorter=int(shorter.sum()),
        data_longer_fraction=int(longer.sum()) / differ if differ else float("nan"),
        model_longer_fraction=_mean(prefers),
    )
    curve = pair_calibration(margin, bins=bins)
    return RewardReport(len(margin), float(right.mean()), float(margin.double().mean()), curve, bias)


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's, of [N] and [N]; NaN where one of them does not vary."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else float("nan")


def _format_or_dash(value: float, form: str) -> str:
    """A dash where there is nothing to say."""
    return "-" if value != value else format(value, form)


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else float("nan")
