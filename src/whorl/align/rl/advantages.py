"""What a policy learns from experience: an advantage for every token, and the objective bound to the network.

    advantages(config, experience)     [R] rewards -> [R, T] advantages, by the algorithm's baseline
    objective_of(config, network)      micro-batch -> Loss, by the algorithm's surrogate, clip and average

The algorithm is a `Method` (`objectives/llm_policy.py`), of which the configuration may change any argument. `Signals` is
what goes on from record to record beside weights: the KL's weight where it is adapted, and how far the engine's word for a
token was from the trainer's.

The subtle part is parity. The first forward of a record is by the very weights that sampled it, so there every token's
log-probability must be the engine's but for rounding: 1e-4 in fp32. It costs nothing to look, and every record that the
newest weights sampled tells it; of one that is older there is nothing to compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import RLConfig
from whorl.align.model.policy_model import Network
from whorl.align.rl.experience import Experience
from whorl.errors import ConfigError
from whorl.objectives import Loss
from whorl.objectives.advantages.group_advantages import advantages as group_advantages
from whorl.objectives.advantages.importance import importance_weights
from whorl.objectives.advantages.token_gae import text_gae, whitened
from whorl.objectives.divergences import adapted_kl_weight, kl_reward
from whorl.objectives.llm_policy import PRESETS, Method, Tokens, overlong_reward, policy_loss, value_loss
from whorl.train.learner.update import Part

VALUE_WEIGHT = 0.5


def method_of(config: RLConfig) -> Method:
    """The algorithm with what the configuration changes of it."""
    method = PRESETS[config.algorithm]
    changed: dict[str, Any] = {
        "kl_weight": config.kl.weight,
        "kl": config.kl.estimator or method.kl,
        "kl_in": config.kl.place or method.kl_in,
        "entropy_weight": config.method.entropy,
    }
    if config.method.ratio == "none":
        changed["clip_low"] = changed["clip_high"] = None
    for name in ("ratio", "dual_clip", "average", "baseline", "deviation"):
        if (given := getattr(config.method, name)) is not None:
            changed[name] = given
    if config.clip is not None:
        changed["clip_low"], changed["clip_high"] = config.clip
    if changed.get("average", method.average) == "constant":
        changed["constant"] = float(config.max_tokens)
    return replace(method, **changed)


def preset_of(config: RLConfig, network: Network, reference: Network | None) -> Method:
    """The same, checked against the networks that are there.

    Raises:
        ConfigError: a KL without a reference, or a critic that is missing, or has no use.
    """
    method = method_of(config)
    if config.kl.weight and reference is None:
        raise ConfigError(
            f"kl.weight is {config.kl.weight:g}, and there is no reference",
            expected="the policy as it was before", do="give one, or set kl.weight to 0",
        )  # fmt: skip
    if (method.baseline == "critic") != (network.value is not None):
        raise ConfigError(
            f"{config.algorithm} {'needs' if network.value is None else 'has no use for'} a critic",
            expected=f"Network(critic={network.value is None})",
        )
    return method


class Signals:
    """What goes on from record to record beside the weights (see the top of this file)."""

    def __init__(self, config: RLConfig) -> None:
        self.kl_weight, self.target = config.kl.weight, config.kl.target
        self.parity: float | None = None
        self.figures: dict[str, float] = {}
        self._expected: int | None = None

    def expect(self, version: int) -> None:
        """The next forward is by the weights that sampled, `version`."""
        self._expected = version

    def compare(self, part: Part, log_prob: Tensor, version: int) -> None:
        """Looks at tokens [...] that the weights of `version` sampled."""
        same = part["loss_mask"] & (part["version"] == version)
        self._look((log_prob - part["behaviour_log_prob"])[same])

    def saw(self, part: Part, log_prob: Tensor) -> None:
        """Of a micro-batch: log_prob [N] of the targets that count."""
        if self._expected is not None:
            mask = part["loss_mask"]
            same = part["version"][mask] == self._expected
            self._look((log_prob.detach() - part["behaviour_log_prob"][mask])[same])

    def _look(self, difference: Tensor) -> None:
        if difference.numel():
            apart = float(difference.abs().max())
            self.parity = max(self.parity or 0.0, apart if math.isfinite(apart) else math.inf)

    def moved(self, kl: float) -> None:
        """KL to the reference of a record, nats a token: the weight is adapted where a target is given."""
        if self.target is not None:
            self.kl_weight = adapted_kl_weight(self.kl_weight, kl, self.target)
            self.figures["kl_weight"] = self.kl_weight

    def take(self) -> dict[str, float]:
        """What was seen since the last call."""
        told = dict(self.figures)
        if self.parity is not None:
            told["parity"] = self.parity
        self.figures, self.parity, self._expected = {}, None, None
        return told

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"kl_weight": self.kl_weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another one was."""
        self.kl_weight = state["kl_weight"]


