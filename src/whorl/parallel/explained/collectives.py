"""Collectives of n ranks, made of point-to-point sends alone.

    group = Communicator("a name that was not used before", {0, 2, 3})    # each of these ranks calls it
    group.all_reduce(tensor)                                              # in place

The ring all-reduce sends the fewest bytes possible (Patarasuk and Yuan 2009): 2 (n - 1) rounds of S / n bytes. The tree has
2 ceil(log2 n) rounds of S bytes, so it is faster for small tensors. docs/parallel.md has the bytes of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whorl.errors import ConfigError

PIECE = 1 << 18  # elements of one send of a ring: a piece is added while the next one arrives
TIMEOUT, WIDTH = timedelta(minutes=10), 96  # of a send; bytes of the description of a call


class Communicator:
    """The ranks of one group, with separate connections, and on CUDA a separate stream: groups work at the same time.

    Args:
        unique_id: equal on all ranks of the group, and used once. (torch numbers groups, so all ranks must create the same
            ones in the same order. An id does not depend on other groups.)
        ranks: of the default process group. In the group they are numbered 0 .. n-1 in ascending order.
        device: of the tensors, "cpu" (gloo) or this rank's "cuda:i" (NCCL).

    Raises:
        ConfigError: a rank is outside of the group, or the id was used. Any method: ranks call different operations.
    """

    def __init__(self, unique_id: str, ranks: Collection[int], device: str = "cpu") -> None:
        me, world, self.ranks = dist.get_rank(), dist.get_world_size(), sorted(set(ranks))
        if me not in self.ranks or self.ranks[0] < 0 or self.ranks[-1] >= world:
            raise ConfigError(
                f"rank {me} makes group {unique_id!r} of the ranks {self.ranks}",
                expected=f"ranks of 0 to {world - 1}, {me} among them",
            )
        self.rank, self.size, self.device = self.ranks.index(me), len(self.ranks), torch.device(device)
        store = dist.distributed_c10d.PrefixStore(unique_id, dist.distributed_c10d._get_default_store())
        if store.add(f"joined by {me}", 1) > 1:
            raise ConfigError(f"group {unique_id!r} exists", do="use an id once")
        cuda = self.device.type == "cuda"
        backend: Any = getattr(dist, "ProcessGroupNCCL" if cuda else "ProcessGroupGloo")
        self.group = backend(store, self.rank, self.size, TIMEOUT)
        self.stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        self.rounds = [1 << k for k in range((self.size - 1).bit_length())]  # of a tree: 1, 2, 4 ..

    def send(self, tensor: Tensor, to: int) -> Any:
        """Start to send to a rank (modulo n); the returned work's `wait` ends it."""
        return self.group.send([tensor], to % self.size, 0)

    def receive(self, tensor: Tensor, source: int) -> Any:
        return self.group.recv([tensor], source % self.size, 0)

    def _exchange(self, out: dict[int, Tensor], into: dict[int, Tensor]) -> None:
        """Send out[r] to rank r and receive into[r] from rank r, all at once."""
        if self.rank in out and self.rank in into:
            into.pop(self.rank).copy_(out.pop(self.rank))
        works = [self.receive(tensor, r) for r, tensor in into.items()]
        for work in works + [self.send(tensor, r) for r, tensor in out.items()]:
            work.wait()

    @contextmanager
    def _call(
        self, name: str, tensor: Tensor | None = None, root: int = 0, rows: bool = False
    ) -> Iterator[None]:
        """Compare this call with those of the other ranks, then run the body on the group's stream.

        The comparison is a barrier (Bruck et al. 1997): in each round a rank sends all that it has to rank - step.
        """
        text, valid = name, 0 <= root < self.size
        if tensor is not None:
            text += f" {list(tensor.shape)} {tensor.dtype} root {root}"
            valid = valid and tensor.is_contiguous() and not (rows and tensor.shape[:1] != (self.size,))
        text = text if valid else f"invalid {text}"
        known = torch.zeros(self.size, WIDTH, dtype=torch.uint8)
        known[0] = torch.tensor(list(text.encode()[:WIDTH].ljust(WIDTH)))
        known = known.to(self.device)
        for step in self.rounds:
            others = known[step : step + min(step, self.size - step)]
            self._exchange({self.rank - step: known[: len(others)]}, {self.rank + step: others})
        calls = [bytes(row).decode(errors="replace").strip() for row in known.roll(self.rank, 0).tolist()]
        if len(set(calls)) > 1 or not valid:
            raise ConfigError(
                "; ".join(f"rank {rank}: {call}" for rank, call in zip(self.ranks, calls, strict=True)),
                expected=f"the same on all, contiguous, with {self.size} rows where each rank gets one",
            )
        if self.stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        with self._call("barrier"):
            pass

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy the root's tensor to all ranks, in place."""
        with self._call("broadcast", tensor, root):
            self._broadcast(tensor, root)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        me = (self.rank - root) % self.size
        for step in self.rounds:  # the `step` ranks that have it send it to as many others
            if me < step and me + step < self.size:
                self._exchange({self.rank + step: tensor}, {})
            elif step <= me < 2 * step:
                self._exchange({}, {self.rank - step: tensor})

    def scatter(self, output: Tensor, rows: Tensor | None = None, root: int = 0) -> None:
        """Write row r of the root's `rows` [n, *output.shape] into rank r's `output`."""
        shape = list(rows.shape) if rows is not None and self.rank == root else None
        fits = self.rank != root or shape == [self.size, *output.shape]
        with self._call("scatter" if fits else f"scatter {shape} into", output, root):
            self._exchange({} if rows is None or shape is None else dict(enumerate(rows)), {root: output})

    def gather(self, tensor: Tensor, root: int = 0) -> Tensor | None:
        """Return the tensors of all ranks [n, *shape] on the root, None elsewhere."""
        with self._call("gather", tensor, root):
            rows = tensor.new_empty(self.size, *tensor.shape) if self.rank == root else None
            self._exchange({root: tensor}, {} if rows is None else dict(enumerate(rows)))
            return rows

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row r of [n, ...] to rank r; return the rows that came, in rank order."""
        with self._call("all_to_all", rows, rows=True):
            result = torch.empty_like(rows)
            self._exchange(dict(enumerate(rows)), dict(enumerate(result)))
            return result

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Return this rank's row of the sum over ranks of [n, ...]."""
        with self._call("reduce_scatter", rows, rows=True):
            summed = rows.clone()
            self._ring(list(summed.view(self.size, -1)), self.rank - 1, add=True)
            return summed[self.rank]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [n, *shape]."""
        with self._call("all_gather", tensor):
            rows = tensor.new_empty(self.size, *tensor.shape)
            rows[self.rank] = tensor
            self._ring(list(rows.view(self.size, -1)), self.rank, add=False)
            return rows

    def all_reduce(self, tensor: Tensor, tree: bool = False) -> None:
        """Replace the tensor by its sum over ranks: by a ring, or by a tree."""
        with self._call("all_reduce by tree" if tree else "all_reduce", tensor):
            if not tree:
                chunks = list(tensor.view(-1).tensor_split(self.size))
                self._ring(chunks, self.rank - 1, add=True)
                return self._ring(chunks, self.rank, add=False)
            other = torch.empty_like(tensor)
            for step in reversed(self.rounds):  # a broadcast backwards, and then a broadcast
                if step <= self.rank < 2 * step:
                    self._exchange({self.rank - step: tensor}, {})
                elif self.rank < step and self.rank + step < self.size:
                    self._exchange({}, {self.rank + step: other})
                    tensor += other
            return self._broadcast(tensor, 0)

    def _ring(self, chunks: Sequence[Tensor], first: int, add: bool) -> None:
        """In n - 1 rounds send a chunk to the right and receive one from the left, which is sent in the next round.

        The first one is sent from number `first`. A chunk that arrives is added to the rank's own one, or replaces it.
        """
        scratch, sends = chunks[0].new_empty(2, min(PIECE, len(chunks[0]))), []
        for step in range(self.size - 1):
            out, into = (torch.split(chunks[(first - step - k) % self.size], PIECE) for k in (0, 1))
            sends += [self.send(piece, self.rank + 1) for piece in out]
            buffers = [scratch[k % 2][: len(piece)] if add else piece for k, piece in enumerate(into)]
            arriving = [self.receive(buffers[0], self.rank - 1)]
            for k, (piece, buffer) in enumerate(zip(into, buffers, strict=True)):
                if k + 1 < len(into):
                    arriving.append(self.receive(buffers[k + 1], self.rank - 1))
                arriving[k].wait()
                if add:
                    piece += buffer
        for work in sends:
            work.wait()


def shift_over_gpus(tensors: Sequence[Tensor], by: int = 7) -> list[Tensor]:
    """Copy tensor i, on GPU i of n, to GPU (i + by) mod n by peer copies, without host memory, at once on a stream each."""
    copies, streams = [], []
    for i, tensor in enumerate(tensors):
        target = (i + by) % len(tensors)
        if tensor.device != torch.device("cuda", i) or not (
            i == target or torch.cuda.can_device_access_peer(i, target)
        ):
            raise ConfigError(
                f"tensor {i} on {tensor.device}", expected=f"on cuda:{i}, with peer access to cuda:{target}"
            )
        streams.append(torch.cuda.Stream(i))  # type: ignore[no-untyped-call]
        streams[-1].wait_stream(torch.cuda.current_stream(i))
        with torch.cuda.stream(streams[-1]):
            copies.append(torch.empty_like(tensor, device=f"cuda:{target}").copy_(tensor, non_blocking=True))
    for stream in streams:
        stream.synchronize()
    return copies
