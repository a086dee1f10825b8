"""Where an update reads its peers: gradients of its parameters before a step, and weights after it.

    share      a barrier: numbers of every rank, and which parameters have a gradient anywhere
    reduce     gradients [replicas, ...] of the parameters that this rank owns, to be summed in rank order
    update     the lookups of a table by all ranks, and whose rows this rank updates
    gather     a barrier: all ranks have the new weights

Each dense parameter has one owner, which sums its gradient, keeps its moments and updates it whole (ZeRO stage 1; Muon needs
whole matrices). So the norm, summed over owners, counts each parameter once. In shared memory nothing is sent. Over
torch.distributed a rank sends each gradient to its owner alone, all-to-all, and owners send new weights: (N - 1) / N of the
parameters each way, as an all-reduce. Sums run over the same parts in the same order, so both stores give the same bits.

Of a lookup table every rank receives all rows that were looked up, and applies all of them. That sends less than gradients
to an owner and new rows back: a batch looks up few rows twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

from torch import Tensor

from whorl.parallel.distributed import DistributedGroup
from whorl.parallel.process_group import ProcessGroup

Lookups = tuple[int, list[Tensor], list[Tensor]]
BITS = 48  # flags in one number


class State(Protocol):
    """The tensors of a learner by parameter name: `train/learner/learner.py`."""

    @property
    def weights(self) -> dict[str, Tensor]: ...
    @property
    def state(self) -> dict[str, Tensor]: ...
    @property
    def gradients(self) -> dict[str, Tensor]: ...
    @property
    def row_ids(self) -> dict[str, Tensor]: ...
    @property
    def row_gradients(self) -> dict[str, Tensor]: ...
    @property
    def has_gradient(self) -> Tensor: ...


class ParameterStore(ABC):
    """The peers of one update on one rank.

    Args:
        owners: owner of each dense parameter of the update.
        tables: names of its lookup tables.

    own: this rank's gradient of each dense parameter. own_rows: ids [capacity] and gradients [capacity, d] of each table.
    owned, targets, moments: names of the parameters that this rank updates; what it updates, by name; their state.
    counted: those of which this rank adds the gradient to the norm. writers: the rank that saves a parameter of the state.
    """

    own: dict[str, Tensor]
    own_rows: dict[str, tuple[Tensor, Tensor]]

    def __init__(
        self, group: ProcessGroup, state: State, owners: Mapping[str, int], tables: Sequence[str]
    ) -> None:
        self.group, self.state, self.owners, self.tables = group, state, owners, tables
        self.owned = [name for name, owner in owners.items() if owner == group.rank]
        self.counted, self.targets, self.moments = set(self.owned), state.weights, state.state
        self.writers = owners

    def drop_foreign(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Remove the moments, by "parameter/moment", that other ranks keep."""

    def export(self, state: State) -> None:  # noqa: B027
        """Write whole weights and moments into `state`, where this rank has parts. All ranks call this."""

    def load(self, state: State) -> None:  # noqa: B027
        """Take this rank's parts of `state`. All ranks call this."""

    @abstractmethod
    def share(self, values: Sequence[float], seen: set[str]) -> list[tuple[float, ...]]:
        """Return the values of every rank. seen: the parameters with a gradient here; afterwards `seen_anywhere` holds."""

    @abstractmethod
    def seen_anywhere(self) -> set[str]:
        """Return the parameters with a gradient on any rank."""

    @abstractmethod
    def reduce(self) -> dict[str, Tensor]:
        """Return the gradients [replicas, ...] of the owned parameters."""

    @abstractmethod
    def update(self, name: str, counts: Sequence[int]) -> Iterator[Lookups]:
        """Yield (rank, ids, gradients) for each rank whose rows of a table this one updates; lists of all ranks' lookups.

        counts: lookups of each rank. Rows r belong to rank r mod replicas.
        """

    @abstractmethod
    def gather(self) -> None:
        """Return when this rank has the new weights of all."""


