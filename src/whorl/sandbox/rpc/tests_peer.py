"""The tests' end of the connection: handles of the program's objects, and what tests may hand to the program.

Tests hand over values (`codec.py`), handles, and plain functions, which the program may only call; functions of the library
that are written in C travel by name. All else is refused (`Unverifiable`): an object of the tests' process in the
program's reach would lead to its classes, and from there to the comparisons.

A handle forwards every operation to the program and gets a value or another handle. The subtle part is equality. The
program may return an object that claims to be equal to everything. So a handle is never equal to a value, except by the
plain content of a subclass of list, tuple, dict or set. Two handles are compared by the program. Other operators would
show the expected value to the program (`f(x) - 3.5`); they need tests that use a class of the program (`operands`).
"""

from __future__ import annotations

import io
import opcode
import sys
from collections.abc import Generator
from types import (
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

from whorl.sandbox.rpc.peer import Peer, ProgramEnded
from whorl.sandbox.rpc.program_peer import ARITHMETIC, BINARY, PATCHABLE, UNARY

# Special attributes that tests read; the interpreter and the library look up many more, for their own protocols.
READABLE = (
    "__name__",
    "__qualname__",
    "__wrapped__",
    "__members__",
    "__annotations__",
    "__mro__",
    "__bases__",
)
PREDICATES = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint")  # of str and set: comparisons
_BY_NAME = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_STREAMS = ("stdin", "stdout", "stderr")


class Unverifiable(BaseException):
    """The tests hand something over that is no value, handle or plain function."""


class TestsPeer(Peer):
    """See the top of this file.

    Attributes:
        failure: why the verdict is no pass, even if the tests catch the exception. The program has ended or sent a malformed
            message, the tests handed over what they must not, or an assertion failed in a function that was called back.
        operands: whether the program may see the other operand of its objects' operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure, self.operands = "", False
        self._patched = [getattr(sys.modules[module], name) for module, name in PATCHABLE]
        self.remember_streams()

    def remember_streams(self) -> None:
        """Take the present standard streams for those that the tests do not replace."""
        self._streams = {name: getattr(sys, name) for name in _STREAMS}

    def request(self, operation: str, target: Any, /, *arguments: Any, **named: Any) -> Any:
        """Apply an operation of `OPERATIONS` to an object of the program and return its value.

        Raises:
            ProgramEnded: the program has ended.
            Unverifiable: an argument cannot be handed over.
            BaseException: what the operation raised. StopIteration becomes RuntimeError (PEP 479): in a call it would end
                the loops of the tests.
        """
        if self.failure:
            raise ProgramEnded(self.failure)
        replaced = [name for name in _STREAMS if getattr(sys, name) is not self._streams[name]]
        text = self._read_stdin() if "stdin" in replaced else None
        outputs = [getattr(sys, name) for name in replaced if name != "stdin"]
        try:
            encoded = self.encode_items(arguments), self.encode_named(named)
            streams = [text, *(name for name in replaced if name != "stdin")]
            message = ["?", self._origins[id(target)], operation, *encoded, self._patches(), streams]
        except RecursionError:
            self._refuse("a value that is nested too deep or contains itself")
        try:
            kind, value, changed, (read, *printed) = self.exchange(message)
            result = self.result(value, changed if kind == "=" else [], [*arguments, *named.values()])
            if kind == "!" and not isinstance(result, BaseException):
                raise TypeError("an exception was expected")
            for stream, written in zip(outputs, printed, strict=True):
                stream.write(written)
            if text:
                sys.stdin.seek(sys.stdin.tell() - len(text[read:]))
        except (EOFError, BrokenPipeError):
            self.failure = "exited"
            raise ProgramEnded("the program ended during its tests") from None
        except Exception as error:
            self.failure = f"crashed: the program sent a malformed value ({type(error).__name__})"
            raise ProgramEnded(self.failure) from None
        if kind == "!":
            if operation != "next" and isinstance(result, (StopIteration, StopAsyncIteration)):
                raise RuntimeError(f"the program raised {type(result).__name__}") from result
            raise result
        return result

    def answer(self, message: list[Any]) -> list[Any]:
        """Call a function that the tests handed over and return the reply."""
        function = self.exported[message[1]]
        if type(function) is not FunctionType:
            raise TypeError("the program called what is no function")

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except AssertionError as error:
                self.failure = f"failed: {error}"
                raise

        return self.reply(call, *self.decode_arguments(*message[2:]))

    def encode_other(self, value: Any, kind: type) -> Any:
        if kind is FunctionType:
            return ["object", self.export(value), value.__name__, value.__qualname__, value.__doc__]
        if kind in _BY_NAME and isinstance(getattr(value, "__self__", None), (ModuleType, type(None))):
            return ["object", getattr(value, "__objclass__", value).__module__, value.__qualname__]
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        named = getattr(value, "__qualname__", "") if kind.__module__ == "builtins" else ""
        return self._refuse(f"a {name}" + f" ({named})" * bool(named))

    def decode_object(self, number: Any, *described: Any) -> Any:
        """Return the handle of an object of the program."""
        if not isinstance(self._received.get(number), Handle):
            self.receive(number, (CoroutineHandle if described[0] is True else Handle)(self))
        return self._received[number]

    def class_body(self, number: Any) -> dict[str, Any]:
        """Return the attributes of an exception class: the program creates its objects and answers for them."""

        def new(kind: Any, *arguments: Any, **named: Any) -> Any:
            return self.request("call", kind, *arguments, **named)

        def attribute(error: Any, name: str) -> Any:
            if name[:2] == "__" or id(error) not in self._origins:
                raise AttributeError(name)
            return self.request("getattr", error, name)

        own = {"__new__": new, "__init__": lambda error, *arguments, **named: None, "__getattr__": attribute}
        return super().class_body(number) | own

    def check_operand(self, other: Any) -> None:
        """Raise TypeError if an operator of a handle would show a value of the tests to the program."""
        if not self.operands and not isinstance(other, Handle):
            raise TypeError("the program returned its own object where a builtin value is compared")

    def _refuse(self, what: str) -> Any:
        self.refuse(f"the tests hand {what} to the program")

    def refuse(self, why: str) -> NoReturn:
        """End the tests. Raises Unverifiable."""
        self.failure = f"unverifiable: {why}"
        raise Unverifiable(self.failure)

    def _patches(self) -> list[Any]:
        found = [getattr(sys.modules[module], name) for module, name in PATCHABLE]
        pairs = enumerate(zip(found, self._patched, strict=True))
        return [[i, self.encode(new)] for i, (new, old) in pairs if new is not old]

    def _read_stdin(self) -> str:
        is_text = type(sys.stdin) is io.StringIO
        return sys.stdin.read() if is_text else self._refuse("a stdin that is no io.StringIO")


def _peer(handle: Any) -> TestsPeer:
    return object.__getattribute__(handle, "_whorl_peer")  # type: ignore[no-any-return]


def _forward(handle: Any, operation: str, /, *arguments: Any, **named: Any) -> Any:
    return _peer(handle).request(operation, handle, *arguments, **named)


class Handle:
    """An object of the program: an instance, function, class, iterator or module."""

    __slots__ = ("_whorl_peer",)
    __all__ = ()  # of the handle in sys.modules: names that the tests use are there without an import
    __doc__ = property(lambda self: _forward(self, "getattr", "__doc__"))
    __dict__ = property(lambda self: _forward(self, "getattr", "__dict__"))

    def __init__(self, peer: TestsPeer) -> None:
        object.__setattr__(self, "_whorl_peer", peer)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" and name not in READABLE:
            raise AttributeError(name)
        if name in PREDICATES and id(self) != id(sys.modules.get("program")):
            _peer(self).check_operand(None)
        return _forward(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _forward(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _forward(self, "delattr", name)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Handle):
            return _forward(self, "eq", other) is True
        plain = _forward(self, "plain")
        return type(plain) in (list, tuple, dict, set, frozenset) and bool(plain == other)

    def __hash__(self) -> int:
        return int(_forward(self, "hash"))

    def __contains__(self, value: Any) -> bool:
        _peer(self).check_operand(value)
        return _forward(self, "contains", value) is True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if not _forward(self, "exit", error) or error is None:
            return False
        while trace.tb_next:
            trace = trace.tb_next
        code = trace.tb_frame.f_code
        is_raise = code.co_code[trace.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
        if (
            not is_raise or code.co_filename != "tests.py" or isinstance(error, AssertionError)
        ):  # an assertion of the block may not have run
            _peer(self).refuse("a context manager of the program suppresses an error that no `raise` raised")
        return True

    def __deepcopy__(self, memo: Any) -> Any:
        return _forward(self, "deepcopy")

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and _forward(self, "isinstance", value) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return _forward(self, "issubclass", kind) is True

    def __mro_entries__(self, bases: Any) -> Any:
        _peer(self)._refuse("a class that derives from one of the program")


class CoroutineHandle(Handle):
    """A coroutine of the program. An event loop of the tests runs it to its end in one step."""

    __slots__ = ()
    __class__ = property(lambda self: CoroutineType)

    def __await__(self) -> Generator[Any, Any, Any]:
        return _forward(self, "await")
        yield

    def __next__(self) -> Any:
        raise StopIteration(_forward(self, "await"))

    def send(self, value: Any) -> Any:
        next(self)


def _method(operation: str, shows_operand: bool) -> Any:
    def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        if shows_operand:
            _peer(self).check_operand(arguments[0])
        return _forward(self, operation, *arguments, **named)

    return method


for _name in (*UNARY, "call", "getitem", "setitem", "delitem", "round", "format", "enter"):
    if _name != "hash":
        setattr(Handle, f"__{_name}__", _method(_name, shows_operand=False))
for _name in (*BINARY, *(f"r{name}" for name in ARITHMETIC)):
    setattr(Handle, f"__{_name}__", _method(_name, shows_operand=True))
