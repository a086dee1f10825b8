"""VQ-VAE: an autoencoder whose latents are codes of a table, and a GPT over the codes (arXiv:1711.00937).

    1. encoder, decoder    - log p(x | q) + beta |z - e|^2, with the straight-through gradient
    2. codes               moving averages of their latents, and restarts of dead codes (`objectives/generative/codes.py`)
    3. prior               next-token prediction of the row's codes after a token of its class; the encoder is fixed

A row is a grid of codes: the cells of a picture, or one per dimension of a vector. The class tokens follow the codes in the
vocabulary; the last one means no class. The likelihood is the bound log p(codes) + log p(x | codes) (section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.generative.data import Data
from whorl.generative.methods.method import ConditionalConfig, DrawOptions, GenerativeConfig
from whorl.generative.methods.vae import VAE, held_out
from whorl.models.autoencoder import Autoencoder, make_coders, n_positions
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.objectives.generative import codes
from whorl.objectives.generative.elbo import gaussian_log_prob
from whorl.objectives.next_token import Loss, next_token
from whorl.train.learner.update import MicroBatch, Update, all_adamw


class VQVAEConfig(ConditionalConfig):
    """Settings of the VQ-VAE."""

    method: Literal["vqvae"] = "vqvae"
    codes: int = Field(default=128, ge=2, description="in the table")
    code_dim: int = Field(default=8, ge=1, description="dimensions of a code")
    code_decay: float = Field(default=0.99, gt=0, lt=1, description="of the codes' moving average")
    commitment: float = Field(
        default=0.25, ge=0, description="weight of the distance from latents to their codes"
    )


class VQNetworks(Autoencoder):
    """moments: of the codes, [K, 1 + d]. prior: over the codes of a row."""

    def __init__(self, coders: tuple[nn.Module, nn.Module], prior: Transformer, table: Tensor) -> None:
        super().__init__(*coders, log_std=True)
        share = torch.full((len(table), 1), codes.DEAD / 2 / len(table))  # dead: the first batch restarts all
        self.moments, self.prior = nn.Parameter(torch.cat([share, share * table], 1)), prior


class VQVAE(VAE):
    """VQ-VAE: an autoencoder whose latents are codes of a table, and a GPT over the codes."""

    Config: ClassVar[type[GenerativeConfig]] = VQVAEConfig

    @property
    def positions(self) -> int:
        """Codes of a row."""
        return n_positions(self.info.shape)

    def make_networks(self, rng: torch.Generator) -> nn.Module:
        c = self.config
        if c.width % (2 * c.n_heads):
            raise ConfigError(f"width is {c.width}", expected=f"an even multiple of n_heads, {c.n_heads}")
        heads = AttentionConfig(n_heads=c.n_heads, n_kv_heads=c.n_heads, head_dim=c.width // c.n_heads)
        shape = TransformerConfig(
            vocab_size=c.codes + self.n_classes + 1, d_model=c.width, n_layers=c.depth, mlp_hidden=2 * c.width,
            max_length=self.positions, mixers={"attention": heads}, mlp="gelu",
        )  # fmt: skip
        coders = make_coders(
            self.info.shape,
            c.code_dim,
            c.code_dim,
            c.width,
            c.depth,
            grid=True,
            n_classes=self.n_classes,
            rng=rng,
        )
        return VQNetworks(coders, Transformer(shape, rng), torch.randn(c.codes, c.code_dim, generator=rng))

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        """Return labels, and which latents dead codes may become: [N, positions] numbers of codes, or -1."""
        candidates = torch.full((len(data) * self.positions,), -1)
        order = torch.randperm(len(candidates), generator=rng)[: self.config.codes]
        candidates[order] = torch.randperm(self.config.codes, generator=rng)[: len(order)]
        return {"restarts": candidates.view(len(data), -1), **self.draw_labels(labels, rng)}

    def encode(self, networks: Any, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return latents [N, positions, code_dim] and the numbers of their codes [N, positions]."""
        latents = networks.encoder(x, labels).view(len(x), self.positions, -1)
        return latents, codes.nearest(latents, codes.codes_of(networks.moments))

    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        data, labels = batch["data"], batch.get("labels")
        latents, numbers = self.encode(networks, data, labels)
        found = codes.codes_of(networks.moments)[numbers]
        decoded = networks.decoder(codes.straight_through(latents, found), labels)
        log_prob = gaussian_log_prob(data, decoded, networks.log_std)
        commitment = codes.commitment(latents, found)
        metrics = {"reconstruction": -log_prob.sum().detach(), "commitment": commitment.sum().detach()}
        total = self.config.commitment * commitment.sum() - log_prob.sum()
        return Loss(total, torch.tensor(float(len(data)), device=data.device), metrics)

    def codes_loss(self, networks: Any, batch: MicroBatch) -> Loss:
        """Return the loss whose gradient moves the codes."""
        c, moments = self.config, networks.moments
        with torch.no_grad():
            latents, numbers = self.encode(networks, batch["data"], batch.get("labels"))
            rows, total = latents.flatten(0, 1), c.batch_size * self.positions
            added = codes.statistics(rows, numbers.flatten(), c.codes)
            added += codes.restarts(moments, rows, batch["restarts"].flatten(), c.code_decay, total)
        return codes.follow(moments, added, len(rows))

    def move_codes(self, parameters: Sequence[Tensor], gradient: Tensor) -> dict[str, float]:
        """Move the moments to their new average."""
        with torch.no_grad():
            for moments in parameters:
                moments.lerp_(-gradient.view_as(moments), 1 - self.config.code_decay)
        return {}

    def hidden(self, networks: Any, numbers: Tensor, labels: Tensor | None) -> Tensor:
        """Return the prior's states [N, positions, width] that predict the codes of a row."""
        ids = torch.cat([self.first(networks, len(numbers), labels), numbers[:, :-1]], 1)
        hidden: Tensor = networks.prior(ids)
        return hidden

    def first(self, networks: Any, n: int, labels: Tensor | None) -> Tensor:
        """Return the class tokens [n, 1]."""
        if labels is None:
            labels = torch.full((n,), self.n_classes)
        tokens: Tensor = self.config.codes + labels.to(networks.device)[:, None]
        return tokens

    def prior_loss(self, networks: Any, batch: MicroBatch) -> Loss:
        """Return the next-token loss over the codes."""
        labels = batch.get("labels")
        with torch.no_grad():
            numbers = self.encode(networks, batch["data"], labels)[1]
        hidden, head = self.hidden(networks, numbers, labels), networks.prior.head_weight[: self.config.codes]
        targets = numbers.flatten()
        loss = next_token(hidden.flatten(0, 1), head, targets, torch.ones_like(targets, dtype=torch.bool))
        return Loss(loss.total, loss.count, {"prior": loss.metrics["nll"]})

    def updates(self, networks: nn.Module) -> Sequence[Update]:
        coders = self.adamw(networks, self.loss, ("encoder.", "decoder.", "log_std"))
        own = all_adamw(networks, self.config.lr, "moments")
        follow = Update(partial(self.codes_loss, networks), own, clip_norm=math.inf, apply=self.move_codes)
        return [coders, follow, self.adamw(networks, self.prior_loss, "prior.")]

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return ()

    @torch.no_grad()
    def sample(self, networks: Any, n: int, rng: torch.Generator, options: DrawOptions) -> Tensor:
        self.check_options(options)
        ids, prior = self.first(networks, n, options.labels), networks.prior
        state, found = prior.new_state(n, self.positions), list[Tensor]()
        for _ in range(self.positions):
            logits = prior.logits(prior(ids, state=state)[:, -1])[:, : self.config.codes]
            ids = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=rng).to(ids.device)
            found.append(ids)
        latents = codes.codes_of(networks.moments)[torch.cat(found, 1)]
        return self.from_noise(networks, latents, rng, options)

    def reconstruct(self, networks: Any, x: Tensor) -> Tensor:
        """Return the means of x at its codes."""
        found: Tensor = networks.decoder(codes.codes_of(networks.moments)[self.encode(networks, x)[1]])
        return found

    @torch.no_grad()
    def log_likelihood(self, networks: Any, x: Tensor) -> Tensor:
        numbers = self.encode(networks, x)[1]
        logits = networks.prior.logits(self.hidden(networks, numbers, None))[..., : self.config.codes]
        prior = -F.cross_entropy(logits.transpose(1, 2), numbers, reduction="none").sum(1)
        decoded = networks.decoder(codes.codes_of(networks.moments)[numbers])
        return (prior + gaussian_log_prob(x, decoded, networks.log_std)).double()

    @torch.no_grad()
    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return the perplexity of the codes and the share of codes in use."""
        numbers = self.encode(networks, *held_out(data, networks.device))[1]
        perplexity, used = codes.usage(numbers, self.config.codes)
        return {"code_perplexity": perplexity, "codes_used": used}
