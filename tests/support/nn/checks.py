"""Helpers of the tests of layers and objectives: seeded tensors, comparison with gradients, decoding in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(shape, generator=gen(seed), dtype=dtype, requires_grad=grad)


def assert_same_with_gradients(
    actual: Tensor,
    expected: Tensor,
    inputs: Sequence[Tensor],
    grad_atol: float = 1e-5,
    grad_rtol: float = 1e-4,
) -> None:
    """Compare two outputs and their gradients with respect to `inputs`, for one random upstream gradient."""
    assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    upstream = randn(*actual.shape, seed=9).to(actual.dtype)
    both = [torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (actual, expected)]
    assert_close(*both, atol=grad_atol, rtol=grad_rtol)


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], *, allow_unused: bool = False, **options: Any
) -> None:
    """Compare half the gradients of two scalars, as of a learner that divides. options: of `assert_close`."""
    how = {"retain_graph": True, "materialize_grads": allow_unused}
    assert_close(*(torch.autograd.grad(0.5 * y, inputs, **how) for y in (actual, expected)), **options)


def assert_same_losses(actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], **options: Any) -> None:
    """Compare two scalars and their gradients. options: of `assert_same_gradients`."""
    assert_close(actual, expected, **{k: v for k, v in options.items() if k != "allow_unused"})
    assert_same_gradients(actual, expected, inputs, **options)


def assert_all_parameters_trained(layer: nn.Module, y: Tensor, without: tuple[str, ...] = ()) -> None:
    """Check that every parameter gets a gradient that is not zero everywhere, except names that start with `without`."""
    (y * randn(*y.shape, seed=6).to(y.dtype)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert name.startswith(without) or bool((parameter.grad != 0).any()), name


@torch.no_grad()
def copy_values(sources: Mapping[Tensor, Tensor]) -> None:
    """Copy each value of the mapping into its key."""
    for target, source in sources.items():
        target.copy_(source)


def draw_zero_parameters(layer: nn.Module, std: float = 0.3) -> None:
    """Draw the parameters that start at 0, in place, so that they affect the output."""
    for seed, parameter in enumerate(layer.parameters()):
        if not parameter.any():
            nn.init.normal_(parameter, std=std, generator=gen(100 + seed))


def in_pieces(layer: Any, x: Tensor, pieces: Sequence[int], state: Any, **by_position: Tensor) -> Tensor:
    """Return the outputs of consecutive pieces of rows. by_position: keyword tensors [B, T], split like x."""
    split = {name: t.split(list(pieces), 1) for name, t in {"x": x, **by_position}.items()}
    parts = [{name: tensors[i] for name, tensors in split.items()} for i in range(len(pieces))]
    return torch.cat([layer(**part, state=state) for part in parts], 1)


@contextmanager
def saved_sizes() -> Iterator[list[int]]:
    """Record the number of elements of each tensor that autograd saves."""
    sizes: list[int] = []

    def record(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        yield sizes
