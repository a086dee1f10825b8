"""Activation checkpointing: the backward recomputes the activations of the first blocks instead of storing them.

Only the input of a checkpointed block is stored; the backward runs its forward again (Chen et al. 2016, arXiv:1604.06174,
section 4, with a block as the segment). The price is one more forward of the block. `measure_activation_memory` measures
the bytes of each block, and `min_checkpointed_blocks` returns the fewest blocks that fit a budget.

Subtle point: which blocks. While block b is recomputed, the activations of later blocks are free and those of earlier
blocks are not. Checkpointing a prefix therefore meets every budget that any set of blocks can meet, as long as a block
keeps at least its input. With blocks 0 .. k-1 checkpointed,

    stored(k) = outside + sum_{i<k} checkpointed_i + sum_{i>=k} saved_i                   at the end of the forward
    peak(k)   = max(stored(k), max_{b<k} outside + sum_{i<=b} checkpointed_i + recomputed_b)         in the backward

Proof: adding the blocks before a checkpointed block b lowers what is stored when b is recomputed. Their own recomputation
happens later and needs no more. The last block gains little: its backward directly follows its forward.

A block may append to lists in its arguments (routing records, shared keys). It runs twice and must append once: each run
gets copies, and the first run's are copied back. Dropout uses the same random state in both runs. Losses and gradients
are bit-identical to a run without checkpointing, in eager execution (tested for every kind of network).

Shapes: x [B, T, d_model]; bytes are of one forward of `rows` rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whorl.errors import BudgetError

if TYPE_CHECKING:
    from whorl.models.language_model import LanguageModel


def checkpointed(block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """Compute `block(x, *rest)`, storing only its arguments for the backward.

    rest: the block's other arguments; lists among them are changed by the first run only.
    """
    arguments = [list(r) if isinstance(r, list) else r for r in rest]

    def run(x: Tensor) -> tuple[Tensor, list[list[Any]]]:
        copies = [list(r) if isinstance(r, list) else r for r in arguments]
        out = block(x, *copies)
        return out, [r for r in copies if isinstance(r, list)]

    out, lists = checkpoint(run, x, use_reentrant=False)
    for r, new in zip((r for r in rest if isinstance(r, list)), lists, strict=True):
        r[:] = new
    result: Tensor = out
    return result


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes that a forward keeps for its backward.

    Attributes:
        outside_blocks: stored by no single block.
        saved: of each block without checkpointing.
        checkpointed: of each block with checkpointing: its input.
        recomputed: of each block, added to `checkpointed` during its backward.
    """

    outside_blocks: int
    saved: tuple[int, ...]
    checkpointed: tuple[int, ...]
    recomputed: tuple[int, ...]

    def peak(self, count: int) -> int:
        """Return the largest number of bytes alive at one time with the first `count` blocks checkpointed."""
        stored, worst = self.outside_blocks, 0
        for input_bytes, recomputed in zip(self.checkpointed[:count], self.recomputed[:count], strict=True):
            stored += input_bytes
            worst = max(worst, stored + recomputed)
        return max(worst, stored + sum(self.saved[count:]))

    @property
    def min_peak(self) -> int:
        """Return the smallest peak over all numbers of checkpointed blocks."""
        return min(self.peak(count) for count in range(len(self.saved) + 1))


