"""Denoising: a network predicts a quantity of a Gaussian path. Diffusion and flow matching differ in path and quantity.

The labels of some rows are dropped, so that one network is the model of each class and of all. Guidance moves its prediction
away from that without a class (Ho & Salimans 2022, arXiv:2207.12598, eq. 6, with guidance = 1 + w):

    f = f(x, t) + guidance (f(x, t, label) - f(x, t))

The quantities are linear in each other, so the rule is the same for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whorl.generative.likelihood import log_likelihood
from whorl.generative.methods.method import DrawOptions, GenerativeMethod
from whorl.generative.samplers import Estimate, clamp_data, draw
from whorl.objectives.generative.diffusion import GaussianPath, Prediction

STEPS = 20  # of sampling, by default


class Denoising(GenerativeMethod):
    """path: from data to noise. prediction: of the network."""

    draws_in_steps, likelihood = True, "exact"
    path: GaussianPath
    prediction: Prediction

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        return self.make_denoiser(rng)

    def predict(self, networks: Any, x: Tensor, time: Tensor, labels: Tensor | None) -> Tensor:
        """Return the prediction [N, ...] at x_t [N, ...], times [N] and classes [N]."""
        found: Tensor = networks(x, time, labels)
        return found

    def estimate(self, networks: Any, labels: Tensor | None = None, guidance: float = 1.0) -> Estimate:
        """Return the function from (x_t, t) to x_0 and eps, for rows of these classes."""

        def found(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
            time = x.new_full((len(x),), t)
            value = self.predict(networks, x, time, labels)
            if labels is not None and guidance != 1:
                free = self.predict(networks, x, time, None)
                value = free + guidance * (value - free)
            return self.path.at(t, x).split(self.prediction, value, x)

        return found

    def from_noise(self, networks: Any, noise: Tensor, rng: torch.Generator, options: DrawOptions) -> Tensor:
        labels = options.labels_on(noise.device)
        estimate = clamp_data(self.path, self.estimate(networks, labels, options.guidance), self.info.limit)
        x, steps, sampler = self.path.start_std * noise, options.steps or STEPS, options.sampler or "heun"
        return draw(self.path, estimate, x, steps, sampler, rng, options.record)

    def log_likelihood(self, networks: Any, x: Tensor) -> Tensor:
        return log_likelihood(self.path, self.estimate(networks), x)
