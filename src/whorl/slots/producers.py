"""Producers: what fills slots, in this process or in one of its own, by the same code.

A producer is an object with one method,

    def fill(self, slot, weights, rng) -> int

which writes into `slot.data` and returns how much of it is in use. What it writes may depend on
`slot.sequence` (the record's place in the order of all records), on the weights, and on `rng`, a generator
made anew for each record from the seed, the producer's number and the sequence number. So a record does not
depend on which came before it or on when it was asked for, and `SerialProducer` (fills when the record is
wanted) and `ProducerProcess` (fills ahead) give the same bits.

The process is started as a fresh interpreter, not forked (a fork copies the locks of torch's threads, held
by threads that the copy does not have) and not through `multiprocessing` (which would import the caller's
main script again). It gets the ring's file descriptor, one end of a socket, and the pickled producer; then
only integers travel: (slot, sequence) there, the slot number back. It runs on one thread with less priority
(nice +5), since the learner is what must not wait.

Death is loud. A producer that raises sends its traceback; one that is killed closes its socket by dying;
one that hangs runs into `timeout`. Each becomes a `ProducerError` in the parent. A producer whose parent
dies ends itself.
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from whorl.errors import ProducerError
from whorl.runs import seeds
from whorl.slots.ring import Slot, SlotRing, State

_ASK = struct.Struct("<qq")  # slot, sequence
_DONE = struct.Struct("<q")  # slot
_FAILED = -1
_NICE = 5


class Producer(Protocol):
    """Fills one slot at a time."""

    def fill(self, slot: Slot[Any], weights: Any, rng: Any) -> int:
        """Write a record into `slot.data`; returns the length in use. `rng` is a numpy Generator."""
        ...


class SerialProducer:
    """A producer in lockstep with its reader: a record is made at the moment it is received."""

    def __init__(self, ring: SlotRing[Any], producer: Producer, *, seed: int = 0, number: int = 0) -> None:
        self.ring, self.producer, self.seed, self.number = ring, producer, seed, number
        self._asked: deque[tuple[int, int]] = deque()

    def ask(self, slot: int, sequence: int) -> None:
        """Have record `sequence` written into a free slot."""
        self._asked.append((slot, sequence))

    def receive(self) -> int:
        """Number of the slot with the record asked for longest ago."""
        slot, sequence = self._asked.popleft()
        _fill(self.ring, slot, sequence, self.producer, self.seed, self.number)
        return slot

    def close(self) -> None:
        self._asked.clear()


class ProducerProcess:
    """A producer in a process of its own, filling ahead of its reader.

    Args:
        producer: must pickle, and come from a module that can be imported (not from a script).
        seed: with `number`, what its generators are derived from.
        number: which producer this is, where there are several.
        timeout: seconds that a record may take before the producer counts as hung.
    """

    def __init__(
        self,
        ring: SlotRing[Any],
        producer: Producer,
        *,
        seed: int = 0,
        number: int = 0,
        timeout: float = 300.0,
    ) -> None:
        self.number, self.timeout, self.name = number, timeout, type(producer).__name__
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(), ring.fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(_THREAD_COUNTS, "1")},
            )
        work = pickle.dumps((ring.spec, len(ring), ring.poison, ring.fd, producer, seed, number))
        self._send(pickle.dumps((sys.path, work)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, slot: int, sequence: int) -> None:
        """Have record `sequence` written into a free slot.

        Raises:
            ProducerError: the producer is dead.
        """
        self._send(_ASK.pack(slot, sequence))

    def receive(self) -> int:
        """Number of the slot with the record asked for longest ago; waits for it.

        Raises:
            ProducerError: the producer raised (its traceback is in the message), died, or hung.
        """
        try:
            if not self._connection.poll(self.timeout):
                self._process.kill()
                raise ProducerError(
                    f"producer {self.number} ({self.name}) wrote nothing for {self.timeout:g} s and was ended",
                    do="look for what it waits for, or raise its timeout",
                )
            answer = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise self._death() from None
        slot: int = _DONE.unpack_from(answer)[0]
        if slot == _FAILED:
            told = answer[_DONE.size :].decode(errors="replace")
            raise ProducerError(f"producer {self.number} ({self.name}) raised:\n{told}")
        return slot

    def close(self) -> None:
        """End the process; returns when it is gone."""
        self._connection.close()
        try:
            self._process.wait(1.0)  # its next read sees the closed socket
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            # It may have told why before it went.
            while self._connection.poll(0):
                self.receive()
            raise self._death() from None

    def _death(self) -> ProducerError:
        code = self._process.wait()
        how = (
            f"was killed by signal {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        return ProducerError(
            f"producer {self.number} ({self.name}, process {self.pid}) {how}",
            expected="it to run as long as its reader",
            do="if nobody killed it, see whether the machine ran out of memory; the same command continues",
        )


def _fill(ring: SlotRing[Any], index: int, sequence: int, producer: Producer, seed: int, number: int) -> None:
    """Make one record: the whole of what a producer does, wherever it runs."""
    slot = ring.slots[index]
    own_seed = seeds.derive(seed, "producer", number, sequence)
    slot.step(
        State.FREE,
        State.WRITING,
        producer=number,
        sequence=sequence,
        seed=own_seed,
        policy_version=0,
        length=0,
    )
    length = producer.fill(slot, None, seeds.numpy_rng(own_seed))
    slot.step(State.WRITING, State.READY, length=length)


_CHILD = "from whorl.slots.producers import _child; _child()"
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _child() -> None:
    """The life of a producer process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.nice(_NICE)
    parent = int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        path, work = pickle.loads(connection.recv_bytes())
        sys.path[:] = path
        spec, n_slots, poison, fd, producer, seed, number = pickle.loads(work)
        ring: SlotRing[Any] = SlotRing(spec, n_slots, poison=poison, fd=fd)
        while True:
            slot, sequence = _ASK.unpack(connection.recv_bytes())
            _fill(ring, slot, sequence, producer, seed, number)
            connection.send_bytes(_DONE.pack(slot))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent closed its end, or is gone
    except BaseException:
        connection.send_bytes(_DONE.pack(_FAILED) + traceback.format_exc().encode())
        raise


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, even while it is busy filling."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
