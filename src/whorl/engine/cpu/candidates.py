"""The ways in which the native library computes one product, for choices by timing and for `whorl machine`.

    with NativeProducts(n, k) as weight:              a random matrix [n, k], packed once for each way
        weight.candidates(rows, threads)              {"native float32 vectors": work, "native int8 tiles": work, ...}

`make_variants` lists the ways: a further one is a further entry there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType

import torch

from whorl.engine.cpu import build, layout

WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


def make_variants(n: int, k: int) -> dict[str, layout.Matrix]:
    """Return an empty matrix [n, k] for each way of this library."""
    library = build.library()
    variants: dict[str, layout.Matrix] = {}
    if library is None:
        return variants
    for kind in WEIGHT_DTYPES:
        for method in layout.usable_methods(library, kind):
            matrix = variants[f"native {kind} {method}"] = layout.make_matrix(kind, None, n, k)
            matrix.method = layout.METHODS[method]
    return variants


class NativeProducts:
    """A random matrix [n, k] in all variants; none without a compiler, or with WHORL_CHOOSE=cpu=torch. A context manager."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self._library = build.library()
        self._variants = make_variants(n, k)
        self._step: int | None = None
        if self._library is not None:
            self._step = self._library.whorl_open()
            weights = torch.randn(n, k) * k**-0.5
            self._arenas = [layout.Arena(self._library, [matrix]) for matrix in self._variants.values()]
            for matrix in self._variants.values():
                self._library.whorl_pack(ctypes.byref(matrix), weights.data_ptr(), None, None, 1)

    def candidates(self, rows: int, threads: int) -> dict[str, Callable[[], object]]:
        """Return the ways to multiply `rows` fp32 rows with the matrix. Each raises RuntimeError if the library refuses."""
        x, y = torch.randn(rows, self.k), torch.empty(rows, self.n)
        return {name: self._product(name, x, y, threads) for name in self._variants}

    def _product(self, name: str, x: torch.Tensor, y: torch.Tensor, threads: int) -> Callable[[], object]:
        library, matrix, step = self._library, self._variants[name], self._step
        assert library is not None

        def work() -> object:
            code = library.whorl_product(
                step, ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr(), 0, 0.0, threads
            )
            if code:
                raise RuntimeError(f"the native library returned {code}")
            return y

        return work

    def __enter__(self) -> NativeProducts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._library is not None and self._step is not None:
            self._library.whorl_close(self._step)
            self._step = None
