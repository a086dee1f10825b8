"""Networks without values: shapes and types only, on torch's "meta" device.

Torch implements random numbers and arithmetic on that device in Python, which imports `torch._dynamo` and `sympy`: 1.2 s
in each process that loads a model. Nothing reads the numbers, so `meta_device` leaves out what draws initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKE: frozenset[Any] = frozenset({torch.randn, torch.rand})
_FILL: frozenset[Any] = frozenset({
    Tensor.normal_, Tensor.uniform_, torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.orthogonal_,
})  # fmt: skip


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
