"""Encoding of values between two processes of which one is not trusted.

Values travel as copies in JSON: exact builtin types, and the value types of the standard library in `_VALUES`. A decoded
value has exactly the type that its tag names, for any object of the sender. Exceptions travel by their class's name.
Any other object stays in its process, under a number (`encode_other` of `program_peer.py` and `tests_peer.py`).

    1, "a", None                        raw JSON for str, bool, None, float, and int below 2^53
    ["tuple", 1, 2]                     containers and value types: a tag, then encoded parts
    ["type", "int"]                     a builtin class of values
    ["mine", n]                         the receiver's own object n
    ["object", n, ...]                  the sender's object n
    ["error", n, class, args, text, attributes]  an exception; it comes back as ["mine", n]
    ["class", module, name]             an exception class that both sides have
    ["class", n, name, bases]           an exception class of the sender
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


def _pairs(parts: list[Any]) -> Any:
    half = len(parts) // 2
    return zip(parts[:half], parts[half:], strict=True)


# type: (parts of a value, value from its parts)
_VALUES: dict[Any, tuple[Any, Any]] = {
    **{kind: (lambda v: v, kind) for kind in (list, tuple, set, frozenset)},
    **{
        kind: (lambda v: [*v, *v.values()], lambda parts, kind=kind: kind(dict(_pairs(parts))))
        for kind in (dict, Counter, OrderedDict)
    },
    **{
        kind: (lambda v: [v.hex()], lambda parts, kind=kind: kind.fromhex(*parts))
        for kind in (bytes, bytearray)
    },
    **{
        kind: (lambda v: [v.start, v.stop, v.step], lambda parts, kind=kind: kind(*parts))
        for kind in (range, slice)
    },
    complex: (lambda v: [v.real, v.imag], lambda parts: complex(*parts)),
    deque: (lambda v: [v.maxlen, *v], lambda parts: deque(parts[1:], parts[0])),
    **{
        kind: (lambda v: [str(v)], lambda parts, kind=kind: kind(*parts))
        for kind in (Decimal, Fraction, UUID, PosixPath, PurePosixPath)
    },
    **{
        kind: (lambda v: [v.isoformat()], lambda parts, kind=kind: kind.fromisoformat(*parts))
        for kind in (datetime.date, datetime.time, datetime.datetime)
    },
    datetime.timezone: (lambda v: [v.utcoffset(None)], lambda parts: datetime.timezone(*parts)),
    datetime.timedelta: (
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
_TYPES = {kind.__name__: kind for kind in (bool, int, float, str, type(None), *_VALUES)}
_PARTS = {kind: (kind.__name__, parts) for kind, (parts, _) in _VALUES.items()}
_PARTS[defaultdict] = _PARTS[dict]
_BUILD = {kind.__name__: build for kind, (_, build) in _VALUES.items()} | {
    "int": lambda parts: int(parts[0], 16)
}


class Codec:
    """Encodes and decodes for one side.

    Attributes:
        exported: objects of this side, by the number under which the other side refers to them.
        encode_other: returns an object that is no value as JSON.
        decode_object: returns what stands for an object of the other side.
    """

    encode_other: Callable[[Any, type], Any]
    decode_object: Callable[..., Any]

    def __init__(self) -> None:
        self.exported: list[Any] = []
        self._numbers: dict[int, int] = {}  # id of an exported object: its number
        self._received: dict[int, Any] = {}  # number of the other side: the object that stands for it here
        self._origins: dict[int, int] = {}  # id of such an object: that number
        self._decoders: dict[str, Callable[..., Any]] = {
            "type": _TYPES.__getitem__,
            "mine": self.exported.__getitem__,
            "object": self.decode_object,
            "error": self.decode_error,
            "class": self.decode_class,
        }

    def encode(self, value: Any) -> Any:
        """Return a value as JSON. Raises RecursionError if it is nested too deep or contains itself."""
        kind = type(value)
        if kind in _RAW:
            return value
        if kind is int:
            return value if -_RAW_INT < value < _RAW_INT else ["int", hex(value)]
        if kind in _PARTS:
            name, parts = _PARTS[kind]
            return [name, *self.encode_items(parts(value))]
        if id(value) in self._origins:
            return ["mine", self._origins[id(value)]]
        if issubclass(kind, BaseException):
            return self.encode_error(value)
        if issubclass(kind, type) and value in _TYPES.values():
            return ["type", value.__name__]
        if issubclass(kind, type) and issubclass(value, BaseException):
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
        if type(data) is not list:
            return data
        if data[0] in self._decoders:
            return self._decoders[data[0]](*data[1:])
        parts = data[1:]
        return _BUILD[data[0]]([self.decode(p) for p in parts] if list in set(map(type, parts)) else parts)

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

    def encode_error(self, error: BaseException) -> Any:
        """Return an exception as JSON. Its methods are untrusted and may raise."""
        if id(error) in self._origins:
            return ["mine", self._origins[id(error)]]
        try:
            arguments, attributes = self.encode_items(error.args), self.encode(dict(vars(error)))
        except BaseException:
            arguments, attributes = [], None
        try:
            text = str.__str__(str(error))
        except BaseException:
            text = ""
        return ["error", self.export(error), self.encode_class(type(error)), arguments, text, attributes]

    def encode_class(self, kind: type) -> Any:
        """Return an exception class as JSON: by its name, or with its bases if the other side does not have it."""
        if id(kind) in self._origins:
            return ["mine", self._origins[id(kind)]]
        module, name, bases = (
            type.__getattribute__(kind, n) for n in ("__module__", "__qualname__", "__bases__")
        )
        if str(module) not in _USER_MODULES:
            return ["class", str(module), name]
        described = [self.encode_class(b) for b in bases if issubclass(b, BaseException)]
        return ["class", self.export(kind), name.rpartition(".")[2], described]

    def decode_class(self, first: Any, name: Any, described: Any = ()) -> Any:
        """Return the local class of a described exception class."""
        if type(first) is str:
            return _library_exception(first, name)
        if first not in self._received:
            bases = tuple(self._exception_class(b) for b in described)
            try:
                kind = type(str(name), bases, self.class_body(first))
            except TypeError:  # bases that cannot be combined
                kind = type(str(name), (Exception,), self.class_body(first))
            self.receive(first, kind)
        return self._received[first]

    def class_body(self, number: Any) -> dict[str, Any]:
        """Return the attributes of a local class that stands for an exception class of the other side."""
        return {"__module__": "program", "__str__": lambda error: str(vars(error).get("_whorl_text"))}

    def decode_error(self, number: Any, described: Any, encoded: Any, text: Any, attributes: Any) -> Any:
        """Return a local exception of a described one."""
        if isinstance(self._received.get(number), BaseException):
            return self._received[number]
        kind, arguments = self._exception_class(described), [self.decode(a) for a in encoded]
        base: Any = next(b for b in kind.__mro__ if b.__module__ != "program")
        try:
            error = base(*arguments) if kind is base else base.__new__(kind, *arguments)
        except Exception:
            error = BaseException.__new__(kind, *arguments)
        vars(error).update(self.decode(attributes) or {})
        if kind is not base:
            vars(error)["_whorl_text"] = text
        return self.receive(number, error)

    def _exception_class(self, data: Any) -> Any:
        kind = self.decode(data)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise TypeError("an exception class was expected")
        return kind


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
