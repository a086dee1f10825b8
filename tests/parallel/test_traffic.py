"""Counted traffic."""

import torch
import torch.distributed as dist

from whorl.parallel.ranks import run_ranks
from whorl.parallel.traffic import Traffic


def collectives():
    """Calls through torch.distributed and of a backward, on two axes."""
    pair = dist.new_subgroups(2)[0]
    names = {dist.group.WORLD.group_name: "dp", pair.group_name: "tp"}
    x = torch.ones(6, requires_grad=True)
    with Traffic(names) as traffic:
        dist.all_reduce(torch.ones(4))
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=pair)
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), group=pair)
        torch.distributed.nn.functional.all_reduce(x, group=pair).sum().backward()
        peer = dist.get_rank() ^ 1
        sends = [dist.P2POp(dist.isend, torch.ones(5), peer), dist.P2POp(dist.irecv, torch.ones(5), peer)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        dist.barrier()
    assert all(call.started <= call.ended for call in traffic.calls)
    return {key: tuple(total) for key, total in traffic.totals().items()}


def test_traffic_counts_calls_bytes_and_sent_bytes_by_axis():
    for backend in ("gloo", "fake"):
        for found in run_ranks(4, collectives, backend=backend):
            assert found == {
                ("dp", "all_reduce"): (1, 16, 24.0),
                ("dp", "send"): (1, 20, 20.0),
                ("tp", "all_to_all"): (1, 16, 8.0),
                ("tp", "all_gather"): (1, 24, 12.0),
                ("tp", "all_reduce"): (2, 48, 48.0),
            }
