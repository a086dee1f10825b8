"""Fine-tuning: learning, bitwise resume, replay, adapters, replicas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.align.byte_model import network, sums, tokenizer
from tests.support.align.kill_at_step import History, check_replicas, check_resume, kill_replicas_at
from tests.support.align.stage_inputs import MOE, SFT, train_sft, write_replay_tokens

from whorl.align.config import LoRAConfig, SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.io import load_stage_model, save_stage_model
from whorl.align.stage.sft import fine_tune
from whorl.align.stage.task import choose_replicas
from whorl.errors import ConfigError, DataError
from whorl.models import make_model
from whorl.tracking.seeds import generator
from whorl.train.resilience.oom_advice import OutOfMemoryError


def changed(**changes: Any) -> SFTConfig:
    return SFT.model_copy(update=changes)


@pytest.mark.parametrize("packing", [True, False])
def test_fine_tune_lowers_loss_of_all_parameters(packing: bool) -> None:
    net, seen = train_sft(changed(packing=packing, batch_size=4 if packing else 16))
    assert seen[-1]["nll"] < 0.6 * seen[0]["nll"]
    begun = dict(network().named_parameters())
    assert all(not torch.equal(p, begun[n]) for n, p in net.named_parameters() if "memory" not in n)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_resume_gives_same_bits(lora: LoRAConfig | None, tmp_path: Path) -> None:
    check_resume(partial(train_sft, changed(lora=lora, epochs=3)), tmp_path, kill=5)


def test_fine_tune_rejects_missing_data() -> None:
    with pytest.raises(DataError, match="no examples"):
        fine_tune(network(), [], SFT, pad_id=0)
    with pytest.raises(DataError, match="pretraining token set"):
        fine_tune(network(), sums(3), changed(replay_fraction=0.5), pad_id=0)


def test_replay_keeps_one_row_of_each_kind(tmp_path: Path) -> None:
    write_replay_tokens(tmp_path)
    for share, tokens in ((0.02, 48), (0.5, 2 * 40), (0.97, 48)):  # a row of pretraining is full
        _, seen = train_sft(changed(replay_fraction=share, epochs=1), replay_data=tmp_path)
        assert seen[0]["loss_tokens"] > tokens
    with pytest.raises(ConfigError, match="batch_size"):
        train_sft(changed(replay_fraction=0.5, batch_size=1), replay_data=tmp_path)


def test_separate_adapter_is_merged_by_next_stage(tmp_path: Path) -> None:
    settings = changed(lora=LoRAConfig(rank=2, merge=False), dtype="float32", epochs=1)
    net, _ = train_sft(settings)
    policy = {name: p.clone() for name, p in net.merged_weights().items()}
    before = tmp_path / "before"
    before.mkdir()
    tokenizer(before)
    save_stage_model(net, before, tmp_path / "out")
    machine = SimpleNamespace(torch_dtype=torch.float32, device="cpu")
    read = load_stage_model(tmp_path / "out", settings, machine)  # type: ignore[arg-type]
    for name, p in read.named_parameters():
        torch.testing.assert_close(p, policy[name])


@pytest.mark.parametrize(
    "change", [{}, {"packing": False, "batch_size": 9}, {"lora": LoRAConfig(rank=2), "replay_fraction": 0.5}]
)
def test_sft_replicas_match_single_process(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest: dict[str, Any] = {}
    if "replay_fraction" in change:
        rest["replay_data"] = write_replay_tokens(tmp_path)
    messages: list[str] = []
    used: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    check_replicas(lambda n: train_sft(changed(**change, epochs=2, replicas=n), log=messages.append, **rest))
    assert messages == ["2 replicas train, 1 thread each"] and used[-2:] == [1, 2]  # restored at the end


def test_experts_are_balanced_over_replicas() -> None:
    def train(n: int) -> tuple[PolicyModel, History]:
        net = PolicyModel(make_model(MOE, generator(0, "weights")))
        found = train_sft(changed(epochs=1, replicas=n), net)
        assert any(b.any() for name, b in net.state_dict().items() if "bias" in name)
        return found

    check_replicas(train)


def test_killed_replica_ends_run_and_resume_works(tmp_path: Path) -> None:
    train = partial(train_sft, changed(epochs=2, replicas=2))
    check_resume(train, tmp_path, OutOfMemoryError, "SIGKILL", at=kill_replicas_at(3))


def test_choose_replicas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    choose = partial(choose_replicas, network(), length=48)
    assert choose(None, positions=1e3, max_replicas=16) == 1  # a stage of milliseconds
    assert choose(None, positions=1e12, max_replicas=16) == 8
    assert choose(None, positions=1e12, max_replicas=3) == 3
    assert choose(2, positions=1e3, max_replicas=16) == 2
    assert choose(2, positions=1e3, max_replicas=1) == 1
