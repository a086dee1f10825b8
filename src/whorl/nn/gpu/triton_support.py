"""The only import of Triton, so that every kernel file can be imported without it.

Triton (Tillet et al. 2019, MAPL) is a language for GPU kernels inside Python: a program works on whole tiles, many
programs run at once, and the compiler spreads a tile over threads. A kernel saves memory traffic: a chain of tensor
operations writes and reads each intermediate, a kernel keeps it in registers. Kernel arguments have no annotations
except `tl.constexpr`, because the compiler reads them.

`jit` is Triton's or, without Triton, a decorator that does nothing. `require_triton` is called before each launch and
raises an error that names the missing part. With TRITON_INTERPRET=1 in the environment before the first import of
Triton, kernels run as numpy on a CPU, one program after another: for tests of small shapes only.

The subtle part: numpy has no bf16. The interpreter stores such tensors as 16-bit integers and converts them in loads,
stores and casts, but not in `tl.dot`, which then multiplies the integers (seen in 3.7.1 and 3.9.0: products of 1e10). So
`dot` casts its operands to fp32 when interpreted; they are already rounded to bf16. The interpreter also truncates to
bf16 where a GPU rounds to nearest, so interpreted results have up to twice the error.
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
    """Return `triton.jit(function)`, or the function unchanged without Triton."""
    return function if triton is None else triton.jit(function)


def require_triton(*tensors: Tensor) -> None:
    """Raise ConfigError when kernels cannot run on these tensors."""
    if triton is None:
        raise ConfigError(
            "a Triton kernel is requested, and Triton is not installed",
            expected="the package triton, which exists for Linux only",
            do="pip install triton, or WHORL_CHOOSE=gpu=torch",
        )
    for tensor in tensors:
        if not tensor.is_cuda and not INTERPRETED:
            raise ConfigError(
                f"a Triton kernel is requested, and a tensor is on {tensor.device}",
                expected="tensors on a CUDA device",
                do="WHORL_CHOOSE=gpu=torch; for a test on a CPU, set TRITON_INTERPRET=1 before the start",
            )


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context that launches kernels on the tensor's device; Triton otherwise launches on torch's current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of fp32 products in `dot`, as torch's setting: tf32 keeps 10 bits of mantissa, ieee all 23."""
    loose = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and loose else "ieee"


@jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a: [m, k], b: [k, n] -> [m, n] fp32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)
