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

Way = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Rule:
    """theirs -> ours by `pull`, ours -> theirs by `push`; both map as many tensors as there are names."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    pull: Way
    push: Way


def _as_is(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def same(theirs: str, ours: str) -> Rule:
    """One tensor, unchanged."""
    return Rule((theirs,), (ours,), _as_is, _as_is)


def transposed(theirs: str, ours: str) -> Rule:
    """One matrix, [d_in, d_out] at theirs."""

    def turn(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].t()]

    return Rule((theirs,), (ours,), turn, turn)


def behind(theirs: tuple[str, ...], ours: str) -> Rule:
    """Equal parts of theirs behind each other (dimension 0) in one of ours."""
    return Rule(
        theirs,
        (ours,),
        lambda tensors: [torch.cat(tensors, dim=0)],
        lambda tensors: list(tensors[0].chunk(len(theirs), dim=0)),
    )


def cut(theirs: str, ours: tuple[str, ...], transpose: bool = False) -> Rule:
    """One of theirs holds equal parts of ours behind each other; transposed, matrices [d_in, d_out] beside each other."""

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        whole = tensors[0].t() if transpose else tensors[0]
        return list(whole.chunk(len(ours), dim=0))

    def push(tensors: list[Tensor]) -> list[Tensor]:
        whole = torch.cat(tensors, dim=0)
        return [whole.t() if transpose else whole]

    return Rule((theirs,), ours, pull, push)


def converted(
    theirs: str, ours: str, pull: Callable[[Tensor], Tensor], push: Callable[[Tensor], Tensor]
) -> Rule:
    """One tensor through a function and its inverse."""
    return Rule((theirs,), (ours,), lambda tensors: [pull(tensors[0])], lambda tensors: [push(tensors[0])])
