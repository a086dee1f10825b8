"""Golden cases of the stages after pretraining: about 20 steps each of a tiny decoder over bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from golden_case import Result, case, weight_hash
from golden_inputs import decoder, scratch, scribe, sums
from tests.support.configs import nested
from tests.support.tiny import BYTE_VOCAB
from torch import nn

from whorl.align import config as settings
from whorl.align.data.curriculum import Curriculum
from whorl.align.distillation.student import make_student
from whorl.align.distillation.teacher import LiveTeacher
from whorl.align.distillation.train import train_student
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.preference.dpo import train_preferences
from whorl.align.preference.pairs import PreferencePair
from whorl.align.preference.reward_model import RewardModel, train_reward_model
from whorl.align.rl import config as rl_settings
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.evals.grading.task import VerifiableTask
from whorl.models import LanguageModel

COMMON: dict[str, Any] = {"dtype": "float32", "lr_scale": 0.2}
STAGE: dict[str, Any] = {"batch_size": 4, "run": {"replicas": 1}, **COMMON}


class Curve:
    """A callback that stores one metric of each step."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.curve: list[float] = []

    def __call__(self, step: int, metrics: dict[str, float], *_: object) -> None:
        self.curve.append(metrics[self.metric])


def _network(model: LanguageModel | None = None, **options: Any) -> PolicyModel:
    forbidden = scribe().banned_ids(BYTE_VOCAB)
    return PolicyModel(model or decoder(), banned_ids=forbidden, **options)


def _trained(
    network: nn.Module, metric: str, train: Callable[..., object], *inputs: Any, **options: Any
) -> Result:
    """Train a network on its inputs; the curve is one metric."""
    seen = Curve(metric)
    train(network, *inputs, pad_id=scribe().tokenizer.pad_id, callback=seen, **options)
    return Result(bits={"weights": weight_hash(network)}, curve=seen.curve)


def _pairs() -> list[PreferencePair]:
    write = scribe().prompt_completion
    return [PreferencePair(write(f"{i}>", str(i) * (1 + i % 3)), write(f"{i}>", "zz")) for i in range(20)]


def _sft(lora: settings.LoRAConfig | None) -> Result:
    config = settings.SFTConfig(**nested(epochs=4, seq_len=48, lora=lora, **STAGE))
    return _trained(_network(lora=lora), "nll", fine_tune, sums(96), config)


case("sft")(partial(_sft, None))
case("sft-lora")(partial(_sft, settings.LoRAConfig(rank=2)))


def _preference(objective: Any, epochs: int) -> Result:
    changes = {"objective": objective, "epochs": epochs, "optimizer": "adamw"}
    config = settings.PreferenceConfig(**nested(seq_len=32, **changes, **STAGE))
    return _trained(_network(), "loss", train_preferences, _pairs(), config)


case("dpo")(partial(_preference, "dpo", epochs=4))
case("kto")(partial(_preference, "kto", epochs=2))


@case("reward-model")
def _reward() -> Result:
    config = settings.RewardConfig(**nested(epochs=4, seq_len=32, **STAGE))
    return _trained(RewardModel(decoder(), seed=3), "loss", train_reward_model, _pairs(), config)


def _grpo(**options: Any) -> Result:
    sizes = {"steps": 20, "prompts_per_step": 3, "group_size": 4, "max_completion_tokens": 5}
    more = {
        "max_seq_len": 24, "optimizer": "adamw", "run": {"replicas": 1}, "kl": rl_settings.KLConfig(coef=0.1),
    }  # fmt: skip
    config = rl_settings.RLConfig(algorithm="grpo", **nested(**sizes, **more, **COMMON, **options))
    digits = "format(.*[0-9].*)"
    tasks = [
        VerifiableTask(id=str(i), prompt=f"{i}+1=", verifier=digits, answer=str(i + 1)) for i in range(12)
    ]
    with scratch() as folder:
        scribe().tokenizer.save(folder)
        network, seen = _network(temperature=config.temperature), Curve("entropy")
        limits = (config.group_size, config.max_completion_tokens, config.max_seq_len, config.temperature)
        order = Curriculum([0.0] * len(tasks))
        worker = RolloutWorker(network.model.config, "float32", folder, tasks, *limits, order, threads=1)
        # The reference differs from the policy: at KL 0 gradients would be rounding errors, which AdamW amplifies.
        reference = frozen_reference(decoder(seed=7), network)
        train_policy(network, worker, config, reference=reference, callback=seen)
    return Result(bits={"weights": weight_hash(network)}, curve=seen.curve)


case("grpo")(_grpo)
# One worker process in lockstep: it samples with the weights that were just published.
LOCKSTEP = rl_settings.AsyncRolloutConfig(workers=1, max_policy_lag=0)
case("grpo-one-worker")(partial(_grpo, async_rollout=LOCKSTEP))


def _distil(**options: Any) -> Result:
    sizes = {"epochs": 5, "batch_size": 12, "seq_len": 24, "max_completion_tokens": 5}
    config = settings.DistilConfig(**nested(**sizes, **COMMON, **options))
    teacher = decoder(seed=7)
    network = _network(make_student(teacher, settings.StudentConfig(n_layers=1)))
    inputs = (LiveTeacher(teacher), sums(48), config)
    return _trained(network, "kl", train_student, *inputs, encoder=scribe())


case("distil")(_distil)
case("distil-on-policy")(partial(_distil, on_policy_fraction=0.5, sync_every=2))
