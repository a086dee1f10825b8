"""Collectives from point-to-point sends."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from whorl.errors import ConfigError
from whorl.parallel.explained import collectives
from whorl.parallel.explained.collectives import Communicator, shift_over_gpus
from whorl.parallel.ranks import run_ranks


class Counted(Communicator):
    """Counts sends and bytes of an operation without its exchange of descriptions."""

    calls = sent = barrier_calls = barrier_sent = 0

    def send(self, tensor: Tensor, to: int) -> Any:
        if tensor.dtype == torch.uint8:
            self.barrier_calls, self.barrier_sent = self.barrier_calls + 1, self.barrier_sent + tensor.nbytes
        else:
            self.calls, self.sent = self.calls + 1, self.sent + tensor.nbytes
        return super().send(tensor, to)


def rows_of(rank: int, *shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * (rank + 1)


def counted(group: Counted, name: str, *args: Any, **kwargs: Any) -> tuple[int, int]:
    group.calls = group.sent = group.barrier_calls = group.barrier_sent = 0
    getattr(group, name)(*args, **kwargs)
    assert (group.barrier_calls, group.barrier_sent) == (2, 96 * 3)  # before each operation of four ranks
    return group.calls, group.sent


def check_values(group: Communicator) -> None:
    n, me = group.size, group.rank
    total = n * (n + 1) / 2
    for shape in ((), (3, 5)):
        for tree in (False, True):
            tensor = rows_of(me, *shape)
            group.all_reduce(tensor, tree)
            torch.testing.assert_close(tensor, rows_of(0, *shape) * total)
        every = torch.stack([rows_of(r, *shape) for r in range(n)])
        assert torch.equal(group.all_gather(rows_of(me, *shape)), every)
        for root in {0, n - 1}:
            tensor = rows_of(me, *shape)
            group.broadcast(tensor, root)
            assert torch.equal(tensor, rows_of(root, *shape))
            gathered = group.gather(rows_of(me, *shape), root)
            assert torch.equal(gathered, every) if me == root else gathered is None
            group.scatter(tensor, every if me == root else None, root)
            assert torch.equal(tensor, rows_of(me, *shape))
        rows = rows_of(me, n, *shape)
        torch.testing.assert_close(group.reduce_scatter(rows), rows_of(0, n, *shape)[me] * total)
        assert torch.equal(rows, rows_of(me, n, *shape))
        exchanged = torch.stack([rows_of(r, n, *shape)[me] for r in range(n)])
        assert torch.equal(group.all_to_all(rows), exchanged)


def four_ranks() -> dict[str, Any]:
    me, n = dist.get_rank(), 4
    collectives.PIECE = 3  # several pieces per chunk
    group = Counted("all", range(n))
    check_values(group)
    check_values(Communicator("pair" + str(me % 2), {me % 2, me % 2 + 2}))
    if me != 2:  # a group that rank 2 does not have, while `group` exists
        check_values(Communicator("three", {0, 1, 3}))
    one = Communicator(f"alone {me}", {me})
    check_values(one)
    # Two groups at once: the sends of one are not taken for those of the other.
    other = Communicator("again", range(n))
    a, b = torch.full((4,), 1.0), torch.full((4,), 2.0)
    works = [group.send(a, me + 1), other.send(b, me + 1)]
    from_a, from_b = torch.empty(4), torch.empty(4)
    for communicator, tensor in ((other, from_b), (group, from_a)):
        communicator.receive(tensor, me - 1).wait()
    assert [work.wait() for work in works] and from_a[0] == 1.0 and from_b[0] == 2.0
    errors = {}
    for name, attempt in {
        "outside": lambda: Communicator("outside", {(me + 1) % n}),
        "id": lambda: Communicator("all", range(n)),
        "root": lambda: group.broadcast(a, 4),
        "rows": lambda: group.all_to_all(torch.zeros(3, 2)),
        "scatter": lambda: group.scatter(a, torch.zeros(3, 4) if me == 0 else None),
        "shape": lambda: group.all_reduce(torch.zeros(5 if me == 3 else 4)),
        "order": lambda: group.barrier() if me == 1 else group.all_gather(a),
        "shift": lambda: shift_over_gpus([a]),
    }.items():
        with pytest.raises(ConfigError) as caught:
            attempt()
        errors[name] = str(caught.value)
    collectives.PIECE = 1 << 18
    tensor, rows = torch.zeros(240), torch.zeros(n, 60)
    counts = {
        "ring": counted(group, "all_reduce", tensor), "tree": counted(group, "all_reduce", tensor, True),
        "broadcast": counted(group, "broadcast", tensor), "gather": counted(group, "gather", tensor),
        "scatter": counted(group, "scatter", rows[0], rows), "all_gather": counted(group, "all_gather", tensor),
        "barrier": counted(group, "barrier"),
        "reduce_scatter": counted(group, "reduce_scatter", rows), "all_to_all": counted(group, "all_to_all", rows),
    }  # fmt: skip
    return {"errors": errors, "counts": counts}


def test_collectives_of_four_ranks_values_errors_and_bytes():
    results = run_ranks(4, four_ranks)
    errors = results[0]["errors"]
    assert "rank 0 makes group 'outside' of the ranks [1]" in errors["outside"]
    assert "'all' exists" in errors["id"] and "invalid broadcast [4] torch.float32 root 4" in errors["root"]
    assert (
        "rank 0: scatter [3, 4] into [4]" in errors["scatter"] and "rank 1: scatter [4]" in errors["scatter"]
    )
    assert "rank 2: all_reduce [4]" in errors["shape"] and "rank 3: all_reduce [5]" in errors["shape"]
    assert "rank 0: all_gather [4]" in errors["order"] and "rank 1: barrier" in errors["order"]
    assert "[3, 2]" in errors["rows"] and "cuda:0" in errors["shift"]
    # docs/parallel.md's table: calls and bytes of the rank that sends most, n = 4, S = 960.
    n, size = 4, 960
    most = {name: max(r["counts"][name] for r in results) for name in results[0]["counts"]}
    assert most == {
        "ring": (2 * (n - 1), 2 * (n - 1) * size // n),
        "tree": (2, 2 * size),
        "barrier": (0, 0),
        "broadcast": (2, 2 * size),
        "gather": (1, size),
        "scatter": (n - 1, (n - 1) * size // n),
        "all_gather": (n - 1, (n - 1) * size),
        "reduce_scatter": (n - 1, (n - 1) * size // n),
        "all_to_all": (n - 1, (n - 1) * size // n),
    }
    everyone = {name: sum(r["counts"][name][1] for r in results) for name in most}
    assert everyone["ring"] == everyone["tree"] == 2 * (n - 1) * size
    assert everyone["broadcast"] == everyone["gather"] == everyone["all_to_all"] == (n - 1) * size
    assert everyone["reduce_scatter"] == (n - 1) * size and everyone["scatter"] == (n - 1) * size // n
    assert everyone["all_gather"] == n * (n - 1) * size


@pytest.mark.skipif(torch.cuda.device_count() < 8, reason="needs eight GPUs")
def test_shift_of_seven_moves_each_tensor_to_the_gpu_before():
    shifted = shift_over_gpus([torch.full((4,), float(i), device=f"cuda:{i}") for i in range(8)])
    assert [(t.device.index, t[0].item()) for t in shifted] == [((i + 7) % 8, float(i)) for i in range(8)]
