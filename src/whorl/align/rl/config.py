"""Settings of reinforcement learning, importable without torch so that a recipe can be checked quickly.

The arguments of each algorithm are in `objectives/llm_policy.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from whorl.align.config import StageConfig
from whorl.align.environments import EnvironmentField
from whorl.align.policy_config import KLConfig, PolicyLossOverrides
from whorl.registry import Registry, require_extra
from whorl.train.config import RunConfig

ALGORITHMS = Registry(
    "algorithm",
    {
        name: f"whorl.objectives.llm_policy:{name.upper()}"
        for name in ("reinforce", "rloo", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "expert_iteration")
    },
)


class AsyncRolloutConfig(BaseModel):
    """Rollout workers that sample ahead of the learner, and the correction for stale samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(
        default=0, ge=0, description="worker processes that sample ahead; 0: lockstep in this process"
    )
    backend: Literal["process", "ray"] = Field(
        default="process", description="local processes, or actors of a Ray cluster"
    )
    prefetch: int = Field(default=1, ge=1, description="rollout batches that a worker may be ahead")
    max_policy_lag: int = Field(
        default=4, ge=0, description="maximum age in weight versions; older rollouts are sampled again"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="device of the workers; auto: GPUs that the learner does not use, in turn, else CPU",
    )
    update_in_flight: bool = Field(
        default=False, description="accept new weights between two tokens of a completion"
    )
    importance: Literal["none", "truncate", "mask", "trace"] = Field(
        default="truncate", description="importance weights of tokens sampled with older weights"
    )
    importance_level: Literal["token", "sequence", "mean"] = Field(
        default="token", description="ratio of a token, of the sequence, or its geometric mean"
    )
    importance_clip: float = Field(default=2.0, gt=1, description="upper bound of these weights")

    @model_validator(mode="after")
    def _possible(self) -> AsyncRolloutConfig:
        if self.importance == "trace" and self.importance_level != "token":
            raise ValueError(
                f"importance is trace and importance_level is {self.importance_level}: a trace needs level token"
            )
        return self


MAX_LOGPROB_DIFF = {
    "float32": 1e-4,
    "bfloat16": 0.02,
    "float16": 0.02,
}  # nats, by the learner's compute dtype
SamplingType = Literal["auto", "model", "float32", "bfloat16", "int8"]


class RolloutConfig(BaseModel):
    """The type in which rollouts are sampled, and how far its log-probabilities may be from the learner's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: SamplingType = Field(
        default="auto",
        description="weights of the sampler; auto: the fastest type within max_logprob_diff, in stages of half a minute "
        "or more on a CPU; model: the learner's compute dtype; another type is forced",
    )
    max_logprob_diff: float | None = Field(
        default=None,
        ge=0,
        description="largest mean difference between log-probabilities of sampler and learner, in nats; default: 1e-4 "
        "for a learner in fp32, 0.02 in bf16",
    )

    def bound(self, dtype: str) -> float:
        """Return the largest mean difference for a learner that computes in `dtype`."""
        return MAX_LOGPROB_DIFF.get(dtype, 0.0) if self.max_logprob_diff is None else self.max_logprob_diff


class RLRunConfig(RunConfig):
    """How a stage of reinforcement learning runs."""

    replicas: int | None = Field(
        default=None,
        ge=1,
        description="CPU processes that each sample and train a shard of a rollout batch, at most prompts_per_step; "
        "default: one per core where that pays",
    )
    max_train_seconds: float | None = Field(
        default=None, gt=0, description="training time after which the run ends early"
    )
    max_worker_restarts: int = Field(
        default=3, ge=0, description="restarts of a killed worker before it delivers a rollout batch"
    )
    log_rollouts_every: int = Field(default=20, ge=1, description="steps between tables of rollouts")


class TaskSamplingConfig(BaseModel):
    """Which tasks and completions a rollout batch has, and the penalty of long ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    curriculum: Literal["uniform", "variance", "filter", "easy_first"] = Field(
        default="uniform",
        description="task sampling: uniform, tasks that are sometimes solved, or easy before hard",
    )
    dynamic_sampling_rounds: int | None = Field(
        default=None,
        ge=0,
        description="rounds that replace groups with equal rewards; default: 2 in DAPO",
    )
    overlong_buffer: int | None = Field(
        default=None,
        ge=0,
        description="tokens before the limit over which the reward falls; default: a quarter in DAPO",
    )


