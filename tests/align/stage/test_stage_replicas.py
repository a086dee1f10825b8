"""Replicas of the data-set stages: the steps of one process up to rounding, and errors that end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.align.byte_model import decoder, network
from tests.support.align.kill_at_step import kill_replicas_at
from tests.support.align.stage_inputs import (
    MOE,
    SFT,
    density_pairs,
    letter_pairs,
    other_reference,
    preference_config,
    reward_config,
    same_weights,
    train_sft,
    write_replay_tokens,
)

from whorl.align.config import LoRAConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.dpo import train_preferences
from whorl.align.preference.reward_model import RewardModel, train_reward_model
from whorl.align.stage.trainer import choose_replicas
from whorl.models import make_model
from whorl.parallel.process_group import ReplicaError
from whorl.tracking.seeds import generator

SHORT = SFT.model_copy(update={"epochs": 2})
History = list[dict[str, float]]


def assert_runs_close(one: PolicyModel, history: History, two: PolicyModel, history_two: History) -> None:
    """Compare weights and metrics up to the rounding of sums."""
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)
    for x, y in zip(history, history_two, strict=True):
        assert set(x) == set(y) and y["loss_tokens"] == x["loss_tokens"]
        for name in set(x) - {"grad_norm"}:
            if not name.startswith("time/"):
                assert y[name] == pytest.approx(x[name], rel=1e-3, abs=1e-4), name
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-2, abs=1e-5)


@pytest.mark.parametrize(
    "change", [{}, {"packing": False, "batch_size": 9}, {"lora": LoRAConfig(rank=2), "replay_fraction": 0.5}]
)
def test_sft_replicas_match_single_process(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = {"replay_data": write_replay_tokens(tmp_path)} if "replay_fraction" in change else {}
    messages: list[str] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    one = train_sft(SHORT.model_copy(update={**change, "replicas": 1}), **rest)
    two = train_sft(SHORT.model_copy(update={**change, "replicas": 2}), log=messages.append, **rest)
    assert messages == ["2 replicas train, 1 thread each"] and used[-2:] == [1, 2]  # restored at the end
    assert_runs_close(*one, *two)


def test_experts_are_balanced_over_replicas() -> None:
    found = []
    for n in (1, 2):
        net = PolicyModel(make_model(MOE, generator(0, "weights")))
        found.append(train_sft(SHORT.model_copy(update={"replicas": n, "epochs": 1}), net))
        biases = [b for name, b in net.state_dict().items() if "bias" in name]
        assert any(b.any() for b in biases)
    assert_runs_close(*found[0], *found[1])


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_preference_replicas_match_single_process(objective: str) -> None:
    found = []
    for n in (1, 2):
        seen: History = []
        net, other = network(), other_reference()
        config = preference_config(objective, batch_size=5, epochs=2, replicas=n)
        train_preferences(
            net, letter_pairs(), config, pad_id=0, reference=other,
            callback=lambda _, m, seen=seen: seen.append(m),  # type: ignore[misc]
        )  # fmt: skip
        found.append((net, seen))
    assert_runs_close(*found[0], *found[1])
    if objective == "kto":
        assert all(m["kl"] > 0 for m in found[1][1])


def test_reward_replicas_match_single_process() -> None:
    found = []
    for n in (1, 2):
        seen: History = []
        model = RewardModel(decoder())
        config = reward_config(epochs=2, batch_size=5, replicas=n)
        train_reward_model(
            model, density_pairs(12), config, pad_id=0,
            callback=lambda _, m, seen=seen: seen.append(m),  # type: ignore[misc]
        )  # fmt: skip
        found.append((model, seen))
    assert_runs_close(*found[0], *found[1])


def test_killed_replica_ends_run_and_resume_works(tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"replicas": 2})
    whole, history = train_sft(settings)
    with pytest.raises(ReplicaError, match="SIGKILL"):
        train_sft(settings, checkpoint_dir=tmp_path, at=kill_replicas_at(3))
    again, rest = train_sft(settings, checkpoint_dir=tmp_path)
    assert 0 < len(rest) < len(history)
    assert same_weights(whole, again)


def test_choose_replicas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert (
        choose_replicas(net, None, positions=1e3, length=48, max_replicas=16) == 1
    )  # a stage of milliseconds
    assert choose_replicas(net, None, positions=1e12, length=48, max_replicas=16) == 8
    assert choose_replicas(net, None, positions=1e12, length=48, max_replicas=3) == 3
    assert choose_replicas(net, 2, positions=1e3, length=48, max_replicas=16) == 2
    assert choose_replicas(net, 2, positions=1e3, length=48, max_replicas=1) == 1
