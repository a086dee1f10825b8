"""Policy optimization end to end: learning, bitwise resume, worker processes, metrics."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import ValidationError
from tests.support.align.byte_model import network, scribe
from tests.support.align.rl_policies import SMALL, Killed, tasks, train
from tests.support.align.stage_inputs import same_weights

from whorl.align.config import AsyncRolloutConfig, KLConfig, LoRAConfig, PolicyLossOverrides, RLConfig
from whorl.align.rl.advantages import resolve_method
from whorl.align.rl.rollout import filter_by_length
from whorl.align.rl.train import train_policy
from whorl.errors import ConfigError, ProducerError
from whorl.evals.verify.task import VerifiableTask

pytestmark = pytest.mark.usefixtures("one_runner")


@pytest.mark.parametrize("algorithm", ["reinforce", "rloo", "ppo", "grpo", "dr_grpo", "dapo", "gspo"])
def test_every_algorithm_learns_reward(algorithm: str, folder: Path) -> None:
    """The reward is for a completion that starts with a digit, which is rare at first."""
    config = SMALL.model_copy(
        update={
            "algorithm": algorithm, "steps": 40, "lr_scale": 1.0, "prompts_per_step": 8, "group_size": 8,
            "max_completion_tokens": 2,
            "schedule": SMALL.schedule.model_copy(update={"kind": "constant", "decay_ratio": 0.5}),
        }
    )  # fmt: skip
    before = dict(network().named_parameters())
    net, history, _ = train(folder, config)
    assert np.mean([t["accuracy"] for t in history[:5]]) < 0.3
    assert np.mean([t["accuracy"] for t in history[-5:]]) > 0.7
    assert max(t["logprob_diff_max"] for t in history) < 1e-4
    changed = {n for n, p in net.named_parameters() if n not in before or not torch.equal(p, before[n])}
    assert {n for n in before if "memory" not in n} <= changed


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"algorithm": "ppo", "update_epochs": 2, "minibatches": 2},
        {"lora": LoRAConfig(rank=2)},
        {"kl": KLConfig(coef=0.1, target_kl=0.01), "curriculum": "variance", "dynamic_sampling_rounds": 1},
    ],
)
def test_resume_gives_same_bits(change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    config = SMALL.model_copy(update=change)
    whole, _, _ = train(folder, config)
    with pytest.raises(Killed):
        train(folder, config, checkpoint_dir=tmp_path, kill=3)
    again, history, _ = train(folder, config, checkpoint_dir=tmp_path)
    assert len(history) < config.steps
    assert same_weights(whole, again)


LEARNING = SMALL.model_copy(
    update={
        "prompts_per_step": 6,
        "group_size": 8,
        "max_completion_tokens": 2,
        "lr_scale": 1.0,
        "steps": 6,
        "curriculum": "variance",
    }
)


def test_lockstep_worker_process_matches_serial(folder: Path) -> None:
    """A worker whose rollouts may not be older than the weights equals serial sampling, bit for bit."""
    serial, history, _ = train(folder, LEARNING)
    assert sum(t["grad_norm"] > 0 for t in history) >= 3
    ahead = AsyncRolloutConfig(workers=1, max_policy_lag=0, importance="none")
    other, _, seen = train(folder, LEARNING.model_copy(update={"async_rollout": ahead}))
    for step, experience in enumerate(seen):
        assert set(experience.batch["version"][experience.batch["loss_mask"]].tolist()) == {step}
    assert same_weights(serial, other)


@pytest.mark.xdist_group("ray")
def test_ray_worker_matches_serial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = os.pathsep.join(p for p in sys.path if p)
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "WHORL_NATIVE": "0"}},
    )  # fmt: skip
    try:
        ahead = AsyncRolloutConfig(workers=1, backend="ray", max_policy_lag=0, importance="none")
        other, _, _ = train(folder, LEARNING.model_copy(update={"async_rollout": ahead}))
    finally:
        ray.shutdown()
    serial, _, _ = train(folder, LEARNING)
    assert same_weights(serial, other)


def test_async_workers_report_policy_lag(folder: Path) -> None:
    ahead = AsyncRolloutConfig(workers=1, prefetch=2, max_policy_lag=2, importance="truncate")
    _, history, seen = train(folder, SMALL.model_copy(update={"async_rollout": ahead, "steps": 8}))
    assert max(t["policy_lag/max"] for t in history) <= 2
    for step, experience in enumerate(seen):
        versions = experience.batch["version"][experience.batch["loss_mask"]]
        assert (versions <= step).all() and (versions >= step - 3).all()
    assert all("importance/effective_sample_size" in t for t in history)


def test_equal_rewards_change_nothing(folder: Path) -> None:
    net, history, _ = train(folder, verifier="exact")
    assert all(t["zero_std_groups"] == SMALL.prompts_per_step and t["grad_norm"] == 0 for t in history)
    assert same_weights(net, network())


@pytest.mark.parametrize(
    ("algorithm", "changes", "becomes"),
    [
        ("grpo", {"loss": {"scale_rewards": "none", "aggregation": "constant"}}, "dr_grpo"),
        ("grpo", {"loss": {"ratio": "sequence"}, "clip": (3e-4, 4e-4)}, "gspo"),
        ("reinforce", {"loss": {"baseline": "leave_one_out"}}, "rloo"),
        (
            "ppo",
            {"loss": {"baseline": "group", "scale_rewards": "unbiased", "aggregation": "sequence"}},
            "grpo",
        ),
        (
            "gspo",
            {"loss": {"ratio": "none", "aggregation": "token", "baseline": "batch", "scale_rewards": "none"}},
            "reinforce",
        ),
    ],
)
def test_overrides_turn_algorithm_into_another(
    algorithm: str, changes: dict[str, Any], becomes: str, folder: Path
) -> None:
    given = {**SMALL.model_dump(exclude_unset=True), "update_epochs": 2, "steps": 2}
    net, _, _ = train(folder, RLConfig.model_validate({**given, **changes, "algorithm": algorithm}))
    assert same_weights(net, train(folder, RLConfig.model_validate({**given, "algorithm": becomes}))[0])
    assert not same_weights(net, train(folder, RLConfig.model_validate({**given, "algorithm": algorithm}))[0])


def test_dual_clip_override_is_applied() -> None:
    assert (
        resolve_method(SMALL.model_copy(update={"loss": PolicyLossOverrides(dual_clip=3.0)})).dual_clip == 3.0
    )


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_entropy_bonus_raises_entropy(lora: LoRAConfig | None, folder: Path) -> None:
    config = SMALL.model_copy(update={"loss": PolicyLossOverrides(entropy_coef=0.1), "lora": lora})
    _, history, _ = train(folder, config, verifier="exact")  # rewards without a signal
    assert history[-1]["entropy"] > history[0]["entropy"]


def test_verifier_error_is_counted(folder: Path) -> None:
    _, history, _ = train(folder, verifier="custom:json:loads")
    assert len(history) == SMALL.steps
    assert all(t["verifier_errors"] > 0 and np.isfinite(t["policy_loss"]) for t in history)


def kill_worker() -> None:
    workers = [p for p in psutil.Process().children() if "slots.producers" in " ".join(p.cmdline())]
    assert len(workers) == 1
    workers[0].kill()


def test_killed_worker_is_restarted(folder: Path) -> None:
    """Killed while sampling ahead, inside a completion or between two."""
    messages = list[str]()
    _, history, seen = train(
        folder, SMALL.model_copy(update={"async_rollout": AsyncRolloutConfig(workers=1), "steps": 6}), log=messages.append,
        at=lambda step: kill_worker() if step == 2 else None,
    )  # fmt: skip
    assert len(history) == 6 and sum(t["worker_restarts"] for t in history) == 1 and len(messages) == 1
    assert "(RolloutWorker, process" in messages[0] and "SIGKILL" in messages[0]
    assert all(np.isfinite(t["policy_loss"]) for t in history)
    for step, experience in enumerate(seen):
        versions = experience.batch["version"][experience.batch["loss_mask"]]
        assert (versions <= step).all() and (versions >= 0).all()


def test_killed_lockstep_worker_keeps_bits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed during verification; the next worker draws tasks from the learner's curriculum."""
    monkeypatch.setenv("WHORL_TEST_STRIKES", str(tmp_path))
    config, verifier = (
        LEARNING.model_copy(update={"prompts_per_step": 4}),
        "custom:tests.support.align.killing_verifier:verify",
    )
    serial, history, _ = train(folder, config, verifier=verifier)
    assert sum(t["grad_norm"] > 0 for t in history) >= 3
    ahead = AsyncRolloutConfig(workers=1, max_policy_lag=0, importance="none")
    other, history, _ = train(
        folder, config.model_copy(update={"async_rollout": ahead}), verifier=verifier,
        at=lambda step: (tmp_path / "armed").touch() if step == 3 else None,
    )  # fmt: skip
    assert [t["worker_restarts"] for t in history] == [0, 0, 0, 1, 0, 0]
    assert same_weights(serial, other)
    _, alive = psutil.wait_procs(
        [psutil.Process(n) for n in [int((tmp_path / "struck").read_text())] if psutil.pid_exists(n)],
        timeout=30,
    )
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]  # its children ended too


