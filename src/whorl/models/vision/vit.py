"""ViT and MLP-Mixer: images [B, C, H, W] to logits [B, classes]. `models/vision/resnet.py` has the convolutional network.

    ViT       x += attention(norm(x));  x += mlp(norm(x))       over patches: Dosovitskiy et al. 2020, arXiv:2010.11929
    MLPMixer  x += mlp(norm(x)^T)^T;  x += mlp(norm(x))         over patches, then channels: Tolstikhin et al. 2021,
                                                                arXiv:2105.01601, eq. 1

A ResNet has the strongest prior and does best with few images; with very many the order reverses. The ViT uses the text
encoder's blocks without a causal mask. Learned positions are its only information about the place of a patch; they are
interpolated for images of another size. A mixer's token matrix fixes the image size. Its last bias has no effect, because
every layer norm removes a constant added to all channels of a token; published models have it.

Every residual branch starts at 0: its last gain or matrix is zero (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

`flops(image_size)` counts the forward operations of one image's matrix products (multiplication and addition are two;
norms, softmax and pooling are excluded). Tests compare it with torch's counter.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledModule
from whorl.models.encoder import EncoderBlock
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP, Activation
from whorl.nn.norm import LayerNorm
from whorl.nn.patches import PatchEmbedding, patch_grid

LAYER_NORM_EPS = 1e-6  # of the published ViT and Mixer
# Initial positions, relative to patches of unit size. On digits, the ViT of bench/vision/digits.py (one split and learning
# rate) reached 98.6 % after 40 epochs with 0.5, and 92.2 % after 60 epochs with the published 0.02.
POSITION_STD = 0.5


class ViTConfig(BaseModel):
    """The shape of a ViT; see the arguments of `ViT`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image_size: int = Field(ge=1)
    patch: int = Field(ge=1)
    channels: int = Field(ge=1)
    classes: int = Field(ge=0)
    d_model: int = Field(ge=1)
    n_layers: int = Field(ge=1, le=10_000)
    n_heads: int = Field(ge=1)
    mlp: Activation = "gelu"
    mlp_hidden: int = Field(ge=1)
    pooling: Literal["class", "mean"] = "class"
    eps: float = Field(default=LAYER_NORM_EPS, gt=0)
    patch_bias: bool = True
    first_norm: bool = False
    head_bias: bool = True

    @model_validator(mode="after")
    def _validate(self) -> ViTConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads is {self.n_heads}, which does not divide d_model, {self.d_model}")
        if self.image_size % self.patch:
            raise ValueError(f"patch is {self.patch}, which does not divide image_size, {self.image_size}")
        return self


