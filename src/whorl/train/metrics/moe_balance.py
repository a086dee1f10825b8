"""Load balancing of mixtures of experts: two auxiliary losses, a router bias, and load metrics.

An unconstrained router sends most tokens to a few experts. So each forward pass adds, for every expert layer, the
load-balancing loss and the router's z-loss (`objectives/routing.py`). Each step moves the balancing bias of routers
that have one (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), which needs no gradient.

The subtle point is the *load*. A step consists of micro-batches on replicas, and the split must not change the result.
So loads are summed over micro-batches here and over replicas by an all-reduce, and rank 0 moves the bias in shared
memory. The load-balancing loss is a product of two means, of which the load has no gradient. It uses the load of the
whole batch (better than a micro-batch's, Qiu et al. 2025, arXiv:2501.11873), taken from the previous step, since this
step's is complete only at its end. Loads and biases are in checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whorl.nn.experts import MixtureOfExperts, Routing
from whorl.nn.experts.monitor import load_stats
from whorl.objectives.next_token import Loss
from whorl.objectives.routing import load_balance, router_z
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import derive
from whorl.train.config import RoutingConfig


class MoEBalancer:
    """Balances the mixtures of experts of one network; falsy if it has none.

    Args:
        process_group: of the replicas; all of them call `on_step_end`.
        state: of the run to continue.
    """

    def __init__(
        self,
        network: nn.Module,
        config: RoutingConfig,
        process_group: ProcessGroup,
        state: list[list[float]] | None = None,
    ) -> None:
        self.config, self.process_group = config, process_group
        found = {n: m for n, m in network.named_modules() if isinstance(m, MixtureOfExperts)}
        self.names, self.layers = [*found], [*found.values()]
        self.requested = [torch.zeros(m.router.n_experts, dtype=torch.float64) for m in self.layers]
        self.assigned = [torch.zeros_like(w) for w in self.requested]
        # uniform at first: the loss is then 1 without a gradient
        self.previous_load = [torch.ones_like(w) for w in self.requested]
        self.logged_load: list[tuple[Tensor, Tensor]] = [(w.clone(), w.clone()) for w in self.requested]
        for part, load in zip(self._kept(), state, strict=True) if state is not None else ():
            part.copy_(torch.tensor(load, dtype=torch.float64))

    def draw_rows(self, seed: int, rows: Tensor | None) -> None:
        """Draw the dropout of the next micro-batch by row (`MoERouter.draw_rows`). seed: of the step."""
        for name, layer in zip(self.names, self.layers, strict=True):
            layer.router.draw_rows(derive(seed, name), rows)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def add_aux_losses(
        self, loss: Loss, routings: list[Routing], mask: Tensor, scale: Tensor | float = 1.0, first: int = 0
    ) -> Loss:
        """Return `loss` of a micro-batch plus its auxiliary losses, summed over the same tokens.

        mask: of the targets, any shape. scale: of the sums, where `loss` is no sum over tokens. first: layer of the
        first routing. Adds the metrics `moe/aux_loss` (1 = balanced) and `moe/z_loss`, means over the layers.
        """
        balance, z = loss.total.new_zeros(()), loss.total.new_zeros(())
        for n, record in enumerate(routings, first):
            self.requested[n] += record.requested.double().cpu()
            self.assigned[n] += record.counts.double().cpu()
            loads = self.previous_load[n].to(record.scores.device)
            balance = balance + load_balance(record.scores, loads, mask.flatten()).total * scale
            z = z + router_z(record.logits, mask.flatten()).total * scale
        total = loss.total + self.config.aux_loss_coef * balance + self.config.z_loss_coef * z
        layers = len(self.layers)
        metrics = {"moe/aux_loss": balance.detach() / layers, "moe/z_loss": z.detach() / layers}
        return Loss(total, loss.count, {**loss.metrics, **metrics})

    @torch.no_grad()
    def on_step_end(self, steps_done: int) -> None:
        """Move the biases by the loads of all replicas, unless they are frozen; called after an update, which counts."""
        if not self.layers:
            return
        mine = [float(x) for part in (*self.requested, *self.assigned) for x in part]
        summed = torch.tensor(self.process_group.all_reduce_scalars(*mine), dtype=torch.float64)
        sizes = [len(part) for part in (*self.requested, *self.assigned)]
        parts = list(torch.split(summed, sizes))
        requested, counts = parts[: len(self.layers)], parts[len(self.layers) :]
        limit = self.config.freeze_router_step
        moves = limit is None or steps_done <= limit
        for n, layer in enumerate(self.layers):
            is_own = self.process_group.rank == 0 or not self.process_group.shares_memory
            if moves and layer.router.balance_bias is not None and is_own:
                layer.router.update_balance_bias(requested[n], self.config.bias_update_rate)
            self.previous_load[n] = requested[n].clone()
            self.logged_load[n][0].add_(requested[n])
            self.logged_load[n][1].add_(counts[n])
            self.requested[n].zero_()
            self.assigned[n].zero_()
        self.process_group.all_gather_scalars()

    @property
    def state(self) -> list[list[float]]:
        """The loads for the next step's load-balancing loss, and those since the last report."""
        return [part.tolist() for part in self._kept()]

    def _kept(self) -> list[Tensor]:
        return [*self.previous_load, *(part for parts in self.logged_load for part in parts)]

    def discard_step(self) -> None:
        """Discard the loads of a step that was skipped."""
        for part in (*self.requested, *self.assigned):
            part.zero_()

    def pop_metrics(self) -> dict[str, float]:
        """Return the load metrics of each layer since the last call.

        Each expert's load fraction, Gini coefficient (0 = balanced), maximum over mean load, load entropy, dropped
        fraction.
        """
        found: dict[str, float] = {}
        for n, (requested, counts) in enumerate(self.logged_load):
            if counts.any():
                even = load_stats(counts, requested)
                found |= {
                    f"moe/{n}/load_fraction/{e}": float(c) for e, c in enumerate(even.pop("load_fraction"))
                }
                found |= {f"moe/{n}/{name}": float(value) for name, value in even.items()}
            requested.zero_()
            counts.zero_()
        return found
