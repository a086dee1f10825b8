"""Work without torch's compiler, whose import takes half of the time of a process that loads a model.

`torch.compiler.disable` imports `torch._dynamo` where a function is defined. `eager_only` waits until something is
compiled.

Torch implements random numbers and arithmetic on its "meta" device (shapes and types, without values) in Python, which
imports `torch._dynamo` and `sympy`: 1.2 s in each process that loads a model. Nothing reads the numbers, so `meta_device`
leaves out what draws initial weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKE: frozenset[Any] = frozenset({torch.randn, torch.rand})
_FILL: frozenset[Any] = frozenset({
    Tensor.normal_, Tensor.uniform_, torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.orthogonal_,
})  # fmt: skip
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


class _NoRandomNumbers(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _MAKE:
            kwargs.pop("generator", None)
            return torch.empty(*args, **kwargs)
        if function in _FILL:
            return args[0] if args else kwargs["tensor"]
        if function is Tensor.mul and args[0].is_meta and not isinstance(args[1], Tensor):
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        return function(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Within the context, new tensors have a shape and a type, but no memory and no values."""
    with torch.device("meta"), _NoRandomNumbers():
        yield
