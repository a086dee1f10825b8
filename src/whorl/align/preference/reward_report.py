"""Quality report of a reward model on held-out pairs: accuracy, calibration and length bias.

    accuracy      share of pairs where r(chosen) > r(rejected); a tie counts half
    calibration   predicted preference probability against observed frequency (`objectives/reward.py`)
    length bias   people prefer longer answers, and reward models even more (Singhal et al. 2023, arXiv:2310.03716),
                  so a policy trained on such a model becomes verbose

Length bias needs three measures. The correlation of reward and length over all texts mixes prompts: a hard prompt has
a long answer. The correlation of the differences within a pair removes prompts. Accuracy, split by whether the longer
completion was chosen, gives the cost of the bias. A model that only counts tokens has 1 and 0.

The subtle point is the baseline. If 70 % of the chosen completions are longer, a model that prefers the longer one in
70 % of pairs need not be biased. So the share in the data is reported next to the model's.
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
    """Length bias; lengths are ids of the completion, NaN where undefined.

    reward_correlation: of reward and length over all texts. margin_correlation: of their differences within a pair.
    accuracy_longer_chosen, n_longer: accuracy and number of pairs where the chosen completion is longer.
    accuracy_shorter_chosen, n_shorter: the same where it is shorter.
    data_longer_fraction: share of pairs of different length whose longer completion was chosen.
    model_longer_fraction: share where the model prefers it.
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
    """Metrics of a reward model on pairs. accuracy: ties count half. margin: mean of r(chosen) - r(rejected)."""

    pairs: int
    accuracy: float
    margin: float
    calibration: Calibration
    length_bias: LengthBias

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
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
        """Return the report as text: metrics, reliability curve, length bias."""
        curve, bias = self.calibration, self.length_bias
        lines = [
            f"{self.pairs:,} pairs, accuracy {self.accuracy:.1%}, margin {self.margin:.3f}, "
            f"calibration error {curve.expected_error:.3f} (largest {curve.max_error:.3f})",
            "  probability  predicted  observed    pairs",
        ]
        for i, n in enumerate(curve.count.tolist()):
            if n:
                interval = f"{float(curve.edges[i]):.0%} to {float(curve.edges[i + 1]):.0%}"
                lines.append(
                    f"  {interval:12} {float(curve.predicted[i]):9.1%}  {float(curve.observed[i]):8.1%}  {n:7,.0f}"
                )
        n_different = bias.n_longer + bias.n_shorter
        lines.append(
            f"  length: correlation with reward {_format_or_dash(bias.reward_correlation, '+.2f')}, "
            f"of the differences within a pair {_format_or_dash(bias.margin_correlation, '+.2f')}"
            + ("" if n_different else "; no pair has completions of different length")
        )
        if n_different:
            lines += [
                f"  accuracy where the longer one was chosen: {_format_or_dash(bias.accuracy_longer_chosen, '.1%')} of "
                f"{bias.n_longer:,}, where the shorter one was: "
                f"{_format_or_dash(bias.accuracy_shorter_chosen, '.1%')} of {bias.n_shorter:,}",
                f"  the longer one is preferred in {bias.data_longer_fraction:.1%} of the data, by the model in "
                f"{bias.model_longer_fraction:.1%}",
            ]
        return "\n".join(lines)


def evaluate_reward_model(
    model: RewardModel, pairs: Sequence[PreferencePair], *, bins: int = 10
) -> RewardReport:
    """Return the report of a model on held-out pairs.

    Raises:
        DataError: there are no pairs.
    """
    if not pairs:
        raise DataError("there are no pairs", expected="at least one", do="hold some out")
    scored = model.score_examples([text for pair in pairs for text in (pair.chosen, pair.rejected)])
    lengths = [[int(t.loss_mask.sum()) for t in (pair.chosen, pair.rejected)] for pair in pairs]
    return make_reward_report(scored.view(-1, 2), torch.tensor(lengths), bins=bins)


def make_reward_report(rewards: Tensor, lengths: Tensor, *, bins: int = 10) -> RewardReport:
    """Return the report. rewards, lengths: [P, 2], chosen and rejected."""
    margin, length_difference = rewards[:, 0] - rewards[:, 1], lengths[:, 0] - lengths[:, 1]
    right = torch.where(margin == 0, 0.5, (margin > 0).double())
    longer, shorter = length_difference > 0, length_difference < 0
    prefers_longer = torch.cat([right[longer], 1 - right[shorter]])  # the longer one
    n_different = int(longer.sum() + shorter.sum())
    bias = LengthBias(
        reward_correlation=correlation(rewards.flatten(), lengths.flatten()),
        margin_correlation=correlation(margin, length_difference),
        accuracy_longer_chosen=_mean(right[longer]),
        n_longer=int(longer.sum()),
        accuracy_shorter_chosen=_mean(right[shorter]),
        n_shorter=int(shorter.sum()),
        data_longer_fraction=int(longer.sum()) / n_different if n_different else float("nan"),
        model_longer_fraction=_mean(prefers_longer),
    )
    curve = pair_calibration(margin, bins=bins)
    return RewardReport(len(margin), float(right.mean()), float(margin.double().mean()), curve, bias)


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation of [N] and [N]; NaN where one of them is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else float("nan")


def _format_or_dash(value: float, form: str) -> str:
    """Return the formatted value, or a dash for NaN."""
    return "-" if value != value else format(value, form)


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else float("nan")
