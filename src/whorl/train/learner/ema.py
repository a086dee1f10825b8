"""A running average of the weights: a model that was at many places at once, and often a better one than the last.

Weights late in training walk around a minimum as far as the learning rate carries them; their average lies nearer to
it (Polyak and Juditsky 1992; for networks, Izmailov et al. 2018, arXiv:1803.05407). It is worth most at a high rate:
a schedule that decays to zero does much of the same, so it is off unless asked for (`Job.ema`).

    every 10th step:  average <- b average + (1 - b) weights,   b = min(decay^10, (1 + step) / (10 + step))

Every 10th, because it is a pass over all weights, and one step moves them little. The second bound makes the
beginning a plain mean, which forgets the untrained weights. Each replica averages its share of the tensors, which lie
in shared memory and in checkpoints.
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
    """Averages of all weights of `shared`, which begin as these."""
    for name, weight in shared.weights.items():
        shared.ema[name] = weight.detach().float().clone()  # in bf16 an average would stand still
        if replicas > 1:
            shared.ema[name].share_memory_()  # type: ignore[no-untyped-call]


class EMA:
    """The averages of `shared` in training; without any, nothing happens."""

    def __init__(self, shared: SharedState, decay: float, process_group: ProcessGroup) -> None:
        self.shared, self.decay, self.process_group = shared, decay, process_group
        self.local_names = sorted(shared.ema)[process_group.rank :: process_group.size]

    @torch.no_grad()
    def on_step_end(self, steps_done: int) -> None:
        """After `done` steps in all; called by every replica."""
        if not self.shared.ema or steps_done % UPDATE_INTERVAL:
            return
        decay = min(self.decay**UPDATE_INTERVAL, (1 + steps_done) / (10 + steps_done))
        for name in self.local_names:
            self.shared.ema[name].lerp_(self.shared.weights[name].float(), 1 - decay)
        self.process_group.all_gather_scalars()

    @contextmanager
    def average_parameters(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` has the average weights."""
        self.bind(model, use_ema=True)
        try:
            yield
        finally:
            self.bind(model, use_ema=False)

    def bind(self, model: nn.Module, *, use_ema: bool) -> None:
        """Gives `model` the average weights or the trained ones; the memory is shared either way."""
        if self.shared.ema:
            for name, p in model.named_parameters():
                p.data = (self.shared.ema if use_ema else self.shared.weights)[name]
