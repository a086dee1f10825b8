"""Exponential moving average (EMA) of the weights.

The average lies closer to a minimum than the last iterate (Polyak and Juditsky 1992; for networks, Izmailov et al.
2018, arXiv:1803.05407). It helps most at a high learning rate. A schedule that decays to zero has much of the same
effect, so the EMA is off by default (`Job.ema`).

    every 10th step:  average <- b average + (1 - b) weights,   b = min(decay^10, (1 + step) / (10 + step))

The interval limits the cost: one update is a pass over all weights. The second bound on b makes early averages a plain
mean, which discards the untrained weights. Each replica averages its share of the tensors. The averages are in shared
memory and in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.learner import SharedState

UPDATE_INTERVAL = 10


def allocate_ema(shared: SharedState, replicas: int) -> None:
    """Allocate averages of all weights of `shared`, initialized with the weights."""
    for name, weight in shared.weights.items():
        shared.ema[name] = weight.detach().float().clone()  # in bf16 small changes would round to zero
        if replicas > 1:
            shared.ema[name].share_memory_()  # type: ignore[no-untyped-call]


class EMA:
    """Updates the averages of `shared` during training; does nothing if `shared.ema` is empty."""

    def __init__(self, shared: SharedState, decay: float, process_group: ProcessGroup) -> None:
        self.shared, self.decay, self.process_group = shared, decay, process_group
        self.local_names = sorted(shared.ema)[process_group.rank :: process_group.size]

    @torch.no_grad()
    def on_step_end(self, steps_done: int) -> None:
        """Update the averages.

        Every replica calls this after each step; `steps_done` counts from the start of the run.
        """
        if not self.shared.ema or steps_done % UPDATE_INTERVAL:
            return
        decay = min(self.decay**UPDATE_INTERVAL, (1 + steps_done) / (10 + steps_done))
        for name in self.local_names:
            self.shared.ema[name].lerp_(self.shared.weights[name].float(), 1 - decay)
        self.process_group.all_gather_scalars()

    @contextmanager
    def average_parameters(self, model: nn.Module) -> Iterator[None]:
        """Within the context, `model` has the average weights."""
        self.bind(model, use_ema=True)
        try:
            yield
        finally:
            self.bind(model, use_ema=False)

    def bind(self, model: nn.Module, *, use_ema: bool) -> None:
        """Point the parameters of `model` at the averages or at the trained weights. Both stay in shared memory."""
        if self.shared.ema:
            for name, p in model.named_parameters():
                p.data = (self.shared.ema if use_ema else self.shared.weights)[name]
