"""The settings of every stage after pretraining, apart from them so that a recipe can be checked without importing torch.

Rates are a share of pretraining's (`train/config.py`): a stage goes on with the same optimisers on the same parameters, more
gently. What an algorithm of policy optimisation is, as a choice of arguments, stands in `objectives/llm_policy.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.train.config import OptimConfig, ScheduleConfig

Algorithm = Literal["reinforce", "rloo", "ppo", "grpo", "dr_grpo", "dapo", "gspo"]
PreferenceObjective = Literal["dpo", "ipo", "kto", "simpo", "orpo"]
MatrixOptimizer = Literal["muon", "adamw"]
Divergence = Literal["forward", "reverse", "jensen"]
DType = Literal["float32", "bfloat16", "float16"]


class LoRAConfig(BaseModel):
    """An adapter to train in place of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0, description="over the rank: what the product is multiplied with")
    target_modules: tuple[str, ...] = Field(
        default=(), description="ends of names, as 'mixer.q'; default: all of the blocks"
    )
    merge: bool = Field(
        default=True, description="add it to the weights that are kept; else keep it beside them"
    )


class StageConfig(BaseModel):
    """What every stage has that moves weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr_scale: float = Field(default=0.1, gt=0, description="of pretraining's learning rates")
    optimizer: MatrixOptimizer = Field(default="muon", description="what trains the blocks' matrices")
    lora: LoRAConfig | None = Field(default=None, description="train an adapter in place of the weights")
    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="positions of a forward with gradients, about"
    )
    clip_norm: float = Field(default=1.0, gt=0, description="of the mean gradient")
    schedule: ScheduleConfig = ScheduleConfig(warmup_ratio=0.05)
    dtype: DType | None = Field(
        default=None, description="of products; default: what is fastest on this machine"
    )
    seed: int = 0
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")

    def optim(self) -> OptimConfig:
        """The rates of this stage."""
        usual = OptimConfig()
        rates = {
            name: getattr(usual, name) * self.lr_scale
            for name in ("lr_muon", "lr_adamw", "lr_embedding", "lr_scalar", "lr_ngram")
        }
        return usual.model_copy(
            update={**rates, "optimizer": self.optimizer, "muon_every": 1, "clip_norm": self.clip_norm}
        )


class SFTConfig(StageConfig):
    """Supervised fine-tuning."""

    epochs: float = Field(default=1.0, gt=0, description="times that the texts are gone through")
    seq_len: int = Field(
        default=512, ge=8, description="positions of a row; longer texts are left out, and counted"
    )
    batch_size: int = Field(default=16, ge=1, description="rows a step")
    packing: bool = Field(default=True, description="several texts a row, apart by a document mask")
    replay_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of a step's rows that are pretraining's, against forgetting",
    )
    replicas: int | None = Field(
        default=None, ge=1, description="processes that learn together; default: one a core where that pays"
    )


class DistilConfig(StageConfig):
    """Distillation: what is learnt of a teacher, and on whose words."""

    divergence: Divergence = Field(
        default="forward",
        description="forward covers what a teacher may say, reverse seeks what it says most",
    )
    beta: float = Field(default=0.5, gt=0, lt=1, description="of jensen: towards forward at 0, reverse at 1")
    temperature: float = Field(default=1.0, gt=0, description="of both, in the divergence")
    on_policy_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of a step's texts whose answers the student samples itself",
    )
    max_completion_tokens: int = Field(default=64, ge=1, description="of an answer of its own")
    sync_every: int = Field(default=1, ge=1, description="steps for which answers are sampled at once")
    epochs: float = Field(default=1.0, gt=0, description="times that the texts (or prompts) are gone through")
    seq_len: int = Field(default=512, ge=8, description="positions of a row")
    batch_size: int = Field(default=32, ge=1, description="texts a step")
    packing: bool = Field(default=True, description="several texts a row, apart by a document mask")


class StudentConfig(BaseModel):
    """How a student is made from its teacher: a narrower one, or one of its layers, or one that is pruned."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width_multiplier: float | None = Field(
        default=None, gt=0, le=1, description="share of the teacher's width; such a student begins untaught"
    )
    n_layers: int | None = Field(
        default=None, ge=1, description="layers, of the teacher's own, evenly, unless it is narrower"
    )
    n_heads: int | None = Field(default=None, ge=1, description="that pruning leaves in each layer")
    n_kv_heads: int | None = Field(default=None, ge=1, description="that pruning leaves in each layer")
    mlp_hidden: int | None = Field(default=None, ge=1, description="channels that pruning leaves")

    @model_validator(mode="after")
    def _possible(self) -> StudentConfig:
        if self.width_multiplier is not None and (self.n_heads or self.n_kv_heads or self.mlp_hidden):
            raise ValueError("a student with a width of its own is drawn anew: there is nothing to prune")
        return self


