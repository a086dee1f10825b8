"""Every stage after pretraining in one call: from a model's folder to a network trained for a few steps, on a device.

It follows the recipe steps (`recipes/steps/align`). `weights` of the result are on the CPU, so devices can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.support.align.byte_model import decoder, scribe, sums, tokenizer
from tests.support.align.kill_at_step import VARYING, Killed
from tests.support.align.rl_policies import tasks
from tests.support.align.stage_inputs import PAD, make_pair
from tests.support.configs import nested, updated
from whorl.align import config as configs
from whorl.align.data.curriculum import Curriculum
from whorl.align.distillation.cached_teacher import cache_teacher_logits
from whorl.align.distillation.student import make_student
from whorl.align.distillation.teacher import LiveTeacher
from whorl.align.distillation.train import train_student
from whorl.align.model.batch import pad
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.preference import reward_model as rewards
from whorl.align.preference.dpo import evaluate_preferences, train_preferences
from whorl.align.preference.reward_report import evaluate_reward_model
from whorl.align.rl import config as rl_configs
from whorl.align.rl.evaluation import evaluate_tasks
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.io import load_stage_model, make_policy_model, save_stage_model
from whorl.align.stage.sft import fine_tune
from whorl.models import LanguageModel, save_model
from whorl.tracking.seeds import generator

LORA = configs.LoRAConfig(rank=2)
COMMON: dict[str, Any] = {
    "model": {"dtype": "float32"}, "run": {"checkpoint_seconds": 1e-9}, "train": {"micro_batch_tokens": 96}, "lr_scale": 0.2,
}  # fmt: skip
PAIRED: dict[str, Any] = {"data": {"seq_len": 32, "batch_size": 4}, "optimizer": "adamw", **COMMON}
PAIRS = [make_pair(f"{i}>", str(i) * (1 + i % 3), "zz") for i in range(10)]
TASKS = tasks(6)


class StageRun:
    """Inputs of a stage and its recorded metrics.

    device: as `Machine.device`. scratch: folder of checkpoints. kill: step after which it is killed.
    """

    def __init__(self, folder: Path, device: str, scratch: Path | None = None, kill: int = 0) -> None:
        self.folder, self.device, self.kill = folder, device, kill
        self.machine: Any = SimpleNamespace(device=device)
        self.history: list[dict[str, float]] = []
        self.usual: dict[str, Any] = {"callback": self.observe, "checkpoint_dir": scratch}

    def observe(self, step: int, metrics: dict[str, float], *_: Any) -> None:
        self.history.append({n: v for n, v in metrics.items() if not n.startswith(VARYING)})
        if step == self.kill:
            raise Killed

    def model(self, config: Any) -> LanguageModel:
        return load_stage_model(self.folder, config, self.machine)

    def network(self, config: Any, model: LanguageModel | None = None, **options: Any) -> PolicyModel:
        return make_policy_model(model or self.model(config), scribe(), config, context_hint=48, **options)

    def beside(self, name: str) -> Path:
        """Return a path beside the model's folder that depends on the kind of device."""
        return self.folder.parent / f"{name}-{self.device.partition(':')[0]}"

    def evaluate(self, network: PolicyModel) -> None:
        items = evaluate_tasks(network, scribe(), TASKS, max_tokens=4, length=24).items
        passed = sum(item.scores["passed"] for item in items)
        self.history.append({"texts": float(sum(len(item.answers[0]) for item in items)), "accuracy": passed})


def begin(folder: Path) -> Path:
    """Write the folder of a byte model with its tokenizer."""
    save_model(decoder(), folder)
    tokenizer(folder)
    return folder


def weights(network: PolicyModel) -> dict[str, Tensor]:
    return {n: p.detach().cpu().clone() for n, p in network.named_parameters()}


def _sft(run: StageRun, **options: Any) -> PolicyModel:
    config = updated(configs.SFTConfig(**COMMON), **nested(epochs=2, seq_len=48, batch_size=4, **options))
    network = run.network(config)
    fine_tune(network, sums(24), config, pad_id=PAD, **run.usual)
    save_stage_model(network, run.folder, run.beside(f"out-{len(options)}"))
    return network


def _prefer(run: StageRun, objective: Any) -> PolicyModel:
    config = configs.PreferenceConfig(objective=objective, **PAIRED)
    network = run.network(config)
    before = frozen_reference(run.model(config), network)
    train_preferences(network, PAIRS, config, pad_id=PAD, **run.usual)
    run.history.append(evaluate_preferences(network, PAIRS, config, pad_id=PAD, reference=before))
    return network


