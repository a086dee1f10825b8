"""The learner: weights, gradients and optimizer state of some networks, updated together by all replicas.

One step of an update, on 1 or N replicas:

    each rank    total, count and gradients of the *summed* loss of its share of the batch (`accumulate`, repeatable)
    all-gather   the global count divides the gradients once
    each rank    sums its share of the parameters over the replicas; all-gather of the global gradient norm, for clipping
    each rank    updates its share in place
    all-gather   barrier: all ranks see the new weights

So 1 x 8, 2 x 4 and 8 x 1 micro-batches, on any number of replicas, give the same step up to the rounding of sums
(tested). Parameters are partitioned by update cost (`zero1.py`), rows of lookup tables by row number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.nn.norm import BatchNorm
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup, world_size
from whorl.train.learner.average import Average, Averages
from whorl.train.learner.update import GradHook, ParamOptim, Update, check_updates, stored_buffers
from whorl.train.learner.zero1 import open_update_store
from whorl.train.optim.clipping import clip_scale, squared_norm, sum_replicas
from whorl.train.optim.flat_views import contiguous_zeros, flatten_views
from whorl.train.optim.optimizer import Optimizer, OptimizerInputs, get_optimizer
from whorl.train.optim.optimizers import SparseAdagrad, own_rows


@dataclass
class SharedState:
    """Tensors in shared memory, visible to all replicas, by name.

    weights, buffers: by parameter or buffer name; state: by "parameter/moment". gradients: [replicas, ...] for each
    dense parameter. row_ids: [replicas, capacity] and row_gradients: [replicas, capacity, d] for each sparse parameter
    (in a world 0 in place of replicas: `parallel/parameter_store.py` has the buffers).
    averages: of the weights if enabled (`average.py`). has_gradient: [replicas, dense parameters] bool, in the order of
    `gradients`: whether a replica's backward gave one in this step. Only rank 0 writes a buffer, between two barriers.
    """

    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    row_ids: dict[str, Tensor]
    row_gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    has_gradient: Tensor
    averages: dict[str, Tensor] = field(default_factory=dict)
    PREFIXES: ClassVar[tuple[str, ...]] = ("weights/", "buffers/", "state/", "averages/")  # of `tensors`

    @classmethod
    def allocate(
        cls,
        networks: nn.Module,
        param_optims: Mapping[str, ParamOptim],
        replicas: int = 1,
        max_rows: int = 0,
        *,
        contiguous: bool = False,
        bf16_matrices: bool = False,
        stateless: Collection[str] = (),
    ) -> SharedState:
        """Allocate the tensors of `networks`.

        Args:
            max_rows: upper bound on lookups in one table per replica and step.
            contiguous: place all AdamW parameters in one flat buffer (one replica): an update is a few operations.
            bf16_matrices: store Muon's matrices in bf16 (`stochastic_rounding.py`).
            stateless: parameters that no optimizer moves, and that therefore have no moments.
        """
        device, is_local = next(networks.parameters()).device, world_size() == 1
        rows = (
            replicas if is_local or replicas == 1 else 0
        )  # ranks of a world have their own buffers: the shape alone

        def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            if replicas > 1 and is_local:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return tensor

        weights, gradients, ids, values, state = {}, {}, {}, {}, {}
        if contiguous:
            by_adamw = {n for n, p in param_optims.items() if p.optimizer == "adamw"}
            one = {n: p for n, p in networks.named_parameters() if n in by_adamw}
            weights, gradients = contiguous_zeros(one), {n: t[None] for n, t in contiguous_zeros(one).items()}
            moved = {n: p for n, p in one.items() if n not in stateless}
            state = {f"{n}/{m}": t for m in ("mean", "square") for n, t in contiguous_zeros(moved).items()}
        for name, p in networks.named_parameters():
            if name in weights:
                weights[name].copy_(p.detach())
                continue
            is_bf16 = bf16_matrices and name in param_optims and param_optims[name].optimizer == "muon"
            weights[name] = shared(*p.shape, dtype=torch.bfloat16 if is_bf16 else torch.float32)
            weights[name].copy_(p.detach())
            if name not in param_optims:  # a target network, or frozen
                continue
            rule = param_optims[name].optimizer
            if rule == "sparse_adagrad":
                ids[name] = shared(rows, max_rows, dtype=torch.int64)
                values[name] = shared(rows, max_rows, p.shape[1])
                state[f"{name}/square"] = shared(p.shape[0])
            else:
                gradients[name] = shared(rows, *p.shape)
                spec = {} if name in stateless else get_optimizer(rule).state_spec(tuple(p.shape))
                for moment, size in spec.items():
                    state[f"{name}/{moment}"] = shared(*size)
        buffers = {}
        for name, module, _, buffer in stored_buffers(networks):
            if replicas > 1 and isinstance(module, BatchNorm):
                raise ConfigError(
                    f"{name} changes in every forward pass, so it would differ between {replicas} replicas",
                    expected="1 replica, or a layer, group or RMS norm",
                )
            buffers[name] = shared(*buffer.shape, dtype=buffer.dtype)
            buffers[name].copy_(buffer)
        has_gradient = shared(replicas, len(gradients), dtype=torch.bool)
        return cls(weights, state, gradients, ids, values, buffers, has_gradient)

    @classmethod
    def for_updates(cls, networks: nn.Module, updates: Sequence[Update], replicas: int = 1) -> SharedState:
        """Allocate, without moments of the parameters that an update moves itself (`Update.apply`)."""
        param_optims = {n: t for update in updates for n, t in update.param_optims.items()}
        stateless = {n for update in updates if update.apply is not None for n in update.param_optims}
        return cls.allocate(networks, param_optims, replicas, contiguous=replicas == 1, stateless=stateless)

    def allocate_averages(self, replicas: int) -> None:
        """Allocate averages of all weights, initialized with the weights."""
        for name, weight in self.weights.items():
            own = weight.detach().float().clone()  # in bf16 small changes would round to zero
            if replicas > 1 and world_size() == 1:
                own.share_memory_()  # type: ignore[no-untyped-call]
            self.averages[name] = own

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: weights, buffers, moments and averages."""
        kinds = {prefix: getattr(self, prefix[:-1]) for prefix in self.PREFIXES}
        return {f"{prefix}{name}": t for prefix, tensors in kinds.items() for name, t in tensors.items()}


