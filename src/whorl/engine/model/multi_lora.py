"""Several LoRA adapters in one batch: each position of a step has one or none.

    adapters = Adapters(model)
    adapters.add("polite", load_lora(folder, model))   # Engine(model, adapters=adapters) serves it under that name
    with adapters.active([0, 1, 1, 2, 0]):             # adapter index of each of the N positions; 0 for none
        model.trunk(x, ...)

Base weights are read once for all positions and the low-rank term is small, so one batch serves all adapters (Chen et al.
2023, Punica, arXiv:2310.18547; Sheng et al. 2023, S-LoRA, arXiv:2311.03285). Position n with adapter k(n) gets

    y_n += scale_k B_k A_k x_n

Positions are sorted by adapter once per step, for all layers (`LoRAMapping`). Then either each adapter's positions form a
block of equal height and one batched product computes all ("padded"), or, where padding would be most of the work, each
adapter runs separately ("segments"). One adapter for all positions needs neither ("all"). `lora_delta_reference` is the
definition, one position at a time; tests compare all three with it and with merged models.

Layers are ordinary `Linear`s, also quantized ones. While an adapter is active, a forward hook adds to a layer's output;
without active adapters there is no hook and no cost (bench/engine/multi_lora.py).

Shapes: x [N, in] of a layer, with any leading dimensions; A [K, R, in], B [K, out, R] of K adapters. Ranks are padded with
0 to the largest, R, and the scale is multiplied into B.
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

MAX_PADDING_RATIO = 2.0  # limit of padded rows per real row


class LoRAMapping:
    """Positions sorted by adapter. adapter_indices: [N], 0 for none.

    active_indices: adapters that occur, ascending. adapted_rows: [M] positions with an adapter, by adapter. counts: of each
    adapter. strategy: "all" (one adapter, every position), "padded" or "segments".
    """

    def __init__(self, adapter_indices: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.n_positions = len(adapter_indices)
        inputs = torch.tensor(adapter_indices, dtype=torch.long)
        order = inputs.argsort(stable=True)
        order = order[inputs[order] > 0]
        kinds, counts = torch.unique(inputs[order], return_counts=True)
        self.active_indices: tuple[int, ...] = tuple(kinds.tolist())
        self.counts: list[int] = counts.tolist()
        self.adapted_rows = order.to(device)
        longest = max(self.counts, default=0)
        if len(self.active_indices) == 1 and longest == self.n_positions:
            self.strategy = "all"
        elif len(self.active_indices) * longest <= MAX_PADDING_RATIO * len(order):
            self.strategy = "padded"
            # [K, longest]: each adapter's positions in a padded block, and the mask of real entries
            valid = torch.arange(longest)[None, :] < counts[:, None]
            self.valid_slots = valid.flatten().nonzero()[:, 0].to(device)
            table = torch.zeros(valid.shape, dtype=torch.long)
            table[valid] = order
            self.padded_rows = table.to(device)
        else:
            self.strategy = "segments"


def lora_delta(x: Tensor, a: Tensor, b: Tensor, mapping: LoRAMapping) -> Tensor:
    """Low-rank terms of the positions `mapping.adapted_rows`.

    x: [N, in]; a: [K, R, in], b: [K, out, R] of `mapping.active_indices`. Returns [M, out] ("all": [N, out], in order).
    """
    if mapping.strategy == "all":
        return (x @ a[0].t()) @ b[0].t()
    if mapping.strategy == "padded":
        reduced = torch.bmm(x[mapping.padded_rows], a.transpose(1, 2))  # [K, longest, R]
        return torch.bmm(reduced, b.transpose(1, 2)).flatten(0, 1)[mapping.valid_slots]
    parts = torch.split(x[mapping.adapted_rows], mapping.counts)
    return torch.cat([(part @ a[k].t()) @ b[k].t() for k, part in enumerate(parts)])


def lora_delta_reference(x: Tensor, a: Tensor, b: Tensor, adapter_indices: Sequence[int]) -> Tensor:
    """Reference: [N, in] -> [N, out], 0 where there is no adapter; a, b: of all adapters, adapter k at k - 1."""
    rows = [
        b[k - 1] @ (a[k - 1] @ row) if k else row.new_zeros(b.shape[1])
        for k, row in zip(adapter_indices, x, strict=True)
    ]
    return torch.stack(rows)


class Adapters:
    """The loaded adapters of a model, by name; each has an index from 1.

    Args:
        model: base model; adapters are kept in its compute dtype, on its device.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._layers = target_modules(model)
        self._indices: dict[str, int] = {}
        self._loaded: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._cache_keys: dict[str, str] = {}
        self._n_added = 0
        # Returns the adapter names of unfinished requests.
        self.names_in_use: Callable[[], Collection[str | None]] = tuple
        self._stacked_factors: tuple[tuple[int, ...], dict[str, tuple[Tensor, Tensor]]] = (), {}

    def __contains__(self, name: object) -> bool:
        return name in self._indices

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._indices)

    @property
    def n_bytes(self) -> int:
        """Bytes of the loaded factors."""
        return sum(t.nbytes for parts in self._loaded.values() for pair in parts.values() for t in pair)

    def add(self, name: str, lora: LoRA) -> int:
        """Load an adapter and return its index.

        Raises:
            ConfigError: the name is taken or empty; the adapter does not fit the model (the message names the tensor).
        """
        if not name or name in self._indices:
            raise ConfigError(f"the adapter's name is {name!r}", expected="an unused name")
        check_lora(lora, self.model, name)
        index = next(n for n in range(1, len(self._loaded) + 2) if n not in self._loaded)
        device, dtype = self.model.embedding.device, self.model.dtype
        self._loaded[index] = {
            layer: (part.a.to(device, dtype), (part.b.float() * part.scale).to(device, dtype))
            for layer, part in lora.factors.items()
        }
        self._n_added += 1
        self._indices[name], self._cache_keys[name] = index, f"{name}#{self._n_added}"
        self._stacked_factors = (), {}
        return index

    def remove(self, name: str) -> None:
        """Unload an adapter; its index may be reused.

        Raises:
            ConfigError: there is no adapter of that name, or an unfinished request uses it.
        """
        if name in self.names_in_use():
            raise ConfigError(
                f"adapter {name!r} is in use", expected="an adapter that no unfinished request uses"
            )
        del self._loaded[self.index_of(name)]
        del self._indices[name], self._cache_keys[name]
        self._stacked_factors = (), {}

    def index_of(self, name: str | None) -> int:
        """Return the index of an adapter, 0 for None.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        if name is None:
            return 0
        if name not in self._indices:
            expected = one_of(name, self.names) if self._indices else "none is loaded"
            raise ConfigError(f"adapter {name!r} is not loaded", expected=expected)
        return self._indices[name]

    def cache_key(self, name: str | None) -> str:
        """Return a key that no other adapter ever has, under any name: the seed of cache hashes."""
        return "" if name is None else self._cache_keys[name]

    def indices_of(self, names: Iterable[str | None]) -> list[int] | None:
        """Return the adapter index of each row, or None if no row has an adapter."""
        named = list(names)
        return [self.index_of(name) for name in named] if any(named) else None

    def expand_to_positions(self, adapter_indices: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Expand indices of rows to positions. starts: borders of the rows."""
        lengths = [stop - start for start, stop in pairwise(starts)]
        return [n for index, length in zip(adapter_indices, lengths, strict=True) for n in [index] * length]

    @contextmanager
    def active(self, adapter_indices: Sequence[int]) -> Iterator[None]:
        """Context in which the layers add adapter adapter_indices[n] (0: none) to position n.

        Raises:
            ConfigError: an index is not loaded; raised by a layer that receives another number of positions.
        """
        if not any(adapter_indices):
            yield
            return
        mapping = LoRAMapping(adapter_indices, self.model.embedding.device)
        for index in mapping.active_indices:
            if index not in self._loaded:
                raise ConfigError(f"adapter {index} is not loaded", expected=f"one of {sorted(self._loaded)}")
        hooks = []
        try:
            for layer, (a, b) in self._stack_factors(mapping.active_indices).items():
                hooks.append(self._layers[layer].register_forward_hook(_MultiLoRAHook(mapping, a, b, layer)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _stack_factors(self, active_indices: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> A [K, R, in] and B [K, out, R] of these adapters; cached, since steps mostly repeat them."""
        if self._stacked_factors[0] != active_indices:
            factors: dict[str, tuple[Tensor, Tensor]] = {}
            for layer in self._layers:
                pairs = [self._loaded[index].get(layer) for index in active_indices]
                loaded = [pair for pair in pairs if pair is not None]
                if not loaded:
                    continue
                rank = max(len(a) for a, _ in loaded)
                d_in, d_out = loaded[0][0].shape[1], loaded[0][1].shape[0]
                a = loaded[0][0].new_zeros(len(active_indices), rank, d_in)
                b = loaded[0][0].new_zeros(len(active_indices), d_out, rank)
                for k, pair in enumerate(pairs):
                    if pair is not None:
                        a[k, : len(pair[0])], b[k, :, : len(pair[0])] = pair
                factors[layer] = a, b
            self._stacked_factors = active_indices, factors
        return self._stacked_factors[1]


class _MultiLoRAHook:
    """The forward hook of one layer in one step."""

    def __init__(self, mapping: LoRAMapping, a: Tensor, b: Tensor, name: str) -> None:
        self.mapping, self.a, self.b, self.name = mapping, a, b, name

    def __call__(self, _layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        x: Tensor = inputs[0]
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) != self.mapping.n_positions:
            raise ConfigError(
                f"{self.name} receives {len(flat)} positions, and adapter_indices has {self.mapping.n_positions}",
                expected="equal numbers",
            )
        delta = lora_delta(flat, self.a, self.b, self.mapping).to(output.dtype)
        if self.mapping.strategy == "all":
            return output + delta.view(output.shape)
        flat_output = output.reshape(-1, output.shape[-1])
        return flat_output.index_add(0, self.mapping.adapted_rows, delta).view(output.shape)
