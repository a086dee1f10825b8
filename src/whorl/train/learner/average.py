"""Moving averages of weights: target networks, and the averaged weights of a run (EMA).

    after every `every`-th round:   average <- b average + (1 - b) source,   b = decay^every

A target network is a part of the learner's networks that follows another part (Lillicrap et al. 2016, arXiv:1509.02971).
With decay 0 it is a copy at intervals (Mnih et al. 2015, doi:10.1038/nature14236).

Without a target, the averages are stored beside the weights. The average lies closer to a minimum than the last iterate
(Polyak and Juditsky 1992; for networks, Izmailov et al. 2018, arXiv:1803.05407). It helps most at a high learning rate. A
schedule that decays to zero has much of the same effect, so it is off by default (`Job.ema`). Here b is at most
(1 + round) / (10 + round). So early averages are a plain mean, which discards the untrained weights.

The interval limits the cost: one update is a pass over all weights. Each replica averages its share of the tensors. The
averages are in shared memory and in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whorl.parallel.process_group import ProcessGroup

EMA_INTERVAL = 10  # steps between two updates of a run's averages


@dataclass(frozen=True)
class Average:
    """A moving average of the parameters whose names start with `source`.

    decay: per round, 0 to 1. every: rounds between two updates.
    target: prefix of the parameters that hold the average, which no update trains; None: stored beside the weights.
    """

    source: str
    decay: float
    every: int = 1
    target: str | None = None

    def factor(self, rounds: int) -> float:
        """Weight of the old average in the update after `rounds` rounds."""
        decay = self.decay**self.every
        return decay if self.target is not None else min(decay, (1 + rounds) / (10 + rounds))


class Averages:
    """Updates averages during training.

    Args:
        weights: of the networks, by name. stored: averages beside them, by name; empty if there are none.
    """

    def __init__(
        self,
        averages: Sequence[Average],
        weights: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        process_group: ProcessGroup,
    ) -> None:
        self.weights, self.stored, self.process_group = weights, stored, process_group
        self.pairs: list[tuple[Average, list[tuple[Tensor, Tensor]]]] = []  # of this rank: (average, source)
        for average in averages:
            own, prefix = (stored, average.source) if average.target is None else (weights, average.target)
            names = sorted(name for name in own if name.startswith(prefix))
            found = [(own[name], weights[average.source + name[len(prefix) :]]) for name in names]
            if found:
                self.pairs.append((average, found[process_group.rank :: process_group.size]))

    @torch.no_grad()
    def on_round_end(self, rounds: int) -> None:
        """Update the averages that are due. Every replica calls this; `rounds` counts from the start of the run."""
        due = [(average, pairs) for average, pairs in self.pairs if rounds % average.every == 0]
        for average, pairs in due:
            for tensor, source in pairs:
                tensor.lerp_(source.to(tensor.dtype), 1 - average.factor(rounds))
        if due:
            self.process_group.all_gather_scalars()

    @contextmanager
    def average_parameters(self, model: nn.Module) -> Iterator[None]:
        """Within the context, `model` has the stored averages."""
        self.bind(model, use_average=True)
        try:
            yield
        finally:
            self.bind(model, use_average=False)

    def bind(self, model: nn.Module, *, use_average: bool) -> None:
        """Point the parameters of `model` at the averages or at the trained weights. Both stay in shared memory."""
        if self.stored:
            for name, p in model.named_parameters():
                p.data = (self.stored if use_average else self.weights)[name]