class PreferenceStageConfig(StageConfig):
    """What is learnt from answers of which one was preferred."""

    epochs: float = Field(default=1.0, gt=0, description="times that the answers are gone through")
    seq_len: int = Field(default=512, ge=8, description="ids of prompt and answer; longer ones are left out")
    batch_size: int = Field(default=32, ge=1, description="pairs a step; KTO: answers a step")
    packing: bool = Field(default=False, description="several texts a row, apart by a document mask")
    replicas: int | None = Field(
        default=None, ge=1, description="processes that learn together; default: one a core where that pays"
    )


class PreferenceConfig(PreferenceStageConfig):
    """Preference optimisation; the equations stand in `objectives/preference.py`."""

    lr_scale: float = Field(default=0.02, gt=0, description="of pretraining's learning rates")
    objective: PreferenceObjective = "dpo"
    beta: float | None = Field(
        default=None, gt=0, description="the paper's beta (IPO: tau, ORPO: lambda); default: the objective's"
    )
    gamma: float = Field(default=1.0, ge=0, description="SimPO: the margin that is asked for")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="DPO: share of labels that are wrong"
    )
    length_normalized: bool = Field(default=False, description="IPO: means over tokens in place of sums")
    desirable_weight: float = Field(default=1.0, description="KTO: weight of desirable completions")
    undesirable_weight: float = Field(default=1.0, description="KTO: weight of undesirable completions")


class RewardConfig(PreferenceStageConfig):
    """A reward model; the equation stands in `objectives/reward.py`."""

    center_rewards_coef: float = Field(default=0.01, ge=0, description="pull of the rewards' level to 0")


