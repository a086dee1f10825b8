"""Triton's real compiler without a GPU: launches are caught, and each kernel is compiled for a named target instead.

What the interpreter cannot see is seen here: types that do not meet, shapes that a product does not take, values that change
their type in a loop, shared memory that a GPU has not got. What comes out of the kernels is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages")


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    # As a launch does it: an argument of 1 is a constant of the program.
    return "constexpr" if value == 1 else "i64" if abs(value) >= 1 << 31 else "i32"


@contextmanager
def compiled_for(capability: int, shared: dict[str, int]) -> Iterator[None]:
    """Inside, `kernel[grid](...)` compiles and runs nothing; `shared` gets the bytes of shared memory of each kernel."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        assert sorted(values) == sorted(kernel.arg_names)
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in fixed else _type(values[name]) for name in kernel.arg_names}
        constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
        # Divisible by 16, as launches mark it: strides and pointers then load four numbers at a time.
        even = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if signature[name][0] == "*" or (signature[name] == "i32" and values[name] % 16 == 0)
        }
        source = ASTSource(kernel, signature, constants, even)
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        name = kernel.fn.__module__.rsplit(".", 1)[-1] + kernel.fn.__name__
        shared[name] = max(shared.get(name, 0), found.metadata.shared)
        assert all(size > 0 for size in grid) and "ptx" in found.asm

    usual = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = usual
