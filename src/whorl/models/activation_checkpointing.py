"""Activations for arithmetic: blocks whose insides are made anew when the backward comes to them.

    kept       x -> [block 0] -> [block 1] -> ... -> [block n-1] -> loss      every block's insides wait for the backward
    remade     of a block only the input waits; the backward runs it forward once more and goes on as if it had been kept

(Chen et al. 2016, arXiv:1604.06174, section 4, with a block as the segment.) It costs a forward of the block, so it is done
to as many blocks as a budget of bytes asks for, and to no more. `choose` finds how many from bytes that `measure` saw.

The subtle part is *which*. The first ones. While a block is remade its insides stand beside all that is still held; what
blocks behind it had kept is free by then, what blocks before it hold is not. Remaking a prefix therefore meets every
budget that any choice of blocks can meet, as long as a block keeps at least its input: with blocks 0 .. k-1 remade,

    saved(k) = outside + sum_{i<k} held_i + sum_{i>=k} whole_i                                at the end of the forward
    peak(k)  = max(saved(k), max_{b<k} outside + sum_{i<=b} held_i + inner_b)                 and on the way back

(proof: to add the blocks before a remade block b lowers what is held when b is remade, and their own remaking is over
before more than that is needed). The last block is hardly worth it: its backward comes right behind its forward.

A block may write into lists that it is given (routing records, keys lent to blocks behind it). It must do so once, though
it runs twice: each run gets copies, and the first run's are put back. Chance (dropout) is drawn again from the same state.
Weights, losses and gradients are the same bits as without, in eager execution: a test, for every kind of network.

Shapes: x [B, T, d_model]; bytes are of one forward of `rows` rows.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from whorl.errors import BudgetError

if TYPE_CHECKING:
    from whorl.models.language_model import LanguageModel


def checkpointed(block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """`block(x, *rest)`, of which only what it was given is kept for the backward.

    rest: as the block takes it; lists among them are written by the first run alone.
    """
    before = [list(r) if isinstance(r, list) else r for r in rest]

    def run(x: Tensor) -> tuple[Tensor, list[list[Any]]]:
        mine = [list(r) if isinstance(r, list) else r for r in before]
        out = block(x, *mine)
        return out, [r for r in mine if isinstance(r, list)]

    out, written = checkpoint(run, x, use_reentrant=False)
    for r, new in zip((r for r in rest if isinstance(r, list)), written, strict=True):
        r[:] = new
    result: Tensor = out
    return result


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes that a forward keeps for its backward.

    outside: of no block; whole: of each block, kept; held: of each block if it is remade (its input, and what it hands to
    others beside its output); inner: what remaking it adds to that for the time of its backward.
    """

    outside_blocks: int
    saved: tuple[int, ...]
    checkpointed: tuple[int, ...]
    recomputed: tuple[int, ...]

    def peak(self, count: int) -> int:
        """The most that is held at one time with the first `count` blocks remade."""
        before, worst = self.outside_blocks, 0
        for held, inner in zip(self.checkpointed[:count], self.recomputed[:count], strict=True):
            before += held
            worst = max(worst, before + inner)
        return max(worst, before + sum(self.saved[count:]))

    @property
    def min_peak(self) -> int:
        """The smallest peak that any number of remade blocks has."""
        return min(self.peak(count) for count in range(len(self.saved) + 1))


