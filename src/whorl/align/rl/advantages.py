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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import RLConfig
from whorl.align.model.logprob_diff import LogProbDiff
from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.experience import Experience
from whorl.errors import ConfigError
from whorl.objectives.advantages.group_advantages import group_advantages
from whorl.objectives.advantages.importance import importance_weights
from whorl.objectives.advantages.token_gae import token_gae, whiten
from whorl.objectives.divergences import adapt_kl_coef, kl_reward
from whorl.objectives.llm_policy import (
    PRESETS,
    CompletionTokens,
    PolicyLossConfig,
    overlong_reward,
    policy_loss,
    value_loss,
)
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.update import MicroBatch

VALUE_COEF = 0.5


def resolve_method(config: RLConfig) -> PolicyLossConfig:
    """The algorithm with what the configuration changes of it."""
    method = PRESETS[config.algorithm]
    changed: dict[str, Any] = {
        "kl_coef": config.kl.coef,
        "kl_estimator": config.kl.estimator or method.kl_estimator,
        "kl_apply_to": config.kl.apply_to or method.kl_apply_to,
        "entropy_coef": config.loss.entropy_coef,
    }
    if config.loss.ratio == "none":
        changed["clip_low"] = changed["clip_high"] = None
    for name in ("ratio", "dual_clip", "aggregation", "baseline", "scale_rewards"):
        if (given := getattr(config.loss, name)) is not None:
            changed[name] = given
    if config.clip is not None:
        changed["clip_low"], changed["clip_high"] = config.clip
    if changed.get("aggregation", method.aggregation) == "constant":
        changed["constant"] = float(config.max_completion_tokens)
    return replace(method, **changed)


def check_method(config: RLConfig, network: PolicyModel, reference: PolicyModel | None) -> PolicyLossConfig:
    """The same, checked against the networks that are there.

    Raises:
        ConfigError: a KL without a reference, or a critic that is missing, or has no use.
    """
    method = resolve_method(config)
    if config.kl.coef and reference is None:
        raise ConfigError(
            f"kl.coef is {config.kl.coef:g}, and there is no reference",
            expected="the policy as it was before", do="give one, or set kl.coef to 0",
        )  # fmt: skip
    if (method.baseline == "critic") != (network.value is not None):
        raise ConfigError(
            f"{config.algorithm} {'needs' if network.value is None else 'has no use for'} a critic",
            expected=f"Network(critic={network.value is None})",
        )
    return method


class RLState:
    """What goes on from record to record beside the weights (see the top of this file)."""

    def __init__(self, config: RLConfig) -> None:
        self.kl_coef, self.kl_target = config.kl.coef, config.kl.target_kl
        self.logprob_diff = LogProbDiff()
        self.metrics: dict[str, float] = {}
        self._expected_version: int | None = None

    def expect_version(self, version: int) -> None:
        """The next forward is by the weights that sampled, `version`."""
        self._expected_version = version

    def compare_log_probs(self, batch: MicroBatch, log_prob: Tensor, version: int) -> None:
        """Looks at tokens [...] that the weights of `version` sampled."""
        same = batch["loss_mask"] & (batch["version"] == version)
        self.logprob_diff.update((log_prob - batch["behaviour_log_prob"])[same])

    def observe_micro_batch(self, batch: MicroBatch, log_prob: Tensor) -> None:
        """Of a micro-batch: log_prob [N] of the targets that count."""
        if self._expected_version is not None:
            mask = batch["loss_mask"]
            same = batch["version"][mask] == self._expected_version
            self.logprob_diff.update((log_prob.detach() - batch["behaviour_log_prob"][mask])[same])

    def update_kl_coef(self, kl: float) -> None:
        """KL to the reference of a record, nats a token: the weight is adapted where a target is given."""
        if self.kl_target is not None:
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, self.kl_target)
            self.metrics["kl_coef"] = self.kl_coef

    def pop_metrics(self, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics since the last call and reset them. process_group: its ranks call this together."""
        metrics = self.metrics | self.logprob_diff.pop_metrics(process_group)
        self.metrics, self._expected_version = {}, None
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another one was."""
        self.kl_coef = state["kl_coef"]


@torch.no_grad()
def compute_advantages(config: RLConfig, experience: Experience, state: RLState) -> dict[str, Tensor]:
    """advantage [R, T] beside the targets of a record, on the host as all its streams are; with a critic value_target too;
    with workers weight."""
    method, part = resolve_method(config), experience.batch
    mask, reward = part["loss_mask"], experience.reward.clone()
    if config.resolved_overlong_buffer:
        reward += overlong_reward(
            experience.length, config.max_completion_tokens, config.resolved_overlong_buffer
        )
    current = part.get("proximal_log_prob", part["behaviour_log_prob"])
    kl: Tensor | None = None
    if "reference_log_prob" in part:
        kl = (
            kl_reward(current, part["reference_log_prob"], 1.0, method.kl_estimator) * mask
        )  # [R, T], minus the KL
        state.update_kl_coef(float(-kl.sum() / mask.sum().clamp(min=1)))
    penalty = kl * state.kl_coef if kl is not None and method.kl_apply_to == "reward" else None
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
        advantage, target = token_gae(each[mask], part["old_value"][mask], rows, lambda_=config.gae_lambda)
        found = {"advantage": spread(whiten(advantage)), "value_target": spread(target)}
    else:
        if penalty is not None:
            reward += penalty.sum(1)
        group = torch.arange(experience.rows) // config.group_size
        told = group_advantages(reward, group, baseline=method.baseline, scale_rewards=method.scale_rewards)
        found["advantage"] = told.advantage[:, None] * mask
    if config.async_rollout.workers and config.async_rollout.importance != "none":
        weight, ratios = importance_weights(
            current[mask],
            part["behaviour_log_prob"][mask],
            rows,
            rule=config.async_rollout.importance,
            level=config.async_rollout.importance_level,
            high=config.async_rollout.importance_clip,
        )
        found["weight"] = spread(weight)
        state.metrics |= {f"importance/{name}": value for name, value in vars(ratios).items()}
    return found


def policy_objective(config: RLConfig, network: PolicyModel, state: RLState) -> Callable[[MicroBatch], Loss]:
    """The loss of a micro-batch of rows with their streams."""
    method = resolve_method(config)

    def objective(part: MicroBatch) -> Loss:
        bonus = method.entropy_coef > 0
        # Of adapters only where it counts: with a frozen head the gradient without it is cheaper.
        judged = network.log_probs(part, entropy=bonus or network.lora is None)
        state.observe_micro_batch(part, judged.log_prob)
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
        tokens = CompletionTokens(judged.log_prob, sequence=rows, n_sequences=n, entropy=entropy, **streams)
        now = replace(method, kl_coef=state.kl_coef)
        loss = policy_loss(tokens, now)
        if judged.value is None:
            return loss
        critic = value_loss(
            judged.value, part["old_value"][mask], part["value_target"][mask], rows,
            aggregation=now.aggregation, constant=now.constant, n_sequences=n,
        )  # fmt: skip
        return Loss(loss.total + VALUE_COEF * critic.total, loss.count, {**loss.metrics, **critic.metrics})

    return objective
