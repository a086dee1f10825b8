"""A batch of experts split into micro-batches gives the same step: 1 x 8 = 2 x 4 = 8 x 1.

Tokens are routed independently (no capacity limit), and the z-loss is a mean over tokens. The load-balancing loss uses
the loads of the previous step (`train/metrics/moe_balance.py`), so it is a mean over tokens too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.train.model_shapes import EXPERTS, HEADS, disturbed, shape
from tests.support.train.pretraining import assert_close, train
from tests.support.train.tiny import job

from whorl.models import make_model
from whorl.parallel.process_group import ProcessGroup
from whorl.train.config import RoutingConfig
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer


@pytest.mark.parametrize("balance", [0.0, 0.01])
def test_moe_step_independent_of_batch_split(balance: float, tokens: Path, tmp_path: Path) -> None:
    routing = {"aux_loss_coef": balance, "z_loss_coef": 0.01}
    wanted = job(tokens, model=shape(HEADS, experts=EXPERTS), steps=3, routing=routing)
    whole = train(wanted, tmp_path / "whole")
    for replicas, rows in ((1, 4), (1, 1), (2, None), (2, 1)):
        way = {"replicas": replicas, "micro_batch_size": rows}
        end = train(wanted.model_copy(update=way), tmp_path / f"{replicas} {rows}")
        assert_close(whole, end)
        for name, bias in whole.state_dict().items():  # moved by the load of the whole step
            if name.endswith("balance_bias"):
                assert torch.equal(bias, end.state_dict()[name])


def test_moe_losses_of_parts_sum_to_whole() -> None:
    model = disturbed(make_model(shape(HEADS, experts=EXPERTS), torch.Generator().manual_seed(0)), 0.3)
    routing = RoutingConfig(aux_loss_coef=0.5, z_loss_coef=0.01)
    moe = MoEBalancer(model, routing, ProcessGroup())
    moe.previous_load = [torch.tensor(w) for w in ([5.0, 1.0, 2.0, 8.0], [1.0, 1.0, 7.0, 2.0])]
    loss = LMObjective(model, moe, z_loss=1e-3, compile=False)
    ids = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": torch.ones(8, 32, dtype=torch.bool)}
    batch["loss_mask"][:2, 3:] = False  # the parts have different numbers of targets
    whole = loss(batch)
    for size in (4, 1):
        parts = [loss({n: t[i : i + size] for n, t in batch.items()}) for i in range(0, 8, size)]
        assert {"nll", "moe/z_loss", "moe/aux_loss"} <= set(whole.metrics)
        for name, value in whole.metrics.items():
            torch.testing.assert_close(value, sum(p.metrics[name] for p in parts))
        torch.testing.assert_close(whole.total, sum(p.total for p in parts))


def test_moe_loads_since_the_report_continue() -> None:
    model = make_model(shape(HEADS, experts=EXPERTS), torch.Generator().manual_seed(0))
    moe = MoEBalancer(model, RoutingConfig(), ProcessGroup())
    loss, ids = LMObjective(model, moe, z_loss=0.0, compile=False), torch.arange(66).view(2, 33)
    loss({"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": torch.ones(2, 32, dtype=torch.bool)})
    moe.on_step_end(1)
    again = MoEBalancer(model, RoutingConfig(), ProcessGroup(), moe.state)
    assert again.state == moe.state
    assert (found := again.pop_metrics()) == moe.pop_metrics() and "moe/0/gini" in found
