"""Autoencoders: AE, and the VAE, which adds a prior of the latents and noise (Kingma & Welling 2014, arXiv:1312.6114).

    ae     |f(g(x)) - x|^2                                    no distribution of latents, so no samples
    vae    - log p(x | z, label) + KL(q(z | x, label) || N(0, I))         `objectives/generative/elbo.py`

The labels of some rows are dropped, so that one network is the model of each class and of all. Samples of pictures are the
decoder's means, as is usual. Samples of vectors have the decoder's noise, which is a part of the density.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from whorl.generative.data import Data
from whorl.generative.methods.method import ConditionalConfig, DrawOptions, GenerativeConfig, GenerativeMethod
from whorl.models.autoencoder import Autoencoder, make_coders
from whorl.objectives.generative.diffusion import denoising
from whorl.objectives.generative.elbo import elbo, gaussian_log_prob, importance_bound, kl_from_prior
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch

DIAGNOSED = 1000  # held-out rows
COLLAPSED = 0.01  # nats: a unit below it carries nothing
IMPORTANCE_SAMPLES = 64


class AEConfig(GenerativeConfig):
    """Settings of the autoencoder."""

    method: Literal["ae"] = "ae"
    latent: int = Field(default=16, ge=1, description="dimensions of the latent")


class VAEConfig(ConditionalConfig):
    """Settings of the variational autoencoder."""

    method: Literal["vae"] = "vae"
    latent: int = Field(default=16, ge=1, description="dimensions of the latent")
    beta: float = Field(
        default=1.0, ge=0, description="weight of the KL divergence; 1 for a bound of the likelihood"
    )
    free_bits: float = Field(
        default=0.0, ge=0, description="nats of a dimension's KL divergence that cost nothing"
    )


def held_out(data: Data, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return rows [N, *shape] and their labels [N] for a diagnosis."""
    labels = None if data.test_labels is None else data.test_labels[:DIAGNOSED].to(device)
    return data.test[:DIAGNOSED].to(device), labels


class AE(GenerativeMethod):
    """AE: encode and reconstruct rows; there are no samples."""

    Config: ClassVar[type[GenerativeConfig]] = AEConfig
    has_samples = False

    @property
    def has_classes(self) -> bool:
        return False

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        c = self.config
        return Autoencoder(*make_coders(self.info.shape, c.latent, c.latent, c.width, c.depth, rng=rng))

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        return {}

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        return denoising(self.reconstruct(networks, batch["data"]), batch["data"])

    def reconstruct(self, networks: Any, x: Tensor) -> Tensor:
        """Return the decoded latents of x, [N, *shape]."""
        found: Tensor = networks.decoder(networks.encoder(x))
        return found

    @torch.no_grad()
    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return the mean square error per dimension."""
        loss = self.loss(networks, {"data": held_out(data, networks.device)[0]})
        return {"reconstruction_mse": float(loss.total / loss.count)}


class VAE(GenerativeMethod):
    """VAE: an autoencoder with a prior of the latents, and noise."""

    Config: ClassVar[type[GenerativeConfig]] = VAEConfig
    likelihood = "bound"

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        c = self.config
        coders = make_coders(
            self.info.shape, 2 * c.latent, c.latent, c.width, c.depth, n_classes=self.n_classes, rng=rng
        )
        return Autoencoder(*coders, log_std=True)

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        return {
            "noise": torch.randn(len(data), self.config.latent, generator=rng),
            **self.draw_labels(labels, rng),
        }

    def posterior(self, networks: Any, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the means and log-deviations of q(z | x, label), [N, latent]."""
        mean, log_std = networks.encoder(x, labels).chunk(2, dim=1)
        return mean, log_std

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        data, labels = batch["data"], batch.get("labels")
        mean, log_std = self.posterior(networks, data, labels)
        z = mean + log_std.exp() * batch["noise"]
        log_prob = gaussian_log_prob(data, networks.decoder(z, labels), networks.log_std)
        return elbo(log_prob, kl_from_prior(mean, log_std), self.config.beta, self.config.free_bits)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.config.latent,)

    def from_noise(self, networks: Any, noise: Tensor, rng: torch.Generator, options: DrawOptions) -> Tensor:
        """Return samples of latents: means of pictures, and vectors with the decoder's noise."""
        mean: Tensor = networks.decoder(noise, options.labels_on(noise.device))
        if self.info.is_pictures:
            return mean
        std: Tensor = networks.log_std.exp()
        return mean + std * torch.randn(mean.shape, generator=rng).to(mean)

    def reconstruct(self, networks: Any, x: Tensor) -> Tensor:
        """Return the means of x at the mean latents."""
        found: Tensor = networks.decoder(self.posterior(networks, x)[0])
        return found

    @torch.no_grad()
    def log_likelihood(self, networks: Any, x: Tensor) -> Tensor:
        mean, log_std = self.posterior(networks, x)
        rng, zero, weights = generator(self.config.seed, "importance"), torch.zeros_like(mean), list[Tensor]()
        for _ in range(IMPORTANCE_SAMPLES):
            z = mean + log_std.exp() * torch.randn(mean.shape, generator=rng).to(mean)
            joint = gaussian_log_prob(z, zero, zero) + gaussian_log_prob(
                x, networks.decoder(z), networks.log_std
            )
            weights.append((joint - gaussian_log_prob(z, mean, log_std)).double())
        return importance_bound(torch.stack(weights))

    @torch.no_grad()
    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return the KL divergence in nats, and of how many units it is below 0.01: posteriors equal to the prior."""
        kl = kl_from_prior(*self.posterior(networks, *held_out(data, networks.device))).mean(0)
        return {
            "kl": float(kl.sum()),
            "units": float(len(kl)),
            "collapsed_units": float((kl < COLLAPSED).sum()),
        }
