"""The optimizers of this package with the interface of `torch.optim`: parameter groups, schedulers, state dicts.

    optimizer = TorchOptimizer(matrices, "muon", lr=0.02)
    loss.backward(); optimizer.step(); optimizer.zero_grad()

It works with every optimizer of the table in `train/config.py`, and with a class outside of the package
("module:Class"). `Learner` does not use it. The state of a parameter has torch's form: its moments by name, and the
number of its steps.

The subtle point: an `Optimizer` is a set of references to tensors and a step number. So each step makes one for the
parameters that have a gradient and are at the same step. Parameters without a gradient are skipped, as in torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.train.optim.optimizer import OptimizerInputs, get_optimizer
from whorl.train.optim.stochastic_rounding import Rounding


@dataclass(frozen=True)
class _Settings:
    """The `OptimizerSettings` of a parameter group."""

    momentum: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    muon_every: int = 1
    fused: bool | None = None
    rounding: Rounding | None = None
    native: bool = False


class TorchOptimizer(torch.optim.Optimizer):
    """An optimizer of the table, as a `torch.optim.Optimizer`.

    Args:
        params: tensors, named tensors, or groups with their own `lr`, `weight_decay`, `betas`, `eps` and `momentum`.
        optimizer: "adamw", "muon", "soap" or "module:Class". Muon and SOAP take matrices only.
        lr: learning rate. weight_decay: times the learning rate, per step; of every parameter given.
        betas, eps: of AdamW. momentum: of Muon.
        dtype: of Muon's products.

    Raises:
        ConfigError: an unknown optimizer, or a parameter that is no matrix.
    """

    def __init__(
        self,
        params: Any,
        optimizer: str = "adamw",
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.kind, self.dtype, self._matrices = get_optimizer(optimizer), dtype, optimizer in ("muon", "soap")
        settings = {"weight_decay": weight_decay, "betas": betas, "eps": eps, "momentum": momentum}
        super().__init__(params, {"lr": lr, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.

        Raises:
            ConfigError: a parameter is no matrix, and the optimizer takes only matrices.
        """
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if self._matrices and p.ndim != 2:
                raise ConfigError(
                    f"a parameter has the shape {list(p.shape)}",
                    expected=f"a matrix, for {self.kind.__name__}",
                    do="give other parameters to a second optimizer",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply one update to the parameters that have a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_step: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
            for n, p in enumerate(group["params"]):
                if p.grad is not None:
                    by_step[self.state[p].get("step", 0)][str(n)] = p
            for steps, params in by_step.items():
                self._update(params, group, steps)
        return loss

    def _update(self, params: dict[str, Tensor], group: dict[str, Any], steps: int) -> None:
        settings = _Settings(*(group[name] for name in ("momentum", "weight_decay", "betas", "eps")))
        shapes = {name: tuple(p.shape) for name, p in params.items()}

        def allocate(path: str, shape: tuple[int, ...]) -> Tensor:
            name, moment = path.split("/")
            state = cast(dict[str, Any], self.state[params[name]])
            if moment not in state:
                state[moment] = params[name].new_zeros(shape)
            return cast(Tensor, state[moment])

        weights = {name: p.data.contiguous() for name, p in params.items()}
        gradients = {name: cast(Tensor, p.grad).contiguous() for name, p in params.items()}
        ones = dict.fromkeys(params, 1.0)
        inputs = OptimizerInputs(weights, shapes, ones, ones, settings, self.dtype, allocate)
        optimizer = self.kind.make(inputs)
        optimizer.steps = steps
        optimizer.step(gradients, group["lr"])
        for name, p in params.items():
            self.state[p]["step"] = steps + 1
            if weights[name].data_ptr() != p.data_ptr():  # p is not contiguous
                p.data.copy_(weights[name])
