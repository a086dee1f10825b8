"""An update: what is learnt (an objective), by which parameters, how (an optimiser for each), and how often.

A learner is networks plus an ordered list of these. One update is a language model or PPO; two are a GAN; three, SAC. No two
updates train the same parameter: what a backward leaves on parameters of another update is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from whorl.errors import ConfigError, WhorlError
from whorl.objectives.next_token import Loss
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.optim.decay_mask import decayed_parameters
from whorl.train.optim.stochastic_rounding import Rounding

AcceptStep = Callable[[Mapping[str, float]], bool]


class DivergedError(WhorlError):
    """Training went wrong and could not be mended by leaving out batches."""


def accept_if_finite(metrics: Mapping[str, float]) -> bool:
    """The judge of a learner that has no other: what is not finite ends the run before it spoils the weights.

    A step whose gradients overflowed because the loss was scaled too far (`scaling.py`) is left out, here as by a guard.

    Raises:
        DivergedError: the loss or the gradient norm is NaN or infinite.
    """
    if "overflow" in metrics:
        return False
    if is_finite(metrics):
        return True
    raise DivergedError(
        f"the loss is {metrics['loss']:g} and the norm of its gradient {metrics['grad_norm']:g}; "
        "no weight was changed by it",
        expected="finite numbers",
        do="look for NaN in the data or the rewards, or lower the learning rate",
    )


def is_finite(figures: Mapping[str, float]) -> bool:
    return math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])


MicroBatch = Mapping[str, Tensor]  # a micro-batch: tensors by field name
OptimizerName = Literal["muon", "adamw", "sparse_adagrad"]


@dataclass(frozen=True)
class ParamOptim:
    """How one parameter is optimised: "muon" (matrices), "adamw", or "rows" (look-up tables with sparse gradients)."""

    optimizer: OptimizerName
    lr: float  # peak learning rate
    decay_scale: float = (
        0.0  # times the update's weight_decay; 0 for all that no layer multiplies with (matrices.py)
    )


@dataclass(frozen=True)
class Update:
    """One line of a learner.

    objective: part -> Loss, its networks bound to it; treatments: by parameter name, all that this update trains;
    every: it is taken in every so-many-th round; clip_norm: of the mean gradient of its dense parameters together;
    momentum, matrix_every: Muon's (see there); betas, eps, fused: AdamW's; weight_decay: of both, where a treatment has
    one; judge: told the figures of a step before any weight moves, says whether it is to be taken (by default what is not
    finite ends the run, `guard.py`); scaling: of the loss, for fp16; rounding: of matrices that are kept in bf16.
    """

    objective: Callable[[MicroBatch], Loss]
    param_optims: Mapping[str, ParamOptim]
    every: int = 1
    clip_norm: float = 1.0
    momentum: float = 0.95
    muon_every: int = 1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    fused: bool | None = None
    accept_step: AcceptStep = accept_if_finite
    loss_scaler: LossScaler | None = None
    rounding: Rounding | None = None

    def names_for(self, optimizer: str) -> list[str]:
        """Its parameters under one rule."""
        return [name for name, t in self.param_optims.items() if t.optimizer == optimizer]


@dataclass(frozen=True)
class TargetNetwork:
    """Target networks: after every round the parameters under `target` move towards those under `source`,
    target += (1 - decay) (source - target) (Polyak averaging, as in Lillicrap et al. 2016, arXiv:1509.02971)."""

    target: str
    source: str
    decay: float


def all_adamw(networks: nn.Module, lr: float, prefix: str = "") -> dict[str, ParamOptim]:
    """Every parameter whose name begins with `prefix`, under AdamW at one rate; matrices may decay."""
    decaying = decayed_parameters(networks)
    return {
        n: ParamOptim("adamw", lr, decay_scale=float(n in decaying))
        for n, _ in networks.named_parameters()
        if n.startswith(prefix)
    }


def check_updates(networks: nn.Module, updates: list[Update], target_networks: list[TargetNetwork]) -> None:
    """That every name exists, and that nothing is trained twice.

    Raises:
        ConfigError: it does not, or is.
    """
    known = dict(networks.named_parameters())
    taken: dict[str, int] = {}
    for number, update in enumerate(updates):
        if update.every < 1:
            raise ConfigError(f"update {number} is taken every {update.every} rounds", expected="at least 1")
        for rule in ("muon", "sparse_adagrad"):
            if len({update.param_optims[name].lr for name in update.names_for(rule)}) > 1:
                raise ConfigError(f"update {number} has several rates under {rule!r}", expected="one")
        for name in update.param_optims:
            if name not in known:
                raise ConfigError(
                    f"update {number} trains {name!r}", expected=f"one of {sorted(known)[:8]} ..."
                )
            if name in taken:
                raise ConfigError(
                    f"{name!r} is trained by the updates {taken[name]} and {number}",
                    expected="one update a parameter",
                )
            taken[name] = number
    for average in target_networks:
        for name in known:
            if name.startswith(average.target):
                source = average.source + name[len(average.target) :]
                if source not in known or known[source].shape != known[name].shape:
                    raise ConfigError(f"the target {name!r} has no source {source!r} of its shape")
                if name in taken:
                    raise ConfigError(
                        f"{name!r} is a target and trained by update {taken[name]}", do="freeze it"
                    )
