"""Golden cases of the stages after pretraining: about 20 steps each of a tiny decoder over bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from golden_case import Result, case, weight_hash
from golden_inputs import BYTES_VOCAB, bytes_tokenizer, decoder, scratch, scribe, sums

from whorl.align.config import (
    AheadConfig,
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
from whorl.align.distillation.teacher import Beside
from whorl.align.distillation.train import learn_from
from whorl.align.model.policy_model import Network, frozen
from whorl.align.model.sampling import never
from whorl.align.preference.dpo import prefer
from whorl.align.preference.pairs import Choice
from whorl.align.preference.reward_model import RewardModel, train_reward
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.evals.verify.task import Task
from whorl.models import LanguageModel

COMMON: dict[str, Any] = {"dtype": "float32", "share": 0.2}
LORA = LoRAConfig(rank=2)


class Curve:
    """An observer that keeps one metric of each step."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.curve: list[float] = []

    def __call__(self, step: int, metrics: dict[str, float], *_: object) -> None:
        self.curve.append(metrics[self.metric])


def _network(model: LanguageModel | None = None, **options: Any) -> Network:
    forbidden = never(scribe(), BYTES_VOCAB, len(scribe().tokenizer.token_bytes))
    return Network(model or decoder(), forbidden=forbidden, **options)


def _result(network: Network, seen: Curve) -> Result:
    return Result(bits={"weights": weight_hash(network)}, curve=seen.curve)


def _pairs() -> list[Choice]:
    write = scribe().answered
    return [Choice(write(f"{i}>", str(i) * (1 + i % 3)), write(f"{i}>", "zz")) for i in range(20)]


def _sft(lora: LoRAConfig | None) -> Result:
    config = SFTConfig(epochs=4, length=48, batch_rows=4, replicas=1, lora=lora, **COMMON)
    network, seen = _network(lora=lora), Curve("nll")
    fine_tune(network, sums(96), config, pad_id=bytes_tokenizer().pad_id, observe=seen)
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
        length=32,
        batch=4,
        matrices="adamw",
        replicas=1,
        **COMMON,
    )
    network, seen = _network(), Curve("loss")
    prefer(network, _pairs(), config, pad_id=bytes_tokenizer().pad_id, observe=seen)
    return _result(network, seen)


@case("dpo")
def _dpo() -> Result:
    return _preference("dpo")


@case("kto")
def _kto() -> Result:
    return _preference("kto")


@case("reward-model")
def _reward() -> Result:
    config = RewardConfig(epochs=4, length=32, batch=4, replicas=1, **COMMON)
    model, seen = RewardModel(decoder(), seed=3), Curve("loss")
    train_reward(model, _pairs(), config, pad_id=bytes_tokenizer().pad_id, observe=seen)
    return _result(model, seen)


def _grpo(**options: Any) -> Result:
    config = RLConfig(
        algorithm="grpo", steps=20, prompts=3, answers=4, max_tokens=5, length=24, matrices="adamw", replicas=1,
        kl=KLConfig(weight=0.1), **COMMON, **options,
    )  # fmt: skip
    tasks = [
        Task(id=str(i), prompt=f"{i}+1=", verifier="format(.*[0-9].*)", answer=str(i + 1)) for i in range(12)
    ]
    seen = Curve("entropy")
    with scratch() as folder:
        bytes_tokenizer(folder)
        network = _network(temperature=config.temperature)
        worker = RolloutWorker(
            network.model.config, "float32", folder, tasks, config.answers, config.max_tokens, config.length,
            config.temperature, Curriculum([0.0] * len(tasks)), threads=1,
        )  # fmt: skip
        # Another model than the policy: a divergence of 0 would make gradients of rounding errors, which AdamW scales up.
        train_policy(network, worker, config, reference=frozen(decoder(seed=7), network), observe=seen)
    return _result(network, seen)


@case("grpo")
def _in_line() -> Result:
    return _grpo()


@case("grpo-one-worker")
def _one_worker() -> Result:
    """One worker process in lockstep: it samples with the weights that were just published."""
    return _grpo(ahead=AheadConfig(workers=1, max_lag=0))


def _distil(**options: Any) -> Callable[[], Result]:
    def run() -> Result:
        config = DistilConfig(epochs=5, batch_texts=12, length=24, max_tokens=5, **COMMON, **options)
        teacher, seen = decoder(seed=7), Curve("kl")
        network = _network(make_student(teacher, StudentConfig(layers=1)))
        learn_from(
            network, Beside(teacher), sums(48), config, scribe=scribe(), pad_id=bytes_tokenizer().pad_id, observe=seen
        )  # fmt: skip
        return _result(network, seen)

    return run


case("distil")(_distil())
case("distil-on-policy")(_distil(own=0.5, refresh=2))
