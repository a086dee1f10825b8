"""Replicas on one machine that train one set of weights, each on its own core.

Why processes rather than threads inside the products. A small model's step is hundreds of short operations; split
each over the cores and they wait for one another hundreds of times a step (two threads were seen to make such a
step 1.3 times as fast as one). Give each core its own share of the *batch* and they meet three times a step.

Weights, gradients and optimiser state lie in shared memory: nothing is sent. After the backward each replica sums,
over all replicas in rank order, the gradients of its share of the parameters, and updates that share in place
(the partition of ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, stage 1). The meeting point is `exchange`: every
replica gives a few numbers and gets everybody's. It goes through pipes: a write and a read in the kernel order memory on
every kind of CPU, and a pipe whose other end died reads as such at once, so a replica never waits for a dead one.
"""

from __future__ import annotations

import signal
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing

from whorl.errors import WhorlError
from whorl.machine.device_probe import keep_freed_memory

SHUTDOWN_TIMEOUT = 15.0  # a replica that samples hears of the end at its next meeting
REPLICA_TIMEOUT = 600.0  # a first step compiles; nothing that is alive takes longer


class ReplicaError(WhorlError):
    """Another replica raised, died or hung. killed: the system ended it (SIGKILL), as it does when memory is full."""

    killed = False


@dataclass
class ProcessGroup:
    """This process among its peers: `rank` of `size`; `links[r]` leads to rank r (None for itself)."""

    rank: int = 0
    size: int = 1
    pipes: list[Connection | None] = field(default_factory=list)
    children: list[BaseProcess] = field(default_factory=list)

    def all_gather_scalars(self, *values: float) -> list[tuple[float, ...]]:
        """Gives `values`, waits for everybody, returns what each rank gave, in rank order.

        Whatever a rank wrote into shared memory before is visible to all after.

        Raises:
            ReplicaError: a peer died or gave no sign for PATIENCE_SECONDS.
        """
        message = b"v" + struct.pack(f"{len(values)}d", *values)
        for rank, peer in enumerate(self.pipes):
            if peer is not None:
                try:
                    peer.send_bytes(message)
                except OSError as error:
                    self._raise_reported_error(rank, peer)
                    raise self._dead_replica_error(rank) from error
        answers = []
        for rank in range(self.size):
            peer = self.pipes[rank] if self.pipes else None
            answers.append(values if peer is None else self._receive(rank, peer))
        return answers

    def _receive(self, rank: int, peer: Connection) -> tuple[float, ...]:
        try:
            if not peer.poll(REPLICA_TIMEOUT):
                raise ReplicaError(
                    f"training replica {rank} gave no sign for {REPLICA_TIMEOUT:.0f} s",
                    do="run the same command again: it continues from the last checkpoint",
                )
            message = peer.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._dead_replica_error(rank) from error
        if message[:1] == b"e":
            raise ReplicaError(f"training replica {rank} failed:\n{message[1:].decode()}")
        return struct.unpack(f"{(len(message) - 1) // 8}d", message[1:])

    def _raise_reported_error(self, rank: int, peer: Connection) -> None:
        """A peer that is gone may have said why before it went."""
        with suppress(OSError, EOFError):
            while peer.poll(0):
                if (message := peer.recv_bytes())[:1] == b"e":
                    raise ReplicaError(f"training replica {rank} failed:\n{message[1:].decode()}")

    def _dead_replica_error(self, rank: int) -> ReplicaError:
        """What is known of how a peer ended: of one that this process started, the exit code."""
        code = None
        if self.children:
            self.children[rank - 1].join(timeout=2)
            code = self.children[rank - 1].exitcode
        how = "killed, or out of memory"
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        dead = ReplicaError(
            f"training replica {rank} died without a word ({how})",
            do="run the same command again: it continues from the last checkpoint",
        )
        dead.killed = code == -signal.SIGKILL
        return dead

    def all_reduce_scalars(self, *values: float) -> tuple[float, ...]:
        """The sum of what each rank gave, value by value, added in rank order."""
        return tuple(sum(column) for column in zip(*self.all_gather_scalars(*values), strict=True))

    def close(self) -> None:
        """Ends what is left of the peers that this process started."""
        for link in self.pipes:
            if link is not None:
                link.close()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        for child in self.children:
            child.join(timeout=max(0.0, deadline - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()


def spawn_replicas(size: int, target: Callable[..., None], *args: Any) -> ProcessGroup:
    """Starts ranks 1 .. size-1, each calling work(world, *arguments), and returns the caller's world (rank 0).

    Arguments cross by pickle; tensors among them must lie in shared memory (`share_memory_`) and are not copied.
    """
    keep_freed_memory()
    context = torch.multiprocessing.get_context("spawn")
    links: list[list[Connection | None]] = [[None] * size for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high], links[high][low] = context.Pipe()
    children: list[BaseProcess] = []
    for rank in range(1, size):
        child = context.Process(
            target=_replica_main, args=(rank, size, links[rank], target, args), daemon=True
        )
        child.start()
        children.append(child)
    for rank in range(1, size):  # only the child holds its ends now: its death closes them
        for link in links[rank]:
            if link is not None:
                link.close()
    return ProcessGroup(0, size, links[0], children)


def _replica_main(
    rank: int,
    size: int,
    pipes: list[Connection | None],
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    # A scheduler may send it to all processes of a job. Rank 0 hears it; the rest end when its links close.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = ProcessGroup(rank, size, pipes)
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        target(world, *args)
    except (ReplicaError, KeyboardInterrupt):
        pass  # somebody else's failure, reported where it happened
    except Exception:
        message = b"e" + traceback.format_exc().encode()
        for link in pipes:
            if link is not None:
                try:
                    link.send_bytes(message)
                except OSError:
                    continue  # that peer is gone already
