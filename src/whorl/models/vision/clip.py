"""CLIP's dual encoder (Radford et al. 2021, arXiv:2103.00020, figure 3): an image tower and a text tower.

    x = unit(image tower(images))      y = unit(text tower(ids))      scores = exp(t) x y^T        [N, M]

It is trained by `objectives.contrastive.info_nce`. The temperature is learned, as t = log of the scale, from 1 / 0.07 and
bounded at 100 (section 2.5).

Subtle point: a plain clamp has no gradient beyond its bound, so a t that Adam's momentum carried over it would stay there.
`straight_through_clamp` stops only the gradient that pushes further out.

Shapes: images [B, C, H, W]; ids [B, T].
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledModule
from whorl.models.encoder import Encoder
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import MLPMixer, ViT
from whorl.nn.linear import Linear

INIT_LOGIT_SCALE, MAX_LOGIT_SCALE = 1 / 0.07, 100.0


def straight_through_clamp(raw: Tensor, max_value: float) -> Tensor:
    """Return min(raw, max_value), which passes gradients that lower raw.  raw: any shape."""
    value = raw + (raw.clamp(max=max_value) - raw).detach()
    if value.requires_grad:
        over = raw.detach() > max_value
        value.register_hook(lambda g: g.masked_fill(over & (g < 0), 0.0))  # type: ignore[no-untyped-call]
    return value


class DualEncoder(ProfiledModule):
    """An image tower and a text tower with one space of unit vectors (see the top of this file).

    Args:
        image: its `classes` are the width of the joint space. Its head becomes the projection and is initialized again: it
            starts at 0, and a vector of 0 has no direction.
        text: projected to the same width here; its classifier, if any, is not used.
        generator: of both projections.
        max_logit_scale: upper bound of the inverse temperature.

    Raises:
        ConfigError: the image tower has no head.
    """

    def __init__(
        self,
        image: ViT | ResNet | MLPMixer,
        text: Encoder,
        generator: torch.Generator | None = None,
        max_logit_scale: float = MAX_LOGIT_SCALE,
    ) -> None:
        super().__init__()
        if image.head is None:
            raise ConfigError("classes of the image tower is 0", expected="the width of the common space")
        self.image, self.text, self.max_logit_scale = image, text, max_logit_scale
        d_joint, d_image = image.head.weight.shape
        nn.init.normal_(image.head.weight, std=d_image**-0.5, generator=generator)
        d_text = text.config.d_model
        self.projection = Linear(d_text, d_joint, std=d_text**-0.5, generator=generator)
        self.log_scale = nn.Parameter(torch.tensor(math.log(INIT_LOGIT_SCALE)))

    @property
    def scale(self) -> Tensor:
        """Return the inverse temperature [], at most `max_logit_scale`."""
        return straight_through_clamp(self.log_scale, math.log(self.max_logit_scale)).exp()

    def embed_images(self, images: Tensor) -> Tensor:
        """Embed images [B, C, H, W] -> [B, d_joint] unit vectors, fp32."""
        return F.normalize(self.image(images), dim=-1)

    def embed_texts(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embed ids [B, T], mask [B, T] True = a real token -> [B, d_joint] unit vectors, fp32; 0 for a row without tokens.

        Raises:
            ConfigError: a row has no tokens, and the tower has an `end_id`.
        """
        return F.normalize(self.projection(self.text.pool(ids, mask)), dim=-1)

    def forward(
        self, images: Tensor, ids: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of `info_nce` from N pairs: x [N, d_joint], y [N, d_joint], scale []."""
        return self.embed_images(images), self.embed_texts(ids, mask), self.scale

    def scores(self, images: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute fp32 logits [N, M] of N images and M texts: a row is a distribution over texts, a column one over images.

        With texts that name classes this is a zero-shot classifier (section 3.1.2).
        """
        x, y, scale = self(images, ids, mask)
        return cast(Tensor, scale * (x @ y.T))

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return pairs of an image of side `size` and the longest text."""
        pictures = torch.zeros(batch, self.image.channels, size, size, device=device)
        return pictures, *self.text.example_inputs(batch, self.text.config.max_length, device)

    def params(self) -> dict[str, int]:
        """Count parameters: total (with the scale), all active; image; text (with its projection); embedding."""
        image, text, projection = (
            sum(p.numel() for p in part.parameters()) for part in (self.image, self.text, self.projection)
        )
        total = image + text + projection + 1
        sizes = {"image": image, "text": text + projection, "embedding": self.text.embedding.numel()}
        return {"total": total, "active": total, **sizes}
