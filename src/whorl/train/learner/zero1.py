"""Who updates what, and when: parameters dealt out to replicas, and Muon's matrices to turns, evenly by what they cost.

An update of a matrix is an orthogonalisation, of anything else a few operations a number; rows of look-up tables are dealt
out by their number (`learner.py`). Greedily, the costliest first, each to whoever has least so far (Graham 1969: at most 4/3
of the best share). The subtle part is that names break ties, so that every replica finds the same shares by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from whorl.train.learner.update import Update
from whorl.train.optim.optimizers import POLAR_EXPRESS


def update_groups(update: Update, shapes: Mapping[str, torch.Size]) -> list[set[str]]:
    """Muon's matrices in `matrix_every` turns of about the same cost; the same on any number of replicas."""
    return greedy_balance(
        [(n, _orthogonalization_flops(shapes[n])) for n in update.names_for("muon")], update.muon_every
    )


def partition_parameters(update: Update, shapes: Mapping[str, torch.Size], world_size: int) -> list[set[str]]:
    """Names of the dense parameters that each rank updates: those of each turn, and the rest, evenly by their cost."""
    owned = [set[str]() for _ in range(world_size)]
    costs = [
        [(n, _orthogonalization_flops(shapes[n])) for n in turn] for turn in update_groups(update, shapes)
    ]
    for cost in (*costs, [(n, float(shapes[n].numel())) for n in update.names_for("adamw")]):
        for rank, mine in enumerate(greedy_balance(cost, world_size)):
            owned[rank] |= mine
    return owned


def _orthogonalization_flops(shape: torch.Size) -> float:
    """FLOPs of orthogonalising a matrix."""
    short, long = sorted(shape)
    return 2.0 * len(POLAR_EXPRESS) * short * short * (2 * long + short)


def greedy_balance(costs: list[tuple[str, float]], parts: int) -> list[set[str]]:
    """Greedily, the costliest first, to the least loaded part."""
    load, names = [0.0] * parts, [set[str]() for _ in range(parts)]
    for name, cost in sorted(costs, key=lambda item: (-item[1], item[0])):
        least = load.index(min(load))
        load[least] += cost
        names[least].add(name)
    return names
