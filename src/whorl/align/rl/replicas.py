"""Replicas of a policy: processes that answer a share of each record's tasks and learn from a share of its rows.

Why processes. Sampling and learning of a small model are thousands of short operations, and operations split over cores
wait for one another each time (`parallel/process_group.py`). Here each core has its own engine for its own tasks, and its own rows to
learn from; they meet a few times a step.

All replicas run the same loop (`learn.py`). What depends on the whole record, and is cheap, each finds out for itself from
the same numbers: which tasks are drawn, who is compared with whom, advantages, the order of rows. What is costly is shared
out, and `gather` puts it together in shared memory: the sampled rows, and what was asked of other weights.

The subtle part is that nothing is drawn differently. An answer's seed follows from its place in the record, not from who
samples it, so one replica and four sample the same answers, up to ties that rounding decides, and take the same steps up to
the rounding of sums (a test).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whorl.align.config import RLConfig
from whorl.align.model.policy_model import Network
from whorl.align.stage.trainer import replicas_for
from whorl.parallel.process_group import World


def replicas_of(config: RLConfig, network: Network, length: int, *, judged: bool = False) -> int:
    """How many replicas a stage takes: what is asked for, no more than there are tasks; or, by default, one a thread where
    that pays, or as many fewer as take the same turns.

    length: ids of a row; judged: by a reward model, of which each replica would have its own. Always one where workers
    sample ahead, or the model is not on the CPU.
    """
    if config.ahead.workers:
        return 1
    rows = config.prompts * config.answers
    most = min(config.prompts, rows // config.minibatches)
    if judged and config.replicas is None:
        return 1
    n = replicas_for(
        network, config.replicas, positions=rows * length * config.steps, length=length, most=most
    )
    return n if config.replicas is not None else -(-config.prompts // -(-config.prompts // n))


@dataclass
class Peers:
    """One replica's place among all; `columns`: shared memory by name, [R, ...] each, that `gather` goes through."""

    world: World = field(default_factory=World)
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to share with."""
        return self.world.size == 1

    def share(self, n: int) -> range:
        """Which of n tasks are this replica's: a stretch as long as the others', or shorter by one."""
        size, rank = self.world.size, self.world.rank
        return range(n * rank // size, n * (rank + 1) // size)

    def every(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This replica's rows of sorted ones: each takes every size-th group, so that all have short and long ones."""
        group = rows["group"][:, 0]
        number = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).long()]).cumsum(0)
        if int(number.max()) + 1 < self.world.size:  # too few to go round
            number = torch.arange(len(number))
        mine = number % self.world.size == self.world.rank
        return {name: t[mine] for name, t in rows.items()}

    def told(self, values: Sequence[float]) -> list[float]:
        """What all replicas have to say of their shares, one behind the other."""
        return [value for each in self.world.exchange(*values) for value in each]

    def gather(self, into: Mapping[str, Tensor], rows: Tensor) -> None:
        """Fills tensors [R, ...] with every replica's rows; `rows` [n] are the numbers of this one's.

        A column is written anew only after a step, at which all have met: so nobody reads what is being overwritten.
        """
        places = {
            name: self.columns[name] if tensor.dim() == 1 else self.columns[name][:, : tensor.shape[1]]
            for name, tensor in into.items()
        }
        for name, tensor in into.items():
            places[name][rows] = tensor[rows]
        self.world.exchange()
        for name, tensor in into.items():
            tensor.copy_(places[name])
