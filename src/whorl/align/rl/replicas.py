"""Replicas of a policy: processes that each sample and train a shard of every rollout batch.

Sampling and training a small model are thousands of short operations. Splitting one operation over cores adds a
synchronization each time (`parallel/process_group.py`). With replicas each core has its own engine for its own tasks
and its own rows, and the replicas synchronize a few times per step.

All replicas run the same loop (`rl/train.py`). Cheap computations over the whole rollout batch are repeated by each
replica on the same numbers: task selection, baselines, advantages, row order. Expensive ones are sharded. The results
are
gathered in shared memory: sampled rows, and log-probabilities under other weights.

The subtle point is randomness. The seed of a completion depends on its index in the rollout batch, not on the
replica. So one replica and four sample the same completions, except for ties decided by rounding. They take the same
steps up to the rounding of sums (tested).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.config import AsyncRolloutConfig, RLConfig
from whorl.align.stage.task import choose_replicas
from whorl.errors import ConfigError
from whorl.machine.device_probe import probe
from whorl.parallel.distributed import DistributedGroup
from whorl.parallel.process_group import ProcessGroup


def choose_rl_replicas(
    config: RLConfig, network: PolicyModel, length: int, *, uses_reward_model: bool = False
) -> int:
    """Return the number of replicas of a stage.

    That is the requested number, at most one per task. By default it is one per thread where that pays, reduced to the
    smallest number with the same number of rounds. It is 1 with asynchronous workers, or if the model is not on the
    CPU.

    length: ids of a row. uses_reward_model: each replica would need its own reward model, so the default is 1.
    """
    if config.async_rollout.workers:
        return 1
    rows = config.prompts_per_step * config.group_size
    most = min(config.prompts_per_step, rows // config.update.minibatches)
    if uses_reward_model and config.run.replicas is None:
        return 1
    n = choose_replicas(
        network, config, positions=rows * length * config.steps, length=length, max_replicas=most
    )
    return (
        n
        if config.run.replicas is not None
        else -(-config.prompts_per_step // -(-config.prompts_per_step // n))
    )


def worker_devices(config: AsyncRolloutConfig, learner: torch.device) -> list[str]:
    """Return the device of each worker process, by `async_rollout.device`.

    With auto, workers never use the learner's GPU; with cuda they do if there is no other GPU. In Ray an actor gets its
    own GPU only with cuda; auto means CPU, because the cluster's devices are not visible here. Worker processes are
    spawned, as CUDA requires.

    Raises:
        ConfigError: cuda is requested and there is no GPU.
    """
    devices, gpus = ["cpu"], torch.cuda.device_count()
    if config.backend == "ray":
        devices = ["cuda"] if config.device == "cuda" else ["cpu"]
    elif config.device == "cuda" or (config.device == "auto" and learner.type == "cuda"):
        free = [f"cuda:{n}" for n in range(gpus) if learner.type != "cuda" or n != (learner.index or 0)]
        devices = free or ([str(learner)] if config.device == "cuda" and gpus else ["cpu"])
        if config.device == "cuda" and not gpus:
            raise ConfigError(
                "async_rollout.device is cuda, and torch finds no GPU", expected="a machine with a GPU",
                do="set it to auto or cpu",
            )  # fmt: skip
    return [devices[n % len(devices)] for n in range(config.workers)]


def flops_within(seconds: float) -> float:
    """The FLOPs that this machine computes at most in this time."""
    return seconds * probe().peak_flops


@dataclass
class ReplicaGroup:
    """One replica's membership of the group. buffers: shared memory by name, [R, ...] each, used to gather."""

    process_group: ProcessGroup = field(default_factory=ProcessGroup)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_single(self) -> bool:
        """Whether this is the only replica."""
        return self.process_group.size == 1

    def shard(self, n: int) -> range:
        """Return the indices of this replica's share of n tasks: contiguous, with sizes that differ by at most one."""
        size, rank = self.process_group.size, self.process_group.rank
        return range(n * rank // size, n * (rank + 1) // size)

    def shard_rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this replica's rows of sorted rows: every size-th group, short and long ones."""
        group = rows["group"][:, 0]
        group_index = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).long()]).cumsum(0)
        if int(group_index.max()) + 1 < self.process_group.size:  # fewer groups than replicas
            group_index = torch.arange(len(group_index))
        own_rows = group_index % self.process_group.size == self.process_group.rank
        return {name: t[own_rows] for name, t in rows.items()}

    def all_gather_list(self, values: Sequence[float]) -> list[float]:
        """Return the values of all replicas, concatenated in rank order."""
        return [value for each in self.process_group.all_gather_scalars(*values) for value in each]

    def all_gather_max(self, values: Sequence[float]) -> list[float]:
        """Return the largest value over all replicas, item by item."""
        gathered, n = self.all_gather_list(values), len(values)
        return [max(gathered[i::n]) for i in range(n)]

    def all_gather_rows(self, into: Mapping[str, Tensor], rows: Tensor) -> None:
        """Fill tensors [R, ...] with the rows of every replica. rows: [n] indices of this replica's rows.

        A buffer is written again only after a step, at which all replicas synchronize, so no replica reads it
        meanwhile. Ranks of a world send each other their rows.
        """
        if isinstance(self.process_group, DistributedGroup):
            own = {name: tensor[rows] for name, tensor in into.items()}
            for indices, values in self.process_group.all_gather_objects((rows, own)):
                for name, tensor in into.items():
                    tensor[indices] = values[name]
            return
        views = {
            name: self.buffers[name] if tensor.dim() == 1 else self.buffers[name][:, : tensor.shape[1]]
            for name, tensor in into.items()
        }
        for name, tensor in into.items():
            views[name][rows] = tensor[rows]
        self.process_group.all_gather_scalars()
        for name, tensor in into.items():
            tensor.copy_(views[name])
