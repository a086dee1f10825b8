"""Producers on other machines: a `Producer` in a Ray actor, on any node of a cluster.

The actor fills a local slot with the same code as a producer process. The slot then travels through Ray's object store
as one byte array (shared memory on the learner's node, network otherwise) into a slot of the learner's ring. Its header
comes along, so readers accept `RayProducer`s like processes. Weights travel the other way: each version is put into the
object store once, for all actors.

    ray.init(address="auto")
    producers = [RayProducer(ring, Actor(...), number=n, board=board) for n in range(64)]
    with FIFOReader(ring, producers, order="ready", board=board) as records: ...

An actor that raises, dies or hangs is a `ProducerError`. An actor that is lost with its process, node or record may be
restarted (`restarts`, as in `producers.py`) on any node. No slot has to be reclaimed: the ring's slot is written only
with a complete record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from whorl.errors import ConfigError, ProducerError
from whorl.slots.board import Board, BoardLayout
from whorl.slots.producers import Producer, SlotFiller
from whorl.slots.ring import HEADER_FIELDS, SlotRing, SlotState


def init_ray() -> None:
    """Join the cluster of RAY_ADDRESS, or start a local one, unless Ray is running.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed", do="pip install 'whorl[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)


class _RayActor:
    """The actor: one slot, and a board with the weights it received."""

    def __init__(
        self, spec: Any, poison: bool, producer: Producer, seed: int, number: int, layout: BoardLayout | None
    ) -> None:
        self.ring: SlotRing[Any] = SlotRing(spec, 1, poison=poison)
        self.board = Board(layout) if layout else None
        self.held_version = -1  # the version on the board; -1 since an empty board has version 0
        self.work = SlotFiller(self.ring, producer, seed, number, self.board)

    def make_record(self, sequence: int, weights: Any, version: int) -> tuple[list[int], Any]:
        """Return (header, content as bytes) of record `sequence`, made with these weights."""
        if self.board is not None and weights is not None and version != self.held_version:
            self.board.publish_flat(weights, version)
            self.held_version = version
        self.work.fill(0, sequence)
        slot = self.ring.slots[0]
        slot.transition(SlotState.READY, SlotState.READING)
        header, content = list(slot.header), slot.content.copy()
        self.ring.release(slot)
        return header, content


def _actor_lost_errors() -> tuple[type[Exception], ...]:
    """Ray's errors for an actor that died without raising, or a record lost with its node."""
    from ray import exceptions

    return exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.ObjectLostError


class RayProducer:
    """A producer in a Ray actor. The arguments are those of `ProducerProcess`.

    Args:
        options: of the actor, in Ray's format: {"num_cpus": 1, "resources": {...}}.

    Raises:
        ConfigError: Ray is not installed, or not initialized.
    """

    # The newest version of each board in the object store, shared by all actors.
    _sent: ClassVar[WeakKeyDictionary[Board, tuple[int, Any]]] = WeakKeyDictionary()

    def __init__(
        self,
        ring: SlotRing[Any],
        producer: Producer,
        *,
        seed: int = 0,
        number: int = 0,
        board: Board | None = None,
        timeout: float = 300.0,
        restarts: int = 0,
        log: Callable[[str], None] = lambda text: None,
        options: dict[str, Any] | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("Ray is not installed", do="pip install 'whorl[ray]'") from error
        if not ray.is_initialized():
            raise ConfigError(
                "Ray is not initialized", do="call ray.init() here, or ray.init(address='auto') in a cluster"
            )
        self.ring, self.number, self.board, self.timeout = ring, number, board, timeout
        self.restarts, self.log, self.name = restarts, log, type(producer).__name__
        actor: Any = ray.remote(_RayActor).options(**({"num_cpus": 1} | (options or {})))
        layout = board.layout if board else None
        self._start: Callable[[], Any] = lambda: actor.remote(
            ring.spec, ring.poison, producer, seed, number, layout
        )
        self._actor: Any = self._start()
        self._asked: deque[tuple[int, int, Any]] = deque()  # slot, sequence, object reference
        self._deaths = 0  # since the last record

    def request(self, slot: int, sequence: int) -> None:
        """Request record `sequence` for a free slot."""
        weights, version = self._weights_ref()
        self._asked.append((slot, sequence, self._actor.make_record.remote(sequence, weights, version)))

    def _weights_ref(self) -> tuple[Any, int]:
        """Return a reference to the current weights, stored once per version, and the version."""
        import ray

        if self.board is None:
            return None, 0
        version, reference = RayProducer._sent.get(self.board, (-1, None))
        if version != self.board.version:
            flat, version = self.board.read_flat()
            reference = ray.put(flat)
            RayProducer._sent[self.board] = (version, reference)
        return reference, version

    @staticmethod
    def first_ready(producers: Sequence[RayProducer], timeout: float) -> list[RayProducer]:
        """Return producers with a finished record, after at most `timeout` seconds."""
        import ray

        waiting = {p._asked[0][2]: p for p in producers if p._asked}
        found, _ = ray.wait(list(waiting), timeout=timeout)
        return [waiting[reference] for reference in found]

    def receive(self) -> int | None:
        """Wait for the oldest requested record; return its slot number.

        None: the actor was lost and is restarted; the record is still to come.

        Raises:
            ProducerError: the actor raised (with its traceback), died, or hung.
        """
        import ray

        index, _, reference = self._asked[0]
        where = f"producer {self.number} ({self.name}, a Ray actor)"
        try:
            header, content = ray.get(reference, timeout=self.timeout)
        except ray.exceptions.GetTimeoutError:
            ray.kill(self._actor)
            raise ProducerError(
                f"{where} wrote no record for {self.timeout:g} s and was ended",
                do="find out where it waits, or increase its timeout",
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise ProducerError(f"{where} raised:\n{error}") from None
        except _actor_lost_errors() as error:
            self._deaths += 1
            if getattr(error, "actor_init_failed", False) or self._deaths > self.restarts:
                raise ProducerError(
                    f"{where} died: {error}", do="check its node; the same command resumes"
                ) from None
            first = str(error).partition("\n")[0]
            self.log(f"{where} died: {first}; restarted ({self._deaths} of at most {self.restarts} in a row)")
            self._restart()
            return None
        self._asked.popleft()
        self._deaths = 0
        slot, fields = self.ring.slots[index], dict(zip(HEADER_FIELDS, header, strict=True))
        fields.pop("state")
        slot.transition(SlotState.FREE, SlotState.WRITING)
        np.copyto(slot.content, content)
        slot.transition(SlotState.WRITING, SlotState.READY, **fields)
        return index

    def _restart(self) -> None:
        """Start another actor and repeat the unreceived requests, with the current weights."""
        import ray

        with suppress(ray.exceptions.RayError, ValueError):  # it may be alive but unreachable
            ray.kill(self._actor)
        asked, self._asked = self._asked, deque()
        self._actor = self._start()
        for slot, sequence, _ in asked:
            self.request(slot, sequence)

    def close(self) -> None:
        """End the actor."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)
