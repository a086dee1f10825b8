"""Proxies: objects that stand for an object of the other process and forward every operation to it.

Each class of the other side gets a local class with the same name and bases, so `isinstance`, `except` and
`assertRaises` work. A proxy of an int, str or tuple subclass (an IntEnum, a named tuple) is itself an int, str or tuple
with the exact value: it is computed and compared on this side.

The subtle part is equality. The program may return an object that claims to be equal to everything. So a proxy is never
equal to a value of this side, except by the plain content of a list, dict or set subclass. Two objects of the program
are compared by the program. Other operators would show the expected value to the program (`f(x) - 3.5`); `Peer` allows
them only if the tests use a class of the program.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import random
from collections.abc import Callable, Generator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MappingProxyType
from typing import Any

from whorl.sandbox.rpc.event_loop import run_awaitable

UNARY: dict[str, Callable[..., Any]] = {
    "bool": operator.truth, "len": len, "iter": iter, "next": next, "hash": hash, "int": int, "float": float,
    "complex": complex, "bytes": bytes, "index": operator.index, "abs": abs, "neg": operator.neg, "pos": operator.pos,
    "invert": operator.invert, "reversed": reversed, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil,
    "copy": copy.copy, "repr": repr, "str": str,
}  # fmt: skip
INPLACE = ["iadd", "isub", "imul", "iand", "ior", "ixor"]
REFLECTED = [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "xor",
    "or",
]
COMPARED = ["lt", "le", "gt", "ge"]
BINARY: dict[str, Callable[..., Any]] = {
    name: getattr(operator, f"__{name}__", divmod) for name in (*REFLECTED, *COMPARED, *INPLACE)
}


# Special attributes that tests read; the interpreter and the library look up many more, for their own protocols.
READABLE = (
    "__name__", "__qualname__", "__doc__", "__wrapped__", "__annotations__", "__members__", "__defaults__",
    "__kwdefaults__", "__self__", "__func__", "__dict__",
)  # fmt: skip
_KINDS = {"generator": GeneratorType, "coroutine": CoroutineType, "async_generator": AsyncGeneratorType}


def plain_content(value: Any) -> Any:
    """Return the content of a list, dict or set subclass, or of a view of a dict, as that builtin type.

    Other objects give NotImplemented.
    """
    if type(value) is MappingProxyType:
        return dict(value)
    if type(value) in (type({}.keys()), type({}.items())):
        return set(value)
    for base, each in ((list, list.__iter__), (dict, dict.items), (set, set.__iter__)):
        if issubclass(type(value), base):
            return base(each(value))
    return NotImplemented


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda value, /, *arguments, **named: value(*arguments, **named),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "dir": dir,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "contains": operator.contains, "eq": operator.eq, "round": round, "format": format,
    "deepcopy": lambda value: copy.deepcopy(value),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *arguments: type(value).__exit__(value, *arguments),
    "aiter": aiter, "anext": anext,
    "aenter": lambda value: type(value).__aenter__(value),
    "aexit": lambda value, *arguments: type(value).__aexit__(value, *arguments),
    "await": run_awaitable, "plain": plain_content,
    "fields": lambda kind: [(f.name, f.init) for f in dataclasses.fields(kind)],
    "seed": lambda module, *arguments: random.seed(*arguments),
    "lookup": lambda module, names: {n: vars(module)[n] for n in names if n in vars(module)},
    **UNARY, **BINARY,
    **{f"r{name}": (lambda value, other, f=BINARY[name]: f(other, value)) for name in REFLECTED},
}  # fmt: skip


def _is_hidden(name: str) -> bool:
    return name.startswith("_whorl") or (name[:2] == "__" and name not in READABLE)


class _Attribute:
    """A special attribute, of an object or its class, that the local class would otherwise answer itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        target = owner if instance is None else instance
        return owner._whorl_peer.request("getattr", target, self.name)


