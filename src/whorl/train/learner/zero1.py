"""Partition of the optimizer work: parameters over replicas, balanced by cost (ZeRO stage 1).

The optimizers define the cost of a parameter, and which parameters are updated in the same step. Rows of lookup tables
are partitioned by row number (`learner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from whorl.train.learner.update import Update
from whorl.train.optim.optimizer import get_optimizer
from whorl.train.optim.optimizers import greedy_balance


def partition_parameters(update: Update, shapes: Mapping[str, torch.Size], world_size: int) -> list[set[str]]:
    """Names of the dense parameters that each rank updates, balanced within each group of each optimizer."""
    owned = [set[str]() for _ in range(world_size)]
    for rule in update.dense_optimizers:
        optimizer = get_optimizer(rule)
        for group in optimizer.step_groups(update, {name: shapes[name] for name in update.names_for(rule)}):
            costs = [(name, optimizer.cost(shapes[name])) for name in group]
            for rank, mine in enumerate(greedy_balance(costs, world_size)):
                owned[rank] |= mine
    return owned
