"""Producers: fill slots, in this process or in a child process, with the same code.

A producer is an object with one method, `fill(self, slot, weights, rng) -> int`. It writes into `slot.data` and returns
the length in use. Its output may depend on `slot.sequence` (the record's number), on `rng` (seeded per record from the
seed, the producer's number and the sequence number), and on the weights (`weights.load_into(module)`; None without a
board). So without weights, `SerialProducer` (fills on demand) and `ProducerProcess` (fills ahead) give the same bits.

The process (`machine/process.py`) gets the ring's file descriptor and the pickled producer. Then only integers travel:
(slot, sequence) there, the slot number back. It runs on one thread at nice +5, since the learner must not wait.

Every failure raises a `ProducerError` in the parent: an exception (with its traceback), a killed process (its channel
closes), a hang (`timeout`).

A killed producer may be restarted (`restarts`); one that raised is not. Its unreported slots are reclaimed and
requested again under the same numbers, so no record is lost or repeated. This is correct if a record depends only on
its number, the weights and the pickled producer. It is wrong for stateful producers such as environments, hence the
default of 0. A dead producer blocks no other process: ring and board have no locks. Its sentinel shows its death even if
a process that it forked holds the channel; such processes are in its session and are killed first.
"""

from __future__ import annotations

import pickle
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from whorl.errors import LOST_HELPER, ProducerError
from whorl.machine.process import Channel, Child, Descriptor, describe_exit, wait_for
from whorl.slots.board import Board, BoardReader
from whorl.slots.ring import Slot, SlotRing, SlotState
from whorl.slots.spec import WriteError
from whorl.tracking import seeds

_REQUEST = struct.Struct("<qq")  # slot, sequence
_DONE = struct.Struct("<q")  # slot
_FAILED = -1
_NICE = 5


class ProducerHandle(Protocol):
    """The interface between a reader and a running producer: serial, process, or Ray actor (`ray.py`)."""

    number: int
    timeout: float

    def request(self, slot: int, sequence: int) -> None: ...
    def receive(self) -> int | None: ...
    def close(self) -> None: ...
    @staticmethod
    def first_ready(producers: Any, timeout: float) -> Any: ...


class Producer(Protocol):
    """Fills one slot at a time."""

    def fill(self, slot: Slot[Any], weights: Any, rng: Any) -> int:
        """Write a record into `slot.data`; return the length in use. `rng` is a numpy Generator for this record."""
        ...


class SerialProducer:
    """A producer in lockstep with its reader: `receive` fills the slot."""

    def __init__(
        self,
        ring: SlotRing[Any],
        producer: Producer,
        *,
        seed: int = 0,
        number: int = 0,
        board: Board | None = None,
    ) -> None:
        self.ring, self.number, self.timeout = ring, number, 0.0
        self._work = SlotFiller(ring, producer, seed, number, board)
        self._asked: deque[tuple[int, int]] = deque()

    def request(self, slot: int, sequence: int) -> None:
        """Request record `sequence` in a free slot."""
        self._asked.append((slot, sequence))

    def receive(self) -> int:
        """Fill the oldest requested record; return its slot number."""
        slot, sequence = self._asked.popleft()
        self._work.fill(slot, sequence)
        return slot

    @staticmethod
    def first_ready(producers: Sequence[SerialProducer], timeout: float) -> list[SerialProducer]:
        """Return all producers with a request: none of them needs waiting."""
        return [p for p in producers if p._asked]

    def close(self) -> None:
        self._asked.clear()


