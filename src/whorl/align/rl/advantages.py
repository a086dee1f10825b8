"""Advantages of a rollout batch, and the policy objective bound to the network.

    compute_advantages(config, experience, state)     [R] rewards -> [R, T] advantages, by the algorithm's baseline
    policy_loss_of(config, network, state, part)      Loss of a micro-batch, by the algorithm's surrogate and aggregation

The algorithm is a `PolicyLossConfig` (`objectives/llm_policy.py`), and the configuration may override any argument.
`RLState` holds what persists between rollout batches in addition to the weights: an adaptive KL coefficient, the
running mean of rewards (baseline "running"), and the difference between the log-probabilities of engine and trainer.
Where its last mean is within `rollout.max_logprob_diff`, the sampler's values are the denominator of the ratio, and
several updates of a rollout batch need no further forward pass for it.

The subtle point is that difference. The first forward pass of a rollout batch uses the weights that sampled it, so each
log-probability must equal the engine's up to rounding: 1e-4 in fp32. The comparison costs nothing. It is made for every
rollout batch that the newest weights sampled; an older one has nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whorl.align.model.logprob_diff import LogProbDiff
from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.config import ALGORITHMS, RLConfig
from whorl.align.rl.experience import Experience
from whorl.errors import ConfigError
from whorl.objectives.advantages.group_advantages import group_advantages, update_running_mean
from whorl.objectives.advantages.importance import importance_weights
from whorl.objectives.advantages.token_gae import token_gae, whiten
from whorl.objectives.divergences import adapt_kl_coef, kl_reward
from whorl.objectives.llm_policy import (
    GRPO,
    CompletionTokens,
    PolicyLossConfig,
    overlong_reward,
    policy_loss,
    value_loss,
)
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.token_objective import checked_function, checked_loss

PolicyObjective = Callable[[CompletionTokens, PolicyLossConfig], Loss]
VALUE_COEF = 0.5


def get_algorithm(name: str) -> tuple[PolicyLossConfig, PolicyObjective]:
    """Return the arguments of an algorithm and its objective. An own function has the arguments of GRPO.

    Raises:
        ConfigError: it cannot be imported, or is neither a `PolicyLossConfig` nor a function like `policy_loss`.
    """
    found = ALGORITHMS.get(name)
    if isinstance(found, PolicyLossConfig):
        return found, policy_loss
    form = "a PolicyLossConfig, or a function (tokens, config) -> Loss like whorl.objectives.llm_policy:policy_loss"
    function = checked_function("algorithm", name, found, 2, form)

    def objective(tokens: CompletionTokens, config: PolicyLossConfig) -> Loss:
        with torch.no_grad():
            usual = policy_loss(tokens, config)
        count = f"the count of policy_loss with loss.aggregation = {config.aggregation!r}"
        return checked_loss(f"algorithm {name!r}", function(tokens, config), usual, count)

    return GRPO, objective


def resolve_method(config: RLConfig) -> PolicyLossConfig:
    """Return the arguments of the algorithm with the overrides of the configuration."""
    method, _ = get_algorithm(config.algorithm)
    changed: dict[str, Any] = {
        "kl_coef": config.kl.coef,
        "kl_estimator": config.kl.estimator or method.kl_estimator,
        "kl_apply_to": config.kl.apply_to or method.kl_apply_to,
        "entropy_coef": config.loss.entropy_coef,
    }
    if config.loss.ratio == "none":
        changed["clip_low"] = changed["clip_high"] = None
    for name in ("ratio", "dual_clip", "aggregation", "baseline", "scale_rewards", "scale_over"):
        if (given := getattr(config.loss, name)) is not None:
            changed[name] = given
    if config.update.clip is not None:
        changed["clip_low"], changed["clip_high"] = config.update.clip
    if changed.get("aggregation", method.aggregation) == "constant":
        turns = config.environment.max_turns if config.environment else 1
        changed["constant"] = float(config.max_completion_tokens * turns)
    return replace(method, **changed)


def check_method(config: RLConfig, network: PolicyModel, reference: PolicyModel | None) -> PolicyLossConfig:
    """Return the same as `resolve_method`, checked against the networks.

    Raises:
        ConfigError: a KL without a reference, or a critic that is missing or unused.
    """
    method = resolve_method(config)
    if config.kl.coef and reference is None:
        raise ConfigError(
            f"kl.coef is {config.kl.coef:g}, and there is no reference",
            expected="a reference, such as the initial policy", do="pass one, or set kl.coef to 0",
        )  # fmt: skip
    if (method.baseline == "critic") != (network.value is not None):
        raise ConfigError(
            f"{config.algorithm} {'needs' if network.value is None else 'does not use'} a critic",
            expected=f"PolicyModel(critic={network.value is None})",
        )
    return method


class RLState:
    """State that persists between rollout batches in addition to the weights (see the top of this file)."""

    def __init__(self, config: RLConfig) -> None:
        self.kl_coef, self.kl_target = config.kl.coef, config.kl.target_kl
        self.reward_mean: float | None = None  # decayed, of earlier rollout batches
        self.logprob_diff = LogProbDiff()
        self.metrics: dict[str, float] = {}
        self.sampler_difference: float | None = None  # the last `logprob_diff_mean`
        self._expected_version: int | None = None

    def expect_version(self, version: int | None) -> None:
        """Declare that the next forward passes use the weights of `version`, which sampled the batch; None: other ones."""
        self._expected_version = version

    def compare_log_probs(self, batch: MicroBatch, log_prob: Tensor, version: int) -> None:
        """Compare tokens [...] that the weights of `version` sampled."""
        same = batch["loss_mask"] & (batch["version"] == version)
        self.logprob_diff.update((log_prob - batch["behaviour_log_prob"])[same])

    def observe_micro_batch(self, batch: MicroBatch, log_prob: Tensor) -> None:
        """Compare the tokens of a micro-batch. log_prob: [N] of the targets in the loss."""
        if self._expected_version is not None:
            mask = batch["loss_mask"]
            same = batch["version"][mask] == self._expected_version
            self.logprob_diff.update((log_prob.detach() - batch["behaviour_log_prob"][mask])[same])

    def update_kl_coef(self, kl: float) -> None:
        """Adapt the KL coefficient if a target is set. kl: of a rollout batch, in nats per token."""
        if self.kl_target is not None:
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, self.kl_target)
            self.metrics["kl_coef"] = self.kl_coef

    def pop_metrics(self, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics since the last call and reset them. process_group: its ranks call this together."""
        differences = self.logprob_diff.pop_metrics(process_group)
        self.sampler_difference = differences.get("logprob_diff_mean", self.sampler_difference)
        metrics = self.metrics | differences
        self.metrics, self._expected_version = {}, None
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "kl_coef": self.kl_coef,
            "reward_mean": self.reward_mean,
            "sampler_difference": self.sampler_difference,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        self.kl_coef, self.reward_mean = state["kl_coef"], state.get("reward_mean")
        self.sampler_difference = state.get("sampler_difference")


