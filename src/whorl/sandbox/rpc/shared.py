"""Containers that both processes hold: each change of one side reaches the other with the next message.

A list, dict, set, deque or bytearray is sent once, under a number; later it is named by the number alone. So identity
and aliasing hold as in one process: a row that occurs twice in a grid, an argument that the program keeps, a result that
it changes later. A message carries the contents of the containers that are new or have changed:

    contents   [[number, ["list", part, ...]], ...]
    released  [number, ...]   containers that this side no longer holds; both sides drop the number

The subtle part is the snapshot of the last content: its parts are compared by identity, so `True` in place of 1 is a
change, and nested containers are compared on their own.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)


def _parts(container: Any) -> tuple[Any, ...]:
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def _same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _replace_content(container: Any, content: Any) -> None:
    """Give a container the content of another one of its type."""
    if type(container) is not type(content):
        raise TypeError("a container changed its type")
    if isinstance(container, (list, bytearray)):
        container[:] = content
    elif isinstance(container, deque):
        container.clear()
        container.extend(content)
    else:
        container.clear()
        container.update(content)


class SharedContainers:
    """The containers of one side.

    Args:
        first: this side's first number, 0 or 1. Its numbers have this parity.
    """

    def __init__(self, first: int) -> None:
        self.next, self.parity = first, first
        self._containers: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # id of a container: its number
        self._snapshots: dict[int, tuple[Any, ...]] = {}  # none if the other side does not have it

    def number(self, container: Any) -> int:
        """Return the number of a container, which the next message sends if it is new."""
        number = self._numbers.get(id(container))
        if number is None:
            number, self.next = self.next, self.next + 2
            self._numbers[id(container)], self._containers[number] = number, container
        return number

    def get(self, number: int) -> Any:
        return self._containers[number]

    def encode_changes(self, encode_content: Callable[[Any], Any]) -> tuple[list[Any], list[int]]:
        """Return (contents, released) of the next message. Encoding a content may add containers, which follow."""
        contents, released = [], []
        waiting = list(self._containers)
        while waiting:
            for number in waiting:
                parts = _parts(self._containers[number])
                snapshot = self._snapshots.get(number)
                if snapshot is None or not _same(parts, snapshot):
                    contents.append([number, encode_content(self._containers[number])])
                self._snapshots[number] = parts
                del parts
                if snapshot is not None and sys.getrefcount(self._containers[number]) <= 2:
                    released.append(number)
                    del snapshot
                    self.release(number)
            waiting = [n for n in self._containers if n not in self._snapshots]
        return contents, released

    def decode_changes(
        self, contents: list[Any], released: list[int], decode_content: Callable[[Any], Any]
    ) -> None:
        """Apply (contents, released) of a message. Raises (any exception) if they are malformed."""
        for number, data in contents:
            if number not in self._containers:
                if type(number) is not int or number % 2 == self.parity:
                    raise TypeError("a number of the other side was expected")
                container = decode_content([*data[: HEADS.get(data[0], 1)]])
                self._containers[number], self._numbers[id(container)] = container, number
                self._snapshots[number] = ()
        for number, data in contents:
            content = decode_content(data)
            container = self._containers[number]
            _replace_content(container, content)
            self._snapshots[number] = _parts(container)
        for number in released:
            self.release(number)

    def release(self, number: int) -> None:
        container = self._containers.pop(number, None)
        if container is not None:
            del self._numbers[id(container)]
            del self._snapshots[number]


HEADS = {"deque": 2, "defaultdict": 2}  # tag: items of an encoded content in front of the parts, if not 1
