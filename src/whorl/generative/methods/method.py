"""A generative method: everything that distinguishes one from another.

    Config          its settings
    make_networks   what is trained
    draws           the random fields of a batch, such as noise, times and dropped labels
    updates         losses, and which parameters each of them trains
    from_noise      samples of the trained networks, from noise of the shape `noise_shape`
    log_likelihood  log-densities, where the method has them

The loop, the optimizers and checkpoints belong to `GenerativeTask` and the trainer. Noise is data: the draws of a step
follow from the seed and the step number, for the whole batch. So a run on other ranks, or a resumed one, draws the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.generative.data import Data, DataInfo
from whorl.generative.samplers import Sampler
from whorl.models.vector_denoiser import VectorDenoiser
from whorl.models.vision.dit import DiT
from whorl.models.vision.unet import UNet
from whorl.objectives.next_token import Loss
from whorl.train.config import RowScheduleConfig, RowTrainConfig
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.rows import ADAM_EPS

Likelihood = Literal["", "exact", "bound"]


class GenerativeConfig(RowTrainConfig):
    """Settings of every method: all that determines a model's weights, given the data."""

    method: str
    steps: int = Field(default=4000, ge=1)
    batch_size: int = Field(default=128, ge=2, description="rows per step")
    lr: float = Field(default=2e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="of weight matrices")
    threads: int | None = Field(default=1, ge=1, description="torch threads; 1 suits tiny networks")
    train: RowScheduleConfig = Field(default=RowScheduleConfig(ema=0.999), description="the update loop")
    width: int = Field(default=128, ge=8, multiple_of=2, description="of the network")
    depth: int = Field(default=3, ge=1, description="blocks of the network, or levels of a U-Net")
    network: Literal["dit", "unet"] = Field(default="dit", description="pictures: the kind of network")
    n_heads: int = Field(
        default=4, ge=1, description="attention heads of pictures, and of the GPT over codes"
    )
    patch: int = Field(default=2, ge=1, description="pictures: side of a patch of the DiT")


class ConditionalConfig(GenerativeConfig):
    """Settings of methods whose one network is the model of each class and of all."""

    label_dropout: float = Field(
        default=0.1, ge=0, le=1, description="probability that a row's label is dropped"
    )


@dataclass(frozen=True)
class DrawOptions:
    """How samples are drawn.

    steps, sampler: of methods that draw in steps; None for their defaults. labels: [n] classes; None for all of them.
    guidance: strength of the class; 1 for its density. record: receives each time and its x_t of methods that draw in steps.
    """

    steps: int | None = None
    sampler: Sampler | None = None
    labels: Tensor | None = None
    guidance: float = 1.0
    record: Callable[[float, Tensor], None] | None = None

    def labels_on(self, device: torch.device) -> Tensor | None:
        """Return the labels on a device."""
        return None if self.labels is None else self.labels.to(device)