class RemoteProxy:
    """Base of all proxies: attributes are those of the other side's object."""

    _whorl_peer: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "__dataclass_fields__":
            return getattr(type(self), name)
        if _is_hidden(name):
            raise AttributeError(name)
        return _forward(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[:2] == "__":  # the interpreter's own, such as __traceback__
            object.__setattr__(self, name, value)
        else:
            _forward(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _forward(self, "delattr", name)

    def __repr__(self) -> str:
        return str(_forward(self, "repr"))

    def __str__(self) -> str:
        return str(_forward(self, "str"))


class RemoteObject(RemoteProxy):
    """Proxy of an object that is no number, text or exception. `build_class` adds the operators that its class has."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, RemoteProxy):
            return _forward(self, "eq", other) is True
        plain = _forward(self, "plain")
        return type(plain) in (list, dict, set) and bool(plain == other)

    def __hash__(self) -> int:
        return int(_forward(self, "hash"))

    def __format__(self, form: str) -> str:
        return str(_forward(self, "format", form))

    def __dir__(self) -> Any:
        return _forward(self, "dir")

    def __copy__(self) -> Any:
        return _forward(self, "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return _forward(self, "deepcopy")


def _forward(proxy: Any, name: str, /, *arguments: Any, **named: Any) -> Any:
    return type(proxy)._whorl_peer.request(name, proxy, *arguments, **named)


def _plain(name: str) -> Callable[..., Any]:
    return lambda self, /, *arguments, **named: _forward(self, name, *arguments, **named)


def _binary(name: str) -> Callable[..., Any]:
    def operate(self: Any, other: Any) -> Any:
        self._whorl_peer.check_operand(self, other)
        return _forward(self, name, other)

    return operate


def _contains(self: Any, value: Any) -> bool:
    self._whorl_peer.check_operand(self, value)
    return _forward(self, "contains", value) is True


def _exit(self: Any, kind: Any, error: Any, trace: Any) -> Any:
    return _forward(self, "exit", kind, error, None)


def _aexit(self: Any, kind: Any, error: Any, trace: Any) -> Any:
    return _forward(self, "aexit", kind, error, None)


def _send(self: Any, value: Any) -> Any:
    """Run a coroutine of the other side to its end: what an event loop of this side calls."""
    raise StopIteration(_forward(self, "await"))


def _await(self: Any) -> Generator[Any, Any, Any]:
    return _forward(self, "await")
    yield


OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _plain(name) for name in UNARY if name not in ("copy", "repr", "str", "hash")},
    **{f"__{name}__": _plain(name) for name in ("call", "getitem", "setitem", "delitem", "round", "enter")},
    **{f"__{name}__": _plain(name) for name in ("aiter", "anext", "aenter")},
    **{f"__{name}__": _binary(name) for name in (*BINARY, *(f"r{name}" for name in REFLECTED))},
    "__contains__": _contains, "__exit__": _exit, "__aexit__": _aexit, "__await__": _await,
}  # fmt: skip


class RemoteMeta(type):
    """Class of the local classes that stand for classes of the other side."""

    _whorl_peer: Any
    _whorl_class_id: int

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> RemoteMeta:
        if "_whorl_class_id" not in namespace:
            raise TypeError("tests cannot derive a class from one of the program: it runs in another process")
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, /, *arguments: Any, **named: Any) -> Any:
        return cls._whorl_peer.request("call", cls, *arguments, **named)

    def __getattr__(cls, name: str) -> Any:
        if name == "__dataclass_fields__":
            return cls._whorl_fields()
        if _is_hidden(name):
            raise AttributeError(name)
        return cls._whorl_peer.request("getattr", cls, name)

    def _whorl_fields(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return fields with the names of the other side's, so that `dataclasses.asdict` and `replace` work."""
        try:
            found = cls._whorl_peer.request("fields", cls)
        except TypeError:
            raise AttributeError("__dataclass_fields__") from None
        fields = [(str(name), Any, dataclasses.field(init=init is True)) for name, init in found]
        return {f.name: f for f in dataclasses.fields(dataclasses.make_dataclass("Fields", fields))}

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._whorl_peer.request("setattr", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        cls._whorl_peer.request("delattr", cls, name)

    def __iter__(cls) -> Any:
        return cls._whorl_peer.request("iter", cls)

    def __len__(cls) -> Any:
        return cls._whorl_peer.request("len", cls)

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return cls._whorl_peer.request("getitem", cls, key)


def _error_text(self: Any) -> str:
    return str(object.__getattribute__(self, "_whorl_text"))


def build_class(
    peer: Any, number: int, name: str, bases: tuple[type, ...], operators: Sequence[str] = ()
) -> type:
    """Return a proxy class.

    Args:
        peer: the connection of its objects.
        number: the class's number on the other side.
        name: the class's name there.
        bases: proxy classes, or builtin types.
        operators: names of OPERATORS that the class has.
    """
    body: dict[str, Any] = {"_whorl_peer": peer, "_whorl_class_id": number, "__module__": "program"}
    body["__doc__"] = _Attribute("__doc__")
    if not bases and name in _KINDS:
        body["__class__"] = property(lambda self: _KINDS[name])
        if name == "coroutine":
            body["send"] = _send
    if any(issubclass(base, BaseException) for base in bases):
        body["__str__"] = _error_text
        body["__repr__"] = lambda self: f"{name}({_error_text(self)!r})"
    exact = [b for b in bases if not issubclass(b, RemoteProxy)]
    values = (int, float, complex, str, bytes, tuple, frozenset, BaseException)
    keep = tuple(b for b in bases if issubclass(b, RemoteProxy) or issubclass(b, values))
    if not keep or (all(b not in keep for b in exact) and not any(issubclass(b, RemoteProxy) for b in keep)):
        keep = (RemoteObject,)
    if issubclass(keep[0], RemoteObject):
        body |= {n: OPERATORS[n] for n in operators} | {"__dict__": _Attribute("__dict__")}
    elif not any(issubclass(b, RemoteProxy) for b in keep):
        keep = (RemoteProxy, *keep)
    try:
        return RemoteMeta(name, keep, body)
    except TypeError:  # bases that cannot be combined
        return RemoteMeta(name, (RemoteObject,), body | {n: OPERATORS[n] for n in operators})
