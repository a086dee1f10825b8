"""A world: ranks that a launcher started, on one machine or many, which train what the driver, rank 0, runs.

    torchrun --nproc-per-node 2 -m whorl.parallel.launch.rank run quickstart

`join` reads the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). The driver runs the command; the
other ranks wait in `serve_calls`. When a task trains, `spawn_replicas` sends them its target and arguments, so every task
that has replicas runs on a world, and each step of a recipe runs once.

Scalars travel through a socket for each pair of ranks, which is the pipe of `ProcessGroup`: a dead rank closes it and is
named, and an error arrives with its traceback. Tensors travel through torch.distributed, in a new group for each call:
closing it wakes the ranks that wait for tensors of this one. The backend is gloo, or NCCL for tensors on a GPU, which needs
two GPUs and is not tested here. At the end of a call each rank sends END, and reads up to the END of every other rank.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from whorl.errors import ConfigError
from whorl.machine.malloc import keep_freed_memory
from whorl.parallel.launch.spec import ATTEMPT
from whorl.parallel.process_group import (
    REPLICA_TIMEOUT,
    ProcessGroup,
    ReplicaError,
    World,
    _worlds,
    run_target,
)

END, QUIT, REQUEST = b"a", b"q", b"s"
SMALL = 1 << 16  # bytes: smaller tensors for one rank travel together
JOIN_TIMEOUT = 300.0  # seconds until all ranks have come


class DistributedGroup(ProcessGroup):
    """The ranks of one call. data: the group of torch.distributed for tensors."""

    shares_memory: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, pipes: list[Connection | None], data: Any) -> None:
        super().__init__(rank, size, pipes)
        self.data, self.ended = data, set[int]()  # ended: ranks whose END has been read
        self.on_request: Callable[[], object] = lambda: None

    def _receive(self, rank: int, peer: Connection) -> bytes:
        if rank in self.ended:
            raise ReplicaError(f"rank {rank} has ended training")
        return super()._receive(rank, peer)

    def _check(self, rank: int, message: bytes) -> bytes:
        if message == REQUEST:
            self.on_request()
            pipe = self.pipes[rank]
            assert pipe is not None
            return self._receive(rank, pipe)
        if message == END:
            self.ended.add(rank)
            raise ReplicaError(f"rank {rank} has ended training")
        return super()._check(rank, message)

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to each rank while those of the other ranks arrive in place; all are contiguous.

        Raises:
            ReplicaError: a rank died, failed or did not answer.
        """
        operations, bundles = [], []
        for peer, tensors in receives.items():
            flat = [t.view(-1).view(torch.uint8) for t in tensors]
            small = [t for t in flat if len(t) < SMALL]
            if small:
                bundle = torch.empty(sum(map(len, small)), dtype=torch.uint8, device=small[0].device)
                bundles.append((small, bundle))
                operations.append(dist.P2POp(dist.irecv, bundle, peer, self.data))
            operations += [dist.P2POp(dist.irecv, t, peer, self.data) for t in flat if len(t) >= SMALL]
        for peer, tensors in sends.items():
            flat = [t.view(-1).view(torch.uint8) for t in tensors]
            if small := [t for t in flat if len(t) < SMALL]:
                operations.append(dist.P2POp(dist.isend, torch.cat(small), peer, self.data))
            operations += [dist.P2POp(dist.isend, t, peer, self.data) for t in flat if len(t) >= SMALL]
        peer = self.rank
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
            for n, work in enumerate(works):
                peer = operations[min(n, len(operations) - 1)].peer
                work.wait()
        except RuntimeError as error:
            raise self._lost(peer) from error
        for small, bundle in bundles:
            torch._foreach_copy_(small, list(torch.split(bundle, [len(t) for t in small])))

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order; values are pickled, and a request is read meanwhile."""
        own = pickle.dumps(value)
        return [pickle.loads(self.broadcast_bytes(rank, own)) for rank in range(self.size)]

    def lost_peer(self, error: Exception) -> ReplicaError | None:
        return self._peer_error() if isinstance(error, RuntimeError) else None

    def _lost(self, rank: int) -> ReplicaError:
        """Return the error of a rank whose tensors did not arrive."""
        return self._peer_error() or ReplicaError(
            f"training replica {rank} sends no tensors: it is frozen, or its connection is lost",
            do="run the same command again: it resumes from the last checkpoint",
        )

    def _peer_error(self) -> ReplicaError | None:
        """Return the error of a peer that died, failed or ended within two seconds."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for other, pipe in enumerate(self.pipes):
                try:
                    while pipe is not None and other not in self.ended and pipe.poll(0.05):
                        self._check(other, pipe.recv_bytes())
                except ReplicaError as error:
                    return error
                except (EOFError, OSError):
                    return self._dead_replica_error(other)
        return None

    def request(self) -> None:
        """Let the other ranks call `on_request` at their next barrier, before any of them changes a weight."""
        if not self.rank:
            self._send(REQUEST)

    def _send(self, message: bytes) -> None:
        for pipe in self.pipes:
            if pipe is not None:
                with suppress(OSError):
                    pipe.send_bytes(message)

    def close(self) -> None:
        """End this rank's part of the call, and wait for the end of the other parts."""
        dist.destroy_process_group(self.data)
        self.data = None
        self._send(END)
        for rank, pipe in enumerate(self.pipes):
            with suppress(EOFError, OSError):
                while pipe is not None and rank not in self.ended and pipe.poll(REPLICA_TIMEOUT):
                    if pipe.recv_bytes() == END:
                        self.ended.add(rank)


