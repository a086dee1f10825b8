"""Every stage after pretraining as a line: from a model's folder to a network that has learnt a few steps, on a device.

The way of the steps of a recipe (`recipes/steps/align*.py`) in small: open, add, learn, ask. `weights` of what comes out
are on the CPU, so that two devices can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.support.align.byte_model import decoder, scribe, sums, tokenizer
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
from whorl.align.distillation.teacher import Beside, tell
from whorl.align.distillation.train import learn_from
from whorl.align.model.batch import lay
from whorl.align.model.policy_model import Network, frozen
from whorl.align.preference.dpo import measure, prefer
from whorl.align.preference.pairs import Choice
from whorl.align.preference.reward_model import RewardModel, load_reward, save_reward, train_reward
from whorl.align.preference.reward_report import report
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.io import network_of, open_model, save_stage, solve
from whorl.align.stage.sft import fine_tune
from whorl.evals.verify.task import Task
from whorl.models import save_model
from whorl.tracking.seeds import generator

LORA = LoRAConfig(rank=2)
COMMON: dict[str, Any] = {"dtype": "float32", "checkpoint_seconds": 1e-9, "micro_tokens": 96, "share": 0.2}
TASKS = [Task(id=str(i), prompt=f"{i}+1=", verifier="format([0-9].*)", answer=str(i + 1)) for i in range(6)]
PAD = tokenizer().pad_id


class Killed(Exception):
    pass


class Lesson:
    """What a stage is given, and what is seen of it.

    device: as `Machine.device`; scratch: for checkpoints; kill: the step that it is killed behind.
    """

    def __init__(self, folder: Path, device: str, scratch: Path | None = None, kill: int = 0) -> None:
        self.folder, self.device, self.scratch, self.kill = folder, device, scratch, kill
        self.machine: Any = SimpleNamespace(device=device)
        self.told: list[dict[str, float]] = []

    def observe(self, step: int, metrics: dict[str, float], *_: Any) -> None:
        self.told.append({n: v for n, v in metrics.items() if "seconds" not in n})
        if step == self.kill:
            raise Killed

    def network(self, config: Any, **options: Any) -> Network:
        return network_of(open_model(self.folder, config, self.machine), scribe(), config, room=48, **options)

    @property
    def usual(self) -> dict[str, Any]:
        return {"observe": self.observe, "scratch": self.scratch}

    def solved(self, network: Network) -> None:
        said, verdicts = solve(network, scribe(), TASKS, max_tokens=4, length=24)
        self.told.append(
            {"said": float(sum(map(len, said))), "passed": float(sum(v.passed for v in verdicts))}
        )


def begin(folder: Path) -> Path:
    """The folder of a model of bytes, with its tokenizer."""
    save_model(decoder(), folder)
    tokenizer(folder)
    return folder


def weights(network: Network) -> dict[str, Tensor]:
    return {n: p.detach().cpu().clone() for n, p in network.named_parameters()}


def _sft(lesson: Lesson, **options: Any) -> Network:
    config = SFTConfig(epochs=2, length=48, batch_rows=4, **COMMON, **options)
    network = lesson.network(config)
    fine_tune(network, sums(24), config, pad_id=PAD, **lesson.usual)
    save_stage(
        network, lesson.folder, lesson.folder.parent / f"out-{lesson.device.partition(':')[0]}-{len(options)}"
    )
    return network


def _prefer(lesson: Lesson, objective: Any) -> Network:
    config = PreferenceConfig(objective=objective, length=32, batch=4, matrices="adamw", **COMMON)
    network = lesson.network(config)
    before = frozen(open_model(lesson.folder, config, lesson.machine), network)
    prefer(network, _pairs(), config, pad_id=PAD, **lesson.usual)
    lesson.told.append(measure(network, _pairs(), config, pad_id=PAD, reference=before))
    return network


def _reward(lesson: Lesson, lora: LoRAConfig | None = None) -> Network:
    config = RewardConfig(length=32, batch=4, matrices="adamw", lora=lora, **COMMON)
    model = RewardModel(open_model(lesson.folder, config, lesson.machine), lora=lora, seed=3)
    train_reward(model, _pairs(), config, pad_id=PAD, **lesson.usual)
    lesson.told.append({"margin": report(model, _pairs()).margin})
    return model


def _rlvr(lesson: Lesson, judged: bool = False, **options: Any) -> Network:
    config = RLConfig(
        steps=3, prompts=2, answers=4, max_tokens=4, length=24, matrices="adamw", **COMMON, **options
    )  # fmt: skip
    network = lesson.network(config, critic=config.algorithm == "ppo")
    reference = (
        frozen(open_model(lesson.folder, config, lesson.machine), network) if config.kl.weight else None
    )
    judge = None
    if judged:
        judge = lesson.folder.parent / f"judge-{lesson.device.partition(':')[0]}"
        if not judge.exists():
            model = RewardModel(open_model(lesson.folder, config, lesson.machine), seed=3)
            save_reward(model, judge, config=RewardConfig(), trained_on={}, base=lesson.folder)
            assert load_reward(judge, device=lesson.device)[0].device == network.device
    worker = RolloutWorker(
        network.model.config, "float32", lesson.folder, TASKS, config.answers, config.max_tokens, config.length,
        config.temperature, Curriculum([0.0] * len(TASKS)), judge=judge,
    )  # fmt: skip
    train_policy(network, worker, config, reference=reference, **lesson.usual)
    if not config.ahead.workers:
        assert worker._engine.model.embedding.device == network.device
    lesson.solved(network)
    return network


def ahead(lesson: Lesson, device: Any = "auto") -> Network:
    """Reinforcement learning with a worker in a process of its own; in lock-step, so that every record tells parity."""
    return _rlvr(lesson, ahead=AheadConfig(workers=1, max_lag=0, device=device))


def _distil(lesson: Lesson, top: int = 0, student: StudentConfig | None = None, **options: Any) -> Network:
    config = DistilConfig(epochs=2, batch_texts=6, length=24, max_tokens=5, **COMMON, **options)
    made = student or StudentConfig(layers=1)
    teacher = open_model(lesson.folder, config, lesson.machine)
    teacher.room = 48
    texts = sums(12)
    rows = [lay(texts, PAD)["tokens"]]
    network = network_of(
        make_student(teacher, made, generator=generator(3), rows=rows), scribe(), config, room=48
    )
    who: Any = tell(teacher, texts, pad_id=PAD, top=top) if top else Beside(teacher)
    learn_from(network, who, texts, config, scribe=scribe(), pad_id=PAD, **lesson.usual)
    return network


def _pairs() -> list[Choice]:
    writer = scribe()
    return [
        Choice(writer.answered(f"{i}>", str(i) * (1 + i % 3)), writer.answered(f"{i}>", "zz"))
        for i in range(10)
    ]


STAGES: dict[str, Callable[[Lesson], Network]] = {
    "sft": _sft,
    "sft-rows": lambda lesson: _sft(lesson, packing=False),
    "sft-adapter": lambda lesson: _sft(lesson, packing=True, lora=LORA),
    "dpo": lambda lesson: _prefer(lesson, "dpo"),
    "kto": lambda lesson: _prefer(lesson, "kto"),
    "orpo": lambda lesson: _prefer(lesson, "orpo"),
    "reward": _reward,
    "reward-adapter": lambda lesson: _reward(lesson, LORA),
    "grpo": lambda lesson: _rlvr(lesson, kl=KLConfig(weight=0.1)),
    "ppo": lambda lesson: _rlvr(lesson, algorithm="ppo", epochs=2, minibatches=2, kl=KLConfig(weight=0.1)),
    "rloo-judged": lambda lesson: _rlvr(lesson, judged=True, algorithm="rloo", lora=LORA),
    "distil-own": lambda lesson: _distil(lesson, own=0.5, refresh=2),
    "distil-told": lambda lesson: _distil(lesson, top=6, student=StudentConfig(mlp_hidden=24)),
    "distil-narrow": lambda lesson: _distil(lesson, packing=False, student=StudentConfig(width=0.5), own=1.0),
}
