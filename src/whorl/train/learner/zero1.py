"""Partition of the optimizer work: parameters over replicas (ZeRO stage 1), Muon's matrices over groups, balanced by cost.

A matrix costs its orthogonalization; any other parameter costs a few operations per number. Rows of lookup tables are
partitioned by row number (`learner.py`). The algorithm is greedy, largest cost first, to the least loaded part (Graham
1969:
at most 4/3 of the optimum). Ties are broken by name, so every replica computes the same partition.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from whorl.train.learner.update import Update
from whorl.train.optim.optimizers import POLAR_EXPRESS


def update_groups(update: Update, shapes: Mapping[str, torch.Size]) -> list[set[str]]:
    """Split Muon's matrices into `muon_every` groups of similar cost; independent of the number of replicas."""
    return greedy_balance(
        [(n, _orthogonalization_flops(shapes[n])) for n in update.names_for("muon")], update.muon_every
    )


def partition_parameters(update: Update, shapes: Mapping[str, torch.Size], world_size: int) -> list[set[str]]:
    """Names of the dense parameters that each rank updates, balanced within each Muon group and over the rest."""
    owned = [set[str]() for _ in range(world_size)]
    costs = [
        [(n, _orthogonalization_flops(shapes[n])) for n in turn] for turn in update_groups(update, shapes)
    ]
    for cost in (*costs, [(n, float(shapes[n].numel())) for n in update.names_for("adamw")]):
        for rank, mine in enumerate(greedy_balance(cost, world_size)):
            owned[rank] |= mine
    return owned


def _orthogonalization_flops(shape: torch.Size) -> float:
    """FLOPs of the orthogonalization of one matrix."""
    short, long = sorted(shape)
    return 2.0 * len(POLAR_EXPRESS) * short * short * (2 * long + short)


def greedy_balance(costs: list[tuple[str, float]], parts: int) -> list[set[str]]:
    """Assign items, largest cost first, to the least loaded part."""
    load, names = [0.0] * parts, [set[str]() for _ in range(parts)]
    for name, cost in sorted(costs, key=lambda item: (-item[1], item[0])):
        least = load.index(min(load))
        load[least] += cost
        names[least].add(name)
    return names
