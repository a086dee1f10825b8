"""Several LoRA adapters in one batch: each position of a step has its own, or none.

    adapters = Adapters(model)
    adapters.add("polite", load_lora(folder, model))          # and Engine(model, adapters=adapters) serves it by that name
    with adapters.active([0, 1, 1, 2, 0]):          # of each of the N positions, by number; 0 for none
        model.trunk(x, ...)

The weights are read once for all positions, and what is added is small, so one batch serves everybody's adapter (Chen et al.
2023, Punica, arXiv:2310.18547; Sheng et al. 2023, S-LoRA, arXiv:2311.03285). The sum over positions n with the adapter k(n),

    y_n += scale_k B_k A_k x_n

is a product whose matrix changes from row to row. Positions are sorted by adapter once a step, for all layers (`Plan`). Then
either each adapter's are gathered into a block of equal height and one batched product makes all ("padded"), or, where one
has far more positions than the others and padding would be most of the work, adapter by adapter ("segments"). One adapter
for all positions needs neither. `reference` is the definition, a position at a time; a test holds all to it, and to models
into which each adapter was merged.

Layers are ordinary `Linear`s, quantised ones too: while an adapter is active, a forward hook adds to what a layer gave;
otherwise there is no hook, so a model without active adapters runs as if there were none (bench/engine/multi_lora.py).

Shapes: x [N, in] of a layer, whatever stands before in [..., in]; A [K, R, in], B [K, out, R] of K adapters, ranks padded
with 0 to the largest, R; the scale is multiplied into B.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError, one_of
from whorl.models.language_model import LanguageModel
from whorl.models.lora import LoRA, adaptable, check

PADDING = 2.0  # rows of a padded product for each row that is real, at most


class Plan:
    """Where the positions of each adapter lie.  numbers: [N], 0 for none.

    chosen: adapters that occur, ascending; rows: [M] positions that have one, by adapter; counts: of each adapter;
    way: "all" (one adapter, every position), "padded" or "segments".
    """

    def __init__(self, numbers: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.n = len(numbers)
        given = torch.tensor(numbers, dtype=torch.long)
        order = given.argsort(stable=True)
        order = order[given[order] > 0]
        kinds, counts = torch.unique(given[order], return_counts=True)
        self.chosen: tuple[int, ...] = tuple(kinds.tolist())
        self.counts: list[int] = counts.tolist()
        self.rows = order.to(device)
        longest = max(self.counts, default=0)
        if len(self.chosen) == 1 and longest == self.n:
            self.way = "all"
        elif len(self.chosen) * longest <= PADDING * len(order):
            self.way = "padded"
            # [K, longest]: place of each adapter's positions in a padded block, and which places are real
            within = torch.arange(longest)[None, :] < counts[:, None]
            self.places = within.flatten().nonzero()[:, 0].to(device)
            table = torch.zeros(within.shape, dtype=torch.long)
            table[within] = order
            self.table = table.to(device)
        else:
            self.way = "segments"


def added(x: Tensor, a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    """What adapters add, for the positions `plan.rows`.

    x: [N, in]; a: [K, R, in], b: [K, out, R] of `plan.chosen` -> [M, out] ("all": [N, out], in order).
    """
    if plan.way == "all":
        return (x @ a[0].t()) @ b[0].t()
    if plan.way == "padded":
        low = torch.bmm(x[plan.table], a.transpose(1, 2))  # [K, longest, R]
        return torch.bmm(low, b.transpose(1, 2)).flatten(0, 1)[plan.places]
    parts = torch.split(x[plan.rows], plan.counts)
    return torch.cat([(part @ a[k].t()) @ b[k].t() for k, part in enumerate(parts)])


def reference(x: Tensor, a: Tensor, b: Tensor, numbers: Sequence[int]) -> Tensor:
    """The definition: [N, in] -> [N, out], 0 where there is no adapter; a, b: of all, adapter k at k - 1."""
    rows = [
        b[k - 1] @ (a[k - 1] @ row) if k else row.new_zeros(b.shape[1])
        for k, row in zip(numbers, x, strict=True)
    ]
    return torch.stack(rows)


class Adapters:
    """The adapters that are loaded beside a model, by name; each has a number from 1.

    Args:
        model: whose layers they change; adapters are kept in its compute type, on its device.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._layers = adaptable(model)
        self._numbers: dict[str, int] = {}
        self._loaded: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._keys: dict[str, str] = {}
        self._added = 0
        self.in_use: Callable[[], Collection[str | None]] = tuple  # names that requests on their way have
        self._picked: tuple[tuple[int, ...], dict[str, tuple[Tensor, Tensor]]] = (), {}

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def names(self) -> list[str]:
        """Of those that are loaded."""
        return list(self._numbers)

    @property
    def n_bytes(self) -> int:
        """Of their factors."""
        return sum(t.nbytes for parts in self._loaded.values() for pair in parts.values() for t in pair)

    def add(self, name: str, lora: LoRA) -> int:
        """Loads an adapter: -> its number.

        Raises:
            ConfigError: the name is taken or empty; the adapter does not fit the model (the tensor is named).
        """
        if not name or name in self._numbers:
            raise ConfigError(f"the adapter's name is {name!r}", expected="one that is not in use")
        check(lora, self.model, name)
        number = next(n for n in range(1, len(self._loaded) + 2) if n not in self._loaded)
        device, dtype = self.model.embedding.device, self.model.dtype
        self._loaded[number] = {
            layer: (part.a.to(device, dtype), (part.b.float() * part.scale).to(device, dtype))
            for layer, part in lora.parts.items()
        }
        self._added += 1
        self._numbers[name], self._keys[name] = number, f"{name}#{self._added}"
        self._picked = (), {}
        return number

    def remove(self, name: str) -> None:
        """Forgets an adapter; its number may be given to another.

        Raises:
            ConfigError: there is none of that name, or a request on its way has it.
        """
        if name in self.in_use():
            raise ConfigError(f"adapter {name!r} is in use", expected="one that no request on its way has")
        del self._loaded[self.number(name)]
        del self._numbers[name], self._keys[name]
        self._picked = (), {}

    def number(self, name: str | None) -> int:
        """0 for None.

        Raises:
            ConfigError: there is none of that name.
        """
        if name is None:
            return 0
        if name not in self._numbers:
            known = one_of(name, self.names) if self._numbers else "none is loaded"
            raise ConfigError(f"adapter {name!r} is not loaded", expected=known)
        return self._numbers[name]

    def key(self, name: str | None) -> str:
        """A word for this adapter that no other ever has, under whatever name: what caches are told apart by."""
        return "" if name is None else self._keys[name]

    def numbers(self, names: Iterable[str | None]) -> list[int] | None:
        """Of rows with these adapters: the number of each, or None where no row has any."""
        named = list(names)
        return [self.number(name) for name in named] if any(named) else None

    def over(self, numbers: Sequence[int], starts: Sequence[int]) -> list[int]:
        """From rows to positions.  starts: borders of the rows, one more than there are."""
        lengths = [stop - start for start, stop in pairwise(starts)]
        return [n for number, length in zip(numbers, lengths, strict=True) for n in [number] * length]

    @contextmanager
    def active(self, numbers: Sequence[int]) -> Iterator[None]:
        """Within it, position n of what the layers are given is changed by adapter numbers[n] (0: by none).

        Raises:
            ConfigError: a number that is not loaded; by a layer that is given another number of positions.
        """
        if not any(numbers):
            yield
            return
        plan = Plan(numbers, self.model.embedding.device)
        for number in plan.chosen:
            if number not in self._loaded:
                raise ConfigError(
                    f"adapter {number} is not loaded", expected=f"one of {sorted(self._loaded)}"
                )
        hooks = []
        try:
            for layer, (a, b) in self._pick(plan.chosen).items():
                hooks.append(self._layers[layer].register_forward_hook(_Adder(plan, a, b, layer)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _pick(self, chosen: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> A [K, R, in] and B [K, out, R] of these adapters; kept, since the next step has mostly the same ones."""
        if self._picked[0] != chosen:
            found: dict[str, tuple[Tensor, Tensor]] = {}
            for layer in self._layers:
                pairs = [self._loaded[number].get(layer) for number in chosen]
                there = [pair for pair in pairs if pair is not None]
                if not there:
                    continue
                rank = max(len(a) for a, _ in there)
                d_in, d_out = there[0][0].shape[1], there[0][1].shape[0]
                a = there[0][0].new_zeros(len(chosen), rank, d_in)
                b = there[0][0].new_zeros(len(chosen), d_out, rank)
                for k, pair in enumerate(pairs):
                    if pair is not None:
                        a[k, : len(pair[0])], b[k, :, : len(pair[0])] = pair
                found[layer] = a, b
            self._picked = chosen, found
        return self._picked[1]


class _Adder:
    """The hook of one layer in one step."""

    def __init__(self, plan: Plan, a: Tensor, b: Tensor, name: str) -> None:
        self.plan, self.a, self.b, self.name = plan, a, b, name

    def __call__(self, _layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        x: Tensor = given[0]
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) != self.plan.n:
            raise ConfigError(
                f"{self.name} is given {len(flat)} positions, and adapters are named for {self.plan.n}",
                expected="the same number",
            )
        more = added(flat, self.a, self.b, self.plan).to(output.dtype)
        if self.plan.way == "all":
            return output + more.view(output.shape)
        whole = output.reshape(-1, output.shape[-1])
        return whole.index_add(0, self.plan.rows, more).view(output.shape)
