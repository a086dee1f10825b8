"""Partition of the optimizer work: parameters over replicas, balanced by cost (ZeRO stage 1).

The optimizers define the cost of a parameter, and which parameters are updated in the same step. Rows of lookup tables
are partitioned by row number (`learner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from whorl.parallel.parameter_store import ParameterStore, State, open_store
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.update import Update
from whorl.train.optim.optimizer import get_optimizer
from whorl.train.optim.optimizers import greedy_balance


def partition_parameters(update: Update, shapes: Mapping[str, torch.Size], world_size: int) -> list[set[str]]:
    """Names of the dense parameters that each rank updates, balanced within each group of each optimizer."""
    owned = [set[str]() for _ in range(world_size)]
    for rule in update.dense_optimizers:
        optimizer = get_optimizer(rule)
        named = {name: shapes[name] for name in update.names_for(rule) if name in shapes}
        for group in optimizer.step_groups(update, named):
            costs = [(name, optimizer.cost(shapes[name])) for name in group]
            for rank, mine in enumerate(greedy_balance(costs, world_size)):
                owned[rank] |= mine
    return owned


def open_update_store(
    update: Update, shapes: Mapping[str, torch.Size], group: ProcessGroup, state: State, laid: Any
) -> ParameterStore:
    """Return the parameter store of an update. shapes: of the whole parameters; laid: of a model under a layout."""
    tables = update.names_for("sparse_adagrad")
    if laid is not None:
        from whorl.parallel.layout_store import LayoutStore  # imports FSDP and pipelines

        def balance(names: list[str], ranks: int) -> list[set[str]]:
            return partition_parameters(update, {name: shapes[name] for name in names}, ranks)

        wholes = [n for rule in update.dense_optimizers if rule != "adamw" for n in update.names_for(rule)]
        return LayoutStore(laid, group, state, wholes, tables, balance)
    owner = {
        n: rank for rank, names in enumerate(partition_parameters(update, shapes, group.size)) for n in names
    }
    return open_store(group, state, {n: owner[n] for n in shapes if n in state.gradients}, tables)