def test_worker_without_restarts_ends_run_and_resumes(folder: Path, tmp_path: Path) -> None:
    config = SMALL.model_copy(
        update={"async_rollout": AsyncRolloutConfig(workers=1), "steps": 9, "max_worker_restarts": 0}
    )
    with pytest.raises(ProducerError, match="SIGKILL"):
        train(folder, config, checkpoint_dir=tmp_path, at=lambda step: kill_worker() if step == 4 else None)
    _, history, _ = train(
        folder, config.model_copy(update={"max_worker_restarts": 1}), checkpoint_dir=tmp_path
    )
    assert 0 < len(history) < 9


def test_invalid_settings_are_rejected(folder: Path) -> None:
    worker: Any = None
    with pytest.raises(ConfigError, match="no reference"):
        train_policy(network(), worker, SMALL.model_copy(update={"kl": KLConfig(coef=0.1)}))
    with pytest.raises(ConfigError, match="needs a critic"):
        train_policy(network(), worker, SMALL.model_copy(update={"algorithm": "ppo"}))
    with pytest.raises(ConfigError, match="does not use a critic"):
        train_policy(network(critic=True), worker, SMALL)
    given = SMALL.model_dump(exclude_unset=True)
    for wrong, messages in (
        (
            {"group_size": 1, "algorithm": "ppo", "loss": {"baseline": "group"}},
            "group compares the completions",
        ),
        ({"algorithm": "rloo", "clip": (0.2, 0.2)}, "clip is set, but rloo has no ratio"),
        ({"loss": {"ratio": "none", "dual_clip": 3}}, "loss.dual_clip is set"),
        ({"async_rollout": {"importance": "trace", "importance_level": "mean"}}, "a trace needs level token"),
    ):
        with pytest.raises(ValidationError, match=messages):
            RLConfig.model_validate(given | wrong)
    assert RLConfig.model_validate(given | {"group_size": 1, "loss": {"baseline": "none"}}).group_size == 1


def test_filter_by_length_counts_rejected_tasks() -> None:
    long = VerifiableTask(id="long", prompt="x" * 40, answer="")
    found, left = filter_by_length(scribe(), [*tasks(3), long], 24, 5)
    assert [task.id for task in found] == ["0", "1", "2"]
    assert left == {"prompt longer than 19 ids": 1}
