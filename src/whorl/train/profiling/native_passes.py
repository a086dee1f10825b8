"""Profiler ranges around the C++ passes of an optimizer's step, which are no operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.profiler import record_function

from whorl.nn.native import update
from whorl.train.optim import clipping, optimizers
from whorl.train.profiling.inductor import KernelInstrumentation
from whorl.train.profiling.trace import LOOKUPS, MATMULS, POINTWISE, RANGE, REDUCTIONS, KernelInfo

PASSES: tuple[tuple[ModuleType, str, str], ...] = (  # the module whose global is called, its name, class
    (clipping, "sum_parts", REDUCTIONS),
    (update, "momentum_", POINTWISE),
    (update, "add_update_", POINTWISE),
    (update, "row_adagrad_", LOOKUPS),
    (optimizers, "orthogonalize_", MATMULS),
)


@contextmanager
def instrumented_passes(kernels: KernelInstrumentation) -> Iterator[None]:
    """Within the context, each pass is a kernel of `kernels` while that is enabled, in the part of the range around it."""
    before = [(module, name, vars(module)[name]) for module, name, _ in PASSES]
    for module, name, kind in PASSES:
        vars(module)[name] = _ranged(vars(module)[name], name, kind, kernels)
    try:
        yield
    finally:
        for module, name, function in before:
            vars(module)[name] = function


def _ranged(
    function: Callable[..., Any], name: str, kind: str, kernels: KernelInstrumentation
) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        if not kernels.enabled:
            return function(*arguments, **named)
        tensors = list(_tensors(arguments))
        shape = tuple(tensors[0].shape) if tensors else ()
        label = f"{RANGE}native {name} {len(tensors)} {'x'.join(map(str, shape))}"
        if label not in kernels.kernels:
            kernels.kernels[label] = _cost(kind, tensors, arguments)
        with record_function(label):
            return function(*arguments, **named)

    return run


def _cost(kind: str, tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> KernelInfo:
    """Return class, least bytes and FLOPs of one call."""
    if kind == LOOKUPS:  # of a table: the gradients are read, as many rows are read and written
        gradients = list(_tensors(arguments[3]))
        numbers = float(sum(t.numel() for t in gradients))
        return KernelInfo("", kind, 3.0 * sum(t.nbytes for t in gradients), numbers)
    moved, numbers = float(sum(t.nbytes for t in tensors)), float(sum(t.numel() for t in tensors))
    if kind == MATMULS:
        numbers = _orthogonalize_flops(tuple(tensors[0].shape), len(arguments[1]))
    return KernelInfo("", kind, moved, numbers)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _orthogonalize_flops(shape: tuple[int, ...], rounds: int) -> float:
    """Return the FLOPs of the symmetric products in full, as `nn/native/orthogonalize.py` counts them."""
    n, rows, columns = shape
    return 2.0 * rounds * n * rows * rows * (2 * columns + rows)
