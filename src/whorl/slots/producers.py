"""Producers: fill slots, in this process or in a child process, with the same code.

A producer is an object with one method, `fill(self, slot, weights, rng) -> int`. It writes into `slot.data` and returns
the length in use. Its output may depend on `slot.sequence` (the record's number), on `rng` (seeded per record from the
seed, the producer's number and the sequence number), and on the weights (`weights.load_into(module)`; None without a
board). So without weights, `SerialProducer` (fills on demand) and `ProducerProcess` (fills ahead) give the same bits.

The process is a new interpreter. A fork would copy locks held by torch's threads; `multiprocessing` would import the
main script again. It gets the ring's file descriptor, a socket and the pickled producer. Then only integers travel:
(slot, sequence) there, the slot number back. It runs on one thread at nice +5, since the learner must not wait.

Every failure raises a `ProducerError` in the parent: an exception (with its traceback), a killed process (its socket
closes), a hang (`timeout`). A producer whose parent dies exits.

A killed producer may be restarted (`restarts`); one that raised is not. Its unreported slots are reclaimed and
requested again under the same numbers, so no record is lost or repeated. This is correct if a record depends only on
its number, the weights and the pickled producer. It is wrong for stateful producers such as environments, hence the
default of 0. A dead producer blocks no other process: ring and board have no locks. A pidfd detects its death even if a
forked child holds the socket; such children are in its session and are killed first.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np

from whorl.errors import ProducerError
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
        ring, board = self.ring, self._board
        weights = (board.layout, board.fd) if board else None
        work = pickle.dumps(
            (ring.spec, len(ring), ring.poison, ring.fd, self._producer, self._seed, self.number, weights)
        )
        self._connection, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(child_end.fileno()), str(os.getpid())],
                pass_fds=(child_end.fileno(), ring.fd, *([board.fd] if board else [])),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(_THREAD_COUNTS, "1")},
                start_new_session=True,  # its children can be killed with it
            )
        self._signs = [self._connection]  # readable on a record, or on its death
        with suppress(AttributeError, OSError):  # Linux only; elsewhere the socket signals its death
            self._signs.append(Connection(os.pidfd_open(self.pid), writable=False))
        self._send(pickle.dumps((sys.path, work)))

    @staticmethod
    def first_ready(producers: Sequence[ProducerProcess], timeout: float) -> list[ProducerProcess]:
        """Return producers with a finished record (or that died), after at most `timeout` seconds."""
        by_sign = {sign: p for p in producers for sign in p._signs}
        ready = wait(list(by_sign), timeout)
        return list(dict.fromkeys(by_sign[sign] for sign in ready if isinstance(sign, Connection)))

    @property
    def pid(self) -> int:
        return self._process.pid

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
            ready = wait(self._signs, self.timeout)
            if not ready:
                self._kill()
                raise ProducerError(
                    f"producer {self.number} ({self.name}) wrote no record for {self.timeout:g} s and was ended"
                    f"{self._unfinished_slot()}",
                    do="find out where it waits, or increase its timeout",
                )
            if self._connection not in ready and not self._connection.poll(0):
                raise EOFError  # it died, and a child that it forked holds the socket
            answer = self._connection.recv_bytes()
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
        for sign in self._signs:
            sign.close()
        try:
            self._process.wait(1.0)  # its next read sees the closed socket
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # it is dead; its earlier messages are still to be read
            self._connection.send_bytes(message)

    def _restart(self) -> None:
        """Restart a killed producer and repeat its unreported requests.

        Raises:
            ProducerError: it exited without a signal, or the limit of restarts is reached.
        """
        death = self._death_error()
        self._deaths += 1
        if self._process.returncode >= 0 or self._deaths > self.restarts:
            raise death from None
        self.log(f"{death.what}; restarted ({self._deaths} of at most {self.restarts} in a row)")
        for sign in self._signs:
            sign.close()
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

    def _kill(self) -> None:
        """Kill the process, if alive, and its children."""
        if self._process.returncode is None:  # not yet waited for, so the pid is still valid
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _unfinished_slot(self) -> str:
        """Describe the slot that it left partly written, if any."""
        own_slots = (s for s in self.ring.slots if s.state == SlotState.WRITING and s.producer == self.number)
        slot = next(own_slots, None)
        return "" if slot is None else f" in slot {slot.index}, record {slot.sequence}"

    def _death_error(self) -> ProducerError:
        self._kill()
        code = self._process.wait()
        how = (
            f"was killed by signal {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        again = f", after {self._deaths} restarts without a record" if self._deaths else ""
        return ProducerError(
            f"producer {self.number} ({self.name}, process {self.pid}) {how}{self._unfinished_slot()}{again}",
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
_CHILD = "from whorl.slots.producers import _child; _child()"
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _child() -> None:
    """Entry point of a producer process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # signals are for the parent, which then closes the socket
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):  # a wake-up does not preempt the learner
        with suppress(OSError):  # forbidden in some containers; it is only slower then
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    parent = int(sys.argv[2])
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        path, work = pickle.loads(connection.recv_bytes())
        sys.path[:] = path
        spec, n_slots, poison, fd, producer, seed, number, weights = pickle.loads(work)
        ring: SlotRing[Any] = SlotRing(spec, n_slots, poison=poison, fd=fd)
        board = Board(weights[0], fd=weights[1]) if weights else None
        working = SlotFiller(ring, producer, seed, number, board)
        while True:
            slot, sequence = _REQUEST.unpack(connection.recv_bytes())
            working.fill(slot, sequence)
            connection.send_bytes(_DONE.pack(slot))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent closed its end or died
    except BaseException:
        connection.send_bytes(_DONE.pack(_FAILED) + traceback.format_exc().encode())
        raise


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent dies, even during a fill."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
