"""Moving averages of weights: target networks, and the averaged weights of a run (EMA).

    after every `every`-th round:   average <- b average + (1 - b) source,   b = decay^every

A target network is a part of the networks that follows another part (Lillicrap et al. 2016, arXiv:1509.02971); with decay 0
it is a copy at intervals (Mnih et al. 2015, doi:10.1038/nature14236).

Without a target, the averages are separate tensors. They lie closer to a minimum than the last iterate (Polyak and
Juditsky 1992; for networks, Izmailov et al. 2018, arXiv:1803.05407), most at a high learning rate. A schedule that decays to
zero has much of the same effect, so they are off by default (`Job.ema`). Here b is at most (1 + round) / (10 + round): early
averages are a plain mean. The interval limits the cost, a pass over all weights, which the replicas share.
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
    target: prefix of the parameters that hold the average, which no update trains; None: separate tensors.
    """

    source: str
    decay: float
    every: int = 1
    target: str | None = None


class Averages:
    """Updates averages during training.

    weights: of the networks, by name. stored: averages without a target, by name, or empty.
    """

    def __init__(
        self, averages: Sequence[Average], weights: Mapping[str, Tensor], stored: Mapping[str, Tensor], group: ProcessGroup
    ) -> None:  # fmt: skip
        self.weights, self.stored, self.group = weights, stored, group
        self.pairs: list[tuple[Average, Tensor, Tensor]] = []  # of an average and its source
        for average in averages:
            own, prefix = (stored, average.source) if average.target is None else (weights, average.target)
            for name in sorted(name for name in own if name.startswith(prefix)):
                self.pairs.append((average, own[name], weights[average.source + name[len(prefix) :]]))

    @torch.no_grad()
    def on_round_end(self, rounds: int) -> None:
        """Update the averages that are due. Every replica calls this; `rounds` counts from the start of the run."""
        due = [pair for pair in self.pairs if rounds % pair[0].every == 0]
        own = slice(self.group.rank, None, self.group.size) if self.group.shares_memory else slice(None)
        for average, tensor, source in due[own]:
            b = average.decay**average.every
            if average.target is None:
                b = min(b, (1 + rounds) / (10 + rounds))
            tensor.lerp_(source.to(tensor.dtype), 1 - b)
        if due:
            self.group.all_gather_scalars()

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
