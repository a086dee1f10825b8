"""A small policy that learns from rewards, for the tests of its loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.align.byte_model import decoder, network
from tests.support.align.kill_at_step import record
from whorl.align.data.curriculum import Curriculum
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.rl.config import RLConfig, RLRunConfig
from whorl.align.rl.experience import Experience
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.evals.grading.task import VerifiableTask

SMALL = RLConfig(
    steps=4, prompts_per_step=3, group_size=4, max_completion_tokens=5, max_seq_len=24, lr_scale=0.2,
    optimizer="adamw", run=RLRunConfig(checkpoint_seconds=1e-9),
)  # fmt: skip


def tasks(n: int = 12, verifier: str = "format([0-9].*)") -> list[VerifiableTask]:
    return [VerifiableTask(str(i), prompt=f"{i}+1=", verifier=verifier, answer=str(i + 1)) for i in range(n)]


def worker_of(
    net: PolicyModel,
    folder: Path,
    config: RLConfig = SMALL,
    verifier: str = "format([0-9].*)",
    worker_class: type[RolloutWorker] = RolloutWorker,
) -> RolloutWorker:
    """A worker on 12 tasks, for a network of the byte model's shape."""
    given = tasks(verifier=verifier)
    return worker_class(
        net.model.config, "float32", folder, given, config.group_size, config.max_completion_tokens, config.max_seq_len,
        config.temperature, Curriculum([0.0] * len(given), rule=config.sampling.curriculum), config.resolved_sampling_rounds,
        config.async_rollout.update_in_flight, threads=1 if config.async_rollout.workers else None,
        environment=config.environment,
    )  # fmt: skip


def train(
    folder: Path,
    config: RLConfig = SMALL,
    *,
    kill: int = 0,
    at: Any = None,
    verifier: str = "format([0-9].*)",
    worker_class: type[RolloutWorker] = RolloutWorker,
    **rest: Any,
):  # type: ignore[no-untyped-def]
    """Train on 12 tasks; return the policy, the metrics and the experience of each step. kill: as in `record`."""
    net = network(temperature=config.temperature, lora=config.model.lora, critic=config.uses_critic)
    seen: list[Experience] = []
    history, callback = record(kill, at)
    worker = worker_of(net, folder, config, verifier, worker_class)

    def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
        seen.append(experience)
        callback(step, metrics)

    reference = frozen_reference(decoder(), net) if config.kl.coef else None
    train_policy(net, worker, config, reference=reference, callback=observe, **rest)
    return net, history, seen
