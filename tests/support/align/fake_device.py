"""A device that is not there, so that a forgotten move is found on a machine with a CPU alone.

    with Pretend():
        model.to(DEVICE)      every storage that is moved there, or made from what is there, is remembered as lying there
        x.device              DEVICE, of a tensor whose storage is
        x + y                 an error, if x lies there and y does not, as CUDA has it
        x.numpy()             an error

The numbers are a CPU's, and so are the bits: all that is pretended is where they lie. Two modes of torch do it. The outer
one sees what programs say (`device=`, `.to`, `.cpu`, `.device`), the inner one every operation below that, a backward's too:
it refuses a mixture, and hands the mark on from what an operation read to what it made.

As on CUDA, a CPU's tensor without dimensions may be mixed with anything, and a CPU's indices may index what lies there.
What this cannot see: what kernels do, and how far their sums are from a CPU's. That needs the device (marker `gpu`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("xpu:0")  # of a kind that nothing here has a special way for
WHERE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
BETWEEN = {"aten::copy_", "aten::_to_copy"}
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}

_there: dict[int, StorageWeakRef] = {}  # while a reference is kept, no other storage gets its number


def _storage(t: Tensor) -> Any:
    return (t if t.layout is torch.strided else t._values()).untyped_storage()


def there(t: Tensor) -> bool:
    """Whether a tensor lies on the device that is not there."""
    found = _there.get(_storage(t)._cdata)
    return found is not None and not found.expired()


def _mark(t: Tensor, there: bool = True) -> Tensor:
    storage = _storage(t)
    if there:
        _there[storage._cdata] = StorageWeakRef(storage)
    else:
        _there.pop(storage._cdata, None)
    return t


class Mixed(RuntimeError):
    """Tensors of two devices in one operation."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        mine = [t for t in given if there(t)]
        if mine and name not in BETWEEN:
            looked_at = given
            if name in INDEXED and there(args[0]):
                looked_at = [t for t in tree_leaves(args[2:]) if isinstance(t, Tensor)]
            strangers = [list(t.shape) for t in looked_at if t.dim() and not there(t)]
            if strangers:
                raise Mixed(
                    f"{name}: {strangers} on the CPU beside {[list(t.shape) for t in mine]} on {DEVICE}"
                )
        out = func(*args, **kwargs)
        if mine:
            old = {_storage(t)._cdata for t in given}
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and _storage(t)._cdata not in old:
                    _mark(t)
        return out


class Pretend(TorchFunctionMode):
    """See the top of this file."""

    def __enter__(self) -> Any:
        self.stack = ExitStack()
        self.stack.enter_context(_Operations())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()
        for number in [n for n, storage in _there.items() if storage.expired()]:
            del _there[number]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == WHERE:
            return DEVICE if there(args[0]) else func(*args)
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if func is Tensor.cpu:
            return _to(args[0], "cpu")
        if func in (Tensor.numpy, Tensor.__array__) and there(args[0]):
            raise TypeError(
                f"a tensor {list(args[0].shape)} on {DEVICE} has no numbers for NumPy: move it first"
            )
        if func is Tensor.backward:  # in which Python's own backwards are to see this mode
            rest = {n: kwargs.get(n) for n in ("retain_graph", "inputs")}
            TorchFunctionMode.__enter__(self)
            try:
                return torch.autograd.backward(args[0], args[1:] or kwargs.get("gradient"), **rest)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != DEVICE.type:
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": "cpu"})
        return _mark(made.clone() if func is torch.as_tensor else made)


def _to(
    t: Tensor, *given: Any, copy: bool = False, device: Any = None, dtype: Any = None, **_: Any
) -> Tensor:
    for one in given:
        if isinstance(one, Tensor):
            device, dtype = DEVICE if there(one) else "cpu", one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, str | torch.device):
            device = one
    device = None if device is None else torch.device(device)
    if device is not None and device.type == "meta":
        return t.to(device, dtype)
    cast = t if dtype is None else t.to(dtype)
    away = device is not None and (device.type == DEVICE.type) != there(t)
    if not away:
        return cast.clone() if copy and cast is t else cast
    return _mark(cast.clone(), device is not None and device.type == DEVICE.type)
