"""Replicas of a policy: the same completions and steps up to rounding, and errors that end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.align.byte_model import network
from tests.support.align.kill_at_step import kill_replicas_at
from tests.support.align.rl_policies import SMALL, train
from tests.support.align.stage_inputs import same_weights

from whorl.align.config import KLConfig, LoRAConfig, RLConfig
from whorl.align.rl.replicas import ReplicaGroup, choose_rl_replicas
from whorl.align.rl.rollout import RolloutWorker
from whorl.parallel.process_group import ProcessGroup, ReplicaError

FOUR = SMALL.model_copy(update={"prompts_per_step": 4})
pytestmark = pytest.mark.usefixtures("one_runner")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"algorithm": "ppo", "update_epochs": 2, "minibatches": 2},
        {"algorithm": "dapo", "dynamic_sampling_rounds": 2, "curriculum": "variance"},
        {"algorithm": "rloo", "kl": KLConfig(coef=0.1, target_kl=0.01), "lora": LoRAConfig(rank=2)},
    ],
)
def test_replicas_match_single_process(change: dict[str, Any], folder: Path) -> None:
    threads = torch.get_num_threads()
    one, history, seen = train(folder, FOUR.model_copy(update={**change, "replicas": 1}))
    two, history_two, seen_two = train(folder, FOUR.model_copy(update={**change, "replicas": 2}))
    assert torch.get_num_threads() == threads  # restored
    for a, b in zip(seen, seen_two, strict=True):
        assert torch.equal(a.batch["targets"], b.batch["targets"])
        assert torch.equal(a.reward, b.reward) and (a.resampled_groups, a.failed_verifications) == (
            b.resampled_groups,
            b.failed_verifications,
        )
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)
    for x, y in zip(history, history_two, strict=True):
        assert set(x) == set(y)
        assert y["logprob_diff_max"] < 1e-4 and y["loss_tokens"] == x["loss_tokens"]
        assert y["loss"] == pytest.approx(x["loss"], abs=1e-4)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-2, abs=1e-5)


def test_killed_replica_ends_run_and_resume_works(folder: Path, tmp_path: Path) -> None:
    config = FOUR.model_copy(update={"replicas": 2})
    whole, _, _ = train(folder, config)
    with pytest.raises(ReplicaError, match="SIGKILL"):
        train(folder, config, checkpoint_dir=tmp_path, at=kill_replicas_at(2))
    again, history, _ = train(folder, config, checkpoint_dir=tmp_path)
    assert 0 < len(history) < config.steps
    assert same_weights(whole, again)


def test_uneven_shards_stop_at_same_time(folder: Path) -> None:
    config = FOUR.model_copy(
        update={"replicas": 3, "steps": 10**6, "max_train_seconds": 0.5, "dynamic_sampling_rounds": 1}
    )
    _, history, _ = train(folder, config)
    assert 1 <= len(history) < 10**5


def test_replica_error_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RolloutWorker, "__getstate__", lambda self: {**vars(self), "tokenizer_path": Path("/nowhere")}
    )
    with pytest.raises(ReplicaError, match=r"replica 1 failed:(.|\n)*nowhere"):
        train(folder, FOUR.model_copy(update={"replicas": 2}))


def test_choose_rl_replicas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert choose_rl_replicas(SMALL, net, 24) == 1  # a stage of milliseconds
    long = SMALL.model_copy(update={"steps": 10**9})
    assert choose_rl_replicas(long, net, 24) == SMALL.prompts_per_step
    assert choose_rl_replicas(long.model_copy(update={"replicas": 2}), net, 24) == 2
    assert choose_rl_replicas(long, net, 24, uses_reward_model=True) == 1
    many = long.model_copy(update={"prompts_per_step": 12})
    assert choose_rl_replicas(many, net, 24) == 6  # two rounds, as with eight
    ahead = long.async_rollout.model_copy(update={"workers": 1})
    assert choose_rl_replicas(long.model_copy(update={"async_rollout": ahead}), net, 24) == 1
    with pytest.raises(ValueError, match="use one of them"):
        RLConfig(replicas=2, async_rollout=ahead)


def test_shards_are_contiguous_and_cover_all() -> None:
    for n in range(10):
        for size in (1, 2, 3, 7):
            shares = [ReplicaGroup(ProcessGroup(rank, size)).shard(n) for rank in range(size)]
            assert [i for share in shares for i in share] == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