class SharedMemoryStore(ParameterStore):
    """Replicas on one machine: gradients are in memory that all of them read."""

    def __init__(
        self, group: ProcessGroup, state: State, owners: Mapping[str, int], tables: Sequence[str]
    ) -> None:
        super().__init__(group, state, owners, tables)
        self.own = {name: state.gradients[name][group.rank] for name in owners}
        self.own_rows = {
            n: (state.row_ids[n][group.rank], state.row_gradients[n][group.rank]) for n in tables
        }
        self.parts = {name: state.gradients[name] for name in self.owned}
        self.columns = {name: n for n, name in enumerate(state.gradients) if name in owners}

    def share(self, values: Sequence[float], seen: set[str]) -> list[tuple[float, ...]]:
        self.seen = seen
        if self.group.size > 1:
            row = self.state.has_gradient[self.group.rank]
            row[list(self.columns.values())] = row.new_tensor([name in seen for name in self.columns])
        return self.group.all_gather_scalars(*values)

    def seen_anywhere(self) -> set[str]:
        if self.group.size == 1:
            return self.seen
        found = self.state.has_gradient.any(dim=0).tolist()
        return {name for name, n in self.columns.items() if found[n]}

    def reduce(self) -> dict[str, Tensor]:
        return self.parts

    def update(self, name: str, counts: Sequence[int]) -> Iterator[Lookups]:
        lists = (self.state.row_ids[name], self.state.row_gradients[name])
        ids, gradients = ([t[rank, :n] for rank, n in enumerate(counts)] for t in lists)
        yield self.group.rank, ids, gradients

    def gather(self) -> None:
        self.group.all_gather_scalars()


class DistributedStore(ParameterStore):
    """Ranks of a world: gradients and weights are sent through torch.distributed."""

    group: DistributedGroup

    def __init__(
        self, group: ProcessGroup, state: State, owners: Mapping[str, int], tables: Sequence[str]
    ) -> None:
        super().__init__(group, state, owners, tables)
        size, rank = group.size, group.rank

        def buffer(name: str, rows: int) -> Tensor:  # the state holds the shape alone
            like = state.gradients[name]
            return like.new_zeros(rows, *like.shape[1:])

        self.parts = {name: buffer(name, size) for name in self.owned}
        self.own = {n: self.parts[n][rank] if n in self.parts else buffer(n, 1)[0] for n in owners}
        self.lists = {
            n: (_filled(state.row_ids[n], size), _filled(state.row_gradients[n], size)) for n in tables
        }
        self.own_rows = {name: (ids[rank], values[rank]) for name, (ids, values) in self.lists.items()}
        self.peers = [other for other in range(size) if other != rank]
        self.names = {r: [name for name, owner in owners.items() if owner == r] for r in range(size)}

    def drop_foreign(self, state: dict[str, Tensor]) -> None:
        for path in [*state]:
            if self.owners.get(path.rpartition("/")[0], self.group.rank) != self.group.rank:
                del state[path]

    def share(self, values: Sequence[float], seen: set[str]) -> list[tuple[float, ...]]:
        flags = [name in seen for name in self.owners]
        packed = [sum(f << n for n, f in enumerate(flags[i : i + BITS])) for i in range(0, len(flags), BITS)]
        found = self.group.all_gather_scalars(*values, *packed)
        split = len(packed)
        self.flags = [each[len(each) - split :] for each in found]
        return [each[: len(each) - split] for each in found]

    def seen_anywhere(self) -> set[str]:
        numbers = [[int(x) for x in each] for each in self.flags]
        return {
            name
            for n, name in enumerate(self.owners)
            if any(each[n // BITS] >> n % BITS & 1 for each in numbers)
        }

    def reduce(self) -> dict[str, Tensor]:
        sends = {other: [self.own[name] for name in self.names[other]] for other in self.peers}
        receives = {other: [self.parts[name][other] for name in self.owned] for other in self.peers}
        self.group.exchange(sends, receives)
        return self.parts

    def update(self, name: str, counts: Sequence[int]) -> Iterator[Lookups]:
        ids, gradients = ([t[rank, :n] for rank, n in enumerate(counts)] for t in self.lists[name])
        rank = self.group.rank
        filled = {
            other: [t for t in (ids[other], gradients[other]) if len(t)] for other in range(self.group.size)
        }
        self.group.exchange(dict.fromkeys(self.peers, filled[rank]), {o: filled[o] for o in self.peers})
        for owner in range(self.group.size):
            yield owner, ids, gradients

    def gather(self) -> None:
        weights = {rank: [self.state.weights[name] for name in names] for rank, names in self.names.items()}
        self.group.exchange(
            dict.fromkeys(self.peers, weights[self.group.rank]), {o: weights[o] for o in self.peers}
        )
        self.group.all_gather_scalars()


def _filled(empty: Tensor, size: int) -> Tensor:
    return empty.new_zeros(size, *empty.shape[1:])


def open_store(
    group: ProcessGroup, state: State, owners: Mapping[str, int], tables: Sequence[str]
) -> ParameterStore:
    """Return the store of an update for this kind of group."""
    kind = SharedMemoryStore if group.shares_memory else DistributedStore
    return cast("ParameterStore", kind(group, state, owners, tables))
