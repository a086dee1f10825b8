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
from whorl.models.lora import LoRA, check_lora, target_modules

MAX_PADDING_RATIO = 2.0  # rows of a padded product for each row that is real, at most


class LoRAMapping:
    """Where the positions of each adapter lie.  numbers: [N], 0 for none.

    chosen: adapters that occur, ascending; rows: [M] positions that have one, by adapter; counts: of each adapter;
    way: "all" (one adapter, every position), "padded" or "segments".
    """

    def __init__(self, adapter_indices: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.n_positions = len(adapter_indices)
        given = torch.tensor(adapter_indices, dtype=torch.long)
        order = given.argsort(stable=True)
        order = order[given[order] > 0]
        kinds, counts = torch.unique(given[order], return_counts=True)
        self.active_indices: tuple[int, ...] = tuple(kinds.tolist())
        self.counts: list[int] = counts.tolist()
        self.adapted_rows = order.to(device)
        longest = max(self.counts, default=0)
        if len(self.active_indices) == 1 and longest == self.n_positions:
            self.strategy = "all"
        elif len(self.active_indices) * longest <= MAX_PADDING_RATIO * len(order):
            self.strategy = "padded"
            # [K, longest]: place of each adapter's positions in a padded block, and which places are real
            within = torch.arange(longest)[None, :] < counts[:, None]
            self.valid_slots = within.flatten().nonzero()[:, 0].to(device)
            table = torch.zeros(within.shape, dtype=torch.long)
            table[within] = order
            self.padded_rows = table.to(device)
        else:
            self.strategy = "segments"


def lora_delta(x: Tensor, a: Tensor, b: Tensor, mapping: LoRAMapping) -> Tensor:
    """What adapters add, for the positions `plan.rows`.

    x: [N, in]; a: [K, R, in], b: [K, out, R] of `plan.chosen` -> [M, out] ("all": [N, out], in order).
    """
    if mapping.strategy == "all":
        return (x @ a[0].t()) @ b[0].t()
    if mapping.strategy == "padded":
        low = torch.bmm(x[mapping.padded_rows], a.transpose(1, 2))  # [K, longest, R]
        return torch.bmm(low, b.transpose(1, 2)).flatten(0, 1)[mapping.valid_slots]
    parts = torch.split(x[mapping.adapted_rows], mapping.counts)
    return torch.cat([(part @ a[k].t()) @ b[k].t() for k, part in enumerate(parts)])


def lora_delta_reference(x: Tensor, a: Tensor, b: Tensor, adapter_indices: Sequence[int]) -> Tensor:
    """The definition: [N, in] -> [N, out], 0 where there is no adapter; a, b: of all, adapter k at k - 1."""
    rows = [
        b[k - 1] @ (a[k - 1] @ row) if k else row.new_zeros(b.shape[1])
        for k, row in zip(adapter_indices, x, strict=True)
    ]
    return torch.stack(rows)


class Adapters:
    """The adapters that are loaded beside a model, by name; each has a number from 1.

    Args:
        model: whose layers they change; adapters are kept in its compute type, on its device.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._layers = target_modules(model)
        self._indices: dict[str, int] = {}
        self._loaded: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._cache_keys: dict[str, str] = {}
        self._n_added = 0
        self.names_in_use: Callable[[], Collection[str | None]] = (
            tuple  # names that requests on their way have
        )
        self._stacked_factors: tuple[tuple[int, ...], dict[str, tuple[Tensor, Tensor]]] = (), {}

    def __contains__(self, name: object) -> bool:
        return name in self._indices

    @property
    def names(self) -> list[str]:
        """Of those that are loaded."""
        return list(self._indices)

    @property
    def n_bytes(self) -> int:
        """Of their factors."""
        return sum(t.nbytes for parts in self._loaded.values() for pair in parts.values() for t in pair)

    def add(self, name: str, lora: LoRA) -> int:
        """Loads an adapter: -> its number.

        Raises:
            ConfigError: the name is taken or empty; the adapter does not fit the model (the tensor is named).
        """
        if not name or name in self._indices:
            raise ConfigError(f"the adapter's name is {name!r}", expected="one that is not in use")
        check_lora(lora, self.model, name)
        number = next(n for n in range(1, len(self._loaded) + 2) if n not in self._loaded)
        device, dtype = self.model.embedding.device, self.model.dtype
        self._loaded[number] = {
            layer: (part.a.to(device, dtype), (part.b.float() * part.scale).to(device, dtype))
            for layer, part in lora.factors.items()
        }
        self._n_added += 1
        self._indices[name], self._cache_keys[name] = number, f"{name}#{self._n_added}"
        self._stacked_factors = (), {}
        return number

    def remove(self, name: str) -> None:
        """Forgets an adapter; its number may be given to another.

        Raises:
            ConfigError: there is none of that name, or a request on its way has it.
        """
        if name in self.names_in_use():
            raise ConfigError(f"adapter {name!r} is in use", expected="one that no request on its way has")
        del self._loaded[self.index_of(name)]
        del self._indices[name], self._cache_keys[name]
        self._stacked_factors = (), {}

    def index_of(self, name: str | None) -> int:
        """0 for None.

        Raises:
            ConfigError: there is none of that name.
        """
        if name is None:
            return 0
        if name not in self._indices:
            known = one_of(name, self.names) if self._indices else "none is loaded"
            raise ConfigError(f"adapter {name!r} is not loaded", expected=known)
        return self._indices[name]

    def cache_key(self, name: str | None) -> str:
        """A word for this adapter that no other ever has, under whatever name: what caches are told apart by."""
        return "" if name is None else self._cache_keys[name]

    def indices_of(self, names: Iterable[str | None]) -> list[int] | None:
        """Of rows with these adapters: the number of each, or None where no row has any."""
        named = list(names)
        return [self.index_of(name) for name in named] if any(named) else None

    def expand_to_positions(self, adapter_indices: Sequence[int], starts: Sequence[int]) -> list[int]:
        """From rows to positions.  starts: borders of the rows, one more than there are."""
        lengths = [stop - start for start, stop in pairwise(starts)]
        return [n for number, length in zip(adapter_indices, lengths, strict=True) for n in [number] * length]

    @contextmanager
    def active(self, adapter_indices: Sequence[int]) -> Iterator[None]:
        """Within it, position n of what the layers are given is changed by adapter numbers[n] (0: by none).

        Raises:
            ConfigError: a number that is not loaded; by a layer that is given another number of positions.
        """
        if not any(adapter_indices):
            yield
            return
        plan = LoRAMapping(adapter_indices, self.model.embedding.device)
        for number in plan.active_indices:
            if number not in self._loaded:
                raise ConfigError(
                    f"adapter {number} is not loaded", expected=f"one of {sorted(self._loaded)}"
                )
        hooks = []
        try:
            for layer, (a, b) in self._stack_factors(plan.active_indices).items():
                hooks.append(self._layers[layer].register_forward_hook(_MultiLoRAHook(plan, a, b, layer)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _stack_factors(self, active_indices: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> A [K, R, in] and B [K, out, R] of these adapters; kept, since the next step has mostly the same ones."""
        if self._stacked_factors[0] != active_indices:
            found: dict[str, tuple[Tensor, Tensor]] = {}
            for layer in self._layers:
                pairs = [self._loaded[number].get(layer) for number in active_indices]
                there = [pair for pair in pairs if pair is not None]
                if not there:
                    continue
                rank = max(len(a) for a, _ in there)
                d_in, d_out = there[0][0].shape[1], there[0][1].shape[0]
                a = there[0][0].new_zeros(len(active_indices), rank, d_in)
                b = there[0][0].new_zeros(len(active_indices), d_out, rank)
                for k, pair in enumerate(pairs):
                    if pair is not None:
                        a[k, : len(pair[0])], b[k, :, : len(pair[0])] = pair
                found[layer] = a, b
            self._stacked_factors = active_indices, found
        return self._stacked_factors[1]


class _MultiLoRAHook:
    """The hook of one layer in one step."""

    def __init__(self, mapping: LoRAMapping, a: Tensor, b: Tensor, name: str) -> None:
        self.mapping, self.a, self.b, self.name = mapping, a, b, name

    def __call__(self, _layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        x: Tensor = given[0]
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) != self.mapping.n_positions:
            raise ConfigError(
                f"{self.name} is given {len(flat)} positions, and adapters are named for {self.mapping.n_positions}",
                expected="the same number",
            )
        more = lora_delta(flat, self.a, self.b, self.mapping).to(output.dtype)
        if self.mapping.strategy == "all":
            return output + more.view(output.shape)
        whole = output.reshape(-1, output.shape[-1])
        return whole.index_add(0, self.mapping.adapted_rows, more).view(output.shape)