class ViT(ProfiledModule):
    """A vision transformer (see the top of this file).

    Args:
        image_size: side of the images that the positions are made for. patch: side of a patch.
        classes: width of the head; 0: no head, only `features`.
        d_model, n_layers, n_heads, mlp_hidden: the shape of the blocks; mlp_hidden is 4 d_model by default.
            768, 12, 12 with patches of 16 is ViT-B/16.
        mlp: kind of MLP (`nn/mlp.py`).
        pooling: "class": the head reads a class token; "mean": the mean over all patches (appendix D.3).
        eps: of the layer norms.
        patch_bias, head_bias: of the patch embedding and the head. first_norm: a norm before the first block. CLIP's image
            tower (arXiv:2103.00020, section 2.4) has False, False and True; its head projects into the joint space.
        backend: of attention (`nn/attention/backends.py`).
        dtype: type of the activations; None: that of the images.

    Raises:
        ConfigError: invalid sizes; when called, images whose sides are no multiples of `patch`.
    """

    def __init__(
        self,
        image_size: int,
        patch: int,
        channels: int,
        classes: int,
        *,
        d_model: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        mlp: Activation = "gelu",
        mlp_hidden: int | None = None,
        pooling: Literal["class", "mean"] = "class",
        eps: float = LAYER_NORM_EPS,
        patch_bias: bool = True,
        first_norm: bool = False,
        head_bias: bool = True,
        backend: str = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * d_model if mlp_hidden is None else mlp_hidden
        try:
            self.config = ViTConfig(
                image_size=image_size, patch=patch, channels=channels, classes=classes, d_model=d_model, n_layers=n_layers,
                n_heads=n_heads, mlp=mlp, mlp_hidden=hidden, pooling=pooling, eps=eps, patch_bias=patch_bias,
                first_norm=first_norm, head_bias=head_bias,
            )  # fmt: skip
        except ValidationError as error:
            first = error.errors()[0]
            field = f"{first['loc'][0]} is {first['input']!r}: " if first["loc"] else ""
            raise ConfigError(f"{field}{first['msg']}", expected="sizes of a ViT") from error
        self.channels, self.patch, self.dtype = channels, patch, dtype
        self.grid = patch_grid(image_size, image_size, patch)[0]
        self.embedding = PatchEmbedding(channels, patch, d_model, bias=patch_bias, generator=generator)
        self.class_token = (
            nn.Parameter(torch.randn(d_model, generator=generator) * 0.02) if pooling == "class" else None
        )
        n_tokens = self.grid**2 + (pooling == "class")
        self.positions = nn.Parameter(torch.randn(n_tokens, d_model, generator=generator) * POSITION_STD)
        self.first_norm = LayerNorm(d_model, eps) if first_norm else None
        self.blocks = nn.ModuleList(
            [
                EncoderBlock(d_model, n_heads, hidden, mlp, eps=eps, backend=backend, generator=generator)
                for _ in range(n_layers)
            ]
        )
        self.norm = LayerNorm(d_model, eps)
        self.head = Linear(d_model, classes, std=0.0, bias=head_bias) if classes else None

    def positions_for(self, rows: int, columns: int) -> Tensor:
        """Return the positions [T, d_model] of a grid of patches, the class token's first if there is one.

        For another grid than the model's own they are interpolated (bicubic), as in section 3.2 of the paper.
        """
        if rows == columns == self.grid:
            return self.positions
        others, patches = self.positions[: -(self.grid**2)], self.positions[-(self.grid**2) :]
        square = patches.T.reshape(1, -1, self.grid, self.grid)
        stretched = F.interpolate(square, (rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([others, stretched[0].flatten(1).T])

    def tokens(self, images: Tensor) -> Tensor:
        """Compute a vector per patch, [B, C, H, W] -> [B, N, d_model]; the class token's is the first if there is one."""
        check_images(images, self.channels)
        x: Tensor = self.embedding(images if self.dtype is None else images.to(self.dtype))
        if self.class_token is not None:
            x = torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        grid = patch_grid(images.shape[2], images.shape[3], self.patch)
        x = x + self.positions_for(*grid).to(x.dtype)
        if self.first_norm is not None:
            x = self.first_norm(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.norm(x))

    def features(self, images: Tensor) -> Tensor:
        """Compute the input of the head, [B, C, H, W] -> [B, d_model]."""
        x = self.tokens(images)
        return x.mean(1) if self.class_token is None else x[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        """Compute fp32 logits [B, classes] of images [B, C, H, W].

        Raises:
            ConfigError: classes is 0.
        """
        if self.head is None:
            raise ConfigError(
                "classes is 0: this ViT has no head", expected="at least 1 to call it", do="use features()"
            )
        return cast(Tensor, self.head(self.features(images))).float()

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return images of side `size`."""
        return (torch.zeros(batch, self.channels, size, size, device=device),)

    def params(self) -> dict[str, int]:
        """Count parameters: total; embedding (of patches, with the class token); positions; blocks; norm (or both); head."""
        norms = nn.ModuleList([norm for norm in (self.first_norm, self.norm) if norm is not None])
        head = nn.Identity() if self.head is None else self.head
        sizes = count_params(self, embedding=self.embedding, blocks=self.blocks, norm=norms, head=head)
        sizes["embedding"] += 0 if self.class_token is None else self.class_token.numel()
        return {**sizes, "positions": self.positions.numel()}

    def flops(self, image_size: int) -> float:
        """Return the forward FLOPs of the matrix products for one image of that side."""
        rows, columns = patch_grid(image_size, image_size, self.patch)
        n_patches = rows * columns
        n_tokens = n_patches + (self.class_token is not None)
        total = n_patches * linear_flops(self.embedding.linear)
        total += 0.0 if self.head is None else linear_flops(self.head)
        for block in self.blocks:
            assert isinstance(block, EncoderBlock)
            a, m = block.attention, block.mlp
            per_token = [linear_flops(w) for w in (a.q, a.k, a.v, a.out, m.up, m.down)]
            total += n_tokens * sum(per_token)
            total += 2 * 2.0 * n_tokens**2 * a.out.weight.shape[1]  # queries with keys; weights with values
        return total


class MixerBlock(nn.Module):
    """x + mlp over the tokens of each channel, then x + mlp over the channels of each token.  [B, N, d] -> [B, N, d]."""

    def __init__(
        self, n_tokens: int, d: int, token_hidden: int, hidden: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.token_norm = LayerNorm(d, LAYER_NORM_EPS)
        self.token_mlp = MLP(n_tokens, token_hidden, "gelu", generator=generator, bias=True)
        self.mlp_norm = LayerNorm(d, LAYER_NORM_EPS)
        self.mlp = MLP(d, hidden, "gelu", generator=generator, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class MLPMixer(ProfiledModule):
    """Patches mixed by MLPs only (see the top of this file).

    Args:
        image_size: side of the images; no other size is supported. patch: side of a patch.
        d_model, n_layers: width and number of blocks. token_hidden, mlp_hidden: hidden widths of the two MLPs, by
            default d_model / 2 and 4 d_model. 768 and 12 with patches of 16 is Mixer-B/16.

    Raises:
        ConfigError: invalid sizes; when called, images of another size.
    """

    def __init__(
        self,
        image_size: int,
        patch: int,
        channels: int,
        classes: int,
        *,
        d_model: int = 768,
        n_layers: int = 12,
        token_hidden: int | None = None,
        mlp_hidden: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        token_hidden = d_model // 2 if token_hidden is None else token_hidden
        hidden = 4 * d_model if mlp_hidden is None else mlp_hidden
        check_positive(channels=channels, classes=classes, d_model=d_model, n_layers=n_layers)
        check_positive(token_hidden=token_hidden, mlp_hidden=hidden)
        self.image_size, self.channels = image_size, channels
        self.n_tokens = patch_grid(image_size, image_size, patch)[0] ** 2
        self.embedding = PatchEmbedding(channels, patch, d_model, generator=generator)
        self.blocks = nn.ModuleList(
            [MixerBlock(self.n_tokens, d_model, token_hidden, hidden, generator) for _ in range(n_layers)]
        )
        self.norm = LayerNorm(d_model, LAYER_NORM_EPS)
        self.head = Linear(d_model, classes, std=0.0, bias=True)

    def features(self, images: Tensor) -> Tensor:
        """Compute the mean over all patches, [B, C, image_size, image_size] -> [B, d_model]."""
        check_images(images, self.channels)
        for side in images.shape[2:]:
            self._check_size(side)
        x: Tensor = self.embedding(images)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.norm(x)).mean(1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute fp32 logits [B, classes] of images [B, C, image_size, image_size]."""
        return cast(Tensor, self.head(self.features(images))).float()

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return images of side `size`."""
        return (torch.zeros(batch, self.channels, size, size, device=device),)

    def params(self) -> dict[str, int]:
        """Count parameters: total; embedding; blocks; norm; head."""
        return count_params(
            self, embedding=self.embedding, blocks=self.blocks, norm=self.norm, head=self.head
        )

    def flops(self, image_size: int) -> float:
        """Return the forward FLOPs of the matrix products for one image, which must have the model's size."""
        self._check_size(image_size)
        total = self.n_tokens * linear_flops(self.embedding.linear) + linear_flops(self.head)
        for block in self.blocks:
            assert isinstance(block, MixerBlock)
            d = self.norm.weight.numel()
            total += d * sum(linear_flops(w) for w in (block.token_mlp.up, block.token_mlp.down))
            total += self.n_tokens * sum(linear_flops(w) for w in (block.mlp.up, block.mlp.down))
        return total

    def _check_size(self, size: int) -> None:
        if size != self.image_size:
            raise ConfigError(
                f"an image has a side of {size}",
                expected=f"image_size = {self.image_size}: a mixer supports no other",
            )


def linear_flops(linear: Linear | None) -> float:
    """Return the FLOPs for one row."""
    assert linear is not None  # layers that share keys have no k and v; a ViT has none of these
    return 2.0 * linear.weight.numel()


def count_params(model: nn.Module, **parts: nn.Module) -> dict[str, int]:
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    total = count(model)
    return {"total": total, "active": total, **{name: count(part) for name, part in parts.items()}}


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}", expected="at least 1")


def check_images(images: Tensor, channels: int) -> None:
    if images.ndim != 4 or images.shape[1] != channels:
        raise ConfigError(f"images are {list(images.shape)}", expected=f"[batch, {channels}, height, width]")
