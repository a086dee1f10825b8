"""Encoding of values between two processes of which one is not trusted.

Values travel as copies in JSON: exact builtin types, and the value types of the standard library in `_VALUE_TYPES`. A
decoded value has exactly the type that its tag names, for any object of the sender. What is no value is an error, or
belongs to one side: `encode_other` of each side decides (`program_peer.py`, `tests_peer.py`).

    1, "a", None                        raw JSON for str, bool, None, float, and int below 2^53
    ["tuple", 1, 2]                     containers and value types: a tag, then encoded parts
    ["mine", n]                         the receiver's own object n
    ["error", n, class, args, text, attributes, cause]  an exception; it comes back as ["mine", n]
    ["class", module, name]             an exception class that both sides have
    ["class", n, name, bases]           an exception class of the sender
    ["type", "int"]                     a builtin class of values
"""

from __future__ import annotations

import datetime
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

_RAW = {str, bool, float, type(None)}
_RAW_INT = 1 << 53
_USER_MODULES = ("program", "__main__", "tests")
MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
_TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type(None))
}  # fmt: skip

# name: (type, parts of a value, value from its parts)
_VALUE_TYPES: dict[str, tuple[type, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "complex": (complex, lambda v: (v.real, v.imag), complex),
    "bytes": (bytes, lambda v: (v.hex(),), bytes.fromhex),
    "bytearray": (bytearray, lambda v: (v.hex(),), bytearray.fromhex),
    "range": (range, lambda v: (v.start, v.stop, v.step), range),
    "slice": (slice, lambda v: (v.start, v.stop, v.step), slice),
    "deque": (deque, lambda v: (list(v), v.maxlen), deque),
    "Counter": (Counter, lambda v: (dict(v),), Counter),
    "OrderedDict": (OrderedDict, lambda v: (dict(v),), OrderedDict),
    **{
        kind.__name__: (kind, lambda v: (str(v),), kind)
        for kind in (Decimal, Fraction, UUID, PosixPath, PurePosixPath)
    },
    "timezone": (datetime.timezone, lambda v: (v.utcoffset(None),), datetime.timezone),
    "timedelta": (datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds), datetime.timedelta),
    **{
        kind.__name__: (kind, lambda v: (v.isoformat(),), kind.fromisoformat)
        for kind in (datetime.date, datetime.time, datetime.datetime)
    },
}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def _encode_value(name: str, parts: Callable[[Any], tuple[Any, ...]]) -> Callable[[Codec, Any], Any]:
    return lambda codec, value: [name, *map(codec.encode, parts(value))]


def _decode_value(build: Callable[..., Any]) -> Callable[[Codec, list[Any]], Any]:
    return lambda codec, data: build(*codec.decode_items(data[1:]))


def _encode_sequence(name: str) -> Callable[[Codec, Any], Any]:
    return lambda codec, value: [name, *codec.encode_items(value)]


def _decode_sequence(build: Callable[..., Any]) -> Callable[[Codec, list[Any]], Any]:
    return lambda codec, data: build(codec.decode_items(data[1:]))


def _encode_dict(codec: Codec, value: Any) -> Any:
    return ["dict", *codec.encode_items(value), *codec.encode_items(value.values())]


def _decode_dict(codec: Codec, data: list[Any]) -> Any:
    parts = codec.decode_items(data[1:])
    half = len(parts) // 2
    return dict(zip(parts[:half], parts[half:], strict=True))


_ENCODERS: dict[type, Callable[[Codec, Any], Any]] = {
    int: lambda codec, v: v if -_RAW_INT < v < _RAW_INT else ["int", hex(v)],
    dict: _encode_dict,
    defaultdict: _encode_dict,
    **{kind: _encode_sequence(name) for kind, name in _SEQUENCES.items()},
    **{kind: _encode_value(name, parts) for name, (kind, parts, _) in _VALUE_TYPES.items()},
}
_DECODERS: dict[str, Callable[[Codec, list[Any]], Any]] = {
    "int": lambda codec, data: int(data[1], 16),
    "dict": _decode_dict,
    "type": lambda codec, data: _TYPES[data[1]],
    "mine": lambda codec, data: codec.exported[data[1]],
    "error": lambda codec, data: codec.decode_error(*data[1:]),
    "class": lambda codec, data: codec.decode_class(data),
    "object": lambda codec, data: codec.decode_object(*data[1:]),
    **{name: _decode_sequence(kind) for kind, name in _SEQUENCES.items()},
    **{name: _decode_value(build) for name, (_, _, build) in _VALUE_TYPES.items()},
}


