"""Weights for tests: parameters that start at zero would hide their part of a network."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def generator(seed: int = 0) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def draw_zeros(module: Module) -> Module:
    """Draw all-zero parameters from N(0, 0.09), seeded by the length of their names; return the module."""
    for name, p in module.named_parameters():
        if not p.any():
            p.normal_(0.0, 0.3, generator=generator(len(name)))
    return module


@torch.no_grad()
def add_noise(module: Module, std: float, rng: torch.Generator) -> Module:
    """Add normal noise to every parameter; return the module."""
    for p in module.parameters():
        p.add_(torch.randn(p.shape, generator=rng) * std)
    return module
