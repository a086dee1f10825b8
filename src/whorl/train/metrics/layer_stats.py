"""Layer statistics of a training run; they do not influence training.

    grad_norm/GROUP              of the mean gradient over the whole batch, before clipping
    weight_norm/GROUP            after the step
    update_ratio/GROUP           |w' - w| / |w| per step: about 1e-3 is usual, 1e-1 destroys a layer, 1e-6 has no effect
    activations/N/rms            of the residual stream after block N
    activations/N/outliers       fraction beyond 6 times the rms, which low precision would clip
    activations/N/zeros          fraction of zeros inside the block's MLP: dead ReLU units
    noise_scale/tokens, /sequences     batch size at which noise and gradient are equal (`noise_scale.py`)
    noise_scale/tr_sigma, /grad_sq     numerator and denominator of this measurement
    stats_overhead               fraction of the time since the last report spent here

GROUP is `embedding`, `head`, `memory`, or `blocks.3.attention`, `blocks.3.mlp`, `blocks.3.norms`. The step number
decides when to measure, so all replicas measure at the same step. Each replica covers the parameters it owns and one
row of its validation text; one all-reduce sums the squares. Training is only read; the activations' forward pass
restores the random state. A test compares the bits with and without measurements.

The subtle point: Muon updates a matrix only every `optim.muon_every` steps. So the weight change is taken over that
many steps and divided by them. For lookup tables only the rows that a step touches are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whorl.models import LanguageModel
from whorl.train.learner.learner import Learner
from whorl.train.metrics.noise_scale import NoiseScale

MIN_INTERVAL = 50  # minimum steps between two measurements
MAX_MEASUREMENTS = 100  # per run
MAX_TOKENS = 256  # length of the row for activation statistics
OUTLIER_THRESHOLD = 6.0


def layer_group(name: str) -> str:
    """Return the layer group of a parameter name."""
    first, *rest = name.removeprefix("model.").split(".")
    if first != "blocks" or len(rest) < 2:
        return first
    return f"blocks.{rest[0]}.{'norms' if 'norm' in rest[1] or rest[1].endswith('_after') else rest[1]}"


class LayerStats:
    """Measures one replica's learner; a `GradHook` of its update.

    Args:
        steps: of the whole run.
        batch_rows: rows of a step, over all replicas.
        muon_every: steps between updates of a matrix.
        model: whose blocks' activations are measured; None measures none.
        ids: [n, T] of this replica; only the first row is used.
        steps_done: as the learner's.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        steps: int,
        batch_rows: int,
        muon_every: int = 1,
        model: LanguageModel | None = None,
        ids: Tensor | None = None,
        steps_done: int = 0,
    ) -> None:
        (update,) = learner.updates
        self.model, self.process_group, self.steps = model, learner.process_group, steps
        self.batch_rows = batch_rows
        self.noise_scale, self._whole = NoiseScale(), math.nan
        self.sample_row = None if ids is None else ids[:1, :MAX_TOKENS]
        self.muon_every = muon_every
        between = max(1, steps // 500)  # report interval: measurements coincide with reports
        wanted = max(MIN_INTERVAL, self.muon_every, math.ceil(steps / MAX_MEASUREMENTS))
        self.every = between * math.ceil(wanted / between)
        self.layer_groups = sorted({layer_group(n) for n in update.named})
        self.weights = {n: p.data for n, p in update.named.items() if n in update.store.owned}
        self.tables = dict(update.sparse_tables)
        self.steps_done = steps_done
        self._before: dict[int, dict[str, Tensor]] = {}  # weights by the step that ends their interval
        self._rows: list[tuple[str, Tensor, Tensor, Tensor]] = []  # group, table, rows, previous values
        self._squares: dict[tuple[str, str], float] = {}
        self._found: dict[str, float] = {}
        self._seconds, self._since = 0.0, time.perf_counter()
        update.grad_hook = self
        self._snapshot_weights()

    def _measured_at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    # GradHook: called after each backward, then between clipping and the step.

    def is_due(self) -> bool:
        return self._measured_at(self.steps_done + 1)

    def on_micro_batch(self, gradients: Sequence[Tensor], count: float, scale: float) -> None:
        with self._timed():
            self.noise_scale.add(gradients, count, scale)

    def on_gradients(self, gradients: Mapping[str, Tensor], clipped: float) -> None:
        with self._timed():
            unclipped = 1.0 / clipped if clipped else math.nan
            self._whole = self._add_squares("gradient", dict(gradients), unclipped)

    def on_sparse_gradients(self, name: str, table: Tensor, ids: Tensor, gradients: Tensor) -> None:
        with self._timed():
            touched, where = torch.unique(ids, return_inverse=True)
            total = gradients.new_zeros(len(touched), gradients.shape[1]).index_add_(0, where, gradients)
            self._add_squares("gradient", {name: total})
            self._rows.append((name, table, touched, table[touched]))

    # Called by the training loop, between steps.

    @torch.no_grad()
    def on_step_end(self, steps_done: int) -> None:
        """Measure if this step is due. All replicas call this."""
        self.steps_done = steps_done
        if self._measured_at(steps_done):
            with self._timed():
                self._measure(self._before.pop(steps_done, {}))
        if self._measured_at(steps_done + self.muon_every):
            with self._timed():
                self._snapshot_weights()

    def reset(self) -> None:
        """Discard snapshots after a rollback: the weight change since then is not an update."""
        self._before, self._rows = {}, []

    def pop_metrics(self) -> dict[str, float]:
        """Return the statistics since the last call; empty at most steps."""
        now = time.perf_counter()
        share = self._seconds / max(1e-9, now - self._since)
        found, self._found = self._found, {}
        self._seconds, self._since = 0.0, now
        return {**found, "stats_overhead": share} if found else {}

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
            )  # of one step; dense changes span several
            self._add_squares("from", {name: old})
        for name, table in self.tables.items():
            shares = table.tensor_split(self.process_group.size)  # views: runs of rows are not copied
            self._add_squares("weight", {name: shares[self.process_group.rank]})
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
        self._whole = math.nan  # stays NaN if the step is skipped
        for group in self.layer_groups:
            gradient, weight, way, start = (math.sqrt(next(summed)) for _ in kinds)
            if not math.isnan(whole):  # otherwise the step was skipped
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
        """Add the squares of `tensors`, each times `scale`, to their groups; return the sum."""
        norms: list[float] = []
        if tensors:
            wide = [t.float() for t in tensors.values()]  # bf16 norms would be summed in bf16
            norms = torch.stack(torch._foreach_norm(wide)).double().square().tolist()
            for name, square in zip(tensors, norms, strict=True):
                key = kind, layer_group(name)
                self._squares[key] = self._squares.get(key, 0.0) + square * scale * scale
        return sum(norms) * scale * scale

    def _activation_stats(self) -> list[list[float]]:
        """Return per block: sum of squares, count and outliers of its output; zeros and count in its MLP.

        Measured over this replica's row.
        """
        if self.model is None or self.sample_row is None:
            return []
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
