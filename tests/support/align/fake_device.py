"""A fake device, which finds missing device moves on a machine with only a CPU.

    with FakeDevice():
        model.to(DEVICE)      marks every storage that is moved is_fake, or computed from marked ones
        x.device              DEVICE, for a tensor with a marked storage
        x + y                 an error, if x is marked and y is not, as with CUDA
        x.numpy()             an error

Values and bits are those of the CPU; only the location is fake. Two modes of torch implement it. The outer one handles
Python calls (`device=`, `.to`, `.cpu`, `.device`). The inner one handles every operation, including backward ones: it
rejects mixtures, and marks the outputs of marked inputs.

As with CUDA, zero-dimensional CPU tensors may be mixed with anything, and CPU indices may index a marked tensor. It
cannot check kernels, or how far their sums differ from a CPU's. That needs a device (marker `gpu`).
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

DEVICE = torch.device("xpu:0")  # a device type without special cases here
WHERE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
BETWEEN = {"aten::copy_", "aten::_to_copy"}
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}

_there: dict[int, StorageWeakRef] = {}  # while a reference is held, no other storage gets its address


def _storage(t: Tensor) -> Any:
    return (t if t.layout is torch.strided else t._values()).untyped_storage()


def is_fake(t: Tensor) -> bool:
    """Return whether a tensor is on the fake device."""
    found = _there.get(_storage(t)._cdata)
    return found is not None and not found.expired()


def _mark(t: Tensor, is_fake: bool = True) -> Tensor:
    storage = _storage(t)
    if is_fake:
        _there[storage._cdata] = StorageWeakRef(storage)
    else:
        _there.pop(storage._cdata, None)
    return t


class MixedDevices(RuntimeError):
    """Tensors of two devices in one operation."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        marked = [t for t in given if is_fake(t)]
        if marked and name not in BETWEEN:
            checked = given
            if name in INDEXED and is_fake(args[0]):
                checked = [t for t in tree_leaves(args[2:]) if isinstance(t, Tensor)]
            unmarked = [list(t.shape) for t in checked if t.dim() and not is_fake(t)]
            if unmarked:
                there = [list(t.shape) for t in marked]
                raise MixedDevices(f"{name}: {unmarked} on the CPU, but {there} on {DEVICE}")
        out = func(*args, **kwargs)
        old = {_storage(t)._cdata for t in given}
        for t in tree_leaves(out) if marked else ():
            if isinstance(t, Tensor) and _storage(t)._cdata not in old:
                _mark(t)
        return out


class FakeDevice(TorchFunctionMode):
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
            return DEVICE if is_fake(args[0]) else func(*args)
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if func is Tensor.cpu:
            return _to(args[0], "cpu")
        if func in (Tensor.numpy, Tensor.__array__) and is_fake(args[0]):
            raise TypeError(f"a tensor on {DEVICE} has no numbers for NumPy: move it first")
        if func is Tensor.backward:  # backward functions written in Python run under this mode too
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


def _to(t: Tensor, *given: Any, copy: bool = False, device: Any = None, dtype: Any = None, **_: Any) -> Any:
    for one in given:
        if isinstance(one, Tensor):
            device, dtype = DEVICE if is_fake(one) else "cpu", one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, str | torch.device):
            device = one
    device = None if device is None else torch.device(device)
    if device is not None and device.type == "meta":
        return t.to(device, dtype)
    cast = t if dtype is None else t.to(dtype)
    away = device is not None and (device.type == DEVICE.type) != is_fake(t)
    if not away:
        return cast.clone() if copy and cast is t else cast
    return _mark(cast.clone(), device is not None and device.type == DEVICE.type)
