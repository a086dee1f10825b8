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
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.trainer import choose_replicas
from whorl.parallel.process_group import ProcessGroup


def choose_rl_replicas(
    config: RLConfig, network: PolicyModel, length: int, *, uses_reward_model: bool = False
) -> int:
    """How many replicas a stage takes: what is asked for, no more than there are tasks; or, by default, one a thread where
    that pays, or as many fewer as take the same turns.

    length: ids of a row; judged: by a reward model, of which each replica would have its own. Always one where workers
    sample ahead, or the model is not on the CPU.
    """
    if config.async_rollout.workers:
        return 1
    rows = config.prompts_per_step * config.group_size
    most = min(config.prompts_per_step, rows // config.minibatches)
    if uses_reward_model and config.replicas is None:
        return 1
    n = choose_replicas(
        network, config.replicas, positions=rows * length * config.steps, length=length, max_replicas=most
    )
    return (
        n if config.replicas is not None else -(-config.prompts_per_step // -(-config.prompts_per_step // n))
    )


@dataclass
class ReplicaGroup:
    """One replica's place among all; `columns`: shared memory by name, [R, ...] each, that `gather` goes through."""

    process_group: ProcessGroup = field(default_factory=ProcessGroup)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_single(self) -> bool:
        """Whether there is nobody to share with."""
        return self.process_group.size == 1

    def shard(self, n: int) -> range:
        """Which of n tasks are this replica's: a stretch as long as the others', or shorter by one."""
        size, rank = self.process_group.size, self.process_group.rank
        return range(n * rank // size, n * (rank + 1) // size)

    def shard_rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This replica's rows of sorted ones: each takes every size-th group, so that all have short and long ones."""
        group = rows["group"][:, 0]
        number = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).long()]).cumsum(0)
        if int(number.max()) + 1 < self.process_group.size:  # too few to go round
            number = torch.arange(len(number))
        mine = number % self.process_group.size == self.process_group.rank
        return {name: t[mine] for name, t in rows.items()}

    def all_gather_list(self, values: Sequence[float]) -> list[float]:
        """What all replicas have to say of their shares, one behind the other."""
        return [value for each in self.process_group.all_gather_scalars(*values) for value in each]

    def all_gather_rows(self, into: Mapping[str, Tensor], rows: Tensor) -> None:
        """Fills tensors [R, ...] with every replica's rows; `rows` [n] are the numbers of this one's.

        A column is written anew only after a step, at which all have met: so nobody reads what is being overwritten.
        """
        places = {
            name: self.buffers[name] if tensor.dim() == 1 else self.buffers[name][:, : tensor.shape[1]]
            for name, tensor in into.items()
        }
        for name, tensor in into.items():
            places[name][rows] = tensor[rows]
        self.process_group.all_gather_scalars()
        for name, tensor in into.items():
            tensor.copy_(places[name])
