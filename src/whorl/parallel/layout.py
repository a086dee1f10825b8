"""A layout: over which axes the ranks of a run are spread, and one ordered function that applies it to a model.

    Layout.parse("dp=2,tp=2,pp=2")

    axis   ranks of the axis hold                         and exchange
    pp     consecutive blocks each (`pipeline.py`)        activations and their gradients, from block to block
    dp     equal copies; other rows of a batch            gradients, once per step
    ep     other experts, within dp                       tokens, to their experts and back
    fsdp   a part of each parameter; other rows           parameters before use, gradients after it (FSDP2)
    cp     equal copies; other positions of a row         keys and values, around a ring
    tp     heads, hidden units and vocabulary             activations of each product (`tensor_parallel.py`)

The stage of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) decides when ranks of `fsdp` exchange. 1 sums
gradients and gathers parameters once per step. 2 sums after every micro-batch. 3 gathers parameters before each use.

A model is changed from outside, in this order: blocks of other stages are removed, parameters are split over tp, experts
over ep, rows over cp; then recomputation, compilation, and FSDP2 last. Names of parameters stay those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from whorl.errors import ConfigError, nearest_divisors, one_of
from whorl.parallel.parameter_layout import ParameterLayout, Place
from whorl.parallel.pipeline import SCHEDULES, ModelStage, Pipeline, keep_blocks, stage_numbers, stage_view
from whorl.parallel.tensor_parallel import (
    Shard,
    exchange,
    shard_parameters,
    split_products,
    vocabulary_logits_step,
    vocabulary_look_up,
)

AXES = ("pp", "dp", "ep", "fsdp", "cp", "tp")  # of the mesh, the innermost last; ep divides dp


@dataclass(frozen=True)
class Layout:
    """Degrees of the axes, the stage of ZeRO on `fsdp`, and the pipeline's schedule."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 3
    schedule: str = "1f1b"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of "axis=degree,...", with `zero` and `schedule` as further names.

        Raises:
            ConfigError: an unknown name, or a value that it cannot have.
        """
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in names:
                raise ConfigError(f"layout {text!r} names {name!r}", expected=one_of(name, names))
            if name == "schedule":
                if value not in SCHEDULES:
                    raise ConfigError(
                        f"layout {text!r}: schedule {value!r}", expected=one_of(value, list(SCHEDULES))
                    )
            elif not value.isdecimal() or not 1 <= int(value) <= (3 if name == "zero" else 1 << 20):
                expected = "1, 2 or 3" if name == "zero" else "a number of ranks, at least 1"
                raise ConfigError(f"layout {text!r}: {name} is {value!r}", expected=expected)
            given[name] = value if name == "schedule" else int(value)
        layout = cls(**given)
        layout.check_divides("ep", "ranks of dp", layout.dp)
        if layout.schedule in ("zero_bubble", "zbv") and layout.fsdp > 1 and layout.zero == 3:
            raise ConfigError(
                f"layout {text!r}: gradients of weights come after the parameters are freed",
                expected="zero=1 or zero=2 with this schedule",
            )
        return layout

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """Return the number of groups of ranks, each with other rows."""
        return self.dp * self.fsdp

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the degrees in the order of `AXES`; ranks of ep are taken from dp."""
        return self.pp, self.dp // self.ep, self.ep, self.fsdp, self.cp, self.tp

    def at(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        found = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def data_rank(self, rank: int) -> int:
        """Return which rows of a batch a rank has."""
        at = self.at(rank)
        return (at["dp"] * self.ep + at["ep"]) * self.fsdp + at["fsdp"]

    def check_ranks(self, ranks: int) -> None:
        """Check the number of ranks.

        Raises:
            ConfigError: the degrees multiply to another one; the nearest data-parallel degree is named.
        """
        if self.ranks != ranks:
            others = self.ranks // self.dp
            below = ranks - ranks % others
            nearest = [f"{n} ranks" for n in (below, below + others) if n]
            raise ConfigError(
                f"the degrees of the layout multiply to {self.ranks}",
                expected=f"{ranks}, the number of ranks, for example "
                + (" or ".join(nearest) if ranks % others else f"dp = {ranks // others}"),
            )

    def check_divides(self, axes: str, what: str, number: int) -> None:
        """Check that the product of degrees, as in "cp x tp", divides the number of a thing.

        Raises:
            ConfigError: it does not; the nearest degrees that do are named.
        """
        degree = prod(getattr(self, axis) for axis in axes.split(" x "))
        if number % degree:
            raise ConfigError(
                f"{axes} = {degree} does not divide {number}, the {what}",
                expected=f"a divisor; the nearest are {nearest_divisors(number, degree)}",
            )


class Mesh:
    """The ranks of a layout: a torch mesh, and this rank's place."""

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        self.layout, self.rank = layout, dist.get_rank()
        self.at = layout.at(self.rank)
        self.torch: DeviceMesh = init_device_mesh(device, layout.shape, mesh_dim_names=AXES)
        self.joined: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.ends: dist.ProcessGroup | None = None  # first and last stage, which both have a tied table
        inside = layout.ranks // layout.pp
        for rank in range(inside if layout.pp > 1 else 0):
            group = dist.new_group([rank, rank + (layout.pp - 1) * inside])
            self.ends = group if rank == self.rank % inside else self.ends

    def close(self) -> None:
        """Destroy the groups, which wakes ranks that wait in them for this one."""
        for group in {*self.torch.get_all_groups(), *self.joined.values(), self.ends} - {
            None,
            dist.group.WORLD,
        }:
            dist.destroy_process_group(group)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one on `axes` only; None for one rank."""
        sizes = dict(zip(AXES, self.layout.shape, strict=True))
        axes = tuple(axis for axis in AXES if axis in axes and sizes[axis] > 1)
        if not axes:
            return None
        if len(axes) == 1:
            return self.torch[axes].get_group()
        if axes not in self.joined:
            self.joined[axes] = self.torch[axes]._flatten("_".join(axes)).get_group()
        return self.joined[axes]


class LaidOut:
    """This rank's part of a model under a layout.

    parameters: by the names of the whole model, this rank's parts as plain tensors. After `run` they have the gradients of
    this rank's rows, summed over fsdp; `parameter_layout.py` has the other sums.
    """

    def __init__(self, mesh: Mesh, stages: list[ModelStage], places: Mapping[str, Place]) -> None:
        self.mesh, self.stages = mesh, stages
        self.places = ParameterLayout(places, mesh.layout, AXES, mesh.rank)
        self.pipeline = Pipeline(stages, mesh.layout, mesh.group("pp")) if mesh.layout.pp > 1 else None
        self.held = {n: p for stage in stages for n, p in stage.model.named_parameters()}
        self.parameters = {
            n: nn.Parameter(p.to_local()) if hasattr(p, "to_local") else p for n, p in self.held.items()
        }

    def run(self, micro_batches: list[dict[str, Tensor]]) -> list[Any]:
        """Run forward and backward of all micro-batches; return their losses on this rank's stages."""
        for stage in self.stages:
            stage.losses.clear()
        context = self.mesh.group("cp")
        if context is not None:
            from whorl.parallel.ring_attention import take_context

            split = ("targets", "loss_mask")
            micro_batches = [
                m | {name: take_context(m[name], context) for name in split} for m in micro_batches
            ]
        if self.pipeline is not None:
            self.pipeline.run(micro_batches)
        else:
            self._run_in_turn(micro_batches)
        for name, held in self.held.items():
            if held is not (own := self.parameters[name]) and held.grad is not None:
                own.grad, held.grad = held.grad.to_local(), None
        return [loss for stage in self.stages for loss in stage.losses]

    def _run_in_turn(self, micro_batches: list[dict[str, Tensor]]) -> None:
        (stage,), zero = self.stages, self.mesh.layout.zero
        sharded: Any = stage
        for number, micro_batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            if self.mesh.layout.fsdp > 1:
                sharded.set_requires_gradient_sync(last or zero > 1)
                sharded.set_is_last_backward(last)
                sharded.set_reshard_after_backward(last or zero > 2)
            stage(micro_batch["tokens"], **micro_batch).backward()


def apply_layout(
    model: Any,
    mesh: Mesh,
    shards: Mapping[str, Shard],
    objective: Callable[[Any], Callable[[Mapping[str, Tensor]], Any]],
    compile_block: Callable[[nn.Module], None] | None = None,
    loads: Sequence[Sequence[float]] = (),
) -> LaidOut:
    """Change a whole model into this rank's part of it (see the top of this file).

    Args:
        model: a decoder with `embedding`, `blocks`, `final_norm`, `head`, `prepare` and `trunk`; equal on every rank.
        shards: how its parameters are held on the tensor axis (`models/parallel_parts.py`).
        objective: makes the loss function of a stage's model.
        compile_block: compiles a block in place.
        loads: of the experts of each layer that has some, which are placed by them; without, by number.
    """
    layout, at = mesh.layout, mesh.at
    numbers = stage_numbers(layout.pp, at["pp"], layout.schedule)
    n_stages = layout.pp * len(numbers)
    bounds = [len(model.blocks) * n // n_stages for n in range(n_stages + 1)]
    owners = expert_owners(model, layout.ep, loads)
    places = place_parameters(model, layout, shards, bounds, owners)
    keep_blocks(
        model, [range(bounds[n], bounds[n + 1]) for n in numbers], 0 in numbers, n_stages - 1 in numbers
    )
    tensor = mesh.group("tp")
    if tensor is not None:
        shard_parameters(model, shards, at["tp"], layout.tp)
        _split_modules(model, tensor)
    expert, context = mesh.group("ep"), mesh.group("cp")
    if expert is not None:
        from whorl.parallel.expert_dispatch import shard_experts  # imports torch's compiler

        for number, ranks in owners.items():
            if hasattr(getattr(model.blocks[number], "mlp", None), "experts"):  # of a stage of this rank
                shard_experts(model.blocks[number].mlp.experts, ranks, expert)
    views = []
    for n in numbers:
        first, last = n == 0, n == n_stages - 1
        view = stage_view(model, range(bounds[n], bounds[n + 1]), first, last) if n_stages > 1 else model
        if tensor is not None:
            _split_ends(view, tensor, first, last)
        if context is not None:
            from whorl.parallel.ring_attention import shard_context

            shard_context(view, context, 0 if first else layout.cp * layout.tp)
        own = bounds[n + 1] - bounds[n]
        view.checkpointed_blocks = bounds[n] + -(-model.checkpointed_blocks * own // len(model.blocks))
        views.append(ModelStage(view, objective(view), n, n_stages))
    blocks = [block for block in model.blocks if any(True for _ in block.parameters())]
    if compile_block is not None:
        for block in blocks:
            compile_block(block)
    if layout.fsdp > 1:
        for stage in views:
            _shard_fully(stage, blocks, mesh)
    return LaidOut(mesh, views, places)


def expert_owners(model: Any, ranks: int, loads: Sequence[Sequence[float]] = ()) -> dict[int, list[int]]:
    """Return block -> the rank of each of its experts, for the blocks that have experts."""
    if ranks == 1:
        return {}
    from whorl.parallel.expert_dispatch import place_experts  # imports torch's compiler

    layers = [n for n, block in enumerate(model.blocks) if hasattr(getattr(block, "mlp", None), "experts")]
    given = loads or [[0.0] * len(model.blocks[n].mlp.experts) for n in layers]
    return {n: place_experts(load, ranks) for n, load in zip(layers, given, strict=True)}


def place_parameters(
    model: Any,
    layout: Layout,
    shards: Mapping[str, Shard],
    bounds: list[int],
    owners: Mapping[int, list[int]],
) -> dict[str, Place]:
    """Return where the parameters of a whole model are held.

    bounds: first block of each stage. owners: block -> the rank of each expert.
    """
    held = [stage_numbers(layout.pp, rank, layout.schedule) for rank in range(layout.pp)]
    ranks = [next(r for r, numbers in enumerate(held) if n in numbers) for n in range(len(bounds) - 1)]
    first, last, found = ranks[0], ranks[-1], {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            number = int(name.split(".")[1])
            stages: tuple[int, ...] = (ranks[next(n for n, stop in enumerate(bounds[1:]) if number < stop)],)
        elif name.startswith(("head", "final_norm")):
            stages = (last,)
        else:
            stages = (
                (first, last) if name == "embedding" and model.head is None and first != last else (first,)
            )
        path = name.split(".")
        expert = owners[int(path[1])][int(path[-1])] if owners and "experts" in path else None
        found[name] = Place(parameter.shape, shards[name], stages, expert, not name.startswith("memory."))
    return found


def _split_modules(model: Any, group: dist.ProcessGroup) -> None:
    size = group.size()
    for block in model.blocks:
        if not hasattr(block, "mixer"):
            continue
        mixer = block.mixer
        mixer.n_heads, mixer.n_kv_heads = mixer.n_heads // size, mixer.n_kv_heads // size
        if mixer.slopes is not None:
            mixer.slopes = mixer.slopes.chunk(size)[group.rank()]
        split_products([mixer, block.mlp], group)


def _split_ends(model: Any, group: dist.ProcessGroup, first: bool, last: bool) -> None:
    """Split the positions between the embedding and the loss, and the vocabulary of both."""
    if first:
        trunk = model.trunk
        model.look_up = vocabulary_look_up(lambda: model.embedding, group)
        model.trunk = lambda x, *rest, **named: trunk(exchange("split", x, group), *rest, **named)
    if last:
        model.final_norm.register_forward_hook(lambda _, args, out: exchange("gather", out, group))
        step = vocabulary_logits_step(model.config.vocab_size, group)
        model.select_logits_step = lambda *_: step


class SumByAllToAll:
    """FSDP2's reduce-scatter as an all-to-all and a local sum in rank order: faster than gloo's own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)


def _shard_fully(stage: ModelStage, blocks: list[nn.Module], mesh: Mesh) -> None:
    from torch.distributed.fsdp import fully_shard  # a second

    sparse = {p for n, p in stage.model.named_parameters() if n.startswith("memory.")}
    own = [block for block in blocks if any(block is module for module in stage.modules())]
    modules: list[Any] = [*own, stage]
    for module in modules:
        again = (
            mesh.layout.zero == 3 and module is not stage
        )  # the backward of head and embedding needs no parameters
        fully_shard(module, mesh=mesh.torch["fsdp"], reshard_after_forward=again, ignored_params=sparse)
        module.set_gradient_divide_factor(1.0)  # losses are sums; the learner divides once
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(SumByAllToAll())
