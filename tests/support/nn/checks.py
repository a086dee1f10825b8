"""Helpers of the layer tests: seeded generators, comparison with gradients, decoding in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=gen(seed), dtype=dtype)


def assert_same_with_gradients(
    actual: Tensor,
    expected: Tensor,
    inputs: Sequence[Tensor],
    *,
    grad_atol: float = 1e-5,
    grad_rtol: float = 1e-4,
) -> None:
    """Compare two outputs and their gradients with respect to `inputs`, for one random upstream gradient."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    upstream = randn(*actual.shape, seed=9).to(actual.dtype)
    both = (torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (actual, expected))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, atol=grad_atol, rtol=grad_rtol)


def assert_all_parameters_trained(layer: nn.Module, y: Tensor, without: tuple[str, ...] = ()) -> None:
    """Check that every parameter gets a gradient that is not zero everywhere, except names that start with `without`."""
    (y * randn(*y.shape, seed=6).to(y.dtype)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert name.startswith(without) or bool((parameter.grad != 0).any()), name


def draw_zero_parameters(layer: nn.Module, std: float = 0.3) -> None:
    """Draw the parameters that start at 0, in place, so that they affect the output."""
    for seed, parameter in enumerate(layer.parameters()):
        if not parameter.any():
            nn.init.normal_(parameter, std=std, generator=gen(100 + seed))


def in_pieces(
    layer: Any, x: Tensor, pieces: Sequence[int], state: Any, **by_position: Tensor | None
) -> Tensor:
    """Return the outputs of consecutive pieces of rows. by_position: keyword tensors [B, T], split like x."""
    outputs, start = [], 0
    for n in pieces:
        part = slice(start, start + n)
        given = {name: None if t is None else t[:, part] for name, t in by_position.items()}
        outputs.append(layer(x[:, part], state=state, **given))
        start += n
    return torch.cat(outputs, 1)
