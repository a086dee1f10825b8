"""Golden cases of the stages after pretraining: about 20 steps each of a tiny decoder over bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from golden_case import Result, case, weight_hash
from golden_inputs import BYTES_VOCAB, bytes_tokenizer, decoder, scratch, scribe, sums

from whorl.align.config import (
    AsyncRolloutConfig,
    DistilConfig,
    KLConfig,
    LoRAConfig,
    PreferenceConfig,
    RewardConfig,
    RLConfig,
    SFTConfig,
    StudentConfig,
)
from whorl.align.data.curriculum import Curriculum
from whorl.align.distillation.student import make_student
from whorl.align.distillation.teacher import LiveTeacher
from whorl.align.distillation.train import train_student
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.model.sampling import banned_ids
from whorl.align.preference.dpo import train_preferences
from whorl.align.preference.pairs import PreferencePair
from whorl.align.preference.reward_model import RewardModel, train_reward_model
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.evals.verify.task import VerifiableTask
from whorl.models import LanguageModel

COMMON: dict[str, Any] = {"dtype": "float32", "lr_scale": 0.2}
LORA = LoRAConfig(rank=2)


class Curve:
    """A callback that stores one metric of each step."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.curve: list[float] = []

    def __call__(self, step: int, metrics: dict[str, float], *_: object) -> None:
        self.curve.append(metrics[self.metric])


def _network(model: LanguageModel | None = None, **options: Any) -> PolicyModel:
    forbidden = banned_ids(scribe(), BYTES_VOCAB, len(scribe().tokenizer.token_bytes))
    return PolicyModel(model or decoder(), banned_ids=forbidden, **options)


def _result(network: PolicyModel, seen: Curve) -> Result:
    return Result(bits={"weights": weight_hash(network)}, curve=seen.curve)


def _pairs() -> list[PreferencePair]:
    write = scribe().prompt_completion
    return [PreferencePair(write(f"{i}>", str(i) * (1 + i % 3)), write(f"{i}>", "zz")) for i in range(20)]


def _sft(lora: LoRAConfig | None) -> Result:
    config = SFTConfig(epochs=4, seq_len=48, batch_size=4, replicas=1, lora=lora, **COMMON)
    network, seen = _network(lora=lora), Curve("nll")
    fine_tune(network, sums(96), config, pad_id=bytes_tokenizer().pad_id, callback=seen)
    return _result(network, seen)


@case("sft")
def _full() -> Result:
    return _sft(None)


@case("sft-lora")
def _lora() -> Result:
    return _sft(LORA)


def _preference(objective: Any) -> Result:
    config = PreferenceConfig(
        objective=objective,
        epochs=2 if objective == "kto" else 4,
        seq_len=32,
        batch_size=4,
        optimizer="adamw",
        replicas=1,
        **COMMON,
    )
    network, seen = _network(), Curve("loss")
    train_preferences(network, _pairs(), config, pad_id=bytes_tokenizer().pad_id, callback=seen)
    return _result(network, seen)


@case("dpo")
def _dpo() -> Result:
    return _preference("dpo")


@case("kto")
def _kto() -> Result:
    return _preference("kto")


@case("reward-model")
def _reward() -> Result:
    config = RewardConfig(epochs=4, seq_len=32, batch_size=4, replicas=1, **COMMON)
    model, seen = RewardModel(decoder(), seed=3), Curve("loss")
    train_reward_model(model, _pairs(), config, pad_id=bytes_tokenizer().pad_id, callback=seen)
    return _result(model, seen)


def _grpo(**options: Any) -> Result:
    config = RLConfig(
        algorithm="grpo",
        steps=20,
        prompts_per_step=3,
        group_size=4,
        max_completion_tokens=5,
        max_seq_len=24,
        optimizer="adamw",
        replicas=1,
        kl=KLConfig(coef=0.1),
        **COMMON,
        **options,
    )
    tasks = [
        VerifiableTask(id=str(i), prompt=f"{i}+1=", verifier="format(.*[0-9].*)", answer=str(i + 1))
        for i in range(12)
    ]
    seen = Curve("entropy")
    with scratch() as folder:
        bytes_tokenizer(folder)
        network = _network(temperature=config.temperature)
        worker = RolloutWorker(
            network.model.config,
            "float32",
            folder,
            tasks,
            config.group_size,
            config.max_completion_tokens,
            config.max_seq_len,
            config.temperature,
            Curriculum([0.0] * len(tasks)),
            threads=1,
        )
        # The reference differs from the policy: at KL 0 gradients would be rounding errors, which AdamW amplifies.
        train_policy(
            network, worker, config, reference=frozen_reference(decoder(seed=7), network), callback=seen
        )
    return _result(network, seen)


@case("grpo")
def _in_line() -> Result:
    return _grpo()


@case("grpo-one-worker")
def _one_worker() -> Result:
    """One worker process in lockstep: it samples with the weights that were just published."""
    return _grpo(async_rollout=AsyncRolloutConfig(workers=1, max_policy_lag=0))


def _distil(**options: Any) -> Callable[[], Result]:
    def run() -> Result:
        config = DistilConfig(
            epochs=5, batch_size=12, seq_len=24, max_completion_tokens=5, **COMMON, **options
        )
        teacher, seen = decoder(seed=7), Curve("kl")
        network = _network(make_student(teacher, StudentConfig(n_layers=1)))
        train_student(
            network,
            LiveTeacher(teacher),
            sums(48),
            config,
            example_tokenizer=scribe(),
            pad_id=bytes_tokenizer().pad_id,
            callback=seen,
        )
        return _result(network, seen)

    return run


case("distil")(_distil())
case("distil-on-policy")(_distil(on_policy_fraction=0.5, sync_every=2))
