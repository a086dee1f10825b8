"""Tensor parallel layers and a pipeline: equal to one process."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from whorl.errors import ConfigError
from whorl.parallel.explained.pipeline import pipeline_step, schedule
from whorl.parallel.explained.tensor_parallel import ColumnLinear, RowLinear
from whorl.parallel.ranks import run_ranks


def tensor_case(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(6, 4 * ranks), nn.Linear(4 * ranks, 5)
    first, second = ColumnLinear(deepcopy(up)), RowLinear(deepcopy(down))
    x = torch.randn(2, 3, 6)
    mine = x.clone().requires_grad_()
    x.requires_grad_()
    expected, got = down(torch.tanh(up(x))), second(torch.tanh(first(mine)))
    torch.testing.assert_close(got, expected)
    for y in (expected, got):
        y.square().sum().backward()
    torch.testing.assert_close(mine.grad, x.grad)
    for part, whole, dim in (
        (first.weight, up.weight, 0),
        (first.bias, up.bias, 0),
        (second.weight, down.weight, 1),
    ):
        torch.testing.assert_close(part.grad, whole.grad.chunk(ranks, dim)[rank])
    torch.testing.assert_close(second.bias.grad, down.bias.grad)
    with pytest.raises(ConfigError, match="out_features 7 does not divide by 3 ranks"):
        ColumnLinear(nn.Linear(3, 7))


def pipeline_case(rank: int, ranks: int, micro_batches: int) -> int:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4 + i, 5 + i), nn.Tanh()) for i in range(ranks)]
    one, stage = nn.Sequential(*deepcopy(layers)), layers[rank]
    live = [0, 0]
    stage.register_forward_hook(lambda *_: live.append(live[-1] + 1))
    stage[0].weight.register_hook(lambda grad: live.append(live[-1] - 1))
    x, y = torch.randn(micro_batches, 2, 4), torch.randn(micro_batches, 2, 4 + ranks)
    loss = pipeline_step(stage, x, y, nn.functional.mse_loss)
    expected = nn.functional.mse_loss(one(x), y)
    expected.backward()
    assert (loss is None) == (rank < ranks - 1)
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach())
    for found, expected in zip(stage.parameters(), one[rank].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    return max(live)


def three_ranks() -> list[int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor_case(rank, ranks)
    with pytest.raises(ConfigError, match="2 micro-batches of inputs, 3 of targets"):
        pipeline_step(nn.Identity(), torch.zeros(2, 1), torch.zeros(3, 1), nn.functional.mse_loss)
    return [pipeline_case(rank, ranks, m) for m in (1, 2, 7)]


def test_tensor_layers_and_pipeline_equal_one_process():
    most_live = run_ranks(3, three_ranks)
    assert most_live == [[1, 2, 3], [1, 2, 2], [1, 1, 1]]


def test_schedule_does_each_micro_batch_once_and_in_time():
    for ranks in (1, 2, 4):
        for m in (1, 3, 8):
            done: dict[tuple[int, bool, int], int] = {}
            orders = [schedule(rank, ranks, m) for rank in range(ranks)]
            assert all(
                sorted(order) == sorted((f, i) for i in range(m) for f in (True, False)) for order in orders
            )
            places, slot = [0] * ranks, 0
            while any(place < 2 * m for place in places):
                ready = []
                for rank, order in enumerate(orders):
                    if places[rank] < 2 * m:
                        forward, i = order[places[rank]]
                        needs = (rank - 1, True, i) if forward else (rank + 1, False, i)
                        if not 0 <= needs[0] < ranks or needs in done:
                            ready.append((rank, forward, i))
                assert ready, "a deadlock"
                for rank, forward, i in ready:
                    done[rank, forward, i] = slot
                    places[rank] += 1
                slot += 1
            assert slot == 2 * (m + ranks - 1)  # the bubble is (n - 1) / (m + n - 1)
