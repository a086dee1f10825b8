"""Denoising: a network predicts a quantity of a Gaussian path. Diffusion and flow matching differ in path and quantity.

Samples of a class follow from one of two kinds of guidance. With both, 1 is the density of the class, 0 that of all classes,
and more than 1 is sharper than the class.

"free": the labels of some rows are dropped, so that one network is the model of each class and of all. Guidance moves its
prediction away from that without a class (Ho & Salimans 2022, arXiv:2207.12598, eq. 6, with guidance = 1 + w):

    f = f(x, t) + guidance (f(x, t, label) - f(x, t))

The quantities are linear in each other, so the rule is the same for all of them.

"classifier": the network has no classes, and a second update trains a classifier of the same x_t. By Bayes' rule its
gradient leads to the class (Dhariwal & Nichol 2021, arXiv:2105.05233, algorithm 2, here for every path and sampler):

    eps = eps(x, t) - guidance s grad log p(label | x, t),        x_0 = (x - s eps) / a
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.generative.data import Data
from whorl.generative.likelihood import log_likelihood
from whorl.generative.methods.method import ConditionalConfig, DrawOptions, GenerativeMethod
from whorl.generative.methods.vae import held_out
from whorl.generative.samplers import Estimate, clamp_data, draw
from whorl.models.autoencoder import ImageEncoder
from whorl.objectives.classify import classification
from whorl.objectives.generative.diffusion import GaussianPath, Prediction
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch, Update

STEPS = 20  # of sampling, by default


class DenoisingConfig(ConditionalConfig):
    """Settings of methods that denoise."""

    guidance: Literal["free", "classifier"] = Field(
        default="free", description="to a class: by dropped labels, or by a classifier of noisy pictures"
    )

    @model_validator(mode="after")
    def _has_effect(self) -> DenoisingConfig:
        if (
            self.guidance == "classifier"
            and self.label_dropout != ConditionalConfig.model_fields["label_dropout"].default
        ):
            raise ValueError("label_dropout has no effect with guidance=classifier: leave it out")
        return self


class GuidedDenoiser(nn.Module):
    """A denoiser without classes, and a classifier of its inputs."""

    def __init__(self, denoiser: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.denoiser, self.classifier = denoiser, classifier

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        out: Tensor = self.denoiser(x, time)
        return out


class Denoising(GenerativeMethod):
    """path: from data to noise. prediction: of the network."""

    draws_in_steps, likelihood = True, "exact"
    path: GaussianPath
    prediction: Prediction

    @property
    def has_classifier(self) -> bool:
        return bool(self.config.guidance == "classifier")

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        """Return the denoiser, or `GuidedDenoiser`. Raises ConfigError: there are no classes."""
        c, shape = self.config, self.info.shape
        if not self.has_classifier:
            return self.make_denoiser(rng, self.n_classes)
        if not (self.n_classes and self.info.is_pictures):
            raise ConfigError(
                f"guidance is classifier, and {self.info.name} has no pictures with classes", do="leave out guidance"
            )  # fmt: skip
        inputs = shape[0] + 1  # channels and the time
        classifier = ImageEncoder(shape[1], inputs, self.n_classes, c.width, c.depth, grid=False, rng=rng)
        return GuidedDenoiser(self.make_denoiser(rng, 0), classifier)

    def draw_labels(self, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        if labels is not None and self.has_classifier:
            return {"labels": labels}
        return super().draw_labels(labels, rng)

    def updates(self, networks: nn.Module) -> Sequence[Update]:
        if not self.has_classifier:
            return super().updates(networks)
        losses = {"denoiser.": self.loss, "classifier.": self.classifier_loss}
        return [self.adamw(networks, loss, prefix) for prefix, loss in losses.items()]

    def classifier_loss(self, networks: Any, batch: MicroBatch) -> Loss:
        """Return the cross entropy of the classes of x_t, summed over rows."""
        x = self.path.at(batch["time"], batch["data"]).noisy(batch["data"], batch["noise"])
        return classification(self.class_logits(networks, x, batch["time"]), batch["labels"])

    def class_logits(self, networks: Any, x: Tensor, time: Tensor) -> Tensor:
        """Return logits [N, classes] at x_t [N, C, H, W] and times [N]."""
        point = self.path.at(time, x)
        scaled = x / (point.a.square() + point.s.square()).sqrt()
        plane = time.view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        logits: Tensor = networks.classifier(torch.cat([scaled, plane], 1))
        return logits

    def class_gradient(self, networks: Any, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of log p(label | x_t) by x_t, [N, ...]."""
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            log_p = self.class_logits(networks, y, time).log_softmax(1)[torch.arange(len(y)), labels]
            return torch.autograd.grad(log_p.sum(), y)[0]

    def predict(self, networks: Any, x: Tensor, time: Tensor, labels: Tensor | None) -> Tensor:
        """Return the prediction [N, ...] at x_t [N, ...], times [N] and classes [N]."""
        found: Tensor = networks(x, time, labels)
        return found

    def estimate(self, networks: Any, labels: Tensor | None = None, guidance: float = 1.0) -> Estimate:
        """Return the function from (x_t, t) to x_0 and eps, for rows of these classes."""

        def found(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
            time = x.new_full((len(x),), t)
            value, point = self.predict(networks, x, time, labels), self.path.at(t, x)
            if labels is not None and guidance != 1 and not self.has_classifier:
                free = self.predict(networks, x, time, None)
                value = free + guidance * (value - free)
            data, noise = point.split(self.prediction, value, x)
            if labels is None or not self.has_classifier or not point.a.all():  # a = 0: x_t has no class
                return data, noise
            shift = guidance * point.s * self.class_gradient(networks, x, time, labels)
            return data + point.s / point.a * shift, noise - shift

        return found

    def from_noise(self, networks: Any, noise: Tensor, rng: torch.Generator, options: DrawOptions) -> Tensor:
        labels = options.labels_on(noise.device)
        estimate = clamp_data(self.path, self.estimate(networks, labels, options.guidance), self.info.limit)
        x, steps, sampler = self.path.start_std * noise, options.steps or STEPS, options.sampler or "heun"
        return draw(self.path, estimate, x, steps, sampler, rng, options.record)

    def log_likelihood(self, networks: Any, x: Tensor) -> Tensor:
        return log_likelihood(self.path, self.estimate(networks), x)

    @torch.no_grad()
    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return the accuracy of the classifier on noisy held-out rows, at times as in training."""
        if not self.has_classifier:
            return {}
        rows, labels = held_out(data, torch.device("cpu"))
        batch = {"data": rows, **self.draws(rows, labels, generator(self.config.seed, "diagnose"))}
        device = next(networks.parameters()).device
        loss = self.classifier_loss(networks, {name: t.to(device) for name, t in batch.items()})
        return {"classifier_accuracy": float(loss.metrics["correct"] / loss.count)}