@dataclass(frozen=True)
class LinearActivationMemory:
    """`Kept` for any number of rows, from those of one and of two."""

    one_row: ActivationMemory
    two_rows: ActivationMemory

    def at_rows(self, rows: int) -> ActivationMemory:
        """For a forward of `rows` rows."""

        def line(a: int, b: int) -> int:
            return max(0, a + (b - a) * (rows - 1))

        def lines(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
            return tuple(line(x, y) for x, y in zip(a, b, strict=True))

        a, b = self.one_row, self.two_rows
        return ActivationMemory(
            line(a.outside_blocks, b.outside_blocks),
            lines(a.saved, b.saved),
            lines(a.checkpointed, b.checkpointed),
            lines(a.recomputed, b.recomputed),
        )


def min_checkpointed_blocks(kept: ActivationMemory, budget: int) -> int:
    """How many blocks, from the first, must be remade so that at most `budget` bytes are held: the fewest.

    Raises:
        BudgetError: not even the least peak is within it.
    """
    for count in range(len(kept.saved) + 1):
        if kept.peak(count) <= budget:
            return count
    raise BudgetError(
        f"activations of {budget:,} bytes are allowed",
        expected=f"at least {kept.min_peak:,}, which all but the last blocks remade would need",
    )


def measure_activation_memory(model: LanguageModel, length: int) -> LinearActivationMemory:
    """What a forward of `model` keeps in rows of `length`: seen on one and on two rows, on the model's own device.

    Rows of one document and rows of two: the larger of each figure, so that it is true of either.
    """
    one, two = (
        _elementwise_max(
            _measure_saved(model, rows, length), _measure_saved(model, rows, length, packed=True)
        )
        for rows in (1, 2)
    )
    return LinearActivationMemory(one, two)


def _elementwise_max(a: ActivationMemory, b: ActivationMemory) -> ActivationMemory:
    def each(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(pair) for pair in zip(x, y, strict=True))

    return ActivationMemory(
        max(a.outside_blocks, b.outside_blocks),
        each(a.saved, b.saved),
        each(a.checkpointed, b.checkpointed),
        each(a.recomputed, b.recomputed),
    )


def _measure_saved(model: LanguageModel, rows: int, length: int, *, packed: bool = False) -> ActivationMemory:
    """Every storage that autograd saves is counted once. What a block hands on beside its output, and what two blocks save,
    waits whether the block is remade or not, so it counts as outside; weights are not counted."""
    n = len(model.blocks)
    weights = {_storage_ptr(t) for t in (*model.parameters(), *model.buffers())}
    alive: list[Any] = []  # freed storages would lend their address to others
    owners: dict[int, set[int]] = {}  # blocks that save a storage; n: none of them
    sizes: dict[int, int] = {}
    inputs, place = [0] * n, n

    def note(t: Tensor, owner: int) -> None:
        if (key := _storage_ptr(t)) not in weights:
            alive.append(t.untyped_storage())
            sizes[key] = t.untyped_storage().nbytes()
            owners.setdefault(key, set()).add(owner)

    def pack(t: Tensor) -> Tensor:
        note(t, place)
        return t

    def enter(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal place
            place = number
            inputs[number] = _storage_ptr(args[0])
            sizes.setdefault(inputs[number], args[0].untyped_storage().nbytes())
            alive.append(args[0])

        return hook

    def leave(_: nn.Module, args: tuple[Any, ...], _out: Any) -> None:
        nonlocal place
        place = n
        for t in tensors(args[1:]):
            note(t, n)

    hooks = [b.register_forward_pre_hook(enter(i)) for i, b in enumerate(model.blocks)]
    hooks += [b.register_forward_hook(leave) for b in model.blocks]
    places = torch.arange(length, device=model.embedding.device).repeat(rows, 1)  # [rows, length]
    ids, half = places % len(model.embedding), max(1, length // 2)
    more = (places % half, places // half) if packed else (None, None)
    remade_before, training, model.checkpointed_blocks = model.checkpointed_blocks, model.training, 0
    model.eval()  # nothing is left out by chance
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            model(ids, *more, routings=[])
    finally:
        model.checkpointed_blocks = remade_before
        model.train(training)
        for one in hooks:
            one.remove()
    saved: list[dict[int, int]] = [{} for _ in range(n)]
    for key, those in owners.items():
        for owner in those - {n}:
            saved[owner][key] = sizes[key]
    inner = [sum(each.values()) - each.get(inputs[b], 0) for b, each in enumerate(saved)]
    whole = [
        sum(size for key, size in each.items() if owners[key] == {b} or key == inputs[b])
        for b, each in enumerate(saved)
    ]
    outside = sum(
        sizes[key] for key, those in owners.items() if (len(those) > 1 or n in those) and key not in inputs
    )
    return ActivationMemory(outside, tuple(whole), tuple(sizes[key] for key in inputs), tuple(inner))


def _storage_ptr(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class LiveTensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: bytes of the storages that operations made and that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.tracked: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._track((args, kwargs), 0)  # there before: written in place, or looked at
        out = op(*args, **(kwargs or {}))
        self._track(out, 1)
        return out

    def _track(self, found: Any, counts: int) -> None:
        for t in tensors(found):
            if t.layout != torch.strided:
                continue
            storage = t.untyped_storage()
            if id(storage) not in self.tracked:
                size = counts * storage.nbytes()
                self.tracked.add(id(storage))
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._release, id(storage), size)

    def _release(self, key: int, size: int) -> None:
        self.tracked.discard(key)
        self.bytes -= size


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors that were alive at one time of those made while `run()` ran, uncompiled."""
    with LiveTensorTracker() as alive:
        run()
    return int(alive.peak)


def tensors(found: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and data classes."""
    if isinstance(found, Tensor):
        return [found]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = [getattr(found, f.name) for f in dataclasses.fields(found)]
    if isinstance(found, dict):
        found = list(found.values())
    return [t for each in found for t in tensors(each)] if isinstance(found, list | tuple) else []