class Codec:
    """Encodes and decodes for one side.

    Attributes:
        exported: objects of this side, by the number under which the other side refers to them.
    """

    decoders = _DECODERS

    def __init__(self) -> None:
        self.exported: list[Any] = []
        self._numbers: dict[int, int] = {}  # id of an exported object: its number
        self._received: dict[int, Any] = {}  # number of the other side: the object that stands for it here
        self._origins: dict[int, int] = {}  # id of such an object: that number

    def encode(self, value: Any) -> Any:
        """Return a value as JSON. Raises RecursionError if it is nested too deep or contains itself."""
        kind = type(value)
        if kind in _RAW:
            return value
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return encoder(self, value)
        if id(value) in self._origins:
            return ["mine", self._origins[id(value)]]
        if issubclass(kind, BaseException):
            return self.encode_error(value)
        if issubclass(kind, type):
            if value in _TYPES.values():
                return ["type", value.__name__]
            if issubclass(value, BaseException):
                return self.encode_class(value)
        return self.encode_other(value, kind)

    def encode_items(self, values: Any) -> list[Any]:
        """Return encoded values."""
        kinds = set(map(type, values))
        if kinds <= _RAW or (kinds == {int} and min(values) > -_RAW_INT and max(values) < _RAW_INT):
            return list(values)
        return [self.encode(v) for v in values]

    def decode(self, data: Any) -> Any:
        """Return the value of JSON from the other side. Raises (any exception) if it is malformed."""
        return self.decoders[data[0]](self, data) if type(data) is list else data

    def decode_items(self, parts: list[Any]) -> list[Any]:
        """Return decoded values."""
        return [self.decode(p) for p in parts] if list in set(map(type, parts)) else parts

    def encode_other(self, value: Any, kind: type) -> Any:
        """Return an object that is no value as JSON."""
        raise NotImplementedError

    def decode_object(self, number: Any, *described: Any) -> Any:
        """Return what stands for an object of the other side."""
        raise NotImplementedError

    def export(self, value: Any) -> int:
        """Return the number under which the other side refers to an object of this side."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return number

    def receive(self, number: Any, value: Any) -> Any:
        """Return `value`, which stands for the other side's object `number` from now on."""
        if type(number) is not int:
            raise TypeError("a number was expected")
        self._received[number] = value
        self._origins[id(value)] = number
        return value

    def encode_error(self, error: BaseException, depth: int = 3) -> Any:
        """Return an exception as JSON, with at most `depth` causes. Its methods are untrusted and may raise."""
        if id(error) in self._origins:
            return ["mine", self._origins[id(error)]]
        try:
            arguments, attributes = [self.encode(a) for a in error.args], self.encode(dict(vars(error)))
        except BaseException:
            arguments, attributes = [], None
        try:
            text = str.__str__(str(error))
        except BaseException:
            text = ""
        cause = (
            self.encode_error(error.__cause__, depth - 1) if error.__cause__ is not None and depth else None
        )
        return [
            "error",
            self.export(error),
            self.encode_class(type(error)),
            arguments,
            text,
            attributes,
            cause,
        ]

    def encode_class(self, kind: type) -> Any:
        """Return an exception class as JSON: by its name, or with its bases if the other side does not have it."""
        if id(kind) in self._origins:
            return ["mine", self._origins[id(kind)]]
        module = str(type.__getattribute__(kind, "__module__"))
        if module not in _USER_MODULES:
            return ["class", module, type.__getattribute__(kind, "__qualname__")]
        bases = [b for b in type.__getattribute__(kind, "__bases__") if issubclass(b, BaseException)]
        described = [self.encode_class(b) for b in bases]
        return ["class", self.export(kind), str(type.__getattribute__(kind, "__name__")), described]

    def decode_class(self, data: list[Any]) -> type[BaseException]:
        """Return the local class of a described exception class."""
        kind: Any
        if data[0] == "mine":
            kind = self.exported[data[1]]
        elif type(data[1]) is str:
            kind = _library_exception(data[1], data[2])
        elif data[1] in self._received:
            kind = self._received[data[1]]
        else:
            _, number, name, described = data
            bases = tuple(self.decode_class(b) for b in described)
            try:
                kind = type(str(name), bases, self.class_body(number))
            except TypeError:  # bases that cannot be combined
                kind = type(str(name), (Exception,), self.class_body(number))
            self.receive(number, kind)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise TypeError("an exception class was expected")
        return kind

    def class_body(self, number: Any) -> dict[str, Any]:
        """Return the attributes of a local class that stands for an exception class of the other side."""
        return {"__module__": "program", "__str__": lambda error: str(vars(error).get("_whorl_text"))}

    def decode_error(
        self, number: Any, described: Any, encoded: Any, text: Any, attributes: Any, cause: Any
    ) -> BaseException:
        """Return a local exception of a described one."""
        known = self._received.get(number)
        if isinstance(known, BaseException):
            return known
        kind: Any = self.decode_class(described)
        error: BaseException
        arguments = [self.decode(a) for a in encoded]
        base: Any = next(b for b in kind.__mro__ if b.__module__ != "program")
        try:
            error = base(*arguments) if kind is base else base.__new__(kind, *arguments)
        except Exception:
            error = BaseException.__new__(kind, *arguments)
        vars(error).update(self.decode(attributes) or {})
        if kind.__module__ == "program":
            vars(error)["_whorl_text"] = text
        decoded_cause = self.decode(cause)
        if isinstance(decoded_cause, BaseException):
            error.__cause__ = decoded_cause
        self.receive(number, error)
        return error


def replace_content(container: Any, content: Any) -> None:
    """Give a mutable container the content of another one of its type."""
    if not isinstance(content, dict if isinstance(container, dict) else type(container)):
        raise TypeError("a container changed its type")
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(content)


def _library_exception(module: str, path: str) -> type:
    """Return a loaded exception class of the library, or Exception. Those of unittest control its runs: none of them."""
    found, top = None, module.split(".")[0]
    if top in sys.stdlib_module_names and top not in ("unittest", "doctest"):
        found = getattr(sys.modules.get(module), path, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else Exception