@dataclass(frozen=True)
class LinearActivationMemory:
    """`ActivationMemory` for any number of rows: as measured for one, and linear through two and three rows.

    One row differs: a product of one row is a view of its operand where several rows need a copy.
    """

    one_row: ActivationMemory
    two_rows: ActivationMemory
    three_rows: ActivationMemory

    def at_rows(self, rows: int) -> ActivationMemory:
        """Return the memory of a forward of `rows` rows."""

        if rows == 1:
            return self.one_row

        def line(a: int, b: int) -> int:
            return max(0, a + (b - a) * (rows - 2))

        def lines(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
            return tuple(line(x, y) for x, y in zip(a, b, strict=True))

        a, b = self.two_rows, self.three_rows
        return ActivationMemory(
            line(a.outside_blocks, b.outside_blocks),
            lines(a.saved, b.saved),
            lines(a.checkpointed, b.checkpointed),
            lines(a.recomputed, b.recomputed),
        )


def min_checkpointed_blocks(memory: ActivationMemory, budget: int) -> int:
    """Return the fewest leading blocks to checkpoint so that at most `budget` bytes are alive.

    Raises:
        BudgetError: the smallest peak exceeds the budget.
    """
    for count in range(len(memory.saved) + 1):
        if memory.peak(count) <= budget:
            return count
    raise BudgetError(
        f"the activation budget is {budget:,} bytes",
        expected=f"at least {memory.min_peak:,}, the smallest peak with checkpointing",
    )


def measure_activation_memory(model: LanguageModel, length: int) -> LinearActivationMemory:
    """Measure the activation memory of `model` in rows of `length`, on one to three rows, on the model's own device.

    Each figure is the larger of two measurements: rows of one document, and packed rows of two documents.
    """
    one, two, three = (
        _elementwise_max(
            _measure_saved(model, rows, length), _measure_saved(model, rows, length, packed=True)
        )
        for rows in (1, 2, 3)
    )
    return LinearActivationMemory(one, two, three)


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
    """Measure one forward. Every storage that autograd saves is counted once; weights are not counted.

    Storages that several blocks save, and additional arguments of a block, count as outside: they are stored whether
    the block is checkpointed or not.
    """
    n = len(model.blocks)
    weights = {_storage_ptr(t) for t in (*model.parameters(), *model.buffers())}
    alive: list[Any] = []  # keeps storages alive: the address of a freed one could be reused
    owners: dict[int, set[int]] = {}  # blocks that save a storage; n: no block
    sizes: dict[int, int] = {}
    inputs, current = [0] * n, n

    def note(t: Tensor, owner: int) -> None:
        if (key := _storage_ptr(t)) not in weights:
            alive.append(t.untyped_storage())
            sizes[key] = t.untyped_storage().nbytes()
            owners.setdefault(key, set()).add(owner)

    def pack(t: Tensor) -> Tensor:
        note(t, current)
        return t

    def enter(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal current
            current = number
            inputs[number] = _storage_ptr(args[0])
            sizes.setdefault(inputs[number], args[0].untyped_storage().nbytes())
            alive.append(args[0])

        return hook

    def leave(_: nn.Module, args: tuple[Any, ...], _out: Any) -> None:
        nonlocal current
        current = n
        for t in tensors(args[1:]):
            note(t, n)

    hooks = [b.register_forward_pre_hook(enter(i)) for i, b in enumerate(model.blocks)]
    hooks += [b.register_forward_hook(leave) for b in model.blocks]
    positions = torch.arange(length, device=model.embedding.device).repeat(rows, 1)  # [rows, length]
    ids, half = positions % len(model.embedding), max(1, length // 2)
    packing = (positions % half, positions // half) if packed else (None, None)
    n_checkpointed, training, model.checkpointed_blocks = model.checkpointed_blocks, model.training, 0
    model.eval()  # no dropout
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            model(ids, *packing, routings=[])
    finally:
        model.checkpointed_blocks = n_checkpointed
        model.train(training)
        for hook in hooks:
            hook.remove()
    saved: list[dict[int, int]] = [{} for _ in range(n)]
    for key, blocks in owners.items():
        for owner in blocks - {n}:
            saved[owner][key] = sizes[key]
    recomputed = [sum(each.values()) - each.get(inputs[b], 0) for b, each in enumerate(saved)]
    alone = [
        sum(size for key, size in each.items() if owners[key] == {b} or key == inputs[b])
        for b, each in enumerate(saved)
    ]
    outside = sum(
        sizes[key] for key, blocks in owners.items() if (len(blocks) > 1 or n in blocks) and key not in inputs
    )
    return ActivationMemory(outside, tuple(alone), tuple(sizes[key] for key in inputs), tuple(recomputed))


def _storage_ptr(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def tensors(found: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples, dicts and data classes."""
    if isinstance(found, Tensor):
        return [found]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = [getattr(found, f.name) for f in dataclasses.fields(found)]
    if isinstance(found, dict):
        found = list(found.values())
    return [t for each in found for t in tensors(each)] if isinstance(found, list | tuple) else []
