"""Pipeline stages of a decoder, run by the schedules of `torch.distributed.pipelining`.

A stage is the whole model without the blocks of other stages: a removed block returns its input, so that names, `prepare`
and `trunk` stay. The first stage embeds, the last one has the final norm, the head and the loss; a tied table is on both.

    1f1b          one forward, one backward in turn (Narayanan et al. 2019, PipeDream, doi:10.1145/3341301.3359646)
    interleaved   two stages per rank, r and r + pp (Narayanan et al. 2021, arXiv:2104.04473)
    zero_bubble   the same, gradients of weights later than those of activations (Qi et al. 2023, arXiv:2401.10241)
    zbv           two stages per rank, r and 2 pp - 1 - r (ibid.)

Losses are sums over tokens, so gradients are added over micro-batches and never divided (`scale_grads`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whorl.errors import ConfigError

SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}  # fmt: skip


def stage_numbers(size: int, rank: int, schedule: str) -> list[int]:
    """Return the stages of a rank of the pipeline axis."""
    if schedule in ("gpipe", "1f1b") or size == 1:
        return [rank]
    return [rank, 2 * size - 1 - rank if schedule == "zbv" else size + rank]


class Elsewhere(nn.Module):
    """A block of another stage: returns its input."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def keep_blocks(model: Any, kept: Sequence[range], first: bool, last: bool) -> None:
    """Remove what no stage of this rank has, in place."""
    for number in range(len(model.blocks)):
        if not any(number in numbers for numbers in kept):
            model.blocks[number] = Elsewhere()
    if not first:
        model.memory = model.positions = None
        model.embedding_norm = nn.Identity()
        if not last or model.head is not None:
            model.embedding = None
    if not last:
        model.final_norm, model.head = nn.Identity(), None


def stage_view(model: Any, own: range, first: bool, last: bool) -> Any:
    """Return a stage of `model`: the same modules and parameters, without the blocks of others."""
    view = copy.copy(model)
    view._modules, view._parameters = dict(model._modules), dict(model._parameters)
    view.blocks = nn.ModuleList([b if n in own else Elsewhere() for n, b in enumerate(model.blocks)])
    if not first:
        view.embedding_norm, view.memory, view.positions = nn.Identity(), None, None
        if not last or model.head is not None:
            view.embedding = None
    if not last:
        view.final_norm, view.head = nn.Identity(), None
    return view


class ModelStage(nn.Module):
    """A stage as a module, for schedules and FSDP2.

    losses: one for each micro-batch since they were cleared; before the last stage auxiliary ones.
    """

    def __init__(self, model: Any, objective: Any, number: int, of: int) -> None:
        super().__init__()
        self.model, self.objective, self.number = model, objective, number
        self.is_first, self.is_last = number == 0, number == of - 1
        self.losses: list[Any] = []
        if not self.is_first:
            model.embed = lambda *_: self._received

    def forward(self, x: Tensor, **micro_batch: Tensor) -> Tensor:
        """Return hidden states of the last block, or the summed loss [1].

        x: ids [B, T] of the first stage, else hidden states. micro_batch: of the objective.
        """
        self._received = x
        if not self.is_last:
            hidden, loss = self.objective.hidden(micro_batch)
            self.losses.append(loss)
            return _Attach.apply(hidden, loss.total) if loss.total.requires_grad else hidden  # type: ignore[no-any-return, no-untyped-call]
        loss = self.objective(micro_batch)
        self.losses.append(loss)
        total: Tensor = loss.total.view(1).clone()
        return total


class _Attach(torch.autograd.Function):
    """Hidden states, in whose backward an auxiliary loss has the gradient 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones((), dtype=torch.float32)


class Pipeline:
    """Runs the stages of this rank.

    A schedule holds buffers of one shape; each shape of a batch has another one.
    """

    def __init__(self, stages: list[ModelStage], layout: Any, group: dist.ProcessGroup | None) -> None:
        self.stages, self.layout, self.group = stages, layout, group
        self.schedules: dict[tuple[int, ...], Any] = {}

    def run(self, micro_batches: list[dict[str, Tensor]]) -> None:
        """Run forward and backward of all micro-batches, which have one shape."""
        shapes = {tuple(m["tokens"].shape) for m in micro_batches}
        n, stages = len(micro_batches), self.layout.pp * len(self.stages)
        if len(shapes) > 1 or n < stages or (len(self.stages) > 1 and n % self.layout.pp):
            raise ConfigError(
                f"a pipeline of {stages} stages with {n} micro-batches of the shapes {sorted(shapes)}",
                expected=f"at least {stages} micro-batches of one shape, a multiple of pp = {self.layout.pp}",
                do="set micro_batch_size to a smaller divisor of the rows of a rank",
            )
        key = (n, *shapes.pop())
        if key not in self.schedules:
            self.schedules[key] = self._schedule(n, micro_batches[0]["tokens"])
        batch = {name: torch.cat([m[name] for m in micro_batches]) for name in micro_batches[0]}
        first = any(stage.is_first for stage in self.stages)
        self.schedules[key].step(
            *([batch["tokens"]] if first else []),
            target=batch["tokens"],
            losses=[],
            return_outputs=False,
            **batch,
        )

    def _schedule(self, n_micro_batches: int, tokens: Tensor) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules  # half a second

        parts = []
        for stage in self.stages:
            model, (rows, length) = stage.model, tokens.shape
            own = length // (self.layout.cp * self.layout.tp)
            hidden = torch.empty(rows, own, model.config.d_model, dtype=model.dtype, requires_grad=True)
            parts.append(
                PipelineStage(
                    stage, stage.number, self.layout.pp * len(self.stages), tokens.device, group=self.group,
                    input_args=tokens if stage.is_first else hidden,
                    output_args=torch.empty(1, requires_grad=True) if stage.is_last else hidden,
                )
            )  # fmt: skip
        schedule = schedules.get_schedule_class(SCHEDULES[self.layout.schedule])
        loss = lambda out, _: out.sum()  # noqa: E731
        return schedule(
            parts if len(self.stages) > 1 else parts[0], n_micro_batches, loss_fn=loss, scale_grads=False
        )
