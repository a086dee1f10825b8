"""Calls between two processes over two pipes, one call at a time, with calls back while a call runs.

    request  ["?", operation, target, arguments, named arguments, patches, contents, released]
    reply    ["=", value, contents, released]    or ["!", error, contents, released]

The process of the tests calls the program's functions and gets values back (`codec.py`). It never runs a statement of
the program, so the program cannot reach the tests, their expected values, or the verdict. Lists, dicts and sets behave
as if both sides shared them: each message carries the contents that changed (`shared.py`).

The program may call back functions and objects that tests passed to it. Only operations on such objects are answered
(`_check_incoming`): a public attribute of an object of the tests' own classes, but no attribute of a function, since
`f.__globals__` leads to everything.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import sys
import time
from types import ModuleType
from typing import Any

from whorl.sandbox.rpc.codec import Codec
from whorl.sandbox.rpc.proxies import OPERATIONS, RemoteMeta, RemoteProxy

# Names that tests replace (by mock.patch, redirect_stdout) and the program then sees replaced during a call.
PATCHABLE: tuple[tuple[ModuleType, str], ...] = (
    *((builtins, name) for name in ("input", "print", "open")),
    *((sys, name) for name in ("stdin", "stdout", "stderr", "argv")),
    *((time, name) for name in ("time", "sleep", "monotonic", "perf_counter")),
    *(
        (random, name)
        for name in ("random", "randint", "choice", "shuffle", "uniform", "randrange", "sample")
    ),
)
PROGRAM_NUMBER = 1  # the program's module, in its process; number 0 is the class of functions
_read, _write = os.read, os.write  # bound here: a program may replace those of `os`
_to_json = json.JSONEncoder(check_circular=False).encode
_from_json = json.JSONDecoder().decode
_OF_FUNCTIONS = (["__name__"], ["__qualname__"], ["__doc__"])  # attributes of the tests' functions
_HIDDEN = ("_", "gi_", "cr_", "ag_", "tb_", "f_")  # attributes that lead to frames, globals and classes


class ProgramEnded(BaseException):
    """The program's process has ended or has sent what is no message."""


def write_frame(descriptor: int, data: bytes) -> None:
    unsent = memoryview(len(data).to_bytes(4, "little") + data)
    while unsent:
        unsent = unsent[_write(descriptor, unsent) :]


def read_frame(descriptor: int) -> bytes:
    """Read one frame. Raises EOFError if the stream ends."""
    size = _read_exactly(descriptor, 4)
    return _read_exactly(descriptor, int.from_bytes(size, "little"))