class Rank:
    """This process as one rank of a world, connected to all others."""

    def __init__(self, rank: int, size: int, pipes: list[Connection | None]) -> None:
        self.rank, self.size, self.pipes = rank, size, pipes

    def call(self, size: int, target: Callable[..., None], *args: Any) -> DistributedGroup:
        """Start target(group, *args) on the ranks 1 to size - 1; return the group of rank 0."""
        if size > self.size:
            raise ConfigError(
                f"{size} replicas are requested, and {self.size} ranks run",
                do="launch more ranks, or set fewer replicas",
            )
        buffer, tensors = io.BytesIO(), list[Tensor]()
        _Pickler(buffer, tensors).dump((target, args))
        described = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
        message = pickle.dumps((size, described, buffer.getvalue()))
        for rank, pipe in enumerate(self.pipes):
            if pipe is not None:
                try:
                    pipe.send_bytes(message)
                except OSError as error:
                    raise self._group(None)._dead_replica_error(rank) from error
        group = self._open(size)
        try:
            for t in tensors:
                dist.broadcast(t.contiguous().view(-1).view(torch.uint8), 0, group.data)
        except RuntimeError as error:
            raise group._lost(self.rank) from error
        return group

    def serve_calls(self) -> None:
        """Run the calls of rank 0 until it leaves the world.

        Raises:
            ReplicaError: rank 0 died.
        """
        driver = self.pipes[0]
        assert driver is not None
        while True:
            try:
                message = driver.recv_bytes()
            except (EOFError, OSError) as error:
                raise ReplicaError("rank 0, the driver, has died", do="read its log") from error
            if message == QUIT:
                return
            size, described, payload = pickle.loads(message)
            group = self._open(size)
            if self.rank >= size:
                continue
            run_target(group, _receive_and_run, (described, payload))
            group.close()

    def _open(self, size: int) -> DistributedGroup:
        """Every rank calls this, members or not: torch numbers the groups."""
        try:
            data = dist.new_group(range(size), timeout=timedelta(seconds=REPLICA_TIMEOUT))
        except RuntimeError as error:
            raise self._group(None)._lost(self.rank) from error
        return self._group(data, size)

    def _group(self, data: Any, size: int | None = None) -> DistributedGroup:
        size = self.size if size is None else size
        return DistributedGroup(self.rank, size, self.pipes[:size], data)