class KLConfig(BaseModel):
    """How the policy is kept near the one that it began as."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coef: float = Field(default=0.0, ge=0, description="0: no reference is kept at all")
    apply_to: Literal["loss", "reward"] | None = Field(
        default=None,
        description="a term of the loss, or taken off the rewards; default: as the algorithm has it",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(default=None, description="default: the algorithm's")
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="KL a token, in nats, that the weight is adapted to (arXiv:1909.08593)",
    )


class PolicyLossOverrides(BaseModel):
    """What is changed of the algorithm, each as one argument of `objectives/llm_policy.py`; None leaves the algorithm's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: Literal["none", "token", "sequence"] | None = Field(
        default=None, description="of whom the ratio is that weighs an answer: of each token, or of all of it"
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="times the advantage: the most that a bad answer may weigh"
    )
    aggregation: Literal["token", "sequence", "constant"] | None = Field(
        default=None, description="who weighs the same: all tokens, all answers, or max_tokens of any"
    )
    baseline: Literal["none", "batch", "group", "leave_one_out"] | None = Field(
        default=None, description="what is taken off a reward: nothing, or a mean"
    )
    scale_rewards: Literal["none", "biased", "unbiased"] | None = Field(
        default=None, description="what it is divided by then"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of an entropy bonus")


class AsyncRolloutConfig(BaseModel):
    """Whether answers are sampled ahead of the learner, and what is done about their age."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(default=0, ge=0, description="that sample ahead; 0: in lock-step, in this process")
    backend: Literal["process", "ray"] = Field(
        default="process", description="where workers live: processes here, or actors of a Ray cluster"
    )
    prefetch: int = Field(default=1, ge=1, description="that a worker may be ahead")
    max_policy_lag: int = Field(
        default=4, ge=0, description="versions of the weights; older records are made anew"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="where workers ahead sample; auto: on GPUs that the learner leaves free, in turn, else on CPUs",
    )
    update_in_flight: bool = Field(default=False, description="new weights between two tokens of an answer")
    importance: Literal["none", "truncate", "mask", "trace"] = Field(
        default="truncate", description="importance weights of what older weights sampled"
    )
    importance_level: Literal["token", "sequence", "mean"] = Field(
        default="token", description="whose weight it is: a token's, an answer's, or its tokens' mean"
    )
    importance_clip: float = Field(default=2.0, gt=1, description="of these weights")

    @model_validator(mode="after")
    def _possible(self) -> AsyncRolloutConfig:
        if self.importance == "trace" and self.importance_level != "token":
            raise ValueError(f"level is {self.importance_level}: a trace weighs token by token")
        return self


class RLConfig(StageConfig):
    """Reinforcement learning from rewards that can be verified."""

    algorithm: Algorithm = "grpo"
    steps: int = Field(default=100, ge=1, description="records of rollouts")
    prompts_per_step: int = Field(default=16, ge=1, description="tasks a record")
    group_size: int = Field(default=8, ge=1, description="answers to each")
    max_completion_tokens: int = Field(default=64, ge=1, description="of an answer")
    max_seq_len: int = Field(
        default=256, ge=8, description="ids of prompt and answer; tasks without room are left out"
    )
    temperature: float = Field(default=1.0, gt=0)
    update_epochs: int = Field(default=1, ge=1, description="passes over a record")
    minibatches: int = Field(default=1, ge=1, description="steps a pass")
    clip: tuple[float, float] | None = Field(
        default=None, description="how far below and above 1 a ratio may go; default: the algorithm's"
    )
    loss: PolicyLossOverrides = PolicyLossOverrides()
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="PPO: 1 is Monte Carlo minus the critic")
    kl: KLConfig = KLConfig()
    async_rollout: AsyncRolloutConfig = AsyncRolloutConfig()
    max_worker_restarts: int = Field(
        default=3, ge=0, description="of a worker ahead that was killed, before it brings another record"
    )
    overlong_buffer: int | None = Field(
        default=None,
        ge=0,
        description="last tokens of the limit over which the reward falls; default: a quarter in DAPO",
    )
    dynamic_sampling_rounds: int | None = Field(
        default=None,
        ge=0,
        description="draws in place of groups whose rewards are all the same; default: 2 in DAPO",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="processes on a CPU that each sample and learn a share of a record, no more than prompts; "
        "default: one a core where that pays",
    )
    curriculum: Literal["uniform", "variance", "filter", "easy_first"] = Field(
        default="uniform", description="which tasks are drawn: any, those sometimes solved, easy before hard"
    )
    log_rollouts_every: int = Field(default=20, ge=1, description="steps between tables of rollouts")
    max_train_seconds: float | None = Field(default=None, gt=0, description="of training; then it ends early")

    @model_validator(mode="after")
    def _possible(self) -> RLConfig:
        alone = (
            self.algorithm in ("reinforce", "ppo")
            if self.loss.baseline is None
            else self.loss.baseline in ("none", "batch")
        )
        if self.group_size < 2 and not alone:
            raise ValueError(
                f"answers is {self.group_size}: {self.loss.baseline or self.algorithm} compares the answers to one task, "
                "and needs 2 at least"
            )
        ratio = self.loss.ratio or ("none" if self.algorithm in ("reinforce", "rloo") else "token")
        if ratio == "none" and (self.clip or self.loss.dual_clip):
            raise ValueError(
                f"{'clip' if self.clip else 'method.dual_clip'} is given, and {self.algorithm} has no ratio to clip: "
                "set method.ratio to token or sequence"
            )
        if self.max_completion_tokens >= self.max_seq_len:
            raise ValueError(
                f"length is {self.max_seq_len}: an answer of max_tokens ({self.max_completion_tokens}) leaves no room for a prompt"
            )
        if (self.replicas or 1) > 1 and self.async_rollout.workers:
            raise ValueError(
                f"replicas is {self.replicas} and ahead.workers {self.async_rollout.workers}: "
                "records are shared out, or sampled ahead"
            )
        if (self.overlong_buffer or 0) > self.max_completion_tokens:
            raise ValueError(
                f"overlong ({self.overlong_buffer}) is beyond max_tokens ({self.max_completion_tokens})"
            )
        return self

    @property
    def uses_critic(self) -> bool:
        """Whether a critic's word is the baseline."""
        return self.algorithm == "ppo" and self.loss.baseline is None

    @property
    def resolved_sampling_rounds(self) -> int:
        """`redraws`, or the algorithm's own."""
        return (
            (2 if self.algorithm == "dapo" else 0)
            if self.dynamic_sampling_rounds is None
            else self.dynamic_sampling_rounds
        )

    @property
    def resolved_overlong_buffer(self) -> int:
        """`overlong`, or the algorithm's own."""
        return (
            (self.max_completion_tokens // 4 if self.algorithm == "dapo" else 0)
            if self.overlong_buffer is None
            else self.overlong_buffer
        )
