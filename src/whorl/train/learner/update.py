"""An update: an objective, the parameters it trains, an optimizer for each, and a period.

A learner is networks plus an ordered list of updates: one for a language model or PPO, two for a GAN, three for SAC. A
parameter belongs to at most one update. Gradients that a backward leaves on parameters of another update are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from whorl.errors import ConfigError, WhorlError
from whorl.objectives.next_token import Loss
from whorl.train.config import OPTIMIZERS
from whorl.train.learner.average import Average
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.optim.decay_mask import decayed_parameters
from whorl.train.optim.stochastic_rounding import Rounding

AcceptStep = Callable[[Mapping[str, float]], bool]


class DivergedError(WhorlError):
    """Training diverged, and skipping batches does not help."""


def accept_if_finite(metrics: Mapping[str, float]) -> bool:
    """Return True for finite metrics; the default `accept_step`.

    It stops a run before non-finite gradients reach the weights. A step whose gradients overflowed because of the loss
    scale (`loss_scaler.py`) is skipped.

    Raises:
        DivergedError: the loss or the gradient norm is NaN or infinite.
    """
    if "overflow" in metrics:
        return False
    if is_finite(metrics):
        return True
    raise DivergedError(
        f"the loss is {metrics['loss']:g} and its gradient norm {metrics['grad_norm']:g}; "
        "no weight was changed",
        expected="finite numbers",
        do="check the data or the rewards for NaN, or lower the learning rate",
    )


def is_finite(metrics: Mapping[str, float]) -> bool:
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


MicroBatch = Mapping[str, Tensor]  # tensors by field name
ApplyGradient = Callable[[Sequence[Tensor], Tensor], dict[str, float]]


class GradHook(Protocol):
    """Observer of the gradients of an update on this rank. Implementations must not change the tensors."""

    def is_due(self) -> bool:
        """Whether the step in progress is observed; in other steps nothing is called."""

    def on_micro_batch(self, gradients: Sequence[Tensor], count: float, scale: float) -> None:
        """Called per micro-batch of this rank with the gradients of its summed loss times `scale`, and its count."""

    def on_gradients(self, gradients: Mapping[str, Tensor], clipped: float) -> None:
        """Called before the step with the dense parameters' mean gradients over the batch, times `clipped`."""

    def on_sparse_gradients(self, name: str, table: Tensor, ids: Tensor, gradients: Tensor) -> None:
        """Called per lookup table: ids [n], with repeats; gradients [n, d]."""


@dataclass(frozen=True)
class ParamOptim:
    """The optimizer of one parameter: see `optim/optimizer.py`; "sparse_adagrad" for a lookup table."""

    optimizer: str
    lr: float  # peak learning rate
    decay_scale: float = (
        0.0  # times the update's weight_decay; 0 for parameters outside `decay_mask.decayed_parameters`
    )
    freeze_step: int | None = None  # from this step on the parameter keeps its value


@dataclass(frozen=True)
class Update:
    """One update of a learner.

    Args:
        objective: micro-batch -> Loss, with its networks bound.
        param_optims: by parameter name, all parameters that this update trains.
        every: period in rounds.
        clip_norm: limit on the mean gradient's norm, over all dense parameters.
        max_weight: largest absolute value of a dense parameter; values beyond it are cut after the step.
        momentum, muon_every: of Muon. betas, eps, fused: of AdamW.
        weight_decay: times each parameter's decay_scale.
        accept_step: maps a step's metrics to whether the step is applied (see `accept_if_finite`, `spike_guard.py`).
        loss_scaler: for fp16.
        rounding: of matrices stored in bf16.
        apply: moves the parameters in place of the optimizers, which then have no state: the parameters and their flat
            mean gradient [P] -> metrics.
        native: run the passes over memory in C++ (`nn/cpu/update.py`) where the types allow it.
    """

    objective: Callable[[MicroBatch], Loss]
    param_optims: Mapping[str, ParamOptim]
    every: int = 1
    clip_norm: float = 1.0
    max_weight: float | None = None
    momentum: float = 0.95
    muon_every: int = 1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    fused: bool | None = None
    accept_step: AcceptStep = accept_if_finite
    loss_scaler: LossScaler | None = None
    rounding: Rounding | None = None
    native: bool = False
    apply: ApplyGradient | None = None

    def limit_weights(self, parameters: Sequence[Tensor]) -> None:
        """Cut the values of parameters beyond `max_weight`."""
        if self.max_weight is not None:
            for parameter in parameters:
                parameter.data.clamp_(-self.max_weight, self.max_weight)

    def names_for(self, optimizer: str) -> list[str]:
        """Names of the parameters under one optimizer."""
        return [name for name, t in self.param_optims.items() if t.optimizer == optimizer]

    @property
    def dense_optimizers(self) -> list[str]:
        """Names of the optimizers in use, apart from that of lookup tables, in the order of the table."""
        used = {t.optimizer for t in self.param_optims.values()} - {"sparse_adagrad"}
        return [*(name for name in OPTIMIZERS if name in used), *sorted(used - set(OPTIMIZERS))]


def all_adamw(networks: nn.Module, lr: float, prefix: str | tuple[str, ...] = "") -> dict[str, ParamOptim]:
    """Return AdamW at one learning rate for every parameter with these name prefixes; matrices may decay."""
    decaying = decayed_parameters(networks)
    return {
        n: ParamOptim("adamw", lr, decay_scale=float(n in decaying))
        for n, _ in networks.named_parameters()
        if n.startswith(prefix)
    }


def check_updates(networks: nn.Module, updates: list[Update], averages: Sequence[Average]) -> None:
    """Check that every name exists and that no parameter is trained twice.

    Raises:
        ConfigError: a check failed.
    """
    known = dict(networks.named_parameters())
    taken: dict[str, int] = {}
    for number, update in enumerate(updates):
        if update.every < 1:
            raise ConfigError(f"update {number} runs every {update.every} rounds", expected="at least 1")
        for rule in {t.optimizer for t in update.param_optims.values()}:
            if (
                rule == "sparse_adagrad"
                and len({update.param_optims[name].lr for name in update.names_for(rule)}) > 1
            ):
                raise ConfigError(f"update {number} has several learning rates for {rule!r}", expected="one")
        for name in update.param_optims:
            if name not in known:
                raise ConfigError(
                    f"update {number} trains {name!r}", expected=f"one of {sorted(known)[:8]} ..."
                )
            if name in taken:
                raise ConfigError(
                    f"{name!r} is trained by the updates {taken[name]} and {number}",
                    expected="one update per parameter",
                )
            taken[name] = number
    for average in averages:
        if average.every < 1 or not 0 <= average.decay <= 1:
            raise ConfigError(f"{average}", expected="decay from 0 to 1, every at least 1")
        for name in known:
            if average.target is not None and name.startswith(average.target):
                source = average.source + name[len(average.target) :]
                if source not in known or known[source].shape != known[name].shape:
                    raise ConfigError(f"the target {name!r} has no source {source!r} of its shape")
                if name in taken:
                    raise ConfigError(
                        f"{name!r} is a target and trained by update {taken[name]}", do="freeze it"
                    )


def stored_buffers(networks: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (name, owning module, name in the module, buffer) for each buffer that is in the state dict."""
    stored = networks.state_dict().keys()
    for path, module in networks.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{path}.{name}" if path else name
            if full in stored:
                yield full, module, name, buffer
