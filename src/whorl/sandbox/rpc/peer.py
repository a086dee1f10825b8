"""Calls between two processes over two pipes, one call at a time, with calls back while a call runs.

    request  ["?", target, ...]                    of each side: `program_peer.py`
    reply    ["=", value, changed, streams]   or ["!", error, [], streams]; streams only of the program

A function that returns None may have changed its arguments in place, so the reply has the new contents of those that
are lists, dicts, sets, ... . Any other result leaves the caller's arguments unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from whorl.sandbox.frames import read_frame, write_frame
from whorl.sandbox.rpc.codec import MUTABLE, Codec, replace_content

_to_json = json.JSONEncoder(check_circular=False).encode
_from_json = json.JSONDecoder().decode


class ProgramEnded(BaseException):
    """The program's process has ended or has sent what is no message."""


class Peer(Codec):
    """One end of the connection.

    Attributes:
        receive_fd: descriptor of the other side's messages.
        send_fd: descriptor of this side's messages.
        answer: returns the reply to a request of the other side.
    """

    answer: Callable[[list[Any]], list[Any]]

    def __init__(self) -> None:
        super().__init__()
        self.receive_fd = self.send_fd = -1

    def exchange(self, message: list[Any]) -> list[Any]:
        """Send a request, answer requests until its reply comes, and return that."""
        self.send(message)
        while (reply := self.read())[0] == "?":
            self.send(self.answer(reply))
        return reply

    def send(self, message: list[Any]) -> None:
        """Send a message. Raises RecursionError if it is nested too deep."""
        write_frame(self.send_fd, _to_json(message).encode())

    def read(self) -> list[Any]:
        """Return the next message. Raises EOFError at the end, ValueError or RecursionError if it is none."""
        message = _from_json(read_frame(self.receive_fd).decode())
        if type(message) is not list or not message or message[0] not in ("?", "=", "!"):
            raise ValueError("a message was expected")
        return message

    def encode_named(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return encoded named arguments."""
        return {n: self.encode(v) for n, v in named.items()}

    def decode_arguments(self, encoded: list[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return decoded arguments and named arguments."""
        return [self.decode(a) for a in encoded], {n: self.decode(v) for n, v in named.items()}

    def reply(
        self, function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
    ) -> list[Any]:
        """Call a function and return the reply, without what it printed."""
        try:
            value = function(*arguments, **named)
            changed = []
            if value is None:
                changed = [
                    self.encode(a) if type(a) in MUTABLE else None for a in (*arguments, *named.values())
                ]
            return ["=", self.encode(value), changed]
        except ProgramEnded:
            raise
        except BaseException as error:
            return ["!", self.encode_error(error), []]

    def result(self, value: Any, changed: list[Any], arguments: Sequence[Any]) -> Any:
        """Return the decoded value of a reply. Raises (any exception) if it is malformed."""
        decoded = self.decode(value)
        if decoded is None:
            for argument, content in zip(arguments, changed, strict=False):
                if content is not None and type(argument) in MUTABLE:
                    replace_content(argument, self.decode(content))
        return decoded
