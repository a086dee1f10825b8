"""Producers: what fills slots, in this process or in one of its own, by the same code.

A producer is an object with one method,

    def fill(self, slot, weights, rng) -> int

which writes into `slot.data` and returns how much of it is in use. What it writes may depend on
`slot.sequence` (the record's place in the order of all records), on `rng`, a generator made anew for each
record from the seed, the producer's number and the sequence number, and, where it acts with a network, on the
weights (`weights.into(module)` loads the board's newest; None without a board). So what takes no weights does
not depend on when it was asked for, and `SerialProducer` (fills when the record is wanted) and
`ProducerProcess` (fills ahead) give the same bits.

The process is started as a fresh interpreter, not forked (a fork copies the locks of torch's threads, held
by threads that the copy does not have) and not through `multiprocessing` (which would import the caller's
main script again). It gets the ring's file descriptor, one end of a socket, and the pickled producer; then
only integers travel: (slot, sequence) there, the slot number back. It runs on one thread with less priority
(nice +5), since the learner is what must not wait.

Death is loud. A producer that raises sends its traceback; one that is killed closes its socket by dying;
one that hangs runs into `timeout`. Each becomes a `ProducerError` in the parent. A producer whose parent
dies ends itself.

One that is killed, by the kernel for its memory or by anybody, may be started again (`restarts`); one that raises would
raise again, and is not. What it was asked for and has not told of is taken back, half written or whole, and asked for
again under the same numbers: no record is lost, none comes twice. That is right where a record follows from its number,
the weights and the producer as the caller has it now (it is pickled anew), and wrong where it goes on from the one before,
as an environment's does: hence the default of none. Nothing that a dead producer held is waited for. It shares no lock
with its reader (ring and board have none), and its end is seen by a descriptor of the process too, as a process that it
forked may hold the socket open; these are in its session, and are killed before a slot is taken back.
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
    """What a reader needs of whatever runs a producer: here in line or in a process, `ray.py` in an actor."""

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
        """Write a record into `slot.data`; returns the length in use. `rng` is a numpy Generator for this record."""
        ...


class SerialProducer:
    """A producer in lockstep with its reader: a record is made at the moment it is received."""

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
        """Have record `sequence` written into a free slot."""
        self._asked.append((slot, sequence))

    def receive(self) -> int:
        """Number of the slot with the record asked for longest ago."""
        slot, sequence = self._asked.popleft()
        self._work.fill(slot, sequence)
        return slot

    @staticmethod
    def first_ready(producers: Sequence[SerialProducer], timeout: float) -> list[SerialProducer]:
        """All that were asked for something: none of them makes anybody wait."""
        return [p for p in producers if p._asked]

    def close(self) -> None:
        self._asked.clear()


class ProducerProcess:
    """A producer in a process of its own, filling ahead of its reader.

    Args:
        producer: must pickle, and come from a module that can be imported (not from a script).
        seed: with `number`, what its generators are derived from.
        number: which producer this is, where there are several.
        board: where it finds the weights that it acts with.
        timeout: seconds that a record may take before the producer counts as hung.
        restarts: how often it is started again, having been killed, before it brings another record.
        say: is told of each.
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
        self._asked: deque[tuple[int, int]] = deque()  # what it has not told of
        self._deaths = 0  # since it last told of a record
        self._start()

    def _start(self) -> None:
        ring, board = self.ring, self._board
        weights = (board.layout, board.fd) if board else None
        work = pickle.dumps(
            (ring.spec, len(ring), ring.poison, ring.fd, self._producer, self._seed, self.number, weights)
        )
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(), ring.fd, *([board.fd] if board else [])),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(_THREAD_COUNTS, "1")},
                start_new_session=True,  # what it starts can be ended with it
            )
        self._signs = [self._connection]  # of a record, or of its end
        with suppress(AttributeError, OSError):  # Linux has it; elsewhere the socket alone tells
            self._signs.append(Connection(os.pidfd_open(self.pid), writable=False))
        self._send(pickle.dumps((sys.path, work)))

    @staticmethod
    def first_ready(producers: Sequence[ProducerProcess], timeout: float) -> list[ProducerProcess]:
        """Those whose next record is there (or that died), waiting for one at most `timeout` seconds."""
        whose = {sign: p for p in producers for sign in p._signs}
        ready = wait(list(whose), timeout)
        return list(dict.fromkeys(whose[sign] for sign in ready if isinstance(sign, Connection)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, slot: int, sequence: int) -> None:
        """Have record `sequence` written into a free slot. (If it is dead, `receive` will tell.)"""
        self._asked.append((slot, sequence))
        self._send(_REQUEST.pack(slot, sequence))

    def receive(self) -> int | None:
        """Number of the slot with the record asked for longest ago; waits for it.

        None: it was killed and is started again; the record is still to come.

        Raises:
            ProducerError: the producer raised (its traceback is in the message), died, or hung.
        """
        try:
            ready = wait(self._signs, self.timeout)
            if not ready:
                self._kill()
                raise ProducerError(
                    f"producer {self.number} ({self.name}) wrote nothing for {self.timeout:g} s and was ended"
                    f"{self._unfinished_slot()}",
                    do="look for what it waits for, or raise its timeout",
                )
            if self._connection not in ready and not self._connection.poll(0):
                raise EOFError  # it ended, and whoever it forked holds its end of the socket
            answer = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            self._restart()
            return None
        slot: int = _DONE.unpack_from(answer)[0]
        if slot == _FAILED:
            told = answer[_DONE.size :].decode(errors="replace")
            raise ProducerError(
                f"producer {self.number} ({self.name}) raised{self._unfinished_slot()}:\n{told}"
            )
        self._asked.popleft()
        self._deaths = 0
        return slot

    def close(self) -> None:
        """End the process; returns when it is gone."""
        for sign in self._signs:
            sign.close()
        try:
            self._process.wait(1.0)  # its next read sees the closed socket
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # it is dead; what it told before it went is still to be read
            self._connection.send_bytes(message)

    def _restart(self) -> None:
        """Another process in the place of one that was killed, with all that it had not told of to do.

        Raises:
            ProducerError: how it died, where another would not help: it ended by itself, or too many were killed.
        """
        death = self._death_error()
        self._deaths += 1
        if self._process.returncode >= 0 or self._deaths > self.restarts:
            raise death from None
        self.log(f"{death.what}; it is started again ({self._deaths} of at most {self.restarts} in a row)")
        for sign in self._signs:
            sign.close()
        for index, _ in self._asked:
            self.ring.reclaim(self.ring.slots[index])
        try:
            self._start()
        except OSError as error:  # no memory, no process number
            raise ProducerError(
                f"{death.what}, and cannot be started again: {error}", do=_RECOVERY_HINT
            ) from error
        for asked in self._asked:
            self._send(_REQUEST.pack(*asked))

    def _kill(self) -> None:
        """It, if it lives, and what it started."""
        if self._process.returncode is None:  # nobody has waited for it: the number is still its own
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _unfinished_slot(self) -> str:
        """Where it was: the slot that it left half written, if there is one."""
        mine = (s for s in self.ring.slots if s.state == SlotState.WRITING and s.producer == self.number)
        slot = next(mine, None)
        return "" if slot is None else f" in slot {slot.index}, record {slot.sequence}"

    def _death_error(self) -> ProducerError:
        self._kill()
        code = self._process.wait()
        how = (
            f"was killed by signal {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        again = f", after {self._deaths} restarts that brought no record" if self._deaths else ""
        return ProducerError(
            f"producer {self.number} ({self.name}, process {self.pid}) {how}{self._unfinished_slot()}{again}",
            expected="it to run as long as its reader",
            do=_RECOVERY_HINT,
        )


class SlotFiller:
    """What a producer does, wherever it runs: one record after another."""

    def __init__(
        self, ring: SlotRing[Any], producer: Producer, seed: int, number: int, board: Board | None
    ) -> None:
        self.ring, self.producer, self.seed, self.number = ring, producer, seed, number
        self.weights = BoardReader(board) if board else None
        self.rng = seeds.ReseedableRNG()
        self.idle_since = time.monotonic_ns()

    def fill(self, index: int, sequence: int) -> None:
        """Make record `sequence` in slot `index`."""
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


_RECOVERY_HINT = "if nobody killed it, see whether the machine ran out of memory; the same command continues"
_CHILD = "from whorl.slots.producers import _child; _child()"
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _child() -> None:
    """The life of a producer process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # theirs who started it, which then closes the socket
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):  # being woken, it does not push aside the learner that woke it
        with suppress(OSError):  # some containers forbid it; it is only slower then
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
        os._exit(0)  # the parent closed its end, or is gone
    except BaseException:
        connection.send_bytes(_DONE.pack(_FAILED) + traceback.format_exc().encode())
        raise


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent is gone, even while it is busy filling."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
