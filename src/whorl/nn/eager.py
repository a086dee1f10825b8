"""Functions that a compiler must not trace, marked without importing the compiler.

`torch.compiler.disable` imports `torch._dynamo` where a function is defined: half of the time of `import whorl.models`, in
every process. `eager_only` waits until something is compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager_only(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that always runs uncompiled, as `torch.compiler.disable(function)` does."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # breaks a graph here and not inside
    return call
