"""Conversion rules between tensors of a family and of Whorl: two lists of names and the functions between them.

A family's table of rules describes its weights completely. The required tensors and shapes of a folder follow by applying
the rules to Whorl's shapes on the "meta" device, so a wrong file is found before the first weight is read. Each rule
holds both directions, so that reading and writing cannot diverge.

The conversions:

- the same tensor;
- a transposed one (GPT-2 keeps its matrices [d_in, d_out]);
- one tensor split into several (GPT-2's fused queries, keys and values);
- several concatenated (gate and up projection);
- rotary features in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TensorsFn = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class ConversionRule:
    """One conversion: `from_hf` maps tensors of the family to Whorl's, `to_hf` the reverse; both by lists of names."""

    hf_names: tuple[str, ...]
    names: tuple[str, ...]
    from_hf: TensorsFn
    to_hf: TensorsFn


def _identity(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def unchanged(hf_name: str, name: str) -> ConversionRule:
    """Return the rule of one unchanged tensor."""
    return ConversionRule((hf_name,), (name,), _identity, _identity)


def transposed(hf_name: str, name: str) -> ConversionRule:
    """Return the rule of one matrix that the family stores as [d_in, d_out]."""

    def turn(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].t()]

    return ConversionRule((hf_name,), (name,), turn, turn)


def concatenated(hf_names: tuple[str, ...], name: str) -> ConversionRule:
    """Return the rule that concatenates equal tensors of the family (dimension 0)."""
    return ConversionRule(
        hf_names,
        (name,),
        lambda tensors: [torch.cat(tensors, dim=0)],
        lambda tensors: list(tensors[0].chunk(len(hf_names), dim=0)),
    )


def split(hf_name: str, names: tuple[str, ...], transpose: bool = False) -> ConversionRule:
    """Return the rule that splits one tensor of the family into equal parts; transposed: matrices [d_in, d_out]."""

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        whole = tensors[0].t() if transpose else tensors[0]
        return list(whole.chunk(len(names), dim=0))

    def push(tensors: list[Tensor]) -> list[Tensor]:
        whole = torch.cat(tensors, dim=0)
        return [whole.t() if transpose else whole]

    return ConversionRule((hf_name,), names, pull, push)


def converted(
    hf_name: str, name: str, from_hf: Callable[[Tensor], Tensor], to_hf: Callable[[Tensor], Tensor]
) -> ConversionRule:
    """Return the rule of one tensor with a function and its inverse."""
    return ConversionRule(
        (hf_name,), (name,), lambda tensors: [from_hf(tensors[0])], lambda tensors: [to_hf(tensors[0])]
    )
