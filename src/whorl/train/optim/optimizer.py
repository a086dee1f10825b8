"""The interface of an optimizer of dense parameters. `train/config.py` has the table of names.

A new optimizer is one file and one entry there. One outside of the package needs no entry: its name is
"my_package.my_module:MyClass", which every replica imports. Lookup tables have sparse gradients and another interface,
`SparseAdagrad`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.train.config import OPTIMIZERS
from whorl.train.optim.stochastic_rounding import Rounding

Shape = tuple[int, ...]
Allocator = Callable[[str, Shape], Tensor]


class OptimizerSettings(Protocol):
    """Settings of an `Update`, which has further ones."""

    @property
    def momentum(self) -> float: ...
    @property
    def muon_every(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def fused(self) -> bool | None: ...
    @property
    def rounding(self) -> Rounding | None: ...
    @property
    def native(self) -> bool: ...


@dataclass(frozen=True)
class OptimizerInputs:
    """The parts from which a rank makes an optimizer.

    params: the parameters that this rank updates. shapes: of the parameters of all ranks. lr: their peak learning rates.
    decay_scale: times the weight decay. dtype: of large products. allocate: returns the tensor of "parameter/moment".
    Replicas share it, and checkpoints hold it.
    """

    params: Mapping[str, Tensor]
    shapes: Mapping[str, Shape]
    lr: Mapping[str, float]
    decay_scale: Mapping[str, float]
    settings: OptimizerSettings
    dtype: torch.dtype
    allocate: Allocator


class Optimizer(ABC):
    """Updates parameters from gradients of the *mean* loss, in place.

    width_scaled: the best rate is inverse to the width, as Adam's (`mup.py`).
    steps: batches seen, skipped ones included.
    """

    width_scaled: ClassVar[bool] = True
    steps: int = 0

    @classmethod
    @abstractmethod
    def state_spec(cls, shape: Shape) -> dict[str, Shape]:
        """Return the shapes of a parameter's moments, by name."""

    @classmethod
    def cost(cls, shape: Shape) -> float:
        """Return the cost of one parameter's update, in any unit; replicas share the parameters by it (`zero1.py`)."""
        return float(prod(shape))

    @classmethod
    def step_groups(cls, settings: OptimizerSettings, shapes: Mapping[str, Shape]) -> list[list[str]]:
        """Return the parameters in groups that are updated at different steps; replicas share each of them."""
        return [list(shapes)]

    @classmethod
    @abstractmethod
    def make(cls, inputs: OptimizerInputs) -> Optimizer:
        """Return the optimizer of one rank."""

    @abstractmethod
    def step(self, gradients: Mapping[str, Tensor], lr_scale: float) -> None:
        """Apply one update. lr_scale: times the peak learning rates. gradients: also of other parameters."""


def get_optimizer(name: str) -> type[Optimizer]:
    """Return the class of an optimizer.

    Raises:
        ConfigError: it cannot be imported, or is of another kind.
    """
    found = OPTIMIZERS.get(name)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{name!r} is no optimizer", expected=f"a subclass of {__name__}.Optimizer")
    return found
