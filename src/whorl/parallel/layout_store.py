"""The parameter store of a laid-out model: gradients and weights are parts, Muon's matrices go whole to one rank.

    reduce     gradients are summed over the axes on which a parameter has copies; each matrix is gathered at its owner
    update     AdamW moves every rank's parts in place; an owner moves its whole matrices and keeps their moments
    gather     an owner sends each rank its part of the new matrix

`counted` are the gradients in this rank's part of the norm: each parameter counts once. `export` writes whole weights and
moments into the state that checkpoints and evaluation read, and `load` takes the parts from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from whorl.parallel.layout import LaidOut
from whorl.parallel.parameter_layout import Place, Slices
from whorl.parallel.parameter_store import DistributedStore, Lookups, ParameterStore, State
from whorl.parallel.process_group import ProcessGroup

# Sender, receiver, name, place in the sender's tensor, place in the receiver's.
Move = tuple[int, int, str, Slices, Slices]
Balance = Callable[[list[str], int], list[set[str]]]  # names over so many ranks


class LayoutStore(DistributedStore):
    """The peers of an update of a laid-out model.

    Args:
        state: with the whole weights and moments of the start, on every rank.
        wholes: parameters whose optimizer needs them whole. tables: lookup tables. Other parameters are updated in parts.
        balance: spreads wholes over ranks.
    """

    def __init__(
        self, laid: LaidOut, group: ProcessGroup, state: State, wholes: Sequence[str], tables: Sequence[str],
        balance: Balance,
    ) -> None:  # fmt: skip
        places, rank = laid.places, group.rank
        self.laid, self.places = laid, places
        dense = [name for name in places.places if name not in tables]
        owners = {name: number % len(places.at) for number, name in enumerate(dense)}  # of moments in `state`
        owners |= _owners(places.places, places.at, wholes, balance)
        ParameterStore.__init__(self, group, state, owners, tables)
        parts = {name: p.data for name, p in laid.parameters.items()}
        self.own = {name: torch.zeros_like(parts[name]) for name in dense if name in parts}
        self.whole_names = set(wholes)
        self.wholes = {name: torch.empty_like(state.weights[name]) for name in wholes if owners[name] == rank}
        self.owned = [n for n in dense if n in self.wholes or (n in parts and n not in wholes)]
        self.targets = parts | self.wholes
        self.counted = {name for name in self.owned if name in self.wholes or places.counted(name)}
        self.sums = {name: t.clone() for name, t in self.wholes.items()}
        at, sizes, others = places.at, places.sizes, range(len(places.at))
        self.to_owner: list[Move] = [
            (sender, owners[name], name, local, whole)
            for name in wholes
            for sender in others
            if places.places[name].counts(at[sender])
            for local, whole in places.places[name].pieces(at[sender], sizes)
        ]
        self.from_owner: list[Move] = [
            (owners[name], receiver, name, whole, local)
            for name in wholes
            for receiver in others
            for local, whole in places.places[name].pieces(at[receiver], sizes)
        ]
        self.own_rows, self.moments = {}, {}
        self.shapes = {path: moment.shape for path, moment in state.state.items()}
        for path, shape in self.shapes.items():
            name = path.rpartition("/")[0]
            if name in self.wholes or (name in parts and name in tables):
                self.moments[path] = torch.zeros(shape)
            elif name in self.own and name not in wholes:
                self.moments[path] = torch.zeros_like(self.own[name])
        for name in (name for name in tables if name in parts):
            room, width = state.row_ids[name].shape[1], parts[name].shape[1]
            self.own_rows[name] = torch.zeros(room, dtype=torch.int64), torch.zeros(room, width)
        self.load(state)

    def load(self, state: State) -> None:
        """Take this rank's parts of whole weights and moments; of moments an owner has the whole. All ranks call this."""
        for name, parameter in self.laid.parameters.items():
            parameter.data.copy_(self.places.take(name, state.weights[name], parameter.data))
        for name, whole in self.wholes.items():
            whole.copy_(state.weights[name])
        moves: list[Move] = []
        for path in self.shapes:
            name, owner = path.rpartition("/")[0], self.writers.get(path.rpartition("/")[0], 0)
            for rank in range(self.group.size):
                held = self._pieces(path, name, rank, counted=False)
                moves += [(owner, rank, path, whole, part) for part, whole in held]
        self._transfer(moves, state.state, self.moments)

    def export(self, state: State) -> None:
        """Write whole weights into `state` on every rank, whole moments on their owners. All ranks call this."""
        parts, ranks = {name: p.data for name, p in self.laid.parameters.items()}, range(self.group.size)
        moves: list[Move] = [
            (rank, other, name, part, whole)
            for name, place in self.places.places.items()
            for rank in ranks
            if place.counts(self.places.at[rank])
            for part, whole in place.pieces(self.places.at[rank], self.places.sizes)
            for other in ranks
        ]
        self._transfer(moves, parts, state.weights)
        moves = []
        for path in self.shapes:
            name = path.rpartition("/")[0]
            for rank in ranks:
                held = self._pieces(path, name, rank, counted=True)
                moves += [(rank, self.writers.get(name, 0), path, part, whole) for part, whole in held]
        self._transfer(moves, self.moments, state.state)

    def _pieces(self, path: str, name: str, rank: int, *, counted: bool) -> list[tuple[Slices, Slices]]:
        """Return the pieces of a moment that a rank has: all of a matrix or a table, else those of the parameter."""
        place, at = self.places.places[name], self.places.at[rank]
        full = tuple(slice(0, n) for n in self.shapes[path])
        if name in self.whole_names:
            return [(full, full)] if self.owners[name] == rank else []
        if not (place.counts(at) if counted else place.holds(at)):
            return []
        return [(full, full)] if name in self.tables else place.pieces(at, self.places.sizes)

    def _transfer(
        self, moves: Sequence[Move], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> None:
        """Copy pieces between ranks, in one exchange."""
        rank, size = self.group.rank, self.group.size
        sends: dict[int, list[Tensor]] = {r: [] for r in range(size)}
        receives: dict[int, list[Tensor]] = {r: [] for r in range(size)}
        for sender, receiver, name, source, target in moves:
            if sender == rank:
                sends[receiver].append(sources[name][source].reshape(-1))
            if receiver == rank:
                receives[sender].append(targets[name][target])
        outgoing = torch.cat([t for r in range(size) for t in sends[r]] or [torch.zeros(0)])
        to, of = ([sum(t.numel() for t in lists[r]) for r in range(size)] for lists in (sends, receives))
        incoming = outgoing.new_empty(sum(of))
        dist.all_to_all_single(incoming, outgoing, of, to, group=self.group.data)
        start = 0
        for r in range(size):
            for t in receives[r]:
                t.copy_(incoming[start : start + t.numel()].view(t.shape))
                start += t.numel()

    def reduce(self) -> dict[str, Tensor]:
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for name, gradient in self.own.items():
            by_axes.setdefault(self.places.places[name].sums, []).append(gradient)
        for axes, gradients in by_axes.items():
            if (group := self.laid.mesh.group(*axes)) is not None:
                flat = torch.cat([g.reshape(-1) for g in gradients])
                dist.all_reduce(flat, group=group)
                summed = torch.split(flat, [g.numel() for g in gradients])
                torch._foreach_copy_(
                    gradients, [t.view(g.shape) for t, g in zip(summed, gradients, strict=True)]
                )
        for name, place in self.places.places.items():
            if len(place.stages) > 1 and name in self.own:
                dist.all_reduce(self.own[name], group=self.laid.mesh.ends)
        self._transfer(self.to_owner, self.own, self.sums)
        return {name: self.sums.get(name, self.own.get(name, Tensor()))[None] for name in self.owned}

    def update(self, name: str, counts: Sequence[int]) -> Iterator[Lookups]:
        at = self.places.at
        here, zero = at[self.group.rank], self.places.places[name].sums
        peers = [
            r for r, other in enumerate(at)
            if all(other[axis] == here[axis] for axis in other if axis not in zero)
        ]  # fmt: skip
        ids, values = self.own_rows[name]
        most = max(counts[r] for r in peers)
        group = self.laid.mesh.group(*zero)
        lists: tuple[list[Tensor], list[Tensor]] = ([], [])
        for t, found in zip((ids[:most], values[:most]), lists, strict=True):
            parts = [t.contiguous()] if group is None else [torch.empty_like(t) for _ in peers]
            if group is not None:
                dist.all_gather(parts, t.contiguous(), group=group)
            found += [part[: counts[r]] for part, r in zip(parts, peers, strict=True)]
        for owner in range(len(peers)):
            yield owner, *lists

    def gather(self) -> None:
        parts = {name: p.data for name, p in self.laid.parameters.items()}
        self._transfer(self.from_owner, self.wholes, parts)
        for ids, values in self.own_rows.values():  # tables of a step have fewer lookups than the fullest one
            ids.zero_()
            values.zero_()
        self.group.all_gather_scalars()


def _owners(
    places: Mapping[str, Place], at: Sequence[Mapping[str, int]], wholes: Sequence[str], balance: Balance
) -> dict[str, int]:
    """Return the owner of each whole parameter, among the ranks that hold a part of it."""
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for name in wholes:
        by_holders.setdefault(tuple(r for r, one in enumerate(at) if places[name].holds(one)), []).append(
            name
        )
    return {
        name: holders[number]
        for holders, names in by_holders.items()
        for number, own in enumerate(balance(names, len(holders)))
        for name in own
    }
