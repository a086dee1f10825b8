"""Keeping mixtures of experts in use while a model trains: two losses, a bias, and figures of who was used.

A router that is left alone sends everything to a few experts. Against that each forward adds, for every layer of
experts, the load-balancing loss and the router's z-loss (`objectives/routing.py`), and each step moves the balancing
bias of the routers that have one (DeepSeek-V3, arXiv:2412.19437, section 2.1.2: no gradient, so nothing of the task is
given up for it).

The subtle part is *whose* load. A step is many micro-batches on many replicas, and how it was cut must not change it. So
loads are summed over micro-batches here and over replicas by an exchange, and rank 0 moves the bias, which lies in shared
memory and in checkpoints like a weight. The balancing loss is a product of two means, of which the load has no gradient:
it takes the load of the whole batch (as Qiu et al. 2025, arXiv:2501.11873, find better than that of a part), and that of
the step before, since the whole of this one is known only when all its parts have gone by. It goes into checkpoints too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whorl.nn.experts import MixtureOfExperts, Routing
from whorl.nn.experts.monitor import evenness
from whorl.objectives import Loss
from whorl.objectives.routing import load_balance, router_z
from whorl.parallel.process_group import World
from whorl.train.config import RoutingConfig


class Mixtures:
    """The mixtures of experts of one network in training; false if it has none.

    Args:
        world: of the replicas; `end_step` is called by all of them.
        loads: `state` of the run that is continued.
    """

    def __init__(
        self,
        network: nn.Module,
        config: RoutingConfig,
        world: World,
        loads: list[list[float]] | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.layers = [m for m in network.modules() if isinstance(m, MixtureOfExperts)]
        self.wished = [torch.zeros(m.router.n_experts, dtype=torch.float64) for m in self.layers]
        self.counts = [torch.zeros_like(w) for w in self.wished]
        # even at first: then the loss is 1 and pulls nowhere
        self.before = (
            [torch.ones_like(w) for w in self.wished]
            if loads is None
            else [torch.tensor(load, dtype=torch.float64) for load in loads]
        )
        self.seen: list[tuple[Tensor, Tensor]] = [(w.clone(), w.clone()) for w in self.wished]

    @property
    def random(self) -> bool:
        """Whether experts or tokens are left out by chance in training."""
        return any(m.router.expert_dropout or m.router.token_dropout for m in self.layers)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def loss(self, loss: Loss, records: list[Routing], mask: Tensor) -> Loss:
        """`loss` of a micro-batch and what its routing adds, summed over the same tokens.

        mask: of the targets, any shape. Metrics gain `balance` (1 = even) and `router_z`, means over the layers.
        """
        balance, z = loss.total.new_zeros(()), loss.total.new_zeros(())
        for n, record in enumerate(records):
            self.wished[n] += record.wished.double().cpu()
            self.counts[n] += record.counts.double().cpu()
            loads = self.before[n].to(record.scores.device)
            balance = balance + load_balance(record.scores, loads, mask.flatten()).total
            z = z + router_z(record.logits, mask.flatten()).total
        total = loss.total + self.config.balance * balance + self.config.z * z
        layers = len(self.layers)
        figures = {"balance": balance.detach() / layers, "router_z": z.detach() / layers}
        return Loss(total, loss.count, {**loss.metrics, **figures})

    @torch.no_grad()
    def end_step(self) -> None:
        """After an update: the biases follow the loads of all replicas."""
        if not self.layers:
            return
        mine = [float(x) for part in (*self.wished, *self.counts) for x in part]
        summed = torch.tensor(self.world.total(*mine), dtype=torch.float64)
        sizes = [len(part) for part in (*self.wished, *self.counts)]
        parts = list(torch.split(summed, sizes))
        wished, counts = parts[: len(self.layers)], parts[len(self.layers) :]
        for n, layer in enumerate(self.layers):
            if layer.router.balance_bias is not None and self.world.rank == 0:
                layer.router.balance(wished[n], self.config.bias_rate)
            self.before[n] = wished[n].clone()
            self.seen[n][0].add_(wished[n])
            self.seen[n][1].add_(counts[n])
            self.wished[n].zero_()
            self.counts[n].zero_()
        self.world.exchange()

    @property
    def state(self) -> list[list[float]]:
        """What the next step's balancing loss takes the loads from."""
        return [before.tolist() for before in self.before]

    def forget(self) -> None:
        """After a step that was not taken: its loads move no bias."""
        for part in (*self.wished, *self.counts):
            part.zero_()

    def figures(self) -> dict[str, float]:
        """Since the last call, of each layer: the share of every expert, the Gini coefficient (0 = even), the busiest
        expert's load over the mean, and the share of wishes that found no place."""
        found: dict[str, float] = {}
        for n, (wished, counts) in enumerate(self.seen):
            if counts.any():
                even = evenness(counts, wished)
                found |= {f"experts/{n}/share/{e}": float(c) for e, c in enumerate(even.pop("share"))}
                found |= {f"experts/{n}/{name}": float(value) for name, value in even.items()}
            wished.zero_()
            counts.zero_()
        return found
