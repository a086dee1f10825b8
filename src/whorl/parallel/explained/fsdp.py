"""Fully sharded data parallelism (ZeRO stage 3): a rank stores 1 / n of each matrix and gathers a layer when it computes it.

    model = FSDP(module, compute_dtype=torch.float16)
    optimizer = AdamW(model.parameters())                 # of shards, so its state is 1 / n too
    loss(model(rows_of_this_rank)).backward()
    model.finish_gradient_synchronization()               # then optimizer.step()

A unit is an element of a ModuleList or Sequential; what is outside of them is the root unit. A unit is gathered before its
forward and again before its backward, while the unit before it computes, and freed after. Its gradients are exchanged while
the backward continues (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277). The subtle point:
autograd has saved the full parameters and views of them. So these stay the same tensors, and only their *storage* is freed
and filled again, through `.data`, which does not count as a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map


class _Unit:
    """Parameters that are gathered together. places: of each parameter, the modules that have it, and its name there."""

    def __init__(
        self, places: dict[nn.Parameter, list[tuple[nn.Module, str]]], dtype: torch.dtype | None
    ) -> None:
        self.places, self.ranks, self.dtype = list(places.values()), dist.get_world_size(), dtype
        self.shards = [nn.Parameter(self._rows(p)[dist.get_rank()].clone(), p.requires_grad) for p in places]
        self.full = [nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad) for p in places]
        for full in self.full:
            if full.requires_grad:
                full.register_post_accumulate_grad_hook(self._count_down)  # type: ignore[no-untyped-call]
        self.arriving: Callable[[], list[Tensor]] | None = None
        self.exchanged: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        self.missing: set[Tensor] = set()  # parameters whose gradients this backward has not computed
        self.free()

    def _rows(self, tensor: Tensor) -> Tensor:
        """A row for each rank, filled up with zeros."""
        return nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % self.ranks)).view(
            self.ranks, -1
        )

    def request(self, dtype: torch.dtype | None) -> Callable[[], list[Tensor]]:
        """Start to gather, cast to `dtype`; the returned function waits and returns the full values."""
        flat = torch.cat([shard.detach() for shard in self.shards]).to(dtype)
        rows = flat.new_empty(self.ranks, len(flat))
        work = dist.all_gather_single(rows.view(-1), flat, async_op=True)

        def wait() -> list[Tensor]:
            work.wait()
            parts = torch.split(rows, [len(shard) for shard in self.shards], 1)
            return [p.reshape(-1)[: f.numel()].view(f.shape) for p, f in zip(parts, self.full, strict=True)]

        return wait

    def prefetch(self) -> None:
        if not self.whole and self.arriving is None:
            self.arriving = self.request(self.dtype)

    def gather(self) -> None:
        """Make the modules' parameters the full ones."""
        self.prefetch()
        if self.arriving is not None:
            for full, value in zip(self.full, self.arriving(), strict=True):
                full.untyped_storage().resize_(full.nbytes)
                full.data.copy_(value)
            self.arriving, self.whole = None, True
        self._place(self.full)

    def free(self) -> None:
        """Make the modules' parameters the shards."""
        for full in self.full:
            full.untyped_storage().resize_(0)
        self.whole = self.in_backward = False
        self._place(self.shards)

    def _place(self, params: list[nn.Parameter]) -> None:
        for param, places in zip(params, self.places, strict=True):
            for module, name in places:
                module._parameters[name] = param

    def _count_down(self, full: Tensor) -> None:
        self.missing.discard(full)
        if not self.missing:
            self._exchange()
            if all(
                full.requires_grad for full in self.full
            ):  # else the inputs' gradients may need a frozen one
                self.free()

    def _exchange(self) -> None:
        """Send each rank its part of the gradients. An all-to-all, added up later, costs what a ring does."""
        pairs = [(s, f) for s, f in zip(self.shards, self.full, strict=True) if f.grad is not None]
        if pairs:
            out = torch.cat([self._rows(f.grad.to_dense()).to(s.dtype) for s, f in pairs], 1)  # type: ignore[union-attr]
            rows = torch.empty_like(out)
            work = dist.all_to_all_single(rows, out, async_op=True)
            self.exchanged.append(([s for s, _ in pairs], rows, (work, out)))
        for full in self.full:
            full.grad = None

    def finish(self) -> None:
        """Exchange what is left and set the shards' gradients to means over ranks."""
        self._exchange()
        for shards, rows, (work, _) in self.exchanged:
            work.wait()
            for shard, grad in zip(
                shards, torch.split(rows.sum(0) / self.ranks, [*map(len, shards)]), strict=True
            ):
                shard.grad = grad.to(shard.dtype) if shard.grad is None else shard.grad + grad
        self.exchanged.clear()
        if self.arriving is not None:  # a prefetch in vain, of values that change now
            self.arriving()
            self.arriving = None
        self.free()


