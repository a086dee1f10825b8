"""Selection of a Triton kernel or the torch reference, by a setting or by measurement.

    WHORL_CHOOSE=gpu=torch    never a kernel
    WHORL_CHOOSE=gpu=triton   a kernel where one supports the shapes
    default                   the first call of each kind times both, forward and backward, on the call's
                              tensors, and the faster one serves all later calls of that kind

A kernel is compared with the reference before it is timed. One that fails to compile, disagrees, or is less than 5 %
faster is not used; a failure is reported once, as a warning. On a CPU nothing is measured and the reference runs.

The caller defines a kind: operation, type and sizes, with lengths rounded up to a power of 2, so that rows of many
lengths share a measurement.

The subtle part is when not to measure:

- inside a compiled region, torch is used: the compiler fuses, and a launch would break its graph;
- while a CUDA graph is recorded, synchronization is forbidden;
- without gradients the backward cannot be timed, so the choice of training is used, or torch;
- with torch's deterministic algorithms, timing must not decide, so torch is used unless gpu=triton is forced (all
  kernels here are deterministic).
"""

from __future__ import annotations

import functools
import importlib.util
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from statistics import median

import torch
from torch import Tensor

from whorl.machine.kernel_choice import forced_choices

MIN_SPEEDUP = 1.05
ROUNDS = 7
# Relative error of the whole tensor (2-norm) between two correct results: both round products of bf16 or tf32.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}

BenchmarkFn = Callable[[], Sequence[Tensor]]
_decisions: dict[Hashable, bool] = {}


@functools.cache
def triton_installed() -> bool:
    """Return whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def next_power_of_2(n: int, minimum: int = 1) -> int:
    """Return the smallest power of 2 that is >= n and >= minimum, the size of a tile."""
    return max(minimum, 1 << (n - 1).bit_length())


def use_kernel(kind: Hashable, x: Tensor, kernel: BenchmarkFn, reference: BenchmarkFn) -> bool:
    """Return whether the kernel should run.

    Args:
        kind: key of the measurement; the device is added.
        x: a tensor of the call, which has its device and type.
        kernel, reference: forward and backward by Triton and by torch -> the same tensors, for comparison. Called only
            when a measurement is due.
    """
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    if (forced := forced_choices().get("gpu")) is not None:
        return forced == "triton"
    if not triton_installed() or torch.are_deterministic_algorithms_enabled():
        return False
    kind = (kind, x.dtype, torch.cuda.get_device_name(x.device))
    if kind not in _decisions:
        if not torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
            return False
        _decisions[kind] = is_correct_and_faster(
            str(kind), kernel, reference, lambda work: _milliseconds(work, x.device)
        )
    return _decisions[kind]


def kernel_choices() -> dict[str, str]:
    """Return the decisions by measurement so far, for reports."""
    return {str(kind): "triton" if kernel else "torch" for kind, kernel in _decisions.items()}


def is_correct_and_faster(
    label: str, kernel: BenchmarkFn, reference: BenchmarkFn, timer: Callable[[BenchmarkFn], float]
) -> bool:
    """Return whether the kernel agrees with torch and is faster. `timer` returns the seconds of one call."""
    try:
        wrong = mismatch(kernel(), reference())
        if wrong is not None:
            warnings.warn(
                f"a Triton kernel is not used, because its results differ: {label}, {wrong}", stacklevel=2
            )
            return False
        turns = [(timer(kernel), timer(reference)) for _ in range(ROUNDS)]
    except Exception as error:  # any kind: a compiler, a driver, no memory for both at once
        warnings.warn(f"a Triton kernel is not used: {label}, {type(error).__name__}: {error}", stacklevel=2)
        return False
    kernel_time, reference_time = (median(times) for times in zip(*turns, strict=True))
    return bool(kernel_time * MIN_SPEEDUP < reference_time)


def mismatch(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return a description of differences beyond rounding, or None."""
    if len(actual) != len(expected):
        return f"{len(actual)} tensors instead of {len(expected)}"
    for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != b.shape:
            return f"tensor {place} has the shape {list(a.shape)} instead of {list(b.shape)}"
        error = float((a.float() - b.float()).norm())
        allowed = TOLERANCE.get(a.dtype, 5e-3) * float(b.float().norm()) + 1e-6
        if not error <= allowed:  # so that NaN is a difference
            return f"tensor {place} is off by {error:.2e}, allowed {allowed:.2e}"
    return None


def forward_and_backward(function: Callable[..., Tensor], *inputs: Tensor | None) -> BenchmarkFn:
    """Run forward and backward of `function` on copies of the inputs; return the output and the gradients.

    The upstream gradient has both signs and needs no generator, whose state a measurement must not change. It differs
    from the output, which is orthogonal to the changes a norm can make, so that the gradient would cancel.
    """

    def work() -> Sequence[Tensor]:
        with torch.enable_grad():
            leaves = [
                t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in inputs
            ]
            y = function(*leaves)
            differentiable = [t for t in leaves if t is not None and t.requires_grad]
            upstream = torch.arange(y.numel(), device=y.device).mul(0.7).cos().view(y.shape).to(y.dtype)
            return y.detach(), *torch.autograd.grad(y, differentiable, upstream)

    return work


def _milliseconds(work: BenchmarkFn, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e3