class PolicyUpdateConfig(BaseModel):
    """The updates on one rollout batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(default=1, ge=1, description="passes over a rollout batch")
    minibatches: int = Field(default=1, ge=1, description="steps per pass")
    clip: tuple[float, float] | None = Field(
        default=None,
        description="lower and upper distance of a ratio from 1; default: those of the algorithm",
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="PPO: 1 is Monte Carlo minus the critic")


class RLConfig(StageConfig):
    """Reinforcement learning from verifiable rewards."""

    algorithm: Annotated[str, AfterValidator(ALGORITHMS.check)] = Field(
        default="grpo",
        description="reinforce, rloo, ppo, grpo, dr_grpo, dapo, gspo, expert_iteration, or module:attribute of a "
        "PolicyLossConfig or of a function like policy_loss",
    )
    environment: EnvironmentField | None = Field(
        default=None,
        description="of several turns, as calculator or module:attribute; default: the task's verifier",
    )
    steps: int = Field(default=100, ge=1, description="rollout batches", json_schema_extra={"shrinks_to": 2})
    prompts_per_step: int = Field(default=16, ge=1, description="tasks per rollout batch")
    group_size: int = Field(default=8, ge=1, description="completions per task")
    max_completion_tokens: int = Field(default=64, ge=1, description="ids of a completion, or of one reply")
    max_seq_len: int = Field(
        default=256, ge=8, description="ids of a whole rollout; tasks with longer prompts are rejected"
    )
    temperature: float = Field(default=1.0, gt=0)
    sampling: TaskSamplingConfig = TaskSamplingConfig()
    update: PolicyUpdateConfig = PolicyUpdateConfig()
    loss: PolicyLossOverrides = PolicyLossOverrides()
    kl: KLConfig = KLConfig()
    rollout: RolloutConfig = RolloutConfig()
    async_rollout: AsyncRolloutConfig = AsyncRolloutConfig()
    run: RLRunConfig = Field(default=RLRunConfig(), description="checkpoints, memory, processes, log")

    @model_validator(mode="after")
    def _possible(self) -> RLConfig:
        alone = (
            self.algorithm in ("reinforce", "ppo", "expert_iteration")
            if self.loss.baseline is None
            else self.loss.baseline in ("none", "batch", "running")
        )
        if self.group_size < 2 and not alone:
            raise ValueError(
                f"group_size is {self.group_size}: {self.loss.baseline or self.algorithm} compares the completions of one "
                "task and needs at least 2"
            )
        ratio = self.loss.ratio or (
            "none" if self.algorithm in ("reinforce", "rloo", "expert_iteration") else "token"
        )
        if ratio == "none" and (self.update.clip or self.loss.dual_clip):
            raise ValueError(
                f"{'update.clip' if self.update.clip else 'loss.dual_clip'} is set, but {self.algorithm} has no ratio to "
                "clip: set loss.ratio to token or sequence"
            )
        if self.max_completion_tokens >= self.max_seq_len:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}: max_completion_tokens ({self.max_completion_tokens}) leaves no room "
                "for a prompt"
            )
        if (self.run.replicas or 1) > 1 and self.async_rollout.workers:
            raise ValueError(
                f"run.replicas is {self.run.replicas} and async_rollout.workers is {self.async_rollout.workers}: "
                "use one of them"
            )
        if self.train.deterministic and (late := self._decided_by_time()):
            raise ValueError(f"{late}: with train.deterministic no time decides a result; remove it")
        if self.environment and self.sampling.overlong_buffer:
            raise ValueError(
                "sampling.overlong_buffer is set: replies of an environment have no common limit; remove it"
            )
        if (self.sampling.overlong_buffer or 0) > self.max_completion_tokens:
            raise ValueError(
                f"sampling.overlong_buffer ({self.sampling.overlong_buffer}) exceeds max_completion_tokens "
                f"({self.max_completion_tokens})"
            )
        return self

    def _decided_by_time(self) -> str:
        """Return the setting by which the speed of the machine decides a result, or ""."""
        ahead = self.async_rollout
        if ahead.workers and (ahead.workers > 1 or ahead.max_policy_lag or ahead.update_in_flight):
            return "async_rollout lets workers sample ahead (in lockstep: workers = 1, max_policy_lag = 0)"
        if self.run.max_train_seconds is not None:
            return f"run.max_train_seconds is {self.run.max_train_seconds:g}"
        return "environment.overlap is true" if self.environment and self.environment.overlap else ""

    def check_installed(self, step: str) -> None:
        """Check the packages that these settings of a step need. Raises ConfigError: one is not installed."""
        if self.async_rollout.workers and self.async_rollout.backend == "ray":
            require_extra(f"{step}.async_rollout.backend = ray", "ray", "ray")
        if self.environment is not None and self.environment.name in ("openenv", "verifiers"):
            name = self.environment.name
            require_extra(f"{step}.environment = {name}", name, name)

    @property
    def uses_critic(self) -> bool:
        """Whether the baseline is a critic's value."""
        return self.algorithm == "ppo" and self.loss.baseline is None

    @property
    def resolved_sampling_rounds(self) -> int:
        """Return `sampling.dynamic_sampling_rounds`, or the algorithm's default."""
        return (
            (2 if self.algorithm == "dapo" else 0)
            if self.sampling.dynamic_sampling_rounds is None
            else self.sampling.dynamic_sampling_rounds
        )

    @property
    def resolved_overlong_buffer(self) -> int:
        """Return `sampling.overlong_buffer`, or the algorithm's default; 0 with an environment."""
        default = self.max_completion_tokens // 4 if self.algorithm == "dapo" and not self.environment else 0
        return default if self.sampling.overlong_buffer is None else self.sampling.overlong_buffer