class ProducerProcess:
    """A producer in a child process that fills ahead of its reader.

    Args:
        producer: must pickle, and come from an importable module (not a script).
        seed, number: the seed of the records' generators, and this producer's number.
        board: the weights that it uses.
        timeout: seconds per record before the producer counts as hung.
        restarts: limit of restarts in a row after kills, without a new record.
        log: receives a message per restart.
    """

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
    ) -> None:
        self.ring, self.number, self.timeout, self.name = ring, number, timeout, type(producer).__name__
        self.restarts, self.log = restarts, log
        self._producer, self._seed, self._board = producer, seed, board
        self._asked: deque[tuple[int, int]] = deque()  # requested and not yet reported
        self._deaths = 0  # since its last record
        self._start()

    def _start(self) -> None:
        ring, board, module = self.ring, self._board, type(self._producer).__module__
        self._child = Child(
            "whorl.slots.producers:serve_records",
            (ring.spec, len(ring), ring.poison, Descriptor(ring.fd)), pickle.dumps(self._producer), self._seed, self.number,
            (board.layout, Descriptor(board.fd)) if board else None,
            name=f"producer {self.number}",
            preload=(__name__, *([module] if module.startswith("whorl.") else [])),
            nice=_NICE, policy="SCHED_BATCH",
            ignore=(signal.SIGINT, signal.SIGTERM),  # for the parent, which then closes the channel
            new_session=True,
        )  # fmt: skip

    @staticmethod
    def first_ready(producers: Sequence[ProducerProcess], timeout: float) -> list[ProducerProcess]:
        """Return producers with a finished record (or that died), after at most `timeout` seconds."""
        children = [p._child for p in producers]
        by_sign = {sign: p for p in producers for sign in (p._child.channel, p._child.sentinel)}
        return list(dict.fromkeys(by_sign[sign] for sign in wait_for(list(by_sign), timeout, children)))

    @property
    def pid(self) -> int:
        return self._child.pid

    def request(self, slot: int, sequence: int) -> None:
        """Request record `sequence` in a free slot. If the producer is dead, `receive` raises."""
        self._asked.append((slot, sequence))
        self._send(_REQUEST.pack(slot, sequence))

    def receive(self) -> int | None:
        """Wait for the oldest requested record; return its slot number.

        None: the producer was killed and is restarted; the record is still to come.

        Raises:
            ProducerError: the producer raised (with its traceback), died, or hung.
        """
        try:
            ready = wait_for([self._child.channel, self._child.sentinel], self.timeout, [self._child])
            if not ready:
                self._child.kill()
                raise ProducerError(
                    f"producer {self.number} ({self.name}) wrote no record for {self.timeout:g} s and was ended"
                    f"{self._unfinished_slot()}",
                    do="find out where it waits, or increase its timeout",
                )
            if self._child.channel not in ready and not self._child.channel.poll(0):
                raise EOFError  # it died, and a child that it forked holds the channel
            answer = self._child.channel.recv_bytes()
        except (EOFError, ConnectionError):
            self._restart()
            return None
        slot: int = _DONE.unpack_from(answer)[0]
        if slot == _FAILED:
            message = answer[_DONE.size :].decode(errors="replace")
            raise ProducerError(
                f"producer {self.number} ({self.name}) raised{self._unfinished_slot()}:\n{message}"
            )
        self._asked.popleft()
        self._deaths = 0
        return slot

    def close(self) -> None:
        """End the process; return when it has exited."""
        self._child.close(1.0)  # its next read sees the closed channel

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # it is dead; its earlier messages are still to be read
            self._child.channel.send_bytes(message)

    def _restart(self) -> None:
        """Restart a killed producer and repeat its unreported requests.

        Raises:
            ProducerError: it exited without a signal, or the limit of restarts is reached.
        """
        code = self._child.kill()
        death = self._death_error(code)
        self._deaths += 1
        if code >= 0 or self._deaths > self.restarts:
            death.exit_code = 1 if code >= 0 else LOST_HELPER
            raise death from None
        self.log(f"{death.what}; restarted ({self._deaths} of at most {self.restarts} in a row)")
        self._child.channel.close()
        for index, _ in self._asked:
            self.ring.reclaim(self.ring.slots[index])
        try:
            self._start()
        except OSError as error:  # no memory or no process number
            raise ProducerError(
                f"{death.what}, and cannot be restarted: {error}", do=_RECOVERY_HINT
            ) from error
        for asked in self._asked:
            self._send(_REQUEST.pack(*asked))

    def _unfinished_slot(self) -> str:
        """Describe the slot that it left partly written, if any."""
        own_slots = (s for s in self.ring.slots if s.state == SlotState.WRITING and s.producer == self.number)
        slot = next(own_slots, None)
        return "" if slot is None else f" in slot {slot.index}, record {slot.sequence}"

    def _death_error(self, code: int) -> ProducerError:
        again = f", after {self._deaths} restarts without a record" if self._deaths else ""
        return ProducerError(
            f"producer {self.number} ({self.name}, process {self.pid}) {describe_exit(code)}"
            f"{self._unfinished_slot()}{again}",
            expected="a producer that runs as long as its reader",
            do=_RECOVERY_HINT,
        )


class SlotFiller:
    """Runs a producer for one record after another, in any process."""

    def __init__(
        self, ring: SlotRing[Any], producer: Producer, seed: int, number: int, board: Board | None
    ) -> None:
        self.ring, self.producer, self.seed, self.number = ring, producer, seed, number
        self.weights = BoardReader(board) if board else None
        self.rng = seeds.ReseedableRNG()
        self.idle_since = time.monotonic_ns()

    def fill(self, index: int, sequence: int) -> None:
        """Fill slot `index` with record `sequence`."""
        slot = self.ring.slots[index]
        own_seed = seeds.derive(self.seed, "producer", self.number, sequence)
        began = time.monotonic_ns()
        slot.transition(
            SlotState.FREE,
            SlotState.WRITING,
            producer=self.number,
            sequence=sequence,
            seed=own_seed,
            policy_version=0,
            length=0,
            idle=began - self.idle_since,
        )
        try:
            length = self.producer.fill(slot, self.weights, self.rng(own_seed))
        except WriteError as error:
            fields = self.ring.spec.fields.items()
            name, field = next(f for f in fields if np.shares_memory(getattr(slot.data, f[0]), error.array))
            raise ProducerError(
                f"{type(self.producer).__name__} wrote into the field {name!r} of record {sequence}: {error}",
                expected=f"{field.dtype} of shape {field.shape}",
            ) from error
        self.idle_since = time.monotonic_ns()
        version = self.weights.version if self.weights else 0
        slot.transition(
            SlotState.WRITING,
            SlotState.READY,
            length=length,
            policy_version=version,
            busy=self.idle_since - began,
        )


_RECOVERY_HINT = (
    "unless it was killed on purpose, check whether the machine ran out of memory; the same command resumes"
)


def serve_records(
    channel: Channel,
    ring: tuple[Any, ...],
    producer: bytes,
    seed: int,
    number: int,
    weights: tuple[Any, int] | None,
) -> None:
    """Main function of a producer process."""
    spec, n_slots, poison, fd = ring
    try:
        board = Board(weights[0], fd=weights[1]) if weights else None
        slots: SlotRing[Any] = SlotRing(spec, n_slots, poison=poison, fd=fd)
        filler = SlotFiller(slots, pickle.loads(producer), seed, number, board)
        while True:
            slot, sequence = _REQUEST.unpack(channel.recv_bytes())
            filler.fill(slot, sequence)
            channel.send_bytes(_DONE.pack(slot))
    except (EOFError, ConnectionError):
        raise  # the parent closed its end or died
    except BaseException:
        channel.send_bytes(_DONE.pack(_FAILED) + traceback.format_exc().encode())
        raise
