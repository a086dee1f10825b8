"""Fine-tuning: learning, bitwise resume, replay, adapters, replicas."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.support.align.byte_model import network, sums, tokenizer
from tests.support.align.kill_at_step import History, check_replicas, check_resume, kill_replicas_at
from tests.support.align.stage_inputs import MOE, PAD, SFT, train_sft, write_replay_tokens
from tests.support.configs import nested, updated

from whorl.align.config import DistilConfig, LoRAConfig, MultiTokenConfig, SFTConfig
from whorl.align.model import policy_model
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage import task
from whorl.align.stage.io import load_stage_model, save_stage_model
from whorl.align.stage.sft import PATIENCE, SFTTask, fine_tune, sum_nll
from whorl.errors import ConfigError, DataError
from whorl.models import make_model
from whorl.parallel import process_group
from whorl.tracking.seeds import generator
from whorl.train.lm import objective
from whorl.train.resilience.oom_advice import OutOfMemoryError


def changed(**changes: Any) -> SFTConfig:
    return updated(SFT, **nested(**changes))


@pytest.mark.parametrize("packing", [True, False])
def test_fine_tune_lowers_loss_of_all_parameters(packing: bool) -> None:
    net, seen = train_sft(changed(packing=packing, batch_size=4 if packing else 16))
    assert seen[-1]["nll"] < 0.6 * seen[0]["nll"]
    begun = dict(network().named_parameters())
    assert all(not torch.equal(p, begun[n]) for n, p in net.named_parameters() if "memory" not in n)


def test_long_stage_compiles_full_packed_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, shapes = changed(batch_size=4, epochs=1), list[tuple[int, ...]]()

    def compiled(function: Any) -> Any:
        def run(*args: Any) -> Any:
            shapes.append(tuple(args[2].shape))
            return function(*args)

        return run

    monkeypatch.setattr(objective, "compiled", compiled)
    _, expected = train_sft(settings)
    assert not shapes
    monkeypatch.setattr(policy_model, "MIN_COMPILED_FLOPS", 0.0)
    _, seen = train_sft(settings)
    assert len(set(shapes)) == 1 and shapes[0][1] == SFT.data.seq_len and len(shapes) >= len(seen) - 1
    for found, usual in zip(seen, expected, strict=True):
        assert found["nll"] == pytest.approx(usual["nll"], rel=1e-3)
    shapes.clear()
    for other in ({"packing": False, "batch_size": 9}, {"lora": LoRAConfig(rank=2)}):
        train_sft(changed(epochs=1, **other))
    assert not shapes


def test_own_objective_equals_usual_loss_of_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        policy_model, "MIN_COMPILED_FLOPS", 0.0
    )  # a long stage, which compiles its usual loss
    lines, settings = list[str](), changed(batch_size=4, epochs=1)
    own = updated(settings, objective="whorl.objectives.next_token:next_token_of_logits")
    _, seen = train_sft(own, log=lines.append)
    assert [line for line in lines if "reads whole logits" in line] == lines[:1]
    monkeypatch.setattr(policy_model, "MIN_COMPILED_FLOPS", 1e30)
    for found, usual in zip(seen, train_sft(settings)[1], strict=True):
        assert found.keys() == usual.keys() and found["nll"] == pytest.approx(usual["nll"], rel=1e-4)
    with pytest.raises(ValidationError, match="next_token"):
        MultiTokenConfig.model_validate({"objective": own.objective})


def test_resume_with_adapter_gives_same_bits(tmp_path: Path) -> None:
    check_resume(partial(train_sft, changed(lora=LoRAConfig(rank=2), epochs=3)), tmp_path, kill=5)


def test_training_stops_when_held_out_texts_get_worse(tmp_path: Path) -> None:
    """Held-out texts contradict the training texts: weights of the lowest loss are kept, and resuming changes no bit."""
    right = sums(60)
    wrong = [replace(one, ids=np.where(one.loss_mask, one.ids[::-1], one.ids)) for one in right]
    stopping = changed(epochs=30, batch_size=4)

    def train(**options: Any) -> tuple[PolicyModel, History]:
        options.setdefault("checkpoint_dir", tmp_path / "whole")
        return train_sft(stopping, task_type=partial(SFTTask, held_out=wrong), **options)

    net, seen = train()
    planned = SFTTask(network(), right, stopping, PAD, None).steps
    assert PATIENCE * planned // 10 <= len(seen) < planned
    total, count = sum_nll(net, wrong, PAD)
    last, _ = train_sft(changed(epochs=30 * len(seen) / planned, batch_size=4))
    worse, _ = sum_nll(last, wrong, PAD)
    assert total < worse, "the weights at the end are not those of the lowest held-out loss"
    assert count == sum(one.loss_mask.sum() for one in wrong)
    shutil.rmtree(tmp_path / "whole")
    check_resume(train, tmp_path / "killed", kill=len(seen) - 1)


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
    check_replicas(
        lambda n: train_sft(changed(**change, epochs=2, run={"replicas": n}), log=messages.append, **rest)
    )
    assert messages == ["2 replicas train, 1 thread each"] and used[-2:] == [1, 2]  # restored at the end


BUDGETS = ({}, {"packing": False}, {"lora": LoRAConfig(rank=2)})


@pytest.mark.parametrize("change", BUDGETS)
def test_token_budget_of_all_equals_a_batch_of_all(change: dict[str, Any]) -> None:
    """The loss is normalized equally: one step over all texts has the same metrics and weights."""
    once = changed(epochs=1, batch_size=1000, **change)
    whole, by_rows = train_sft(once)
    net, by_tokens = train_sft(updated(once, data={"batch_tokens": 100_000}))
    assert len(by_rows) == len(by_tokens) == 1
    for name in ("nll", "loss", "loss_tokens"):
        assert by_tokens[0][name] == pytest.approx(by_rows[0][name], rel=1e-5)
    for p, q in zip(whole.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_token_budget_resumes_with_same_bits(packing: bool, tmp_path: Path) -> None:
    config = changed(epochs=3, batch_tokens=60, packing=packing)
    targets = [int(text.loss_mask.sum()) for text in sums(60)]
    _, history = train_sft(config)
    assert sum(step["loss_tokens"] for step in history) == 3 * sum(targets)
    assert len({step["loss_tokens"] for step in history}) > 1
    check_resume(partial(train_sft, config), tmp_path, kill=5)


def test_token_budget_over_replicas_with_an_idle_one() -> None:
    """A budget of the longest text: many steps have one row, so the second replica has none."""
    longest = max(len(text) - 1 for text in sums(60))
    for packing in (True, False):
        config = changed(epochs=1, batch_tokens=longest + 4, packing=packing)
        history = check_replicas(lambda n, c=config: train_sft(updated(c, run={"replicas": n})))
        assert len(history) > 30


def test_token_budget_keeps_replay_and_refuses_misfits(tmp_path: Path) -> None:
    write_replay_tokens(tmp_path)
    config = changed(epochs=1, batch_tokens=144, replay_fraction=0.3)
    _, seen = train_sft(config, replay_data=tmp_path)
    assert all(48 < step["loss_tokens"] <= 144 for step in seen)  # one full row of pretraining, and texts
    with pytest.raises(ConfigError, match="batch_tokens"):
        train_sft(changed(batch_tokens=95, replay_fraction=0.3), replay_data=tmp_path)
    with pytest.raises(DataError, match="lower seq_len"):
        train_sft(changed(batch_tokens=5))
    with pytest.raises(ValidationError, match="batch_size is 4 and batch_tokens is 64"):
        SFTConfig(data={"batch_size": 4, "batch_tokens": 64})
    with pytest.raises(ValidationError, match="on_policy_fraction"):
        DistilConfig(data={"batch_tokens": 64}, on_policy_fraction=0.5)


def moe_network() -> PolicyModel:
    return PolicyModel(make_model(MOE, generator(0, "weights")))


def test_routers_are_frozen_from_a_step_of_the_stage() -> None:
    def routers(config: SFTConfig) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        net, _ = train_sft(config, moe_network())
        found = {n: p for n, p in net.state_dict().items() if "router" in n}
        return [p for n, p in found.items() if "bias" not in n], [p for n, p in found.items() if "bias" in n]

    before = [p for n, p in moe_network().state_dict().items() if "router" in n and "bias" not in n]
    once = changed(epochs=1)
    never, _ = routers(once)
    at_start, bias = routers(updated(once, train={"routing": {"freeze_router_step": 0}}))
    assert all(torch.equal(p, q) for p, q in zip(before, at_start, strict=True))
    assert not any(b.any() for b in bias)
    assert not any(torch.equal(p, q) for p, q in zip(before, never, strict=True))


def test_expert_rates_apply_to_named_experts() -> None:
    net, _ = train_sft(changed(epochs=1, train={"expert_lr_scales": {1: 0.0}}), moe_network())
    for (name, p), (_, q) in zip(net.named_parameters(), moe_network().named_parameters(), strict=True):
        if ".experts." in name:
            assert torch.equal(p, q) == name.endswith(".1"), name


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"routing": {"freeze_router_step": 3}}, "sft.train.routing.freeze_router_step"),
        ({"routing": {"aux_loss_coef": 0.5}}, "sft.train.routing.aux_loss_coef"),
        ({"expert_lr_scales": 0.5}, "sft.train.expert_lr_scales"),
    ],
)
def test_expert_settings_need_experts(change: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is set, and the model has no experts"):
        train_sft(changed(train=change))
    if "aux" not in setting:
        with pytest.raises(ConfigError, match="trains neither routers nor experts"):
            train_sft(changed(train=change, lora=LoRAConfig(rank=2)), moe_network())


def test_experts_are_balanced_over_replicas() -> None:
    def train(n: int) -> tuple[PolicyModel, History]:
        net = PolicyModel(make_model(MOE, generator(0, "weights")))
        found = train_sft(changed(epochs=1, run={"replicas": n}), net)
        assert any(b.any() for name, b in net.state_dict().items() if "bias" in name)
        return found

    check_replicas(train)


def test_killed_replica_ends_run_and_resume_works(tmp_path: Path) -> None:
    train = partial(train_sft, changed(epochs=2, run={"replicas": 2}))
    check_resume(train, tmp_path, OutOfMemoryError, "SIGKILL", at=kill_replicas_at(3))


def test_choose_replicas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(process_group, "usable_cores", lambda: 6)
    two = {"run": {"replicas": 2}}
    for settings, positions, most, expected in (
        ({}, 1e3, 16, 1),  # a stage of milliseconds
        ({}, 1e12, 16, 8),
        ({}, 1e12, 3, 3),
        ({"train": {"deterministic": True}}, 1e12, 16, 6),  # the number of threads is measured
        (two, 1e3, 16, 2),
        (two, 1e3, 1, 1),
    ):
        found = task.choose_replicas(
            network(), SFTConfig(**settings), length=48, positions=positions, max_replicas=most
        )
        assert found == expected, settings
