"""Figures of a training run that decide nothing: norms by group of layers, how far steps go, what activations look like.

    gradient_norm/GROUP   of the mean gradient over the whole batch, before clipping
    weight_norm/GROUP     after the step
    update_ratio/GROUP    |w' - w| / |w|, a step: about 1e-3 is usual, 1e-1 tears a layer apart, 1e-6 leaves it as it was
    activations/N/rms     of the residual stream after block N
    activations/N/outliers   the share of it beyond 6 times its rms: what low precision would clip
    activations/N/zeros   the share of zeros inside the block's MLP: dead units of a ReLU
    noise_scale/tokens, /rows   the batch size at which noise and gradient are equal (`noise.py`)
    noise_scale/trace, /square  what it is the ratio of, of this look alone
    figures_share         the share of the time, since the last report, that all of this took

GROUP is `embedding`, `head`, `memory`, or a block's `blocks.3.attention`, `blocks.3.mlp`, `blocks.3.norms`.

They are taken every so many steps, by the step number alone, so that all replicas take them at the same step: each replica
over the parameters that it owns and over one row of its held-out text; the sums of squares meet in one exchange. The loop
is only read: gradients between clipping and update, weights between steps, activations in a forward of their own (its
random numbers are given back). A test holds the bits of a run with and without them together.

The subtle part: Muon moves a matrix only every second step (`optim.matrix_every`). So the way of the weights is taken over
that many steps and divided by them; a single step would show no way for half of the layers. Of a look-up table only the
rows that a step touches are compared with what they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whorl.models import LanguageModel
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.learner import Learner
from whorl.train.metrics.noise_scale import NoiseScale
from whorl.train.optim.mup import inverse_width_mult

if TYPE_CHECKING:
    from whorl.train.job import Job

MIN_INTERVAL = 50  # steps between two looks, at least
MAX_MEASUREMENTS = 100  # a run
MAX_TOKENS = 256  # of the row whose activations are looked at
OUTLIER_THRESHOLD = 6.0


def layer_group(name: str) -> str:
    """The group of layers of a parameter, by its name."""
    first, *rest = name.split(".")
    if first != "blocks" or len(rest) < 2:
        return first
    return f"blocks.{rest[0]}.{'norms' if 'norm' in rest[1] or rest[1].endswith('_after') else rest[1]}"


class LayerStats:
    """Looks at one replica's learner; a `Watcher` of its update.

    Args:
        ids: [n, T + 1] of this replica, of which the first row is looked at.
        steps_done: as the learner's.
    """

    def __init__(
        self,
        model: LanguageModel,
        job: Job,
        learner: Learner,
        process_group: ProcessGroup,
        ids: Tensor,
        *,
        steps_done: int = 0,
    ) -> None:
        (update,) = learner.updates
        self.model, self.optim, self.process_group, self.steps = model, job.optim, process_group, job.steps
        self.batch_rows = job.batch_size
        self.noise_scale, self._whole = NoiseScale(), math.nan
        self.flops_per_token = model.flops_per_token(job.seq_len)
        self.sample_row = ids[:1, : min(job.seq_len, MAX_TOKENS)]
        self.muon_every = job.optim.muon_every
        between = max(1, job.steps // 500)  # reports: a look falls on one
        wanted = max(MIN_INTERVAL, self.muon_every, math.ceil(job.steps / MAX_MEASUREMENTS))
        self.every = between * math.ceil(wanted / between)
        self.layer_groups = sorted({layer_group(n) for n in update.named})
        self.weights = {n: p.data for n, p in update.named.items() if n in update.local_shard}
        self.tables = dict(update.sparse_tables)
        self.steps_done = steps_done
        self._before: dict[int, dict[str, Tensor]] = {}  # weights by the step that ends a window
        self._rows: list[tuple[str, Tensor, Tensor, Tensor]] = []  # group, table, rows, what they held
        self._squares: dict[tuple[str, str], float] = {}
        self._found: dict[str, float] = {}
        self._seconds, self._since = 0.0, time.perf_counter()
        update.grad_hook = self
        self._snapshot_weights()

    def _measured_at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    # What the update tells: behind each backward, then between clipping and the step.

    def on_micro_batch(self, gradients: Sequence[Tensor], count: float, scale: float) -> None:
        if self._measured_at(self.steps_done + 1):
            with self._timed():
                self.noise_scale.add(gradients, count, scale)

    def on_gradients(self, gradients: Mapping[str, Tensor], clipped: float) -> None:
        if self._measured_at(self.steps_done + 1):
            with self._timed():
                self._whole = self._add_squares(
                    "gradient", dict(gradients), 1.0 / clipped if clipped else math.nan
                )

    def on_sparse_gradients(self, name: str, table: Tensor, ids: Tensor, gradients: Tensor) -> None:
        if self._measured_at(self.steps_done + 1):
            with self._timed():
                touched, where = torch.unique(ids, return_inverse=True)
                total = gradients.new_zeros(len(touched), gradients.shape[1]).index_add_(0, where, gradients)
                self._add_squares("gradient", {name: total})
                self._rows.append((name, table, touched, table[touched]))

    # What the loop tells, between steps.

    @torch.no_grad()
    def on_step_end(self, steps_done: int) -> None:
        """`done` steps are done. All replicas call this."""
        self.steps_done = steps_done
        if self._measured_at(steps_done):
            with self._timed():
                self._measure(self._before.pop(steps_done, {}))
        if self._measured_at(steps_done + self.muon_every):
            with self._timed():
                self._snapshot_weights()

    def reset(self) -> None:
        """The weights went back: from where they were before, nobody moved them here in a step."""
        self._before, self._rows = {}, []

    def pop_metrics(self) -> dict[str, float]:
        """What was found since the last call: nothing, most times."""
        now = time.perf_counter()
        share = self._seconds / max(1e-9, now - self._since)
        found, self._found = self._found, {}
        self._seconds, self._since = 0.0, now
        return {**found, "stats_overhead": share} if found else {}

    def learning_rates(self, lr_scale: float) -> dict[str, float]:
        """The learning rates at `factor` of their peaks: of matrices by itself, the others by name."""
        o = self.optim
        matrices = o.lr_muon if o.optimizer == "muon" else o.lr_adamw * inverse_width_mult(self.model, o)
        rates = {"": matrices, "/embedding": o.lr_embedding, "/scalars": o.lr_scalar}
        if self.tables:
            rates["/ngram"] = o.lr_ngram
        return {f"learning_rate{name}": lr_scale * rate for name, rate in rates.items()}

    def _snapshot_weights(self) -> None:
        if self._measured_at(self.steps_done + self.muon_every):
            self._before[self.steps_done + self.muon_every] = {n: w.clone() for n, w in self.weights.items()}

    def _measure(self, previous: dict[str, Tensor]) -> None:
        self._add_squares("weight", self.weights)
        if previous:
            names = list(previous)
            ways = torch._foreach_sub([self.weights[n] for n in names], [previous[n] for n in names])
            self._add_squares("way", dict(zip(names, ways, strict=True)))
            self._add_squares("from", previous)
        for name, table, touched, old in self._rows:
            self._add_squares(
                "way", {name: table[touched] - old}, self.muon_every
            )  # of one step; dense ones of several
            self._add_squares("from", {name: old})
        for name, table in self.tables.items():
            self._add_squares("weight", {name: table[self.process_group.rank :: self.process_group.size]})
        kinds = ("gradient", "weight", "way", "from")
        mine = [self._squares.get((kind, group), 0.0) for group in self.layer_groups for kind in kinds]
        seen = self._activation_stats()
        noise = self.noise_scale.local_sums()
        activations = (x for block in seen for x in block)
        summed = iter(self.process_group.all_reduce_scalars(*noise, self._whole, *mine, *activations))
        self._squares, self._rows = {}, []
        parts, tokens, weighted, whole = (next(summed) for _ in range(4))
        self._found |= self.noise_scale.finalize(parts, tokens, weighted, whole, self.batch_rows)
        self.noise_scale.reset()
        self._whole = math.nan  # a step that is not taken tells no gradient
        for group in self.layer_groups:
            gradient, weight, way, start = (math.sqrt(next(summed)) for _ in kinds)
            if not math.isnan(whole):  # else the step was not taken
                self._found[f"grad_norm/{group}"] = gradient
            self._found[f"weight_norm/{group}"] = weight
            if start:
                self._found[f"update_ratio/{group}"] = way / start / self.muon_every
        for block in range(len(seen)):
            square, count, outliers, zeros, hidden = (next(summed) for _ in range(5))
            if count:
                self._found[f"activations/{block}/rms"] = math.sqrt(square / count)
                self._found[f"activations/{block}/outliers"] = outliers / count
            if hidden:
                self._found[f"activations/{block}/zeros"] = zeros / hidden

    def _add_squares(self, kind: str, tensors: Mapping[str, Tensor], scale: float = 1.0) -> float:
        """Adds the squares of `tensors`, times `scale` each, to their groups; returns the sum of them."""
        norms: list[float] = []
        if tensors:
            wide = [t.float() for t in tensors.values()]  # bf16 would sum its squares in bf16
            norms = torch.stack(torch._foreach_norm(wide)).double().square().tolist()
            for name, square in zip(tensors, norms, strict=True):
                key = kind, layer_group(name)
                self._squares[key] = self._squares.get(key, 0.0) + square * scale * scale
        return sum(norms) * scale * scale

    def _activation_stats(self) -> list[list[float]]:
        """Of each block, over this replica's row: sum of squares and number of what it puts out, how many of them are
        outliers; how many zeros there are in its MLP, of how many."""
        found = [[0.0] * 5 for _ in self.model.blocks]
        if not len(self.sample_row):
            return found

        def outputs(number: int) -> Any:
            def look(_: nn.Module, __: Any, out: Tensor) -> None:
                x = out.float()
                square = x.square().sum()
                limit = OUTLIER_THRESHOLD * (square / x.numel()).sqrt()
                found[number][:3] = [float(square), x.numel(), float((x.abs() > limit).sum())]

            return look

        def hidden(number: int) -> Any:
            def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                found[number][3:] = [float((inputs[0] == 0).sum()), inputs[0].numel()]

            return look

        hooks: list[Any] = []
        for number, block in enumerate(self.model.blocks):
            hooks.append(block.register_forward_hook(outputs(number)))
            down = getattr(getattr(block, "mlp", None), "down", None)
            if isinstance(down, nn.Module):
                hooks.append(down.register_forward_pre_hook(hidden(number)))
        devices = [self.sample_row.device] if self.sample_row.is_cuda else []
        try:
            with torch.random.fork_rng(devices=devices):
                self.model(self.sample_row)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began