class Learner:
    """One replica's learner.

    Args:
        networks: their parameters are bound to the shared weights.
        updates: run in this order in every round.
        shared: made by rank 0 with `SharedState.allocate`; allocated here by default, for one replica.
        averages: target networks, updated after every round.
        steps_done: rounds done before (a resumed run), for Adam's bias correction and Muon's groups.
        laid: this rank's part of `networks` (`parallel/layout.py`), whose parameters are trained.

    Raises:
        ConfigError: a parameter does not exist or is trained twice.
    """

    def __init__(
        self,
        networks: nn.Module,
        updates: Sequence[Update],
        shared: SharedState | None = None,
        process_group: ProcessGroup | None = None,
        *,
        averages: Sequence[Average] = (),
        dtype: torch.dtype = torch.float32,
        steps_done: int = 0,
        laid: Any = None,
    ) -> None:
        check_updates(networks, list(updates), averages)
        self.networks, self.process_group = networks, process_group or ProcessGroup()
        self.shared = shared or SharedState.for_updates(networks, updates)
        self.rounds = steps_done
        for name, p in networks.named_parameters():
            p.data = self.shared.weights[name]
        for name, module, own, _ in list(stored_buffers(networks)):
            setattr(module, own, self.shared.buffers[name])
        self.laid, self.parameters = laid, laid.parameters if laid else dict(networks.named_parameters())
        self.updates = [UpdateState(update, self, dtype, steps_done) for update in updates]
        self.writers = {name: rank for each in self.updates for name, rank in each.store.writers.items()}
        for each in self.updates:
            each.store.drop_foreign(self.shared.state)
        self.averages = Averages(averages, self.shared.weights, self.shared.averages, self.process_group)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights by name: the shared tensors, not copies."""
        return self.shared.weights

    def export(self) -> None:
        """Write the whole state into `shared`, where a layout's ranks have parts of it. All ranks call this."""
        for each in self.updates:
            each.store.export(self.shared)

    def load(self) -> None:
        """Take the state from `shared` again, after it was restored. All ranks call this."""
        for each in self.updates:
            each.store.load(self.shared)

    def end_round(self) -> None:
        """Move the target networks; called after all updates of a round."""
        self.rounds += 1
        self.averages.on_round_end(self.rounds)