@torch.no_grad()
def compute_advantages(config: RLConfig, experience: Experience, state: RLState) -> dict[str, Tensor]:
    """Return advantage [R, T] aligned with the targets, on the CPU like all streams of a rollout batch.

    With a critic the result also has value_target, with asynchronous workers weight.
    """
    method, batch = resolve_method(config), experience.batch
    mask, reward = batch["loss_mask"], experience.reward.clone()
    if method.only_passed:
        reward = experience.passed.to(reward.dtype)
    if config.resolved_overlong_buffer:
        reward += overlong_reward(
            experience.length, config.max_completion_tokens, config.resolved_overlong_buffer
        )
    current = batch.get("proximal_log_prob", batch["behaviour_log_prob"])
    kl: Tensor | None = None
    if "reference_log_prob" in batch:
        kl = (
            kl_reward(current, batch["reference_log_prob"], 1.0, method.kl_estimator) * mask
        )  # [R, T], minus the KL
        state.update_kl_coef(float(-kl.sum() / mask.sum().clamp(min=1)))
    penalty = kl * state.kl_coef if kl is not None and method.kl_apply_to == "reward" else None
    rows = torch.arange(experience.rows)[:, None].expand_as(mask)[mask]  # [N], of the targets in the loss
    streams: dict[str, Tensor] = {}

    def to_grid(values: Tensor) -> Tensor:
        out = torch.zeros(mask.shape)
        out[mask] = values
        return out

    if method.baseline == "critic":
        token_rewards = torch.zeros(mask.shape) if penalty is None else penalty.clone()
        last = mask.long().cumsum(1).argmax(1)  # last token of each completion
        nonempty = mask.any(1)
        token_rewards[nonempty.nonzero()[:, 0], last[nonempty]] += reward[nonempty]
        advantage, target = token_gae(
            token_rewards[mask], batch["old_value"][mask], rows, lambda_=config.update.gae_lambda
        )
        streams = {"advantage": to_grid(whiten(advantage)), "value_target": to_grid(target)}
    else:
        if penalty is not None:
            reward += penalty.sum(1)
        group = torch.arange(experience.rows) // config.group_size
        result = group_advantages(
            reward,
            group,
            baseline=method.baseline,
            scale_rewards=method.scale_rewards,
            scale_over=method.scale_over,
            running_mean=state.reward_mean,
        )
        if method.baseline == "running":
            state.reward_mean = update_running_mean(state.reward_mean, reward, config.loss.running_decay)
            state.metrics["reward_mean"] = state.reward_mean
        streams["advantage"] = result.advantage[:, None] * mask
    if config.async_rollout.workers and config.async_rollout.importance != "none":
        weight, ratios = importance_weights(
            current[mask],
            batch["behaviour_log_prob"][mask],
            rows,
            rule=config.async_rollout.importance,
            level=config.async_rollout.importance_level,
            high=config.async_rollout.importance_clip,
        )
        streams["weight"] = to_grid(weight)
        state.metrics |= {f"importance/{name}": value for name, value in vars(ratios).items()}
    return streams


