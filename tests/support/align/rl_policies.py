"""A small policy that learns from rewards: what the tests of its loop share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.align.byte_model import decoder, network
from whorl.align.config import RLConfig
from whorl.align.data.curriculum import Curriculum
from whorl.align.model.policy_model import frozen
from whorl.align.rl.experience import Experience
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.evals.verify.task import Task

SMALL = RLConfig(
    steps=4,
    prompts=3,
    answers=4,
    max_tokens=5,
    length=24,
    share=0.2,
    matrices="adamw",
    checkpoint_seconds=1e-9,
)


class Killed(Exception):
    pass


def tasks(n: int = 12, verifier: str = "format([0-9].*)") -> list[Task]:
    return [Task(id=str(i), prompt=f"{i}+1=", verifier=verifier, answer=str(i + 1)) for i in range(n)]


def train(
    folder: Path,
    config: RLConfig = SMALL,
    *,
    kill: int = 0,
    at: Any = lambda step: None,
    verifier: str = "format([0-9].*)",
    **rest: Any,
):  # type: ignore[no-untyped-def]
    net = network(temperature=config.temperature, lora=config.lora, critic=config.critic)
    told: list[dict[str, float]] = []
    seen: list[Experience] = []
    given = tasks(verifier=verifier)
    worker = RolloutWorker(
        net.model.config, "float32", folder, given, config.answers, config.max_tokens, config.length,
        config.temperature, Curriculum([0.0] * len(given), rule=config.curriculum), config.draws_again,
        config.ahead.in_flight,
        threads=1 if config.ahead.workers else None,
    )  # fmt: skip

    def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
        told.append(metrics)
        seen.append(experience)
        at(step)
        if step == kill:
            raise Killed

    reference = frozen(decoder(), net) if config.kl.weight else None
    train_policy(net, worker, config, reference=reference, observe=observe, **rest)
    return net, told, seen