class UpdateState:
    """Run-time state of an `Update`: optimizers over this rank's share, and the accumulated gradients."""

    def __init__(self, update: Update, learner: Learner, dtype: torch.dtype, steps_done: int) -> None:
        self.update, self.objective, self.every = update, update.objective, update.every
        self.shared, self.process_group = learner.shared, learner.process_group
        self.named = {n: learner.parameters[n] for n in update.param_optims if n in learner.parameters}
        trained = [p for p in learner.parameters.values() if p.requires_grad]
        # Gradients that the update drops are not computed. None: all, which suits every kind of autograd function.
        self.inputs = list(self.named.values()) if len(self.named) < len(trained) else None
        shapes = {n: self.shared.weights[n].shape for n in update.param_optims}
        self.store = open_update_store(update, shapes, self.process_group, self.shared, learner.laid)
        owned, self.data = set(self.store.owned), self.store.targets
        self.dense_names = sorted(owned, key=list(self.named).index)
        self.sparse_tables = [
            (n, self.data[n]) for n in update.names_for("sparse_adagrad") if n in self.named
        ]
        moments = self.store.moments
        self.optimizers: list[Optimizer] = []
        for rule in update.dense_optimizers if update.apply is None else ():
            own = {n: self.data[n] for n in update.names_for(rule) if n in owned}
            of_all = {n: tuple(shapes[n]) for n in update.names_for(rule)}
            chosen = {n: update.param_optims[n] for n in own}
            lr, decay = ({n: getattr(t, field) for n, t in chosen.items()} for field in ("lr", "decay_scale"))
            inputs = OptimizerInputs(own, of_all, lr, decay, update, dtype, lambda n, _: moments[n])
            self.optimizers.append(get_optimizer(rule).make(inputs))
        rates = [update.param_optims[n].lr for n, _ in self.sparse_tables]
        rate = rates[0] if rates else 0.0
        self.sparse_adagrad = SparseAdagrad(self.sparse_tables, rate, allocate=lambda n, _: moments[n])
        # The same tensors in every step: the gradients of a single replica, or the sums over all replicas.
        own = {n: torch.empty_like(self.data[n], dtype=torch.float32) for n in self.dense_names}
        self.reduced_gradients = own if self.process_group.size > 1 else {n: self.store.own[n] for n in own}
        self.flat_gradients = flatten_views(list(self.reduced_gradients.values()))
        counted = [g for n, g in self.reduced_gradients.items() if n in self.store.counted]
        self.counted_gradients = flatten_views(counted) if len(counted) < len(owned) else self.flat_gradients
        self.moments: dict[str, list[Tensor]] = {name: [] for name in self.dense_names}
        for path, moment in moments.items():
            self.moments.get(path.rpartition("/")[0], []).append(moment)
        self._set_steps(-(-steps_done // self.every))
        self.grad_hook: GradHook | None = None
        self._reset()

    def _set_steps(self, steps: int) -> None:
        """Set the number of batches, which decides Adam's bias correction and Muon's group."""
        self.steps = steps
        for optimizer in self.optimizers:
            optimizer.steps = steps

    def _reset(self) -> None:
        """Mark the gradients as empty: the next micro-batch overwrites them."""
        self.no_gradients = True
        self.seen: set[str] = set()  # parameters with a gradient
        self.metric_sums: dict[str, Tensor] = {}  # float64, on the device: reading one waits for a GPU
        self.row_counts = {name: 0 for name, _ in self.sparse_tables}

    def accumulate(self, loss: Loss) -> None:
        """Add the gradients of a micro-batch's summed loss (times the loss scale, if any)."""
        scaler = self.update.loss_scaler
        scale = None if scaler is None else torch.full_like(loss.total, scaler.scale)
        if loss.total.requires_grad:  # else a layout has run the backward, too
            loss.total.backward(scale, inputs=self.inputs)  # type: ignore[no-untyped-call]
        buffers, gradients, own = [], [], self.store.own
        for name, p in self.named.items():
            gradient, p.grad = p.grad, None
            if name in own:
                if gradient is not None:
                    self.seen.add(name)
                    buffers.append(own[name])
                    gradients.append(gradient)
                elif self.no_gradients:
                    own[name].zero_()
            elif gradient is not None:
                rows, values = gradient._indices()[0], gradient._values()
                begin, end = self.row_counts[name], self.row_counts[name] + len(rows)
                ids, own_values = self.store.own_rows[name]
                ids[begin:end], own_values[begin:end] = rows, values
                self.row_counts[name] = end
        if gradients:
            if (hook := self._due_hook()) is not None:
                hook.on_micro_batch(gradients, float(loss.count), 1.0 if scaler is None else scaler.scale)
            put = torch._foreach_copy_ if self.no_gradients else torch._foreach_add_
            put(buffers, gradients)
        self.no_gradients = False
        for key, value in (("loss", loss.total), ("loss_tokens", loss.count), *loss.metrics.items()):
            self.metric_sums[key] = self.metric_sums.get(key, 0.0) + value.detach().double()

    @torch.no_grad()
    def step(self, lr_scale: float) -> dict[str, float]:
        """Update the parameters from the accumulated gradients. All replicas call this together.

        A parameter without a gradient on every replica keeps its value and its moments, as in torch: no decay, no momentum.
        Bias corrections count the steps of the update, not those of the parameter.

        Returns:
            loss and each metric of the objective (means over the global count), loss_tokens, grad_norm (before clipping);
            skipped = 1 if `accept_step` rejected the step: then no weight and no moment has changed on any replica.
        """
        filled = float(max(self.row_counts.values(), default=0))
        if self.no_gradients:  # a rank without micro-batches, never rank 0
            for gradient in self.store.own.values():
                gradient.zero_()
        own_sums = torch.stack([*self.metric_sums.values()]).tolist() if self.metric_sums else []
        all_values = self.store.share([*own_sums, filled], self.seen)
        columns = zip(*(each for each in all_values if len(each) > 1), strict=True)
        sums = dict(zip(self.metric_sums or ("loss", "loss_tokens"), map(sum, columns), strict=False))
        divisor = max(sums["loss_tokens"], 1.0)
        gradients, dense = self.reduced_gradients, self.flat_gradients
        square = None
        if self.process_group.size > 1:
            square = sum_replicas(self.store.reduce(), gradients, self.update.native)
        kept = self._hold()
        if square is None or kept or self.counted_gradients is not dense:  # frozen gradients do not count
            square = squared_norm(self.counted_gradients)
        metrics = {k: v / divisor for k, v in sums.items() if k != "loss_tokens"}
        scaler, nonfinite = self.update.loss_scaler, 0.0
        if scaler is not None:
            divisor *= scaler.scale  # for the gradients from here on
            nonfinite = self._nonfinite_rows()
        total, nonfinite = self.process_group.all_reduce_scalars(square, nonfinite)
        norm = total**0.5 / divisor
        metrics |= {"loss_tokens": sums["loss_tokens"], "grad_norm": norm}
        if scaler is not None:
            metrics["loss_scale"] = scaler.scale
            if scaler.check_overflow(metrics["loss"], norm, not nonfinite):
                metrics["overflow"] = 1.0  # `accept_step` skips the step without an event
        if not self.update.accept_step(metrics):  # equal metrics on every replica, so equal decisions
            self._set_steps(self.steps + 1)  # skipped steps count too: the counters follow the batch number
            self._reset()
            return {**metrics, "skipped": 1.0}
        clipped = clip_scale(norm, self.update.clip_norm)
        if dense:  # a rank may have no share of the parameters
            torch._foreach_mul_(dense, clipped / divisor)
        if (hook := self._due_hook()) is not None:
            hook.on_gradients(gradients, clipped)
        if self.update.apply is not None and self.dense_names:
            flat = torch.cat([gradients[n].flatten() for n in self.dense_names])
            with torch.enable_grad():
                metrics |= self.update.apply([self.named[n] for n in self.dense_names], flat)
        for optimizer in self.optimizers:
            optimizer.step(gradients, lr_scale)
        self.update.limit_weights([self.data[n] for n in self.dense_names])
        for tensor, value in kept:
            tensor.copy_(value)
        self._set_steps(self.steps + 1)
        for name, table in self.sparse_tables:
            self._step_sparse(name, table, [int(each[-1]) for each in all_values], divisor, lr_scale)
        self._reset()
        if scaler is not None:
            scaler.on_step_end()
        self.store.gather()
        return metrics

    def _due_hook(self) -> GradHook | None:
        return self.grad_hook if self.grad_hook is not None and self.grad_hook.is_due() else None

    def _hold(self) -> list[tuple[Tensor, Tensor]]:
        """Return (tensor, copy) of the values and moments of this rank's parameters that the step must not move.

        They are the frozen ones, whose gradients are zeroed and do not count in the norm, and those without a gradient.
        The copies are restored after the step, because momentum and weight decay move a parameter at gradient 0.
        """
        seen = self.store.seen_anywhere()
        limits = {n: self.update.param_optims[n].freeze_step for n in self.dense_names}
        frozen = [n for n, limit in limits.items() if limit is not None and self.steps >= limit]
        for name in frozen:
            self.reduced_gradients[name].zero_()
        held = [n for n in self.dense_names if n not in seen or n in frozen]
        return [(t, t.clone()) for n in held for t in (self.data[n], *self.moments[n])]

    def _nonfinite_rows(self) -> float:
        """Number of non-finite values in this rank's gradients of lookup tables."""
        own = (self.store.own_rows[n][1][:filled] for n, filled in self.row_counts.items())
        return float(sum((~values.isfinite()).sum() for values in own))

    def _step_sparse(
        self, name: str, table: Tensor, counts: list[int], divisor: float, lr_scale: float
    ) -> None:
        hook, native = self._due_hook(), self.update.native
        for rank, rows, gradients in self.store.update(name, counts):
            observed = hook if rank == self.process_group.rank else None
            if observed is not None or not native:
                ids, values = own_rows(rows, gradients, rank)
                values = values / divisor
                if observed is not None and len(ids):
                    observed.on_sparse_gradients(name, table, ids, values)
                if not native and len(ids):
                    self.sparse_adagrad.step(name, table, ids, values, lr_scale)
            if native:
                self.sparse_adagrad.step_native(name, table, rows, gradients, rank, divisor, lr_scale)
