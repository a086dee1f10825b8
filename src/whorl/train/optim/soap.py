"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024, arXiv:2409.11321, algorithm 3).

    L, R      running means of G G^T and G^T G                                       [rows, rows], [columns, columns]
    Q_L, Q_R  their eigenvectors, refreshed every `EVERY` steps
    v         running mean of (Q_L^T G Q_R)^2
    W -= lr Q_L [(Q_L^T m Q_R) / (sqrt(v) + eps)] Q_R^T, with the bias corrections of Adam

A refresh is one power iteration with a QR decomposition (algorithm 4); v follows its directions where their order
changes. The first gradient that is not zero sets the basis and takes no step: after a matrix that begins at zero, the
first gradients are zero.

A step costs four products with the bases, against none of Adam's: `bench/train/optim/optimizer_quality.py` compares
both, at equal steps and at equal seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.train.optim.optimizer import Allocator, Optimizer, OptimizerInputs, Shape

EVERY = 10
BETAS = (0.9, 0.95)
EPS = 1e-12


class SOAP(Optimizer):
    """See the top of this file.

    Args:
        params: matrices by name. learning_rate: peaks by name.
        decay_scale: by name, times weight_decay; default 1.
        every: steps between refreshes of the bases.

    Raises:
        ConfigError: a parameter is no matrix.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        learning_rate: dict[str, float],
        *,
        weight_decay: float = 0.0,
        decay_scale: dict[str, float] | None = None,
        every: int = EVERY,
        allocate: Allocator = lambda name, shape: torch.zeros(shape),
    ) -> None:
        self.params, self.learning_rate, self.every = params, learning_rate, every
        self.decay = {name: weight_decay * (decay_scale or {}).get(name, 1.0) for name in params}
        for name, p in params.items():
            if p.ndim != 2:
                raise ConfigError(f"{name} has the shape {list(p.shape)}", expected="a matrix, for SOAP")
        self.moments = {
            name: {m: allocate(f"{name}/{m}", shape) for m, shape in self.state_spec(tuple(p.shape)).items()}
            for name, p in params.items()
        }

    @classmethod
    def state_spec(cls, shape: Shape) -> dict[str, Shape]:
        rows, columns = shape
        left, right = (rows, rows), (columns, columns)
        return {
            "mean": shape, "square": shape, "left": left, "right": right, "left_basis": left, "right_basis": right,
            "begun": (1,),
        }  # fmt: skip

    @classmethod
    def cost(cls, shape: Shape) -> float:
        """Return the FLOPs of a step, with its share of a refresh (a QR decomposition takes 10 n^3)."""
        rows, columns = shape
        products = 2.0 * 4 * rows * columns * (rows + columns)
        return products + 10.0 * (rows**3 + columns**3) / EVERY

    @classmethod
    def make(cls, inputs: OptimizerInputs) -> SOAP:
        return cls(
            dict(inputs.params), dict(inputs.lr), weight_decay=inputs.settings.weight_decay,
            decay_scale=dict(inputs.decay_scale),
            allocate=inputs.allocate,
        )  # fmt: skip

    def step(self, gradients: Mapping[str, Tensor], lr_scale: float) -> None:
        self.steps += 1
        first, second = BETAS
        for name, p in self.params.items():
            g, own = gradients[name], self.moments[name]
            if not own["begun"]:
                if g.any():
                    self._begin(g, own)
                continue
            left, right = own["left_basis"], own["right_basis"]
            own["mean"].lerp_(g, 1 - first)
            rotated = left.mT @ g @ right
            own["square"].mul_(second).addcmul_(rotated, rotated, value=1 - second)
            t = self.steps - int(own["begun"])
            correction = (1 - second**t) ** 0.5 / (1 - first**t)
            step = (left.mT @ own["mean"] @ right).div_(own["square"].sqrt().add_(EPS))
            rate = self.learning_rate[name] * lr_scale
            if self.decay[name]:
                p.mul_(1 - rate * self.decay[name])
            p.add_(left @ step @ right.mT, alpha=-rate * correction)
            self._gather(g, own)
            if self.steps % self.every == 0:
                self._refresh(own)

    def _begin(self, g: Tensor, own: dict[str, Tensor]) -> None:
        self._gather(g, own)
        for side in ("left", "right"):
            own[f"{side}_basis"].copy_(torch.linalg.eigh(own[side]).eigenvectors.flip(1))
        own["begun"].fill_(float(self.steps))

    def _gather(self, g: Tensor, own: dict[str, Tensor]) -> None:
        own["left"].lerp_(g @ g.mT, 1 - BETAS[1])
        own["right"].lerp_(g.mT @ g, 1 - BETAS[1])

    def _refresh(self, own: dict[str, Tensor]) -> None:
        for axis, side in enumerate(("left", "right")):
            product, basis = own[side], own[f"{side}_basis"]
            order = torch.einsum("ik,ij,jk->k", basis, product, basis).argsort(descending=True)
            own["square"].copy_(own["square"].index_select(axis, order))
            basis.copy_(torch.linalg.qr(product @ basis[:, order]).Q)