def trained_rows(config: RLConfig, experience: Experience, record_index: int) -> Tensor:
    """Return the rows to train on: all, or with `only_passed` those that pass.

    Raises:
        ConfigError: none of the first rollout batch passes.
    """
    if not resolve_method(config).only_passed:
        return torch.arange(experience.rows)
    if not record_index and not experience.passed.any():
        raise ConfigError(
            f"none of the first {experience.rows:,} completions passes: {config.algorithm} has nothing to learn from",
            expected="a model that sometimes succeeds",
            do="fine-tune it first (step sft), take easier tasks, or raise prompts_per_step or group_size",
        )
    return experience.passed.nonzero()[:, 0]


def policy_loss_of(config: RLConfig, network: PolicyModel, state: RLState, part: MicroBatch) -> Loss:
    """Return the loss of a micro-batch of rows with their streams."""
    method = resolve_method(config)
    bonus = method.entropy_coef > 0
    # With an adapter the head is frozen, and the gradient without entropy is cheaper.
    output = network.log_probs(part, entropy=bonus or network.lora is None)
    state.observe_micro_batch(part, output.log_prob)
    mask = part["loss_mask"]
    n = len(mask)  # one completion per row
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
    entropy = output.entropy if bonus or output.entropy is None else output.entropy.detach()
    tokens = CompletionTokens(output.log_prob, sequence=rows, n_sequences=n, entropy=entropy, **streams)
    loss_config = replace(method, kl_coef=state.kl_coef)
    loss = get_algorithm(config.algorithm)[1](tokens, loss_config)
    if output.value is None:
        return loss
    critic_loss = value_loss(
        output.value, part["old_value"][mask], part["value_target"][mask], rows,
        aggregation=loss_config.aggregation, constant=loss_config.constant, n_sequences=n,
    )  # fmt: skip
    return Loss(
        loss.total + VALUE_COEF * critic_loss.total, loss.count, {**loss.metrics, **critic_loss.metrics}
    )
