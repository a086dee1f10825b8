"""Benchmarks of matrix products and copies for `device_probe.py`.

The fastest repetition counts, since interference only slows a run down. On a CPU the shapes come from small models and
a large one; on a GPU one large product gives the peak.

The subtle point is fp8. A layer pays for more than the product: the maximum of each operand, scaling, and casts. All of
it is timed, and the result is checked, since fp8 support in torch and drivers is new. No GPU has run this yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# rows x inner x outer: a small model's projection and MLP, a medium one, and a large product for the peak.
SHAPES = ((2048, 128, 512), (2048, 384, 1536), (768, 1024, 1024))
SECONDS_PER_TIMING = 0.03
SLICE_ROWS = 16  # of a product whose type the CPU may emulate, at 1 GFLOP/s in place of 100


def gpu_dtypes(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the dtypes to time on a GPU of this CUDA capability. (torch emulates bf16 on older ones, slowly.)"""
    if capability < (8, 0):
        return ("float32", "float16")
    return ("float32", "bfloat16", "float8") if capability >= (8, 9) else ("float32", "bfloat16")


def gpu_matmul_flops() -> dict[str, float]:
    """Return FLOP/s of one large product for each dtype that works on this GPU."""
    import torch

    speeds = {}
    for kind in gpu_dtypes(torch.cuda.get_device_capability()):
        try:
            speeds[kind] = matmul_flops((8192, 4096, 4096), kind, "cuda")
        except (RuntimeError, AttributeError, ArithmeticError):
            if kind != "float8":  # a torch build without it, or a wrong product: not offered
                raise
    return speeds


def available_core_fraction(cores: int) -> float:
    """Return the fraction of `cores` that this process gets under full load; about 1 without contention.

    A measurement under contention reflects the remaining capacity; more threads then look slower.
    """
    import torch

    a = torch.ones(1024, 1024)
    began, used = time.perf_counter(), time.process_time()
    with torch.no_grad():
        while time.perf_counter() - began < 5 * SECONDS_PER_TIMING:
            a @ a
    return (time.process_time() - used) / (time.perf_counter() - began) / cores


def matmul_flops(shape: tuple[int, int, int], kind: str, device: str) -> float:
    """Return FLOP/s of one matrix product, from the fastest repetition.

    A CPU without instructions for `kind` takes seconds for a product. Then the rate is that of a few rows.
    """
    import torch

    rows, inner, outer = shape
    dtype = torch.bfloat16 if kind == "float8" else getattr(torch, kind)
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(inner, outer, dtype=dtype, device=device)
    work: Callable[[], Any] = (lambda: _float8_matmul(a, b)) if kind == "float8" else (lambda: a @ b)
    with torch.no_grad():
        if kind == "float8" and not bool(((work() - inner).abs() < 0.01 * inner).all()):
            raise ArithmeticError("a float8 product of ones has a wrong result")
        if device == "cpu" and kind != "float32":
            seconds = best_seconds(lambda: a[:SLICE_ROWS] @ b, device, limit=0.0) / SLICE_ROWS
            if seconds * rows > 4 * SECONDS_PER_TIMING:
                return 2.0 * inner * outer / seconds
        return 2.0 * rows * inner * outer / best_seconds(work, device)


def _float8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b as in float8 training: scales by the maximum, casts, the product (`nn/float8.py`)."""
    import torch

    scales = [t.abs().amax().float() / 448.0 for t in (a, b)]
    left = (a / scales[0]).to(torch.float8_e4m3fn)
    right = (b / scales[1]).to(torch.float8_e4m3fn).t().contiguous().t()  # column-major, as required
    found: torch.Tensor = torch._scaled_mm(
        left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
    )
    return found


def copy_bandwidth(device: str, n_bytes: int) -> float:
    import torch

    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2.0 * n_bytes / best_seconds(lambda: target.copy_(source), device)


def best_seconds(work: Any, device: str, limit: float = SECONDS_PER_TIMING) -> float:
    """Seconds of the fastest repetition in about `limit`, and of three (the cold first one only if it is the only one)."""
    import torch

    if device == "cuda":  # the first product of a process initialises the libraries
        work()
        torch.cuda.synchronize()
    best, start = math.inf, time.perf_counter()
    repetitions = 0
    while repetitions < 3 or time.perf_counter() - start < limit:
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
