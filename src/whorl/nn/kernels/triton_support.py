"""Triton, where it is: the one place that imports it, so that every kernel file can be read and imported without it.

Triton (Tillet et al. 2019, MAPL) is a language for GPU kernels inside of Python: a program works on whole tiles, many
programs run at once, and the compiler spreads a tile over threads. What a kernel saves is traffic: a chain of tensor
operations writes each intermediate to memory and reads it back, a kernel keeps it in registers. Arguments of kernels have
no annotations but `tl.constexpr`: the compiler reads them, and takes none of Python's.

`jit` is Triton's, or, without Triton, a decorator that does nothing: the function is then text. `require` is called
before each launch and says what is missing. With TRITON_INTERPRET=1 in the environment before Triton is first
imported, kernels run as numpy on a CPU, one program after another: for tests of small shapes, far too slow for use.

The subtle part: numpy has no bf16. The interpreter keeps such tensors as 16-bit integers, converts them where it loads,
stores and casts, and forgets it in `tl.dot`, which then multiplies the integers (seen in 3.7.1 and 3.9.0: products of
1e10). So `dot` casts its operands to fp32 when interpreted; rounding to bf16 has happened by then, and stays in. It also
cuts off what does not fit into bf16, where a GPU rounds to nearest: interpreted results are off by up to twice as much.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whorl.errors import ConfigError

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)

__all__ = ["INTERPRETED", "dot", "dot_precision", "jit", "on_device", "require_triton", "tl"]


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function itself where there is no Triton."""
    return function if triton is None else triton.jit(function)


def require_triton(*tensors: Tensor) -> None:
    """Raises ConfigError when kernels cannot run on these tensors."""
    if triton is None:
        raise ConfigError(
            "a Triton kernel is asked for, and Triton is not installed",
            expected="the package triton, which is made for Linux",
            do="pip install triton, or WHORL_KERNELS=torch",
        )
    for tensor in tensors:
        if not tensor.is_cuda and not INTERPRETED:
            raise ConfigError(
                f"a Triton kernel is asked for, and a tensor is on {tensor.device}",
                expected="tensors on a CUDA device",
                do="WHORL_KERNELS=torch; for a test on a CPU, TRITON_INTERPRET=1 before the start",
            )


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where kernels start on the tensor's device: Triton launches on torch's current one, whatever the pointers say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def dot_precision(dtype: torch.dtype) -> str:
    """How `dot` multiplies fp32: as torch would. tf32 keeps 10 bits of mantissa, ieee all 23."""
    loose = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and loose else "ieee"


@jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a: [m, k], b: [k, n] -> [m, n] fp32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)
