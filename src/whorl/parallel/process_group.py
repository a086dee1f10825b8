"""Replicas on one machine that train one set of weights, one process per core.

A small model's step is hundreds of short operations. Threads inside each operation would synchronize hundreds of times
per step (two threads: 1.3 times faster). Replicas with a share of the *batch* each synchronize three times.

Weights, gradients and optimizer state are in shared memory, so no tensor is sent. After the backward each replica sums
its share of the gradients over all replicas in rank order and updates those parameters in place (ZeRO stage 1,
Rajbhandari et al. 2020, arXiv:1910.02054). `all_gather_scalars` is the barrier: every replica sends a few numbers and
receives all of them, through pipes. A pipe orders memory on every CPU, and a dead peer closes it, so a replica never
waits for a dead one.
"""

from __future__ import annotations

import signal
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
import torch.multiprocessing  # registers how shared tensors are pickled

from whorl.errors import LOST, WhorlError
from whorl.machine.device_probe import usable_cores
from whorl.machine.malloc import keep_freed_memory
from whorl.machine.process import Channel, Child, describe_exit, wait_for

SHUTDOWN_TIMEOUT = 15.0  # a replica notices the end at its next barrier
REPLICA_TIMEOUT = 600.0  # a first step includes compilation; no live replica takes longer


def cores_for_replicas(deterministic: bool) -> int:
    """Return the ranks of a launcher, else how many replicas get a core.

    Those are torch's threads, which are measured, or without measurement all usable cores.
    """
    return launched_ranks() or max(1, usable_cores() if deterministic else torch.get_num_threads())


