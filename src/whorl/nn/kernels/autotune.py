"""Triton or torch: by a setting, or by who was faster here, and right.

    WHORL_KERNELS=torch    never a kernel
    WHORL_KERNELS=triton   a kernel wherever one knows the shapes
    WHORL_KERNELS=auto     (the default) the first call of each kind times both, forward and backward, on its own
                           tensors, and the faster serves all later calls of that kind

A kernel that was never seen on the GPU at hand has to earn its place: it is compared before it is timed, and one that
fails to compile, disagrees, or is not faster by a twentieth is not used. (A failure is told once, as a warning.) On a
CPU nothing is asked and nothing is timed: the reference runs, with the bits that it always had.

What counts as one kind is the caller's: operation, type and sizes, lengths rounded up to a power of 2, so that rows of
many lengths do not each cost a measurement.

The subtle part is when not to measure. Inside of a compiled region the compiler fuses for itself, and a launch would cut
its graph: torch. While a CUDA graph is recorded nothing may be synchronised. Without gradients the backward could not be
timed, so what training has chosen is used, or torch. And a job that must give the same bits twice cannot
let a clock decide: with torch's deterministic algorithms on, the choice is torch unless the setting says triton (all
kernels here are deterministic themselves).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from statistics import median

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of

KERNEL_MODES = ("auto", "triton", "torch")
ENV_VAR = "WHORL_KERNELS"
MIN_SPEEDUP = 1.05
ROUNDS = 7
# Relative error of the whole tensor (2-norm) that two right answers may have: both round products of bf16 or tf32.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}

BenchmarkFn = Callable[[], Sequence[Tensor]]
_decisions: dict[Hashable, bool] = {}


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported; does not import it."""
    return importlib.util.find_spec("triton") is not None


def next_power_of_2(n: int, minimum: int = 1) -> int:
    """The smallest power of 2 that is >= n and >= least: tiles have such sizes, masks cut them to fit."""
    return max(minimum, 1 << (n - 1).bit_length())


def kernel_mode() -> str:
    """What the environment asks for.

    Raises:
        ConfigError: a word that is none of SETTINGS.
    """
    asked = os.environ.get(ENV_VAR, "auto")
    if asked not in KERNEL_MODES:
        raise ConfigError(f"{ENV_VAR} is {asked!r}", expected=one_of(asked, KERNEL_MODES))
    return asked


def use_kernel(kind: Hashable, x: Tensor, kernel: BenchmarkFn, reference: BenchmarkFn) -> bool:
    """Whether the kernel is to run.

    Args:
        kind: what one answer is good for; without the device, which is added.
        x: a tensor of the call, which names device and type.
        kernel, plain: forward and backward by Triton and by torch -> the same tensors, for comparison. Called only where
            a measurement is due.
    """
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    asked = kernel_mode()
    if asked != "auto":
        return asked == "triton"
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
    """What was decided by measurement so far, for reports."""
    return {str(kind): "triton" if kernel else "torch" for kind, kernel in _decisions.items()}


def is_correct_and_faster(
    label: str, kernel: BenchmarkFn, reference: BenchmarkFn, timer: Callable[[BenchmarkFn], float]
) -> bool:
    """Whether the kernel agrees with torch and is faster.  `clock` gives the time of one call."""
    try:
        wrong = mismatch(kernel(), reference())
        if wrong is not None:
            warnings.warn(
                f"a Triton kernel is not used, it gave other results: {label}, {wrong}", stacklevel=2
            )
            return False
        turns = [(timer(kernel), timer(reference)) for _ in range(ROUNDS)]
    except Exception as error:  # of any kind: a compiler, a driver, no memory for both at once
        warnings.warn(f"a Triton kernel is not used: {label}, {type(error).__name__}: {error}", stacklevel=2)
        return False
    ours, theirs = (median(times) for times in zip(*turns, strict=True))
    return bool(ours * MIN_SPEEDUP < theirs)


def mismatch(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """What differs beyond rounding, in words, or None."""
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
    """Forward and backward of `function` on the inputs' values -> output and gradients of those that are floating.

    The upstream gradient is made up, of both signs and without a generator, whose state a measurement may not touch.
    It is not the output itself: that is orthogonal to what a norm can change, and all digits of the gradient would cancel.
    """

    def work() -> Sequence[Tensor]:
        with torch.enable_grad():
            leaves = [
                t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in inputs
            ]
            y = function(*leaves)
            learning = [t for t in leaves if t is not None and t.requires_grad]
            upstream = torch.arange(y.numel(), device=y.device).mul(0.7).cos().view(y.shape).to(y.dtype)
            return y.detach(), *torch.autograd.grad(y, learning, upstream)

    return work


def _milliseconds(work: BenchmarkFn, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e3
