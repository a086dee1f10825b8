"""Roofline (Williams et al. 2009): the operators of a step, and what bounds each on a device.

    seconds of an operator >= max(FLOPs / peak, bytes / bandwidth)

With m positions, weights [n, k] and e bytes per number, a product has 2 m n k FLOPs and moves e (m k + n k + m n) bytes;
training runs three of the kind. Attention moves queries, keys, values and output once, as a fused kernel does; in a decode
step it reads the cached keys and values. A weight of E experts with top_k is read if one of m positions chooses it:
1 - (1 - top_k / E)^m. FLOPs are those of matrix products (`models/transformer_cost.py`), so norms, look-ups and the update
of the weights have bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from whorl.models.transformer_cost import mixer_cost
from whorl.plan.accounting.devices import Device
from whorl.plan.accounting.model_cost import TRAINING_BYTES, ModelCost, part_of
from whorl.plan.accounting.number_formats import number_format

STEPS = ("training", "prefill", "decode")


class Operator(NamedTuple):
    """An operator over all layers: its part of the network, FLOPs, and the bytes that it moves at least."""

    name: str
    part: str
    flops: float
    bytes: float

    def on(self, device: Device, dtype: str) -> dict[str, Any]:
        """Return the fields, "intensity", "bound" and least "seconds" on a device. Raises ConfigError as `Device.peak`."""
        compute, memory = self.flops / device.peak(dtype), self.bytes / device.bandwidth
        found = {**self._asdict(), "intensity": self.flops / self.bytes, "seconds": max(compute, memory)}
        return {**found, "bound": "compute" if compute >= memory else "memory"}


def operators(cost: ModelCost, step: str, rows: int, length: int, *, masked: bool = True) -> list[Operator]:
    """Return the operators of a step. masked: False counts the pairs that a mask excludes, too, as torch's counter does.

    step: "training"; "prefill": logits of the last positions only; "decode": one position after `length` in each row.
    """
    found = dict[str, Operator]()
    for one in _operators(cost, step, rows, length, masked):
        old = found.get(one.name, one._replace(flops=0.0, bytes=0.0))
        found[one.name] = one._replace(flops=old.flops + one.flops, bytes=old.bytes + one.bytes)
    return list(found.values())


def _operators(cost: ModelCost, step: str, rows: int, length: int, masked: bool) -> Iterator[Operator]:
    model, c, e, w = cost.model, cost.config, cost.dtype.itemsize, number_format(cost.format).bits / 8
    times, tokens = 3 if step == "training" else 1, rows * (1 if step == "decode" else length)

    def product(name: str, part: str, m: float, shape: tuple[int, ...], read: float = 1.0) -> Operator:
        n, k = shape[0], shape[-1]
        return Operator(name, part, times * 2.0 * m * n * k, times * (e * m * (n + k) + w * read * n * k))

    yield Operator("embedding", "embedding", 0.0, times * e * 2.0 * tokens * c.d_model)
    for name, p in model.blocks.named_parameters():
        inside, part = name.partition(".")[2].removesuffix(".weight"), part_of(f"blocks.{name}")
        if part == "norms":
            yield Operator("norms", part, 0.0, times * e * 2.0 * tokens * p.numel())
        elif part == "experts" and c.experts is not None:
            share = c.experts.top_k / c.experts.n_experts
            read = 1 - (1 - share) ** tokens
            yield product(inside.rstrip(".0123456789"), part, tokens * share, tuple(p.shape), read)
        elif p.dim() > 1 and p.shape[-1] > 1:
            yield product(inside, part, tokens, tuple(p.shape))
    for block, mixer in zip(model.blocks, c.layer_mixers(), strict=True):
        flops, moved = mixer_cost(mixer, block, c.d_model, length, decodes=step == "decode", masked=masked)
        yield Operator("scores", "attention", times * tokens * flops, times * tokens * e * moved)
    yield product("head", "head", rows if step == "prefill" else tokens, tuple(model.head_weight.shape))
    if step == "training":
        sizes, (weights, gradients, state) = model.params(), TRAINING_BYTES["bf16"]
        dense = float(
            sizes["total"] - sizes["ngram"]
        )  # rows of n-gram tables are updated where they are read
        yield Operator("update", "update", 0.0, (gradients + weights + 2 * state) * dense)
