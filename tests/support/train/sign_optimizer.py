"""An optimizer outside of the package: signs of the momentum (Bernstein et al. 2018, arXiv:1802.04434)."""

from __future__ import annotations

from whorl.train.optim.optimizer import Optimizer, OptimizerInputs, Shape


class SignMomentum(Optimizer):
    def __init__(self, inputs: OptimizerInputs) -> None:
        self.params, self.lr = inputs.params, inputs.lr
        self.mean = {n: inputs.allocate(f"{n}/mean", tuple(p.shape)) for n, p in inputs.params.items()}

    @classmethod
    def state_spec(cls, shape: Shape) -> dict[str, Shape]:
        return {"mean": shape}

    @classmethod
    def make(cls, inputs: OptimizerInputs) -> SignMomentum:
        return cls(inputs)

    def step(self, gradients, lr_scale):  # type: ignore[no-untyped-def]
        self.steps += 1
        for name, p in self.params.items():
            p.add_(self.mean[name].lerp_(gradients[name], 0.1).sign(), alpha=-self.lr[name] * lr_scale)
