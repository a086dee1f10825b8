"""Tensors that follow each other in one flat tensor, so that an operation over all of them is one operation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def contiguous_zeros(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros with the shapes of `like`, as views of one flat tensor."""
    sizes = [p.numel() for p in like.values()]
    flat = torch.zeros(sum(sizes), device=next((p.device for p in like.values()), None))
    return {
        n: part.view(p.shape) for (n, p), part in zip(like.items(), torch.split(flat, sizes), strict=True)
    }


def flatten_views(tensors: list[Tensor]) -> list[Tensor]:
    """Return one flat view if the tensors are contiguous in memory, else the tensors."""
    if len(tensors) < 2:
        return [t.view(-1) for t in tensors]
    first, end = tensors[0], tensors[0].data_ptr()
    for t in tensors:
        if t.data_ptr() != end or not t.is_contiguous():
            return tensors
        end += t.numel() * t.element_size()
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return tensors  # adjacent, but in different storages
    return [torch.as_strided(first, (sum(t.numel() for t in tensors),), (1,))]


def flatten_alike(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Return `flatten_views` of each list if all of them can be flattened, else the lists."""
    flat = [flatten_views(tensors) for tensors in lists]
    return flat if len({len(views) for views in flat}) == 1 else list(lists)
