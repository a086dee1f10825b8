"""Replicas of fine-tuning: the same steps but for the rounding of sums, and a death that is heard."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from shared import network, sums, tokenizer
from test_sft import SETTINGS, Written

from whorl.align.config import LoRAConfig, SFTConfig
from whorl.align.network import Network
from whorl.align.sft import fine_tune
from whorl.align.training import replicas_for
from whorl.tokens.shards import write_shards
from whorl.train.world import ReplicaError

SHORT = SETTINGS.model_copy(update={"epochs": 2})


def train(
    settings: SFTConfig,
    net: Network | None = None,
    *,
    at: Callable[[int], None] = lambda step: None,
    **rest: Any,
) -> tuple[Network, list[dict[str, float]]]:
    net, seen = net or network(lora=settings.lora), []

    def observe(step: int, metrics: dict[str, float]) -> None:
        seen.append(metrics)
        at(step)

    fine_tune(net, sums(60), settings, pad_id=tokenizer().pad_id, observe=observe, **rest)
    return net, seen


@pytest.mark.parametrize(
    "change", [{}, {"packing": False, "batch_rows": 9}, {"lora": LoRAConfig(rank=2)}, {"replay": 0.5}]
)
def test_replicas_take_the_steps_of_one(change: dict[str, Any], tmp_path: Path) -> None:
    documents = [Written(f"{n}", "test", f"{n}.txt", 0, f"x = {n}\n" * 20) for n in range(40)]
    write_shards(documents, tokenizer(), tmp_path, "train")  # type: ignore[arg-type]  # as good as a Document
    rest = {"replay": tmp_path} if "replay" in change else {}
    said: list[str] = []
    one, told = train(SHORT.model_copy(update={**change, "replicas": 1}), **rest)
    two, told_two = train(SHORT.model_copy(update={**change, "replicas": 2}), say=said.append, **rest)
    assert said == ["2 replicas learn, 1 thread each"] and torch.get_num_threads() == 1
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)
    for x, y in zip(told, told_two, strict=True):
        assert set(x) == set(y) and y["count"] == x["count"]
        assert y["nll"] == pytest.approx(x["nll"], rel=1e-4)
        assert y["gradient_norm"] == pytest.approx(x["gradient_norm"], rel=1e-2, abs=1e-5)


def test_a_replica_that_is_killed_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"replicas": 2})
    whole, told = train(settings)

    def kill(step: int) -> None:
        if step == 3:
            for child in psutil.Process().children():
                if "spawn_main" in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ReplicaError, match="SIGKILL"):
        train(settings, scratch=tmp_path, at=kill)
    again, rest = train(settings, scratch=tmp_path)
    assert 0 < len(rest) < len(told)
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert replicas_for(net, None, positions=1e3, length=48, most=16) == 1  # a stage of milliseconds
    assert replicas_for(net, None, positions=1e12, length=48, most=16) == 8
    assert replicas_for(net, None, positions=1e12, length=48, most=3) == 3
    assert replicas_for(net, 2, positions=1e3, length=48, most=16) == 2
    assert replicas_for(net, 2, positions=1e3, length=48, most=1) == 1
