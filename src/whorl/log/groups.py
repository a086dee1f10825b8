"""Groups of readers: members of one group share the partitions (a queue), each group reads everything (publish/subscribe).

The state of a group is one document of the log, changed by compare-and-set: the members with the time until which each
is alive, the generation, which member owns which partition, and the committed offsets. A member that joins, leaves or
falls silent raises the generation; a commit of an older generation is refused, so a member that was stopped for a minute
cannot move the group back. Delivery is at least once: a reader that dies before its commit leaves its records to the next.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import orjson

from whorl.errors import WhorlError

if TYPE_CHECKING:
    from whorl.log.event import LogRecord
    from whorl.log.port import Log

POLL_SECONDS = 0.02
Partition = tuple[str, int]  # topic and number


class FencedError(WhorlError):
    """A reader is not a member of its group any more: others own its partitions."""


@dataclass
class GroupState:
    """The document of a group. members: name -> time until which it is alive. owners, offsets: by "topic/partition"."""

    generation: int = 0
    topics: list[str] = field(default_factory=list)
    members: dict[str, float] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)

    @classmethod
    def decode(cls, content: bytes) -> GroupState:
        return cls(**orjson.loads(content)) if content else cls()

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    def committed(self, topic: str, partition: int) -> int:
        """Return the next offset of the group."""
        return self.offsets.get(f"{topic}/{partition}", 0)

    def rebalance(self, now: float, partitions: Sequence[Partition]) -> None:
        """Drop members that are silent, and give every partition an owner, if anything changed."""
        alive = {name: until for name, until in self.members.items() if until > now}
        order, names = sorted(alive), sorted(f"{topic}/{number}" for topic, number in partitions)
        owners = {name: order[i % len(order)] for i, name in enumerate(names)} if order else {}
        if (alive.keys(), owners) != (self.members.keys(), self.owners):
            self.generation += 1
        self.members, self.owners = alive, owners


class Reader:
    """A member of a group. A context manager; for one thread.

    Attributes:
        generation: of the assignment. assigned: partitions that this member reads.
        positions: next offset of each.

    Raises:
        FencedError: from `commit`, the group gave its partitions to others. OffsetRemovedError: from `read`.
    """

    def __init__(self, log: Log, name: str, topics: Sequence[str], *, session: float = 10.0) -> None:
        self.log, self.name, self.topics, self.session = log, name, list(topics), session
        self.member = secrets.token_hex(8)
        self.generation, self.assigned, self.positions = -1, list[Partition](), dict[Partition, int]()
        self._partitions = [(t, p) for t in topics for p in range(log.topic(t).partitions)]
        self._renew_at = 0.0

    def read(self, limit: int = 1000, timeout: float = 1.0) -> list[LogRecord]:
        """Return the next records of the assigned partitions, in order within each; empty after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._heartbeat()
            records: list[LogRecord] = []
            for partition in random.sample(self.assigned, len(self.assigned)):  # none starves
                try:
                    some = self.log.fetch(*partition, self.positions[partition], limit - len(records))
                except WhorlError:
                    if records:  # they would be lost; the next read raises
                        return records
                    raise
                if some:
                    self.positions[partition] = some[-1].offset + 1
                    records += some
                if len(records) >= limit:
                    break
            if records or time.monotonic() >= deadline:
                return records
            time.sleep(POLL_SECONDS)

    def commit(self) -> None:
        """LogRecord that all records read so far are done with."""
        positions = {f"{t}/{p}": offset for (t, p), offset in self.positions.items()}

        def change(state: GroupState) -> None:
            if state.generation != self.generation or self.member not in state.members:
                self._renew_at = 0.0
                raise FencedError(
                    f"group {self.name}: the generation {self.generation} is over, {state.generation} is current",
                    expected="commits of the current generation", do="read on: what was not committed is delivered again",
                )  # fmt: skip
            state.offsets |= positions
            state.members[self.member] = self.log.clock() + self.session

        self._change(change)

    def seek(self, partition: Partition, offset: int) -> None:
        """Read an assigned partition from another offset."""
        self.positions[partition] = offset

    def close(self) -> None:
        """Leave the group, so that others take over at once."""

        def leave(state: GroupState) -> None:
            state.members.pop(self.member, None)
            state.rebalance(self.log.clock(), self._partitions)

        self._change(leave)
        self.assigned = []

    def _heartbeat(self) -> None:
        """Stay a member, and take a new assignment."""
        if (now := self.log.clock()) < self._renew_at:
            return

        def renew(state: GroupState) -> None:
            state.topics = sorted({*state.topics, *self.topics})
            state.members[self.member] = now + self.session
            state.rebalance(now, self._partitions)

        state = self._change(renew)
        self._renew_at = now + self.session / 3
        if state.generation != self.generation:
            self.generation = state.generation
            self.assigned = [p for p in self._partitions if state.owners[f"{p[0]}/{p[1]}"] == self.member]
            first = {topic: self.log.bounds(topic) for topic in {t for t, _ in self.assigned}}
            self.positions = {
                (t, p): state.offsets.get(f"{t}/{p}", first[t][p].first) for t, p in self.assigned
            }

    def _change(self, change: Callable[[GroupState], None]) -> GroupState:
        """Change the document of the group; again if another member was faster."""
        name = f"group/{self.name}"
        while True:
            content, version = self.log.document(name)
            state = GroupState.decode(content)
            change(state)
            if self.log.put_document(name, state.encode(), version):
                return state
            time.sleep(random.uniform(0, POLL_SECONDS))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except WhorlError:  # its session ends without it
            if error is None:
                raise
