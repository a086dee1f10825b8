"""How fast matrix products and copies run: what `machine.py` measures with.

A speed is that of the fastest repetition, since disturbance only ever slows one down. On a CPU the shapes are those of small
models as well as a big one; on a GPU one big product tells the peak.

The subtle part is fp8. Its product alone is not what a layer pays for: each operand is first searched for its largest value,
scaled by it and cast. All of this is in what is timed, and the result is looked at, since what a build of torch or a driver
does with fp8 is younger than the rest. No GPU has run this yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# rows x inner x outer: a small model's projection and its MLP, a middling one, and one big product for the
# peak.
SHAPES = ((2048, 128, 512), (2048, 384, 1536), (768, 1024, 1024))
SECONDS_PER_TIMING = 0.03


def gpu_dtypes(capability: tuple[int, int]) -> tuple[str, ...]:
    """The types worth timing on a GPU of this CUDA capability. (torch emulates bf16 on older ones, slowly.)"""
    if capability < (8, 0):
        return ("float32", "float16")
    return ("float32", "bfloat16", "float8") if capability >= (8, 9) else ("float32", "bfloat16")


def gpu_matmul_flops() -> dict[str, float]:
    """FLOP/s of one big product, of each type that this GPU has and that works on it."""
    import torch

    speeds = {}
    for kind in gpu_dtypes(torch.cuda.get_device_capability()):
        try:
            speeds[kind] = matmul_flops((8192, 4096, 4096), kind, "cuda")
        except (RuntimeError, AttributeError, ArithmeticError):
            if kind != "float8":  # a build of torch without it, or a wrong product: not offered
                raise
    return speeds


def available_core_fraction(cores: int) -> float:
    """What share of `cores` cores this process really had for a moment in which it wanted all: about 1 if it is alone.

    A speed that was taken beside others says what these left over; more threads then look slower than they are.
    """
    import torch

    a = torch.ones(1024, 1024)
    began, used = time.perf_counter(), time.process_time()
    with torch.no_grad():
        while time.perf_counter() - began < 5 * SECONDS_PER_TIMING:
            a @ a
    return (time.process_time() - used) / (time.perf_counter() - began) / cores


def matmul_flops(shape: tuple[int, int, int], kind: str, device: str) -> float:
    """FLOP/s of one matrix product: the fastest repetition, since disturbance only ever slows one down."""
    import torch

    rows, inner, outer = shape
    dtype = torch.bfloat16 if kind == "float8" else getattr(torch, kind)
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(inner, outer, dtype=dtype, device=device)
    work: Callable[[], Any] = (lambda: _float8_matmul(a, b)) if kind == "float8" else (lambda: a @ b)
    with torch.no_grad():
        if kind == "float8" and not bool(((work() - inner).abs() < 0.01 * inner).all()):
            raise ArithmeticError("a product of ones in float8 is wrong")
        return 2.0 * rows * inner * outer / _best_seconds(work, device)


def _float8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b as training in float8 does it: scales by the largest value, casts, the product (`nn/float8.py`)."""
    import torch

    scales = [t.abs().amax().float() / 448.0 for t in (a, b)]
    left = (a / scales[0]).to(torch.float8_e4m3fn)
    right = (b / scales[1]).to(torch.float8_e4m3fn).t().contiguous().t()  # column by column, as it is wanted
    found: torch.Tensor = torch._scaled_mm(
        left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
    )
    return found


def copy_bandwidth(device: str, n_bytes: int) -> float:
    import torch

    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2.0 * n_bytes / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(work: Any, device: str) -> float:
    """Seconds of the fastest repetition in about SECONDS_PER_TIMING (the cold first only if alone)."""
    import torch

    best, start = math.inf, time.perf_counter()
    repetitions = 0
    while repetitions < 3 or time.perf_counter() - start < SECONDS_PER_TIMING:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        repetitions += 1
        if repetitions > 1 or seconds > SECONDS_PER_TIMING:
            best = min(best, seconds)
        if repetitions > 1 and time.perf_counter() - start > 4 * SECONDS_PER_TIMING:
            break
        if seconds > 4 * SECONDS_PER_TIMING:
            break
    return best
