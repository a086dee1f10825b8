"""Triton's compiler without a GPU: launches are intercepted, and each kernel is compiled for a given target.

It finds errors that the interpreter cannot: type mismatches, unsupported shapes of products, values that change their type
in a loop, and too much shared memory. It does not check results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "int64": "i64"}
OPTIONS = ("num_warps", "num_stages")


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, float):
        return "fp32"
    # As in a launch: an argument of 1 is a compile-time constant.
    return "constexpr" if value == 1 else "i64" if abs(value) >= 1 << 31 else "i32"


@contextmanager
def compiled_for(capability: int, shared: dict[str, int]) -> Iterator[None]:
    """Make `kernel[grid](...)` compile only; `shared` gets the bytes of shared memory of each kernel."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        assert sorted(values) == sorted(kernel.arg_names)
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in fixed else _type(values[name]) for name in kernel.arg_names}
        constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
        # Marked as divisible by 16, as in launches, which enables vector loads.
        numbered = enumerate(kernel.arg_names)
        pointers = {name for name, kind in signature.items() if kind[0] == "*"}
        multiples = {name for name, kind in signature.items() if kind == "i32" and values[name] % 16 == 0}
        even = {(i,): [["tt.divisibility", 16]] for i, name in numbered if name in pointers | multiples}
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


def main(capability: int) -> None:
    """Compile every kernel through its public calls, in different types and widths."""
    from whorl.nn.attention.mask import Mask
    from whorl.nn.gpu import attention, cross_entropy, rms_norm, rotary

    for module in (attention, cross_entropy, rms_norm, rotary):
        module.require_triton = lambda *_: None  # type: ignore[attr-defined]  # no GPU is needed without launches
    documents = torch.zeros(1, 100, dtype=torch.long)
    packed = Mask(query_segments=documents, key_segments=documents, window=9)
    shared: dict[str, int] = {}

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    with compiled_for(capability, shared):
        for d, dv, mask in ((64, 64, Mask()), (128, 128, packed)):
            q, k, v = (zeros(2, 100, heads, w).transpose(1, 2) for heads, w in ((4, d), (2, d), (2, dv)))
            attention.attention(q, k, v, mask, 0.1).sum().backward()
        q = zeros(1, 4, 50, 17, dtype=torch.float32)
        attention.attention(q, q, q, Mask(), 0.1, (16, 16)).sum().backward()
        x = zeros(8, 50, 4, 64)
        for gain in (None, zeros(64, dtype=torch.float32), zeros(4, 1, dtype=torch.float32)):
            rms_norm.rms_norm(x, gain).sum().backward()
        for softcap in (None, 30.0):
            logits = torch.zeros(9, 50_000, dtype=torch.bfloat16)
            cross_entropy.cross_entropy_(logits, documents[0, :9], torch.ones(9), 1e-4, softcap)
        for layout in ("half", "interleaved"):
            rotary.rotary(x, torch.ones(50, 1, 32), torch.ones(50, 1, 32), layout).sum().backward()
    assert len(shared) == 8, shared  # four of attention, two of norm, one of each other
    for name, size in shared.items():
        assert size <= 99 * 1024, f"{name} needs {size} bytes of shared memory; the smallest GPU has 99 KB"
    print(shared)


if __name__ == "__main__":
    for number in sys.argv[1:]:
        main(int(number))
