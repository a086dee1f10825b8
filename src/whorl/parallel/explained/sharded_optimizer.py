"""A sharded optimizer (ZeRO stage 1): each parameter has one owner rank, which alone has its optimizer state and updates it.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    optimizer.step()                       # the owned parameters, then a broadcast from each owner

Gradients must be equal on all ranks (`DDP`). A rank's state falls to 1 / n (Rajbhandari et al. 2020, arXiv:1910.02054).
Parameters stay whole, so optimizers of whole matrices (Muon) work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ShardedOptimizer(torch.optim.Optimizer):
    """`cls(params, **kwargs)` over the default group's ranks.

    `param_groups` has all parameters and takes a scheduler's changes; `state` and `state_dict()` are this rank's.
    """

    def __init__(self, params: Any, cls: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        self.local = cls([{"params": []}], **kwargs)
        self.local.param_groups.clear()
        self.owned: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
        super().__init__(params, self.local.defaults)
        self.state = self.local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same group on all ranks. The largest parameter goes first, to the rank with the fewest elements."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in sorted(group["params"], key=torch.numel, reverse=True):
            min(self.owned, key=lambda owned: sum(map(torch.numel, owned))).append(param)
        mine = set(self.owned[dist.get_rank()])
        self.local.add_param_group(_settings(group) | {"params": [p for p in group["params"] if p in mine]})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the owned parameters and receive the others. Returns the closure's loss."""
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update(_settings(group))
        loss = self.local.step(closure)
        sent = []
        for owner, owned in enumerate(self.owned):
            for dtype in sorted({p.dtype for p in owned if p.requires_grad}, key=str):
                params = [p.detach() for p in owned if p.requires_grad and p.dtype == dtype]
                flat = torch.cat([p.reshape(-1) for p in params])
                sent.append((params, flat, dist.broadcast(flat, owner, async_op=True)))
        for params, flat, work in sent:
            work.wait()
            values = torch.split(flat, [p.numel() for p in params])
            torch._foreach_copy_(params, [v.view_as(p) for v, p in zip(values, params, strict=True)])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this rank's `state_dict()` returned."""
        super().load_state_dict(state_dict)
        self.local.state = self.state


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
