"""Data parallelism: each rank has the whole model and a share of the batch; gradients are averaged while they are computed.

    model = DDP(module, bucket_mb=25)
    loss(model(rows_of_this_rank)).backward()
    model.finish_gradient_synchronization()          # then optimizer.step()

A backward computes the last layer's gradient first. A full bucket is sent by an asynchronous all-reduce while the layers
below are computed (Li et al. 2020, arXiv:2006.15704). All ranks must send the same buckets in the same order, but a rank
may use only some parameters (experts). So a bucket is sent after those before it, and the rest at the end with zeros. One
more number per parameter counts the ranks that used it. A parameter that no rank used keeps None.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whorl.errors import ConfigError


class DDP(nn.Module):
    """`module` with rank 0's parameters and buffers, whose gradients are means over the default group's ranks.

    Tied parameters are sent once, and frozen ones (as of now) not at all. Sparse gradients become dense.

    Args:
        bucket_mb: size of a bucket in 10^6 bytes. 0: a bucket for each parameter; None: one bucket.
    """

    def __init__(self, module: nn.Module, bucket_mb: float | None = 25.0) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.buckets: list[list[nn.Parameter]] = []
        limit, size = float("inf") if bucket_mb is None else bucket_mb * 1e6, 0.0
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            size += param.nbytes
            if not self.buckets or size > limit or param.dtype != self.buckets[-1][0].dtype:
                self.buckets.append([])
                size = param.nbytes
            self.buckets[-1].append(param)
            param.register_post_accumulate_grad_hook(self._count_down)  # type: ignore[no-untyped-call]
        self._bucket_of: dict[Tensor, int] = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._missing: list[set[Tensor]] = [set(bucket) for bucket in self.buckets]
        self._sent: list[
            tuple[Tensor, Any]
        ] = []  # flat gradients and the running all-reduce, of the first buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _count_down(self, param: Tensor) -> None:
        missing = self._missing[self._bucket_of[param]]
        if param not in missing:
            raise ConfigError(
                "a second backward before the gradients of the first one were averaged",
                do="call finish_gradient_synchronization() after each backward: what is averaged stays so",
            )
        missing.remove(param)
        while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in bucket]
        used = grads[0].new_tensor([p.grad is not None for p in bucket])
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), used])
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_synchronization(self) -> None:
        """Send what is left, wait, and set each gradient to its mean over ranks (a view of its bucket)."""
        while len(self._sent) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            *grads, used = torch.split(
                flat.div_(dist.get_world_size()), [*(p.numel() for p in bucket), len(bucket)]
            )
            for param, grad, ranks in zip(bucket, grads, used.tolist(), strict=True):
                param.grad = grad.view_as(param) if ranks else None
        self._missing, self._sent = [set(bucket) for bucket in self.buckets], []
