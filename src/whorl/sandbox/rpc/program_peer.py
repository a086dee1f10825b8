"""The program's end of the connection: applies the tests' operations to its objects.

    request of the tests    ["?", target, operation, arguments, named arguments, patches, streams]
    request of the program  ["?", callback, arguments, named arguments]

All that is no value is exported under a number, and described by whether it is a coroutine. A function of the tests
arrives as a function that calls it there.
"""

from __future__ import annotations

import copy
import importlib
import io
import math
import operator
import sys
from collections.abc import Callable
from types import CoroutineType, ModuleType
from typing import Any

from whorl.sandbox.rpc.event_loop import run_awaitable
from whorl.sandbox.rpc.peer import Peer

PROGRAM_NUMBER = 0  # the program's module
UNARY: dict[str, Callable[..., Any]] = {
    "bool": operator.truth, "len": len, "iter": iter, "next": next, "hash": hash, "int": int, "float": float,
    "complex": complex, "bytes": bytes, "index": operator.index, "abs": abs, "neg": operator.neg, "pos": operator.pos,
    "invert": operator.invert, "reversed": reversed, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil,
    "copy": copy.copy, "repr": repr, "str": str, "dir": dir,
}  # fmt: skip
ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()  # noqa: SIM905
BINARY: dict[str, Callable[..., Any]] = {
    name: getattr(operator, f"__{name}__", divmod) for name in (*ARITHMETIC, "lt", "le", "gt", "ge")
}
# Names that tests replace and the program then sees replaced during a call, by a value or a function.
PATCHABLE = [
    *(("builtins", name) for name in ("input", "print", "open")),
    *(("time", name) for name in ("time", "sleep", "monotonic", "perf_counter")),
    *(("random", name) for name in ("random", "randint", "choice", "shuffle", "uniform", "randrange", "sample")),
    ("sys", "argv"),
]  # fmt: skip
_SCALARS: tuple[
    tuple[type, Callable[[Any], Any]], ...
] = (  # the C methods of the bases: none can be overridden
    (int, int.__pos__),
    (float, float.__pos__),
    (complex, complex.__pos__),
    (str, str.__str__),
    (bytes, lambda v: bytes.__getitem__(v, slice(None))),
)


def plain_content(value: Any) -> Any:
    """Return the content of an object whose class derives from a container, or of a view of a dict; else None."""
    if type(value) in (type({}.keys()), type({}.items())):
        return set(value)
    bases: tuple[Any, ...] = (list, tuple, set, frozenset, dict)
    for base in bases:
        if issubclass(type(value), base):
            return base(dict.items(value) if base is dict else base.__iter__(value))
    return None


def _lookup(module: ModuleType, names: list[str]) -> dict[str, Any]:
    found = {n: vars(module)[n] for n in names if n in vars(module)}
    return {n: v for n, v in found.items() if not isinstance(v, ModuleType)}


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda value, /, *arguments, **named: value(*arguments, **named), "await": run_awaitable,
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "lookup": _lookup, "plain": plain_content,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "contains": operator.contains, "eq": operator.eq, "round": round, "format": format, "deepcopy": copy.deepcopy,
    "isinstance": lambda kind, value: isinstance(value, kind), "issubclass": lambda kind, other: issubclass(other, kind),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, error: type(value).__exit__(value, type(error) if error else None, error, None),
    **UNARY, **BINARY,
    **{f"r{name}": (lambda value, other, f=BINARY[name]: f(other, value)) for name in ARITHMETIC},
}  # fmt: skip


class ProgramPeer(Peer):
    """See the top of this file."""

    def encode_other(self, value: Any, kind: type) -> Any:
        for base, exact in _SCALARS:
            if issubclass(kind, base):
                return self.encode(exact(value))
        return ["object", self.export(value), kind is CoroutineType]

    def decode_object(self, number: Any, *described: Any) -> Any:
        """Return a function of the tests, or one of the library by its name."""
        if type(number) is str:
            return operator.attrgetter(described[0])(importlib.import_module(number))
        if number in self._received:
            return self._received[number]

        def callback(*arguments: Any, **named: Any) -> Any:
            request = ["?", number, self.encode_items(arguments), self.encode_named(named)]
            kind, value, changed = self.exchange(request)
            if kind == "!":
                raise self.decode(value)
            return self.result(value, changed, [*arguments, *named.values()])

        callback.__name__, callback.__qualname__, callback.__doc__ = described
        return self.receive(number, callback)

    def answer(self, message: list[Any]) -> list[Any]:
        """Apply an operation to an object of the program and return the reply, with what was printed."""
        _, number, operation, encoded, encoded_named, patches, (text, *captured) = message
        replaced: list[tuple[Any, str, Any]] = []

        def replace(module: Any, name: str, value: Any) -> Any:
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)
            return value

        arguments, named = self.decode_arguments(encoded, encoded_named)
        for i, value in patches:
            replace(importlib.import_module(PATCHABLE[i][0]), PATCHABLE[i][1], self.decode(value))
        stdin = replace(sys, "stdin", io.StringIO(text)) if text is not None else None
        printed = [replace(sys, n, io.StringIO()) for n in captured]
        function, target = OPERATIONS[operation], self.exported[number]
        reply = self.reply(lambda *a, **k: function(target, *a, **k), arguments, named)
        for module, name, value in reversed(replaced):
            setattr(module, name, value)
        return [*reply, [0 if stdin is None else stdin.tell(), *(stream.getvalue() for stream in printed)]]
