"""A batch of experts cut into micro-batches: what is the same (1 x 8 = 2 x 4 = 8 x 1) and what is not, and why.

A mixture's gradient is a sum over tokens, as any: each token is routed by itself (dropless), and the router's z-loss is a
mean over tokens. The load-balancing loss is not: it multiplies the share of tokens that an expert got with its mean score,
and a product of two means over a whole batch is not the mean of the products over its parts. So with its weight at zero the
step is the same however the batch is cut; with it, each micro-batch is balanced by its own load, as its docstring says.
(Where experts have a capacity, each micro-batch has its own: tokens that find no place differ too.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_members import EXPERTS, HEADS, shape
from test_pretrain import assert_close, train, weights
from tiny import job, make_tokens

from whorl.models import make_model
from whorl.train.config import RoutingConfig
from whorl.train.language import LossOf
from whorl.train.mixtures import Mixtures
from whorl.train.world import World


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def test_without_the_balancing_loss_experts_take_the_same_step_however_the_batch_is_cut(
    tokens: Path, tmp_path: Path
) -> None:
    wanted = job(tokens, model=shape(HEADS, experts=EXPERTS), steps=4, routing={"balance": 0.0, "z": 0.01})
    ways: list[dict[str, Any]] = [{}, {"micro_rows": 4}, {"micro_rows": 1}, {"replicas": 2}]
    ends = [train(wanted.model_copy(update=way), tmp_path / str(number)) for number, way in enumerate(ways)]
    for end in ends[1:]:
        assert_close(weights(ends[0]), weights(end))
        for name, bias in ends[0].state_dict().items():  # the load of the whole step moves it
            if name.endswith("balance_bias"):
                assert torch.equal(bias, end.state_dict()[name])


def test_the_balancing_loss_is_all_that_differs() -> None:
    model = make_model(shape(HEADS, experts=EXPERTS), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    routing = RoutingConfig(balance=0.5, z=0.01)
    loss = LossOf(model, Mixtures(model, routing, World()), z_loss=1e-3, compile=False)
    ids = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_mask": torch.ones(8, 32, dtype=torch.bool),
    }
    whole = loss(batch)
    for size in (4, 1):
        parts = [loss({n: t[i : i + size] for n, t in batch.items()}) for i in range(0, 8, size)]
        for name in ("nll", "router_z"):
            torch.testing.assert_close(whole.metrics[name], sum(p.metrics[name] for p in parts))
        apart = whole.metrics["balance"] - sum(p.metrics["balance"] for p in parts)
        assert apart.abs() > 0.001 * whole.metrics["balance"], "smaller batches are less even"
        torch.testing.assert_close(
            whole.total - sum(p.total for p in parts), routing.balance * 2 * apart, rtol=1e-3, atol=1e-2
        )  # two layers, of which the figure is the mean