def _read_exactly(descriptor: int, n: int) -> bytes:
    parts = []
    while n > 0:
        part = _read(descriptor, min(n, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


class Peer(Codec):
    """One end of the connection.

    Args:
        trusted: whether this side runs the tests.

    Attributes:
        receive_fd: descriptor of the other side's messages.
        send_fd: descriptor of this side's messages.
        failure: why the verdict cannot be a pass, even if the tests caught it: the other side ended, sent what is no
            message, or an assertion failed in a function that it called back.
        passes_operands: whether the program may see the other operand of its objects' operators.
    """

    def __init__(self, trusted: bool) -> None:
        super().__init__(trusted)
        self.receive_fd = self.send_fd = -1
        self.failure = ""
        self.passes_operands = not trusted
        self._originals = [(module, name, getattr(module, name)) for module, name in PATCHABLE]

    def request(self, operation: str, target: Any, /, *arguments: Any, **named: Any) -> Any:
        """Apply an operation of `OPERATIONS` to an object of the other side and return its value.

        Raises:
            ProgramEnded: the other side has ended.
            BaseException: what the operation raised there.
        """
        if self.failure:
            raise ProgramEnded(self.failure)
        encoded = [self.encode(a) for a in arguments]
        named_encoded = {n: self.encode(v) for n, v in named.items()}
        patches = [
            [i, self.encode(getattr(module, name))]
            for i, (module, name, original) in enumerate(self._originals)
            if self.trusted and getattr(module, name) is not original
        ]
        message = ["?", operation, self.encode(target), encoded, named_encoded, patches]
        self._send([*message, *self.encode_changes()])
        while True:
            message = self._receive()
            if message[0] != "?":
                break
            self._send(self.answer(message))
        try:
            kind, value, contents, released = message
            self.decode_changes(contents, released)
            result = self.decode(value)
            if kind == "!" and not isinstance(result, BaseException):
                raise TypeError("an exception was expected")
        except Exception as error:
            self.failure = f"crashed: the program sent a malformed value ({type(error).__name__})"
            raise ProgramEnded(self.failure) from None
        if kind == "!":
            raise result
        return result

    def answer(self, message: list[Any]) -> list[Any]:
        """Apply the operation of a request to an object of this side and return the reply."""
        replaced: list[tuple[ModuleType, str, Any]] = []
        try:
            _, operation, described, encoded, encoded_named, patches, contents, released = message
            if self.trusted:
                self._check_incoming(operation, described, encoded, patches)
            self.decode_changes(contents, released)
            target = self.decode(described)
            arguments = [self.decode(a) for a in encoded]
            named = {n: self.decode(v) for n, v in encoded_named.items()}
            for i, value in patches:
                module, name, _ = self._originals[i]
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, self.decode(value))
            reply = ["=", self.encode(OPERATIONS[operation](target, *arguments, **named))]
        except ProgramEnded:
            raise
        except BaseException as error:
            if self.trusted and isinstance(error, AssertionError):
                self.failure = f"failed: {error}"
            reply = ["!", self.encode_error(error)]
        for module, name, value in reversed(replaced):
            setattr(module, name, value)
        return [*reply, *self.encode_changes()]

    def check_operand(self, proxy: Any, other: Any) -> None:
        """Raise TypeError if an operator of a proxy would show a value of the tests to the program."""
        if not self.passes_operands and not isinstance(other, RemoteProxy):
            name = type(proxy).__name__
            raise TypeError(f"the program returned its own object ({name}) where a builtin value is compared")

    def _check_incoming(self, operation: Any, described: Any, arguments: Any, patches: Any) -> None:
        """Raise AttributeError unless a request of the program is one that passing an object to it allows."""
        target = self.exported[described[1]] if described[0] == "mine" else None
        allowed = operation not in ("lookup", "seed", "fields") and not patches and target is not None
        if operation in ("getattr", "setattr", "delattr", "dir"):
            readable = type(target).__module__ in ("tests", "unittest.mock", "_io")
            hidden = any(type(a) is not str or a.startswith(_HIDDEN) for a in arguments[:1])
            allowed = allowed and ((readable and not hidden) or arguments in _OF_FUNCTIONS)
        if not allowed:
            raise AttributeError("the tests did not pass this to the program")

    def _send(self, message: list[Any]) -> None:
        try:
            write_frame(self.send_fd, _to_json(message).encode())
        except BrokenPipeError:
            self._end()

    def _receive(self) -> Any:
        try:
            data = read_frame(self.receive_fd)
        except EOFError:
            self._end()
        try:
            message = _from_json(data.decode())
        except (ValueError, RecursionError):
            message = None
        if type(message) is not list or not message or message[0] not in ("?", "=", "!"):
            self.failure = "crashed: the program sent what is no message"
            raise ProgramEnded(self.failure)
        return message

    def _end(self) -> Any:
        self.failure = "exited"
        raise ProgramEnded("the program ended during its tests")


class ProgramModule(ModuleType):
    """The module `program` of the tests: its names are those of the program."""

    def __init__(self, module: Any) -> None:
        super().__init__("program")
        vars(self)["_whorl_module"] = module

    def __getattr__(self, name: str) -> Any:
        module = vars(self)["_whorl_module"]
        if name == "__all__":
            return [n for n in dir(module) if n[:1] != "_"]
        if name[:2] == "__":
            raise AttributeError(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[:2] == "__":  # the import system's own
            vars(self)[name] = value
        else:
            setattr(vars(self)["_whorl_module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_whorl_module"], name)


def is_remote(value: Any) -> bool:
    return issubclass(type(value), (RemoteProxy, RemoteMeta))
