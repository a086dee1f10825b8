"""Replicas of the stages that go through a data set: the steps of one but for rounding, and a death that is heard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.align.preference import test_dpo as test_preferences
from tests.align.preference import test_reward_model
from tests.align.stage.test_sft import SETTINGS, Written
from tests.support.align.byte_model import decoder, network, sums, tokenizer
from tests.support.align.kill_at_step import kill_replicas_at

from whorl.align.config import LoRAConfig, SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.dpo import train_preferences
from whorl.align.preference.reward_model import RewardModel, train_reward_model
from whorl.align.stage.sft import fine_tune
from whorl.align.stage.trainer import choose_replicas
from whorl.models import make_model
from whorl.models.transformer_config import AttentionConfig, MoEConfig, TransformerConfig
from whorl.parallel.process_group import ReplicaError
from whorl.tokens.shards import write_shards
from whorl.tracking.seeds import generator

SHORT = SETTINGS.model_copy(update={"epochs": 2})
Told = list[dict[str, float]]


def train(
    settings: SFTConfig,
    net: PolicyModel | None = None,
    *,
    at: Callable[[int], None] = lambda step: None,
    **rest: Any,
) -> tuple[PolicyModel, Told]:
    net, seen = net or network(lora=settings.lora), []

    def observe(step: int, metrics: dict[str, float]) -> None:
        seen.append(metrics)
        at(step)

    fine_tune(net, sums(60), settings, pad_id=tokenizer().pad_id, callback=observe, **rest)
    return net, seen


def held_together(one: PolicyModel, told: Told, two: PolicyModel, told_two: Told) -> None:
    """Weights and metrics, up to the rounding of sums."""
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)
    for x, y in zip(told, told_two, strict=True):
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
    documents = [Written(f"{n}", "test", f"{n}.txt", 0, f"x = {n}\n" * 20) for n in range(40)]
    write_shards(documents, tokenizer(), tmp_path, "train")  # type: ignore[arg-type]  # as good as a Document
    rest = {"replay_data": tmp_path} if "replay_fraction" in change else {}
    said: list[str] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    one = train(SHORT.model_copy(update={**change, "replicas": 1}), **rest)
    two = train(SHORT.model_copy(update={**change, "replicas": 2}), log=said.append, **rest)
    assert said == ["2 replicas train, 1 thread each"] and used[-2:] == [1, 2]  # and as before at the end
    held_together(*one, *two)


def test_experts_are_balanced_over_replicas() -> None:
    heads = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16)
    shape = TransformerConfig(
        vocab_size=264, d_model=32, n_layers=2, mlp_hidden=32, max_length=64, mixers={"full": heads},
        experts=MoEConfig(n_experts=4, top_k=2, hidden=16, bias_balance=True),
    )  # fmt: skip
    found = []
    for n in (1, 2):
        net = PolicyModel(make_model(shape, generator(0, "weights")))
        found.append(train(SHORT.model_copy(update={"replicas": n, "epochs": 1}), net))
        biases = [b for name, b in net.state_dict().items() if "bias" in name]
        assert any(b.any() for b in biases)
    held_together(*found[0], *found[1])


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_preference_replicas_match_single_process(objective: str) -> None:
    found = []
    for n in (1, 2):
        seen: Told = []
        net, other = network(), test_preferences.stranger()
        config = test_preferences.config(objective, batch_size=5, epochs=2, replicas=n)
        train_preferences(
            net, test_preferences.pairs(), config, pad_id=0, reference=other,
            callback=lambda _, m, seen=seen: seen.append(m),  # type: ignore[misc]
        )  # fmt: skip
        found.append((net, seen))
    held_together(*found[0], *found[1])
    if objective == "kto":
        assert all(m["kl"] > 0 for m in found[1][1])


def test_reward_replicas_match_single_process() -> None:
    found = []
    for n in (1, 2):
        seen: Told = []
        model = RewardModel(decoder())
        config = test_reward_model.config(epochs=2, batch_size=5, replicas=n)
        train_reward_model(
            model, test_reward_model.pairs(12), config, pad_id=0,
            callback=lambda _, m, seen=seen: seen.append(m),  # type: ignore[misc]
        )  # fmt: skip
        found.append((model, seen))
    held_together(*found[0], *found[1])


def test_killed_replica_ends_run_and_resume_works(tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"replicas": 2})
    whole, told = train(settings)
    with pytest.raises(ReplicaError, match="SIGKILL"):
        train(settings, checkpoint_dir=tmp_path, at=kill_replicas_at(3))
    again, rest = train(settings, checkpoint_dir=tmp_path)
    assert 0 < len(rest) < len(told)
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


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