def _receive_and_run(group: DistributedGroup, described: list[Any], payload: bytes) -> None:
    """Receive the tensors of a call, then run it."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    tensors = []
    for shape, dtype, device in described:
        t = torch.empty(shape, dtype=dtype, device=f"cuda:{local}" if device == "cuda" else device)
        dist.broadcast(t.view(-1).view(torch.uint8), 0, group.data)
        tensors.append(t)
    reader = pickle.Unpickler(io.BytesIO(payload))
    reader.persistent_load = lambda number: tensors[number]  # type: ignore[method-assign]
    target, args = reader.load()
    target(group, *args)


class _Pickler(pickle.Pickler):
    """Leaves large tensors out, each once: they are broadcast."""

    def __init__(self, buffer: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(buffer)
        self.tensors, self.numbers = tensors, dict[int, int]()

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.requires_grad or obj.layout != torch.strided or obj.dim() == 0:
            return None
        if not obj.numel():
            return None
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)  # which keeps its id
        return self.numbers[id(obj)]


def join(identity: Mapping[str, Any] | None = None) -> Rank:
    """Return this process's rank in the world of its environment, connected to all other ranks.

    Args:
        identity: JSON that must be equal on all ranks, such as version and command.

    Raises:
        ReplicaError: some ranks did not come. ConfigError: one has another identity.
    """
    if ready := dist.is_initialized():  # `ranks.run_ranks`
        store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    else:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ConfigError(f"{name} is not set", do="start the ranks with `whorl launch` or torchrun")
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_TIMEOUT)))
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        attempt = os.environ.get(ATTEMPT, count)  # else a restart meets ranks that have died
        store = PrefixStore(f"whorl-{attempt}", store)
    if rank == 0:
        store.set("key", secrets.token_hex(16))
    key = store.get("key")
    with Listener((_own_host(), 0), "AF_INET", backlog=size, authkey=key) as listener:
        store.set(f"rank-{rank}", json.dumps([dict(identity or {}), *listener.address]))
        addresses = _addresses(store, size)
        if not ready:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            limit = timedelta(seconds=REPLICA_TIMEOUT)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        pipes: list[Connection | None] = [None] * size
        for other in range(rank):
            pipes[other] = pipe = Client(addresses[other], "AF_INET", authkey=key)
            pipe.send(rank)
        for _ in range(rank + 1, size):
            pipe = listener.accept()
            pipes[pipe.recv()] = pipe
    for each in pipes:
        if each is not None:
            with socket.socket(fileno=os.dup(each.fileno())) as sock:
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
                )  # a machine that is gone closes it, too
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Rank(rank, size, pipes)


def _own_host() -> str:
    """Return the address of this machine in the network of the first rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])


def _addresses(store: Any, size: int) -> list[tuple[str, int]]:
    """Return host and port of every rank, and compare their identities."""
    names = [f"rank-{rank}" for rank in range(size)]
    try:
        store.wait(names, timedelta(seconds=JOIN_TIMEOUT))
    except RuntimeError as error:
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise ReplicaError(f"the ranks {missing} of {size} did not come in {JOIN_TIMEOUT:.0f} s") from error
    found = [json.loads(store.get(name)) for name in names]
    first = found[0][0]
    for rank, (identity, *_) in enumerate(found):
        if differing := {
            k: identity.get(k) for k in {**first, **identity} if identity.get(k) != first.get(k)
        }:
            raise ConfigError(
                f"rank {rank} differs from rank 0: {differing}", expected=f"{ {k: first.get(k) for k in differing} }",
                do="start all ranks with the same version and the same command",
            )  # fmt: skip
    return [(str(host), int(port)) for _, host, port in found]


def drive(function: Callable[..., Any], *args: Any, identity: Mapping[str, Any] | None = None) -> Any:
    """Return function(*args) on rank 0; the other ranks serve its calls meanwhile, and return None.

    The default process group of torch.distributed is made from the environment, unless there is one.
    """
    try:
        rank = join(identity)
    except (EOFError, OSError, RuntimeError) as error:
        raise ReplicaError(
            f"this rank could not connect to all others: {error}", do="read their logs"
        ) from error
    keep_freed_memory()
    if rank.rank:
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to all ranks; rank 0 handles them
            signal.signal(number, signal.SIG_IGN)
        rank.serve_calls()
        return None
    _worlds.append(World(rank.size, rank.call))
    try:
        return function(*args)
    finally:
        _worlds.clear()
        for pipe in rank.pipes:
            if pipe is not None:
                with suppress(OSError):
                    pipe.send_bytes(QUIT)
