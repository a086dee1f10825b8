"""Pipeline parallelism with the schedule 1F1B: rank r has the r-th part of the layers and works on one micro-batch at once.

    loss = pipeline_step(stage, inputs, targets, loss_function)        # gradients of the mean over micro-batches

Rank r of n begins with n - 1 - r forwards, so that the last rank gets work soonest. Then it does one forward and one
backward in turn, and ends with the backwards that are left (Narayanan et al. 2021, arXiv:2104.04473). With m micro-batches
a rank idles for (n - 1) / (m + n - 1) of a step, as with all forwards first (GPipe), but has n - r activations, not m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whorl.errors import ConfigError


def schedule(rank: int, ranks: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Return what a rank does in turn: (whether it is a forward, the number of the micro-batch)."""
    ahead = min(ranks - 1 - rank, micro_batches)
    steps = [(True, i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        steps += [(True, ahead + i), (False, i)]
    return steps + [(False, i) for i in range(micro_batches - ahead, micro_batches)]


def _inbox(source: int, count: int, like: Tensor) -> Iterator[Tensor]:
    """Yield `count` tensors from a rank. The next one is requested before the last is used."""
    arriving = []
    for i in range(count + 1):
        if i < count:
            tensor = torch.empty_like(like)
            arriving.append((tensor, dist.irecv(tensor, source)))
        if i:
            tensor, work = arriving.pop(0)
            work.wait()  # type: ignore[union-attr]
            yield tensor


def pipeline_step(
    stage: nn.Module, inputs: Tensor, targets: Tensor, loss_function: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Add the gradients of the mean loss to the stage's parameters; return that loss on the last rank, else None.

    Args:
        stage: this rank's layers, from one tensor to one tensor, of the same shape for each micro-batch.
        inputs, targets: [m, ...], a micro-batch in each row; the first rank reads `inputs`, the last one `targets`.
    """
    rank, ranks, m = dist.get_rank(), dist.get_world_size(), len(inputs)
    if not m or m != len(targets):
        raise ConfigError(
            f"{m} micro-batches of inputs, {len(targets)} of targets", expected="as many, at least one"
        )
    activations, gradients, returned = iter(inputs) if rank == 0 else None, None, None
    live: dict[int, tuple[Tensor, Tensor, Any]] = {}
    total = inputs.new_zeros((), dtype=torch.float32) if rank == ranks - 1 else None
    for is_forward, i in schedule(rank, ranks, m):
        if is_forward:
            if activations is None:
                shape: list[Any] = [None, None]
                dist.recv_object_list(shape, rank - 1)
                activations = _inbox(rank - 1, m, inputs.new_empty(shape[0], dtype=shape[1]))
            x = next(activations)
            y, sending = stage(x.requires_grad_() if rank else x), None
            if total is not None:
                y = loss_function(y, targets[i]) / m
                total += y.detach()
            else:
                if i == 0:
                    dist.send_object_list([y.shape, y.dtype], rank + 1)
                sending = dist.isend(y.detach().contiguous(), rank + 1)
            live[i] = x, y, sending
        else:
            x, y, sending = live.pop(i)
            if sending is not None:
                gradients = gradients or _inbox(rank + 1, m, y)
            torch.autograd.backward(y, None if gradients is None else next(gradients))
            if sending is not None:
                sending.wait()  # at once: its gradient has come back
            if returned is not None:
                returned.wait()
            returned = dist.isend(x.grad.contiguous(), rank - 1) if rank and x.grad is not None else None
    if returned is not None:
        returned.wait()
    return total