@torch.no_grad()
def advantages(config: RLConfig, experience: Experience, signals: Signals) -> dict[str, Tensor]:
    """advantage [R, T] beside the targets of a record, on the host as all its streams are; with a critic value_target too;
    with workers weight."""
    method, part = method_of(config), experience.part
    mask, reward = part["loss_mask"], experience.reward.clone()
    if config.falls_over:
        reward += overlong_reward(experience.length, config.max_tokens, config.falls_over)
    current = part.get("proximal_log_prob", part["behaviour_log_prob"])
    kl: Tensor | None = None
    if "reference_log_prob" in part:
        kl = kl_reward(current, part["reference_log_prob"], 1.0, method.kl) * mask  # [R, T], minus the KL
        signals.moved(float(-kl.sum() / mask.sum().clamp(min=1)))
    penalty = kl * signals.kl_weight if kl is not None and method.kl_in == "reward" else None
    rows = torch.arange(experience.rows)[:, None].expand_as(mask)[mask]  # [N], of the targets that count
    found: dict[str, Tensor] = {}

    def spread(values: Tensor) -> Tensor:
        out = torch.zeros(mask.shape)
        out[mask] = values
        return out

    if method.baseline == "critic":
        each = torch.zeros(mask.shape) if penalty is None else penalty.clone()
        last = mask.long().cumsum(1).argmax(1)  # the end of each answer
        some = mask.any(1)
        each[some.nonzero()[:, 0], last[some]] += reward[some]
        advantage, target = text_gae(each[mask], part["old_value"][mask], rows, lambda_=config.gae_lambda)
        found = {"advantage": spread(whitened(advantage)), "value_target": spread(target)}
    else:
        if penalty is not None:
            reward += penalty.sum(1)
        group = torch.arange(experience.rows) // config.answers
        told = group_advantages(reward, group, baseline=method.baseline, deviation=method.deviation)
        found["advantage"] = told.advantage[:, None] * mask
    if config.ahead.workers and config.ahead.correct != "none":
        weight, ratios = importance_weights(
            current[mask],
            part["behaviour_log_prob"][mask],
            rows,
            rule=config.ahead.correct,
            level=config.ahead.level,
            high=config.ahead.bound,
        )
        found["weight"] = spread(weight)
        signals.figures |= {f"stale_{name}": value for name, value in vars(ratios).items()}
    return found


def objective_of(config: RLConfig, network: Network, signals: Signals) -> Callable[[Part], Loss]:
    """The loss of a micro-batch of rows with their streams."""
    method = method_of(config)

    def objective(part: Part) -> Loss:
        bonus = method.entropy_weight > 0
        # Of adapters only where it counts: with a frozen head the gradient without it is cheaper.
        judged = network.judge(part, entropy=bonus or network.lora is None)
        signals.saw(part, judged.log_prob)
        mask = part["loss_mask"]
        n = len(mask)  # every row is one text
        rows = torch.arange(n, device=mask.device)[:, None].expand_as(mask)[mask]
        streams = {
            name: part[name][mask]
            for name in (
                "behaviour_log_prob",
                "advantage",
                "proximal_log_prob",
                "reference_log_prob",
                "weight",
            )
            if name in part
        }
        entropy = judged.entropy if bonus or judged.entropy is None else judged.entropy.detach()
        tokens = Tokens(judged.log_prob, sequence=rows, n_sequences=n, entropy=entropy, **streams)
        now = replace(method, kl_weight=signals.kl_weight)
        loss = policy_loss(tokens, now)
        if judged.value is None:
            return loss
        critic = value_loss(
            judged.value, part["old_value"][mask], part["value_target"][mask], rows,
            average=now.average, constant=now.constant, n_sequences=n,
        )  # fmt: skip
        return Loss(loss.total + VALUE_WEIGHT * critic.total, loss.count, {**loss.metrics, **critic.metrics})

    return objective
