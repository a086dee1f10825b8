"""How tensors of others become ours, and back: a rule is a pair of lists of names and the two ways between them.

A family's table of rules is all there is to say about its weights. Whatever is to be known of it follows: which tensors a
folder must hold, and of which shape, by pushing our own shapes through the rules without any data (the "meta" device);
so a wrong file is found before the first weight is read. And since both ways stand side by side, reading and
writing cannot drift apart.

The ways that occur: the same tensor; a transposed one (GPT-2 keeps its matrices [d_in, d_out]); one of theirs cut into
several of ours along its first or last dimension (GPT-2's fused queries, keys and values); several of theirs
behind each other in one of ours (gate and up projection); rotary features in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TensorsFn = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class ConversionRule:
    """theirs -> ours by `pull`, ours -> theirs by `push`; both map as many tensors as there are names."""

    hf_names: tuple[str, ...]
    names: tuple[str, ...]
    from_hf: TensorsFn
    to_hf: TensorsFn


def _identity(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def unchanged(hf_name: str, name: str) -> ConversionRule:
    """One tensor, unchanged."""
    return ConversionRule((hf_name,), (name,), _identity, _identity)


def transposed(hf_name: str, name: str) -> ConversionRule:
    """One matrix, [d_in, d_out] at theirs."""

    def turn(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].t()]

    return ConversionRule((hf_name,), (name,), turn, turn)


def concatenated(hf_names: tuple[str, ...], name: str) -> ConversionRule:
    """Equal parts of theirs behind each other (dimension 0) in one of ours."""
    return ConversionRule(
        hf_names,
        (name,),
        lambda tensors: [torch.cat(tensors, dim=0)],
        lambda tensors: list(tensors[0].chunk(len(hf_names), dim=0)),
    )


def split(hf_name: str, names: tuple[str, ...], transpose: bool = False) -> ConversionRule:
    """One of theirs holds equal parts of ours behind each other; transposed, matrices [d_in, d_out] beside each other."""

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
    """One tensor through a function and its inverse."""
    return ConversionRule(
        (hf_name,), (name,), lambda tensors: [from_hf(tensors[0])], lambda tensors: [to_hf(tensors[0])]
    )
