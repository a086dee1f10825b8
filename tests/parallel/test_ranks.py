"""Ranks on this machine."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from whorl.parallel.process_group import ReplicaError
from whorl.parallel.ranks import run_ranks


def total(value: float) -> float:
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("planted")
        os._exit(3)
    dist.barrier()


def test_results_come_in_rank_order():
    assert run_ranks(3, total, 2.0) == [12.0] * 3
    assert run_ranks(2, dist.get_rank) == [0, 1]
    assert [t.tolist() for t in run_ranks(2, torch.ones, 3)] == [[1.0] * 3] * 2


@pytest.mark.parametrize(("how", "message"), [("raise", "planted"), ("die", "rank 1.*exit code 3")])
def test_a_rank_that_fails_is_named_and_nothing_hangs(how, message):
    began = time.monotonic()
    with pytest.raises(ReplicaError, match=message):
        run_ranks(2, fail_on, 1, how)
    assert time.monotonic() - began < 60