class FSDP(nn.Module):
    """`module` with rank 0's parameters, sharded over the default group's ranks. All ranks must run the same modules.

    A module that has a matrix gets all its parameters sharded. One that has vectors alone (a norm) keeps them whole. Frozen
    parameters are sharded too, but their unit stays gathered until the end of a backward.

    Args:
        compute_dtype: of sharded parameters when they are gathered, and of the inputs of their modules. Shards, gradients
            and vectors keep their type. None: the parameters' own.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        block_of = {part: block for block in blocks(module) for part in block.modules()}
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            own = {param: (part, name) for name, param in part._parameters.items() if param is not None}
            sharded = any(param.dim() > 1 for param in own)
            for param, place in own.items() if sharded else ():
                places.setdefault(param, []).append(place)
            if own and compute_dtype is not None:
                dtype = compute_dtype if sharded else next(iter(own)).dtype
                part.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)
        units: dict[nn.Module, dict[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for param, where in places.items():
            owners = {block_of.get(part, module) for part, _ in where}
            units.setdefault(owners.pop() if len(owners) == 1 else module, {})[param] = where
        self._vectors = [p for p in module.parameters() if p.requires_grad and p not in places]
        self._units = {block: _Unit(own, compute_dtype) for block, own in units.items()}
        self._order: list[_Unit] = []  # in which units are computed
        for block, unit in self._units.items():
            block.register_forward_pre_hook(partial(self._before_forward, unit))
            block.register_forward_hook(partial(self._after_forward, unit))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _prefetch(self, unit: _Unit, step: int) -> None:
        if unit not in self._order:
            self._order.append(unit)
        place = self._order.index(unit) + step
        if 0 <= place < len(self._order):
            self._order[place].prefetch()

    def _before_forward(self, unit: _Unit, block: nn.Module, args: Any) -> None:
        unit.gather()
        if not unit.in_backward:  # else it is computed again
            self._prefetch(unit, 1)

    def _after_forward(self, unit: _Unit, block: nn.Module, args: Any, output: Any) -> None:
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not unit.in_backward and (
            block is not self.module or not outputs
        ):  # the root's backward follows at once
            unit.free()
        if outputs:
            register_multi_grad_hook(outputs, partial(self._before_backward, unit), mode="any")

    def _before_backward(self, unit: _Unit, grad: Tensor) -> None:
        unit.gather()
        if not unit.in_backward:
            unit.missing = {full for full in unit.full if full.requires_grad}
        unit.in_backward = True
        self._prefetch(unit, -1)

    def finish_gradient_synchronization(self) -> None:
        """Wait for the exchange of gradients; shards and vectors then have their means over ranks."""
        grads = [p.grad for p in self._vectors if p.grad is not None]
        works = [dist.all_reduce(grad, async_op=True) for grad in grads]
        for unit in self._units.values():
            unit.finish()
        for grad, work in zip(grads, works, strict=True):
            work.wait()
            grad /= dist.get_world_size()

    def gather_full_params(self) -> dict[str, Tensor]:
        """Return every parameter whole, in its own type, by its name in `module`; every rank must call it."""
        whole = {
            s: v.to(s.dtype)
            for u in self._units.values()
            for s, v in zip(u.shards, u.request(None)(), strict=True)
        }
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: whole[p] if p in whole else p.detach().clone() for name, p in named}


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost elements of lists of modules within `module`."""
    for child in module.children():
        is_unit = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        yield from [child] if is_unit and not is_list else blocks(child)


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs)
    )
