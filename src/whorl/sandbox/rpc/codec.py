"""Encoding of values between two processes of which one is not trusted.

Exact builtin types, and the value types of the standard library in `_VALUE_TYPES`, travel as copies in JSON: a decoded
value has exactly the type that its tag names, for any object of the sender. Mutable containers are named by a number,
and their contents travel with the message (`shared.py`). Everything else stays where it is: it is exported under a
number, and the receiver gets a proxy (`proxies.py`).

    1, "a", None, [..]                  raw JSON for str, bool, None, float, and int below 2^53
    ["tuple", 1, 2]                     immutable containers and value types: a tag, then encoded parts
    ["shared", n]                       a list, dict, set, ...; its content is ["list", 1, 2]
    ["mine", n]                         the receiver's own object n
    ["object", n, class]                a proxy of the sender's object n
    ["immutable", n, class, value]      a proxy that holds the exact value of an int, str, tuple, ... of a subclass
    ["error", n, class, args, text, cause, attributes]  an exception
    ["class", n, name, bases, operators]  a class of the sender; all but n only the first time
    "int"                               in place of a class: one that both sides have
    ["global", module, name]            a function of the standard library; only the untrusted side accepts it
"""

from __future__ import annotations

import builtins
import datetime
import importlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import (
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from uuid import UUID

from whorl.sandbox.rpc.proxies import OPERATORS, RemoteMeta, RemoteObject, RemoteProxy, build_class
from whorl.sandbox.rpc.shared import MUTABLE, SharedContainers

_RAW = {str, bool, float, type(None)}
_RAW_INT = 1 << 53
_IMMUTABLE: tuple[
    tuple[type, Callable[[Any], Any]], ...
] = (  # the C methods of the bases: none can be overridden
    (int, int.__pos__),
    (float, float.__pos__),
    (complex, complex.__pos__),
    (str, str.__str__),
    (bytes, lambda v: bytes.__getitem__(v, slice(None))),
    (tuple, lambda v: tuple(tuple.__iter__(v))),
    (frozenset, lambda v: frozenset(frozenset.__iter__(v))),
)
SHARED_TYPES: dict[str, type] = {n: v for n, v in vars(builtins).items() if isinstance(v, type)}
_SHARED_NAMES = {v: n for n, v in SHARED_TYPES.items()}
_COPIED = {base for base, _ in _IMMUTABLE} | {list, dict, set, bytearray}
_USER_MODULES = ("program", "__main__", "tests")
# Exported objects of the tests, in addition to functions and instances of the tests' own classes.
_EXPORTED_MODULES = ("unittest.mock", "_io", "io")
_FUNCTIONS = (
    CoroutineType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)

Encoder = Callable[["Codec", Any], Any]
Decoder = Callable[["Codec", list[Any]], Any]


def _encode_items(codec: Codec, values: Any) -> list[Any]:
    kinds = set(map(type, values))
    if kinds <= _RAW or (kinds == {int} and min(values) > -_RAW_INT and max(values) < _RAW_INT):
        return list(values)
    return [codec.encode(v) for v in values]


def _decode_items(codec: Codec, data: list[Any], start: int = 1) -> list[Any]:
    parts = data[start:]
    return [codec.decode(p) for p in parts] if list in set(map(type, parts)) else parts


def _encode_pairs(codec: Codec, value: Any) -> list[Any]:
    return [*_encode_items(codec, list(value)), *_encode_items(codec, list(value.values()))]


def _decode_pairs(codec: Codec, data: list[Any], start: int = 1) -> Any:
    parts = _decode_items(codec, data, start)
    half = len(parts) // 2
    return zip(parts[:half], parts[half:], strict=True)


def _encode_shared(codec: Codec, value: Any) -> Any:
    return ["shared", codec.shared.number(value)]


# name: (type, parts of a value, value from its parts); parts are raw or encoded
_VALUE_TYPES: dict[str, tuple[type, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "complex": (complex, lambda v: (v.real, v.imag), complex),
    "bytes": (bytes, lambda v: (v.hex(),), bytes.fromhex),
    "range": (range, lambda v: (v.start, v.stop, v.step), range),
    "slice": (slice, lambda v: (v.start, v.stop, v.step), slice),
    "Decimal": (Decimal, lambda v: (str(v),), Decimal),
    "Fraction": (Fraction, lambda v: (v.numerator, v.denominator), Fraction),
    **{
        kind.__name__: (kind, lambda v: (str(v),), kind)
        for kind in (PosixPath, PurePosixPath, PureWindowsPath)
    },
    "timezone": (datetime.timezone, lambda v: (v.utcoffset(None),), datetime.timezone),
    "timedelta": (datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds), datetime.timedelta),
    "date": (datetime.date, lambda v: (v.isoformat(),), datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: (v.isoformat(),), datetime.time.fromisoformat),
    "datetime": (datetime.datetime, lambda v: (v.isoformat(),), datetime.datetime.fromisoformat),
    "UUID": (UUID, lambda v: (v.hex,), UUID),
    "Ellipsis": (type(...), lambda v: (), lambda: ...),
    "NotImplemented": (type(NotImplemented), lambda v: (), lambda: NotImplemented),
}


def _encode_int(codec: Codec, value: int) -> Any:
    return value if -_RAW_INT < value < _RAW_INT else ["int", hex(value)]


def _encode_value(name: str, parts: Callable[[Any], tuple[Any, ...]]) -> Encoder:
    return lambda codec, value: [name, *map(codec.encode, parts(value))]


def _decode_value(build: Callable[..., Any]) -> Decoder:
    return lambda codec, data: build(*_decode_items(codec, data))


_ENCODERS: dict[type, Encoder] = {
    int: _encode_int,
    tuple: lambda codec, v: ["tuple", *_encode_items(codec, v)],
    frozenset: lambda codec, v: ["frozenset", *_encode_items(codec, v)],
    **dict.fromkeys(MUTABLE, _encode_shared),
    **{kind: _encode_value(name, parts) for name, (kind, parts, _) in _VALUE_TYPES.items()},
}
_DECODERS: dict[str, Decoder] = {
    "int": lambda codec, data: int(data[1], 16),
    "tuple": lambda codec, data: tuple(_decode_items(codec, data)),
    "frozenset": lambda codec, data: frozenset(_decode_items(codec, data)),
    "shared": lambda codec, data: codec.shared.get(data[1]),
    **{name: _decode_value(build) for name, (_, _, build) in _VALUE_TYPES.items()},
}


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    return _SHARED_NAMES.get(factory) if isinstance(factory, type) else None


def _factory(name: str | None) -> type | None:
    return SHARED_TYPES[name] if name is not None else None


_CONTENT_ENCODERS: dict[type, Encoder] = {
    list: lambda codec, v: ["list", *_encode_items(codec, v)],
    set: lambda codec, v: ["set", *_encode_items(codec, v)],
    deque: lambda codec, v: ["deque", v.maxlen, *_encode_items(codec, v)],
    bytearray: lambda codec, v: ["bytearray", v.hex()],
    dict: lambda codec, v: ["dict", *_encode_pairs(codec, v)],
    Counter: lambda codec, v: ["Counter", *_encode_pairs(codec, v)],
    OrderedDict: lambda codec, v: ["OrderedDict", *_encode_pairs(codec, v)],
    defaultdict: lambda codec, v: ["defaultdict", _factory_name(v), *_encode_pairs(codec, v)],
}
_CONTENT_DECODERS: dict[str, Decoder] = {
    "list": _decode_items,
    "set": lambda codec, data: set(_decode_items(codec, data)),
    "deque": lambda codec, data: deque(_decode_items(codec, data, 2), data[1]),
    "bytearray": lambda codec, data: bytearray.fromhex("".join(data[1:])),
    "dict": lambda codec, data: dict(_decode_pairs(codec, data)),
    "Counter": lambda codec, data: Counter(dict(_decode_pairs(codec, data))),
    "OrderedDict": lambda codec, data: OrderedDict(_decode_pairs(codec, data)),
    "defaultdict": lambda codec, data: defaultdict(_factory(data[1]), _decode_pairs(codec, data, 2)),
}


class Codec:
    """Encodes and decodes; keeps the exported objects and the proxies of one side.

    Args:
        trusted: whether this side runs the tests. It exports only what tests pass by intent: functions, objects of the
            tests' classes, mocks, streams, iterators.
    """

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        self.exported: list[Any] = []
        self.shared: SharedContainers = SharedContainers(0 if trusted else 1)
        self._numbers: dict[int, int] = {}  # id of an exported object: its number
        self._described: set[int] = set()  # classes that were sent with their bases
        self._imported: dict[int, Any] = {}
        self._decoders: dict[str, Decoder] = {
            **_DECODERS,
            "mine": lambda codec, data: codec.exported[data[1]],
            "object": Codec._decode_object,
            "immutable": Codec._decode_immutable,
            "error": Codec._decode_error,
            "class": lambda codec, data: codec._class(data),
            "type": lambda codec, data: SHARED_TYPES[data[1]],
        }
        if trusted:  # most names of a program are functions: their class is built before the fork
            self._class(Codec(trusted=False).function_class)
        if not trusted:
            self._decoders["global"] = lambda codec, data: _find_global(data[1], data[2])
            self.function_class: Any = self._describe(FunctionType)  # number 0

    def encode(self, value: Any) -> Any:
        """Return a value as JSON. Raises TypeError if it can be neither copied nor exported."""
        kind = type(value)
        if kind in _RAW:
            return value
        encoder = _ENCODERS.get(kind)
        return encoder(self, value) if encoder is not None else self._encode_other(value, kind)

    def decode(self, data: Any) -> Any:
        """Return the value of JSON from the other side. Raises (any exception) if it is malformed."""
        return self._decoders[data[0]](self, data) if type(data) is list else data

    def encode_changes(self) -> tuple[list[Any], list[int]]:
        """Return the contents of the containers that are new to the other side, and the numbers to release."""
        return self.shared.encode_changes(lambda v: _CONTENT_ENCODERS[type(v)](self, v))

    def decode_changes(self, contents: list[Any], released: list[int]) -> None:
        """Apply what the other side's `encode_changes` returned."""
        self.shared.decode_changes(contents, released, lambda data: _CONTENT_DECODERS[data[0]](self, data))

    def export(self, value: Any) -> int:
        """Return the number under which the other side refers to an object of this side."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return number

    def _encode_other(self, value: Any, kind: type) -> Any:
        if issubclass(kind, RemoteProxy):
            return ["mine", object.__getattribute__(value, "_whorl_id")]
        if issubclass(kind, RemoteMeta):
            return ["mine", type.__getattribute__(value, "_whorl_class_id")]
        if issubclass(kind, type):
            return self._encode_class(value, kind)
        if issubclass(kind, BaseException):
            return self.encode_error(value)
        for base, exact in _IMMUTABLE:
            if issubclass(kind, base):
                return ["immutable", self.export(value), self._describe(kind), self.encode(exact(value))]
        if self.trusted:
            bound = kind is BuiltinFunctionType and not isinstance(value.__self__, (ModuleType, type(None)))
            if kind in (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType) and not bound:
                owner = getattr(value, "__objclass__", value)
                return ["global", owner.__module__, value.__qualname__]
            if not _is_exportable(value, kind):
                raise TypeError(
                    f"tests cannot pass a {kind.__name__} to the program: it runs in another process"
                )
        return ["object", self.export(value), self._describe(kind)]

    def _encode_class(self, value: type, kind: type) -> Any:
        if value in _SHARED_NAMES:
            return ["type", _SHARED_NAMES[value]]
        if str(value.__module__) in _USER_MODULES:
            return self._describe(value)
        if self.trusted:
            return ["global", value.__module__, value.__qualname__]
        return ["object", self.export(value), self._describe(kind)]

    def encode_error(self, error: BaseException) -> Any:
        """Return an exception as JSON. Its methods are untrusted and may raise."""
        if issubclass(type(error), RemoteProxy):
            return ["mine", object.__getattribute__(error, "_whorl_id")]
        try:
            arguments = [self.encode(a) for a in error.args]
            attributes = self.encode(dict(vars(error)))
        except Exception:
            arguments, attributes = [], None
        try:
            text = str(error)
        except Exception:
            text = ""
        known = id(error) in self._numbers  # its cause may lead back to it
        number, described, cause = self.export(error), self._describe(type(error)), error.__cause__
        encoded_cause = self.encode_error(cause) if cause is not None and not known else None
        return ["error", number, described, arguments, text, encoded_cause, attributes]

    def _describe(self, kind: type) -> Any:
        """Return a class by its name if both sides have it, or described as a class of this side."""
        if issubclass(type(kind), RemoteMeta):
            return ["mine", type.__getattribute__(kind, "_whorl_class_id")]
        name = type.__getattribute__(kind, "__name__")
        if kind in _SHARED_NAMES and (kind in _COPIED or issubclass(kind, BaseException)):
            return _SHARED_NAMES[kind]
        module = str(kind.__module__)
        if module not in _USER_MODULES and issubclass(kind, BaseException):
            return f"{module}:{kind.__qualname__}"
        number = self.export(kind)
        if number in self._described:
            return ["class", number]
        self._described.add(number)
        # Of the library's classes only the builtin bases count.
        users = module in _USER_MODULES
        bases = type.__getattribute__(kind, "__bases__" if users else "__mro__")
        described = [self._describe(b) for b in bases if b is not object and (users or b in _COPIED)]
        defined = set().union(
            *map(vars, type.__getattribute__(kind, "__mro__"))
        )  # getattr finds the metaclass's too
        return ["class", number, name, described, [n for n in OPERATORS if n in defined]]

    def _class(self, data: Any) -> type:
        """Return the local class of a description: a shared class, or a proxy of the other side's."""
        if type(data) is str:
            shared = SHARED_TYPES.get(data) or _stdlib_exception(data)
            return RuntimeError if shared is None else shared
        if data[0] == "mine":
            known = self.exported[data[1]]
        elif len(data) > 2 and data[1] not in self._imported:
            bases = tuple(self._class(b) for b in data[3])
            known = self._imported[data[1]] = build_class(self, data[1], data[2], bases, data[4])
        else:
            known = self._imported[data[1]]
        if not isinstance(known, type):
            raise TypeError("a class was expected")
        return known

    def _decode_object(self, data: list[Any]) -> Any:
        number = data[1]
        if number not in self._imported:
            kind = self._class(data[2])
            if not issubclass(kind, RemoteObject):
                raise TypeError("a class of objects was expected")
            self._imported[number] = _with_number(object.__new__(kind), number)
        return self._imported[number]

    def _decode_immutable(self, data: list[Any]) -> Any:
        _, number, described, encoded = data
        kind, value = self._class(described), self.decode(encoded)
        if number not in self._imported:
            if not issubclass(kind, RemoteProxy) or not issubclass(kind, type(value)):
                return value
            base: Any = type(value)
            self._imported[number] = _with_number(base.__new__(kind, value), number)
        return self._imported[number]

    def _decode_error(self, data: list[Any]) -> BaseException:
        _, number, described, encoded, text, encoded_cause, attributes = data
        kind: Any = self._class(described)
        if not issubclass(kind, BaseException):
            kind = RuntimeError
        arguments, cause = [self.decode(a) for a in encoded], self.decode(encoded_cause)
        error: BaseException
        if issubclass(kind, RemoteProxy):
            error = _with_number(kind.__new__(kind, *arguments), number)
            object.__setattr__(error, "_whorl_text", str(text))
        else:
            try:
                error = kind(*arguments)
            except Exception:
                error = kind.__new__(kind, *arguments)
            vars(error).update(self.decode(attributes) or {})
        if isinstance(cause, BaseException):
            error.__cause__ = cause
        return error


def _with_number(proxy: Any, number: int) -> Any:
    if type(number) is not int:
        raise TypeError("a number was expected")
    object.__setattr__(proxy, "_whorl_id", number)
    return proxy


def _is_exportable(value: Any, kind: type) -> bool:
    module = str(kind.__module__)
    if kind in _FUNCTIONS or module == "tests" or module in _EXPORTED_MODULES or hasattr(kind, "__next__"):
        return True
    return module in ("functools", "operator") and callable(value)


def _stdlib_exception(name: str) -> type | None:
    """Return a loaded exception class of the standard library. Those of unittest control its runs: none of them."""
    module, _, path = name.partition(":")
    found = (
        getattr(sys.modules.get(module), path, None) if path and not module.startswith("unittest") else None
    )
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _find_global(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