class GenerativeMethod(ABC):
    """One method with its settings, for data of one kind.

    has_samples: whether there is a distribution to draw from; without one, `reconstruct` shows what was learned.
    draws_in_steps: whether sampling has steps, a sampler and guidance. likelihood: whether `log_likelihood`
    is exact, a lower bound, or missing ("").
    """

    Config: ClassVar[type[GenerativeConfig]]
    has_samples: ClassVar[bool] = True
    draws_in_steps: ClassVar[bool] = False
    likelihood: ClassVar[Likelihood] = ""

    def __init__(self, config: Any, info: DataInfo) -> None:
        self.config, self.info = config, info

    @property
    def n_classes(self) -> int:
        return len(self.info.classes)

    def make_denoiser(self, rng: torch.Generator, n_classes: int) -> nn.Module:
        """Return a network (x [N, *shape], times [N], classes [N] or None) -> [N, *shape], as `config.network` has it."""
        c, shape = self.config, self.info.shape
        if not self.info.is_pictures:
            return VectorDenoiser(shape[0], c.width, c.depth, n_classes, rng)
        sizes = {"width": c.width, "depth": c.depth, "n_heads": c.n_heads, "n_classes": n_classes}
        if c.network == "unet":
            return UNet(shape[1], shape[0], **sizes, generator=rng)
        return DiT(shape[1], shape[0], patch=c.patch, **sizes, generator=rng)

    @abstractmethod
    def make_networks(self, rng: torch.Generator) -> nn.Module:
        """Return untrained networks. The same generator gives the same bits."""

    @abstractmethod
    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        """Return the random fields of a batch, each [N, ...], for rows [N, *shape] and their labels [N]."""

    def draw_labels(self, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        """Return the labels [N] of a `ConditionalConfig`, some of them replaced by the number that means no class."""
        if labels is None:
            return {}
        dropped = torch.rand(len(labels), generator=rng) < self.config.label_dropout
        return {"labels": torch.where(dropped, self.n_classes, labels)}

    @abstractmethod
    def loss(self, networks: Any, batch: MicroBatch) -> Loss:
        """Return the loss on `data` with its draws."""

    def updates(self, networks: nn.Module) -> Sequence[Update]:
        """Return the updates of a step, in order: by default one, AdamW on all parameters."""
        return [self.adamw(networks, self.loss)]

    def adamw(
        self, networks: nn.Module, loss: Callable[[Any, MicroBatch], Loss], prefix: str | tuple[str, ...] = ""
    ) -> Update:
        """Return the update of a loss of (networks, batch): AdamW on the parameters with these name prefixes."""
        c = self.config
        own = all_adamw(networks, c.lr, prefix)
        return Update(partial(loss, networks), own, weight_decay=c.weight_decay, eps=ADAM_EPS)

    def check_options(self, options: DrawOptions) -> None:
        """Raise ConfigError for options that have no effect on this method, and for classes that it does not have."""
        name, labels = self.config.method, options.labels
        if not self.draws_in_steps:
            for field, value in (("steps", options.steps), ("sampler", options.sampler)):
                if value is not None:
                    raise ConfigError(
                        f"{field} is {value}, but {name} draws in one pass", do=f"leave out {field}"
                    )
        if options.guidance != 1 and (labels is None or not self.draws_in_steps):
            lacks, do = " without a label", "give a label, or "
            if not self.draws_in_steps or not self.has_classes:
                lacks, do = f", but this model of {name} has none", ""
            raise ConfigError(
                f"guidance is {options.guidance:g}{lacks}", expected="ddpm, score or flow with a label",
                do=f"{do}leave out guidance",
            )  # fmt: skip
        if labels is not None and not (
            self.has_classes and labels.min() >= 0 and labels.max() < self.n_classes
        ):
            classes = f"0 to {self.n_classes - 1}" if self.has_classes else "no label: it has no classes"
            raise ConfigError(f"the model has no class {int(labels.max())}", expected=classes)

    @property
    def has_classes(self) -> bool:
        """Whether a sample can be of a given class."""
        return self.n_classes > 0

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the noise of one sample; () for a method whose samples are no function of such noise."""
        return self.info.shape

    @torch.no_grad()
    def sample(self, networks: Any, n: int, rng: torch.Generator, options: DrawOptions) -> Tensor:
        """Return samples [n, *shape] on the device of the networks.

        Raises:
            ConfigError: see `check_options`.
        """
        self.check_options(options)
        if options.labels is not None and len(options.labels) != n:
            raise ConfigError(f"{len(options.labels)} labels for {n} samples", expected="a label per sample")
        noise = torch.randn(n, *self.noise_shape, generator=rng).to(next(networks.parameters()).device)
        return self.from_noise(networks, noise, rng, options)

    def from_noise(self, networks: Any, noise: Tensor, rng: torch.Generator, options: DrawOptions) -> Tensor:
        """Return samples [N, *shape] of standard normal noise [N, *noise_shape]; rng: of what is drawn after it.

        Raises:
            ConfigError: the method has no samples.
        """
        raise ConfigError(
            f"{self.config.method} has no distribution to draw from", expected="a picture that it decodes",
            do="give one with --picture, or train vae, vqvae, gan, ddpm, score or flow",
        )  # fmt: skip

    def log_likelihood(self, networks: Any, x: Tensor) -> Tensor:
        """Return log-densities [N] in nats of x [N, *shape], or lower bounds of them (`likelihood`).

        Raises:
            ConfigError: the method has none.
        """
        raise ConfigError(
            f"{self.config.method} has no likelihood", expected="ddpm, score or flow; vae and vqvae have a bound",
            do="compare samples by sliced Wasserstein, Wasserstein, Sinkhorn, MMD and Frechet: `whorl gen compare`",
        )  # fmt: skip

    def diagnose(self, networks: Any, data: Data) -> dict[str, float]:
        """Return figures that show a collapse, by name; nothing for a method that has no such failure."""
        return {}

    def reconstruct(self, networks: Any, x: Tensor) -> Tensor:
        """Return rows x [N, *shape] as the model decodes them. Raises ConfigError: the method does not encode rows."""
        raise ConfigError(
            f"{self.config.method} decodes no pictures", expected="a model of ae, vae, vqvae or pix2pix",
            do="leave out --picture: it draws samples",
        )  # fmt: skip

    def condition(self, x: Tensor) -> Tensor:
        """Return what `reconstruct` sees of rows x [N, *shape]."""
        return x

    def show(self, networks: Any, x: Tensor) -> Tensor:
        """Return `reconstruct`; pictures [N, C, H, 2 W] with what it sees on the left."""
        found = self.reconstruct(networks, x)
        return torch.cat([self.condition(x), found], 3) if self.info.is_pictures else found
