"""Pretraining under a layout (`parallel/layout.py`): each rank trains its part of the model.

The learner gets whole passes, so that a schedule can run their micro-batches. Its metrics come from the ranks that have a
loss or experts; the other ranks add zeros.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.files import write_atomic
from whorl.models import LanguageModel
from whorl.models.parallel_parts import check_layout, tensor_shards
from whorl.nn.compiler import compiled
from whorl.nn.experts import MixtureOfExperts, MoERouter
from whorl.objectives.next_token import Loss
from whorl.parallel.layout import AXES, LaidOut, Layout, Mesh, apply_layout
from whorl.parallel.process_group import ProcessGroup, world_size
from whorl.parallel.traffic import Traffic
from whorl.train.job import Job
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer


class StageBalancer:
    """A `MoEBalancer` of some layers. Ranks of a tensor axis see the same tokens, and one of them adds losses."""

    def __init__(self, whole: MoEBalancer, first: int, counts: bool) -> None:
        self.whole, self.first, self.counts = whole, first, counts

    def __bool__(self) -> bool:
        return bool(self.whole)

    def add_aux_losses(self, loss: Loss, routings: list[Any], mask: Tensor) -> Loss:
        """Return `loss` with the auxiliary losses of these layers."""
        if self.counts:
            return self.whole.add_aux_losses(loss, routings, mask, first=self.first)
        zero = loss.total.new_zeros(())
        return Loss(loss.total, loss.count, {**loss.metrics, "moe/aux_loss": zero, "moe/z_loss": zero})


class LaidOutObjective:
    """Forward and backward of a pass: a list of micro-batches -> the sum of this rank's losses, without a graph."""

    def __init__(self, laid: LaidOut) -> None:
        self.laid = laid

    def __call__(self, micro_batches: Any) -> Loss:
        losses: Sequence[Loss] = self.laid.run(micro_batches)
        counts = self.laid.mesh.at["tp"] == 0

        def added(values: list[Tensor]) -> Tensor:
            return torch.stack([value.detach().double() for value in values]).sum() * counts

        metrics = {name: added([each.metrics[name] for each in losses]) for name in losses[0].metrics}
        return Loss(added([each.total for each in losses]), added([each.count for each in losses]), metrics)


def lay_out(model: LanguageModel, job: Job, moe: MoEBalancer) -> LaidOut:
    """Return this rank's part of `model`, which stays whole. Every rank of the job's layout calls this.

    Raises:
        ConfigError: the layout does not fit the model, the rows or the number of ranks, or excludes a setting of the job.
    """
    layout = Layout.parse(job.layout or "")
    check_layout(model, layout, job.batch_size, job.seq_len)
    experts = job.model.experts
    unsupported = {
        f"objective = {job.objective!r}": job.objective != "next_token",
        "dtype = 'float16'": job.dtype == "float16",
        f"ema = {job.ema}": job.ema > 0,
        "bf16_weights": job.bf16_weights is not None,
        "long_ratio with cp": job.long_ratio > 0 and layout.cp > 1,
        "experts with dropout": experts is not None and bool(experts.expert_dropout or experts.token_dropout),
    }
    if wrong := [name for name, is_wrong in unsupported.items() if is_wrong]:
        raise ConfigError(f"layout {job.layout!r} excludes {wrong[0]}", do="remove one of them")
    mesh, part = Mesh(layout, torch.device(job.device).type), copy.deepcopy(model)
    for one, whole in zip(part.modules(), list(model.modules()), strict=True):
        if isinstance(one, MoERouter) and isinstance(whole, MoERouter):
            one.balance_bias = whole.balance_bias  # which the balancer of the whole model moves

    def objective(view: Any) -> LMObjective:
        first = next(n for n, block in enumerate(view.blocks) if hasattr(block, "mixer"))
        before: list[Any] = list(model.blocks[:first])
        layers = sum(isinstance(block.mlp, MixtureOfExperts) for block in before)
        balancer: Any = StageBalancer(moe, layers, counts=mesh.at["tp"] == 0)
        return LMObjective(view, balancer, z_loss=job.z_loss, compile=False)

    def compile_block(block: nn.Module) -> None:
        block.forward = compiled(block.forward)

    change = compile_block if job.compile and not moe else None
    loads = () if job.deterministic else [load.tolist() for load in moe.previous_load]
    return apply_layout(part, mesh, tensor_shards(model), objective, change, loads)


def ranks_of(job: Job) -> int:
    """Return the ranks of a job's layout, all ranks of the launcher.

    Raises:
        ConfigError: they run without torch.distributed, or are more or fewer.
    """
    layout = Layout.parse(job.layout or "")
    if layout.ranks > 1 and world_size() == 1:
        raise ConfigError(
            f"layout {job.layout!r} without ranks of torch.distributed",
            do=f"start it by `whorl launch RECIPE --on torchrun --ranks {layout.ranks} --layout {job.layout}`",
        )
    layout.check_ranks(world_size())
    if job.stream is not None:
        raise ConfigError(f"layout {job.layout!r} with raw text", expected="a token set", do="remove stream")
    return layout.ranks


def readers_of(job: Job, group: ProcessGroup) -> ProcessGroup:
    """Return this rank's place among those that read different rows."""
    layout = Layout.parse(job.layout or "")
    return ProcessGroup(layout.data_rank(group.rank), layout.data_ranks)


def whole_pass(found: list[MicroBatch], job: Job) -> list[MicroBatch]:
    """Return the micro-batches of a pass; those of a pipeline without a given size have one row."""
    if Layout.parse(job.layout or "").pp == 1 or job.micro_batch_size is not None:
        return found
    return [{name: t[i : i + 1] for name, t in found[0].items()} for i in range(len(found[0]["tokens"]))]


PARALLEL_FILE = "parallel.json"  # the traced step; the recipe step keeps it for the report
PARTS = 24  # of its timeline


def start_trace(laid: LaidOut) -> Traffic:
    """Count this rank's collectives from here on, by axis."""
    mesh, axes = laid.mesh, dict[str, str]()
    sizes = dict(zip(AXES, mesh.layout.shape, strict=True))
    for group in [place.sums for place in laid.places.places.values()] + [(axis,) for axis in AXES]:
        if (ranks := mesh.group(*group)) is not None:
            axes[ranks.group_name] = "+".join(axis for axis in AXES if axis in group and sizes[axis] > 1)
    return Traffic(axes).__enter__()


def save_trace(traffic: Traffic, laid: LaidOut, group: Any, folder: Path) -> None:
    """End the counting on every rank; rank 0 writes the step's `parallel.json` (`report.training.parallel_blocks`)."""
    traffic.__exit__(None, None, None)
    place = ", ".join(
        f"{axis} {n}" for axis, n in laid.mesh.at.items() if n or getattr(laid.mesh.layout, axis) > 1
    )
    ranks = group.all_gather_objects({"place": place, "timeline": traffic.timeline(PARTS)})
    if group.rank == 0:
        totals = {" ".join(key): (total.calls, total.sent) for key, total in traffic.totals().items()}
        text = json.dumps({"ranks": ranks, "seconds": traffic.seconds, "totals": totals})
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / PARALLEL_FILE, text)