def threads_per_replica(replicas: int) -> int:
    """Return torch's threads for each of the replicas: a rank of a world has its own."""
    return max(1, torch.get_num_threads() // (1 if world_size() > 1 else replicas))


class ReplicaError(WhorlError):
    """Another replica raised, died or hung.

    killed: SIGKILL ended it, as the kernel does when memory is full.
    """

    killed = False
    exit_code = LOST


def _failed(rank: int, message: bytes) -> ReplicaError:
    """Return the error of a replica that has raised, with its exit code."""
    error = ReplicaError(f"training replica {rank} failed:\n{message[2:].decode()}")
    error.exit_code = message[1]
    return error


@dataclass
class ProcessGroup:
    """This process's rank in a group of `size`. `pipes[r]` connects to rank r (None for itself)."""

    rank: int = 0
    size: int = 1
    pipes: list[Connection | None] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    shares_memory: ClassVar[bool] = True  # whether a tensor of one rank is that of all

    def all_gather_scalars(self, *values: float) -> list[tuple[float, ...]]:
        """Send `values`, wait for all ranks, and return each rank's values in rank order.

        A barrier: earlier writes to shared memory are visible to all ranks afterwards.

        Raises:
            ReplicaError: a peer died or did not respond for REPLICA_TIMEOUT seconds.
        """
        self._send_to_all(b"v" + struct.pack(f"{len(values)}d", *values))
        answers = []
        for rank in range(self.size):
            peer = self.pipes[rank] if self.pipes else None
            if peer is None:
                answers.append(values)
            else:
                message = self._receive(rank, peer)
                answers.append(struct.unpack(f"{(len(message) - 1) // 8}d", message[1:]))
        return answers

    def broadcast_bytes(self, source: int, content: bytes = b"") -> bytes:
        """Return the bytes of rank `source`; all ranks call this. Raises ReplicaError, as `all_gather_scalars`."""
        peer = self.pipes[source] if self.pipes else None
        if peer is not None:
            return self._receive(source, peer)[1:]
        self._send_to_all(b"d" + content)
        return content

    def _send_to_all(self, message: bytes) -> None:
        for rank, peer in enumerate(self.pipes):
            if peer is not None:
                try:
                    peer.send_bytes(message)
                except OSError as error:
                    self._raise_reported_error(rank, peer)
                    raise self._dead_replica_error(rank) from error

    def _receive(self, rank: int, peer: Connection) -> bytes:
        try:
            children = self.children[rank - 1 : rank] if rank else []
            if not wait_for([peer], REPLICA_TIMEOUT, children):
                stopped = "; a signal has stopped it" if any(c.is_stopped() for c in children) else ""
                raise ReplicaError(
                    f"training replica {rank} did not respond for {REPLICA_TIMEOUT:.0f} s{stopped}",
                    do="run the same command again: it resumes from the last checkpoint",
                )
            message = peer.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._dead_replica_error(rank) from error
        return self._check(rank, message)

    def _check(self, rank: int, message: bytes) -> bytes:
        if message[:1] == b"e":
            raise _failed(rank, message)
        return message

    def _raise_reported_error(self, rank: int, peer: Connection) -> None:
        """Raise the error that a dead peer sent before its exit, if any."""
        with suppress(OSError, EOFError):
            while peer.poll(0):
                if (message := peer.recv_bytes())[:1] == b"e":
                    raise _failed(rank, message)

    def _dead_replica_error(self, rank: int) -> ReplicaError:
        """Return an error for a dead peer, with its exit code if this process started it."""
        code = self.children[rank - 1].wait(2) if self.children else None
        how = "killed, as the kernel does when memory is full" if code is None else describe_exit(code)
        dead = ReplicaError(
            f"training replica {rank} died without an error message ({how})",
            do="run the same command again: it resumes from the last checkpoint",
        )
        dead.killed = code == -signal.SIGKILL
        return dead

    def lost_peer(self, error: Exception) -> ReplicaError | None:
        """Return the error of a rank of a world that died, if one of torch's collectives failed here for it."""
        return None

    def request(self) -> None:
        """Let the other ranks of a world save what they hold of the last finished step (`distributed.py`)."""

    def all_reduce_scalars(self, *values: float) -> tuple[float, ...]:
        """The sum over ranks of each value, added in rank order."""
        return tuple(sum(column) for column in zip(*self.all_gather_scalars(*values), strict=True))

    def close(self) -> None:
        """End the remaining replicas that this process started."""
        for link in self.pipes:
            if link is not None:
                link.close()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        for child in self.children:
            child.close(max(0.0, deadline - time.monotonic()))


@dataclass
class World:
    """The ranks that a launcher started (`distributed.py`). call: starts target(group, *args) on the first `size` ranks."""

    size: int
    call: Callable[..., ProcessGroup]


_worlds: list[World] = []  # at most one
_local_ranks = 0


def world_size() -> int:
    """Return the number of ranks that a launcher started; 1 without a launcher."""
    return _worlds[0].size if _worlds else 1


def launched_ranks() -> int:
    """Return the number of ranks for everything that trains: of the world, or of `use_local_ranks`; 0 if nothing set it."""
    return _worlds[0].size if _worlds else _local_ranks


def use_local_ranks(size: int) -> None:
    """Train on `size` ranks of this machine, which share its memory, from now on; 0: as many as pay."""
    global _local_ranks
    _local_ranks = size


def spawn_replicas(size: int, target: Callable[..., None], *args: Any) -> ProcessGroup:
    """Start ranks 1 .. size-1, each calling target(process_group, *args); return the caller's group (rank 0).

    Arguments are pickled. Tensors among them are moved to shared memory and not copied. In a world the ranks run already,
    and tensors are sent to them.
    """
    keep_freed_memory()  # also in a single replica: each step allocates again
    if size == 1:
        return ProcessGroup()
    if _worlds:
        return _worlds[0].call(size, target, *args)
    links: list[list[Connection | None]] = [[None] * size for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high], links[high][low] = Pipe()
    module = target.__module__
    children = []
    for rank in range(1, size):
        # A scheduler may signal all processes of a job. Rank 0 handles it; the others end when their pipes close.
        child = Child(
            "whorl.parallel.process_group:run_replica", rank, size, links[rank], target, args,
            name=f"replica {rank}", preload=(__name__, *([module] if module.startswith("whorl.") else [])),
            ignore=(signal.SIGINT, signal.SIGTERM), share_tensors=True,
        )  # fmt: skip
        children.append(child)
    for rank in range(1, size):  # only the child keeps its ends open: its death closes them
        for link in links[rank]:
            if link is not None:
                link.close()
    return ProcessGroup(0, size, links[0], children)


def run_replica(
    _: Channel,
    rank: int,
    size: int,
    pipes: list[Connection | None],
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Main function of a rank other than 0."""
    torch.set_num_threads(1)
    keep_freed_memory()
    run_target(ProcessGroup(rank, size, pipes), target, args)


def run_target(group: ProcessGroup, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call target(group, *args); an error is sent to the peers."""
    try:
        target(group, *args)
    except ReplicaError:
        pass  # another replica's failure, reported there
    except Exception as error:
        if group.lost_peer(error) is not None:
            return
        message = b"e" + bytes([getattr(error, "exit_code", 1)]) + traceback.format_exc().encode()
        for link in group.pipes:
            if link is not None:
                with suppress(OSError):  # that peer has exited
                    link.send_bytes(message)