def _reward(run: StageRun, lora: configs.LoRAConfig | None = None) -> PolicyModel:
    config = updated(configs.RewardConfig(**PAIRED), model={"lora": lora})
    model = rewards.RewardModel(run.model(config), lora=lora, seed=3)
    rewards.train_reward_model(model, PAIRS, config, pad_id=PAD, **run.usual)
    run.history.append({"rewards/margin": evaluate_reward_model(model, PAIRS).margin})
    return model


def _reward_folder(run: StageRun, config: Any) -> Path:
    """Return the folder of an untrained reward model."""
    folder = run.beside("reward_model")
    if not folder.exists():
        model = rewards.RewardModel(run.model(config), seed=3)
        rewards.save_reward_model(
            model, folder, config=configs.RewardConfig(), trained_on={}, base=run.folder
        )
    return folder


def _rlvr(run: StageRun, reward_model_verifier: bool = False, **options: Any) -> PolicyModel:
    config = rl_configs.RLConfig(
        steps=3, prompts_per_step=2, group_size=4, max_completion_tokens=4, max_seq_len=24,
        optimizer="adamw", **{**COMMON, **options},
    )  # fmt: skip
    network = run.network(config, critic=config.algorithm == "ppo")
    reference = frozen_reference(run.model(config), network) if config.kl.coef else None
    reward_model = _reward_folder(run, config) if reward_model_verifier else None
    if reward_model:
        assert rewards.load_reward_model(reward_model, device=run.device)[0].device == network.device
    worker = RolloutWorker(
        network.model.config, "float32", run.folder, TASKS, config.group_size, config.max_completion_tokens,
        config.max_seq_len, config.temperature, Curriculum([0.0] * len(TASKS)), reward_model=reward_model,
    )  # fmt: skip
    train_policy(network, worker, config, reference=reference, **run.usual)
    if not config.async_rollout.workers:
        assert worker._sampler.engine.model.embedding.device == network.device
    run.evaluate(network)
    return network


def ahead(run: StageRun, device: Any = "auto") -> PolicyModel:
    """Run RL with a worker process in lockstep, so that every rollout batch has `logprob_diff_max`."""
    return _rlvr(run, async_rollout=rl_configs.AsyncRolloutConfig(workers=1, max_policy_lag=0, device=device))


def _distil(run: StageRun, top: int = 0, student: Any = None, **options: Any) -> PolicyModel:
    """Distil into `student` (fields of `StudentConfig`). top: logits that are cached; 0 keeps a live teacher."""
    config = updated(
        configs.DistilConfig(**COMMON),
        **nested(epochs=2, batch_size=6, seq_len=24, max_completion_tokens=5, **options),
    )
    teacher, texts = run.model(config), sums(12)
    teacher.context_hint = 48
    shape = configs.StudentConfig(**(student or {"n_layers": 1}))
    rows = [pad(texts, PAD)["tokens"]]
    made = make_student(teacher, shape, generator=generator(3), calibration_ids=rows)
    network = run.network(config, made)
    who: Any = cache_teacher_logits(teacher, texts, pad_id=PAD, top_k=top) if top else LiveTeacher(teacher)
    train_student(network, who, texts, config, encoder=scribe(), pad_id=PAD, **run.usual)
    return network


KL = rl_configs.KLConfig(coef=0.1)
NARROW = {"width_multiplier": 0.5}
STAGES: dict[str, Callable[[StageRun], PolicyModel]] = {
    "sft": _sft,
    "sft-rows": lambda run: _sft(run, packing=False),
    "sft-adapter": lambda run: _sft(run, packing=True, lora=LORA),
    "dpo": lambda run: _prefer(run, "dpo"),
    "kto": lambda run: _prefer(run, "kto"),
    "orpo": lambda run: _prefer(run, "orpo"),
    "reward": _reward,
    "reward-adapter": lambda run: _reward(run, LORA),
    "grpo": lambda run: _rlvr(run, kl=KL),
    "ppo": lambda run: _rlvr(run, algorithm="ppo", update={"epochs": 2, "minibatches": 2}, kl=KL),
    "rloo-reward-model": lambda run: _rlvr(
        run, reward_model_verifier=True, algorithm="rloo", model={"lora": LORA, "dtype": "float32"}
    ),
    "distil-on-policy": lambda run: _distil(run, on_policy_fraction=0.5, sync_every=2),
    "distil-cached": lambda run: _distil(run, top=6, student={"mlp_hidden": 24}),
    "distil-narrow": lambda run: _distil(run, packing=False, student=NARROW, on_policy_fraction=1.0),
}
