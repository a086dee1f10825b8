"""Three ways to look at a picture: images [B, C, H, W] in, logits [B, classes] out.

    ResNet    x = relu(x + f(x)),  f two 3 x 3 convolutions            convolution: what is near belongs together
              He et al. 2015, arXiv:1512.03385, eq. 1 and figure 5 (left)
    ViT       x += attention(norm(x));  x += mlp(norm(x))              attention: what belongs together is learnt
              over patches: Dosovitskiy et al. 2020, arXiv:2010.11929, eq. 1 to 4
    MLPMixer  x += mlp(norm(x)^T)^T;  x += mlp(norm(x))                a fixed matrix mixes patches, another channels
              Tolstikhin et al. 2021, arXiv:2105.01601, eq. 1

From the first to the last less is built in and more is to be learnt, so that with few pictures the first is best and with
very many the order turns. The ViT's blocks are the language model's, with every token seeing every other: a picture has no
order in time. It is told where a patch lies by learned positions alone, which are stretched to the grid of a picture of
another size. A mixer's token matrix is tied to one size for good (and its last bias is idle, though published models have
it: what is added to all channels of a token is taken away by every layer norm).

ResNet has the order of 2015 by default, or that of 2016 (`pre_activation`, arXiv:1603.05027, figure 4e): norm and ReLU come
before each convolution, so that nothing but the sums stands on the path from the last block back to the first.

Every residual branch starts silent: the last gain or the last matrix of it is zero (Goyal et al. 2017, arXiv:1706.02677,
section 5.1), as in the house's other blocks.

The cost is a question to the model: `params()`, and `flops(image_size)`, the forward operations of one picture's products
(a multiplication and an addition are two; norms, softmax and pooling are left out), which torch's counter agrees with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.heads import MultiHead
from whorl.nn.convolution import Conv2d
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP
from whorl.nn.norm import BatchNorm, LayerNorm
from whorl.nn.patches import PatchEmbedding, patch_grid

LAYER_NORM_EPS = 1e-6  # of the published ViT and Mixer
# Of the first positions, beside patches of unit size. At the published 0.02 a short run hardly finds out where patches lie:
# the ViT of bench/models_digits.py, at one rate (seed 0): 92.2 % after 60 passes; with this, 98.6 % after 40.
POSITION_STD = 0.5


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut.  [B, c_in, H, W] -> [B, c_out, H / stride, W / stride].

    The shortcut is the identity, or a 1 x 1 convolution where the shape changes (option B of section 3.3).
    """

    def __init__(
        self, c_in: int, c_out: int, stride: int, pre_activation: bool, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.pre_activation = pre_activation
        self.convolution1 = Conv2d(c_in, c_out, 3, stride=stride, generator=generator)
        self.norm1 = BatchNorm(c_in if pre_activation else c_out)
        last_std = 0.0 if pre_activation else None
        self.convolution2 = Conv2d(c_out, c_out, 3, std=last_std, generator=generator)
        self.norm2 = BatchNorm(c_out)
        self.shortcut: Conv2d | None = None
        self.shortcut_norm: BatchNorm | None = None
        if stride != 1 or c_in != c_out:
            self.shortcut = Conv2d(c_in, c_out, 1, stride=stride, generator=generator)
        if not pre_activation:
            nn.init.zeros_(self.norm2.weight)
            self.shortcut_norm = None if self.shortcut is None else BatchNorm(c_out)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_activation:
            h = F.relu(self.norm1(x))
            kept: Tensor = x if self.shortcut is None else self.shortcut(h)
            return cast(Tensor, kept + self.convolution2(F.relu(self.norm2(self.convolution1(h)))))
        h = self.norm2(self.convolution2(F.relu(self.norm1(self.convolution1(x)))))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + h)

    def flops(self, size: int) -> float:
        """For an input of side `size`."""
        after = self.convolution1.size_after(size)
        shortcut = 0.0 if self.shortcut is None else self.shortcut.flops(size)
        return self.convolution1.flops(size) + self.convolution2.flops(after) + shortcut


class ResNet(nn.Module):
    """A residual network of basic blocks (see the top of this file).

    Args:
        channels: of the images. classes: how many.
        widths: channels of each stage; every stage but the first halves the sides. depths: blocks in each stage.
            (64, 128, 256, 512) with (2, 2, 2, 2) and a large stem is ResNet-18; (16, 32, 64) with (3, 3, 3) and a
            small stem, ResNet-20 for CIFAR.
        stem: "small", a 3 x 3 convolution, or "large", 7 x 7 at stride 2 and a maximum over 3 x 3 at stride 2.
        pre_activation: the order of 2016.

    Raises:
        ConfigError: a setting that makes no network; when called, images of another shape.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        widths: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        stem: Literal["small", "large"] = "small",
        pre_activation: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _at_least_one(channels=channels, classes=classes)
        if not widths or len(widths) != len(depths) or min(*widths, *depths) < 1:
            raise ConfigError(
                f"widths are {list(widths)} and depths {list(depths)}",
                expected="as many of each, all at least 1",
            )
        if stem not in ("small", "large"):
            raise ConfigError(f"stem is {stem!r}", expected="'small' or 'large'")
        self.channels, self.large = channels, stem == "large"
        self.stem = (
            Conv2d(channels, widths[0], 7, stride=2, generator=generator)
            if self.large
            else Conv2d(channels, widths[0], 3, generator=generator)
        )
        blocks, c_in = [], widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(BasicBlock(c_in, width, stride, pre_activation, generator))
                c_in = width
        self.blocks = nn.ModuleList(blocks)
        # 2015: behind the stem; 2016: behind the last block, whose sum is not normalised yet.
        self.norm = BatchNorm(c_in if pre_activation else widths[0])
        self.pre_activation = pre_activation
        self.head = Linear(c_in, classes, std=0.01, bias=True, generator=generator)

    def features(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, last width], the mean over all places."""
        _check_images(images, self.channels)
        x: Tensor = self.stem(images)
        if not self.pre_activation:
            x = F.relu(self.norm(x))
        if self.large:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        if self.pre_activation:
            x = F.relu(self.norm(x))
        return x.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> logits [B, classes], fp32."""
        return cast(Tensor, self.head(self.features(images))).float()

    def params(self) -> dict[str, int]:
        """Parameters: total; stem; blocks; head; norm, the one that stands outside of the blocks."""
        return _params(self, stem=self.stem, blocks=self.blocks, norm=self.norm, head=self.head)

    def flops(self, image_size: int) -> float:
        """Forward operations of the products for one image of that side."""
        total, size = self.stem.flops(image_size), self.stem.size_after(image_size)
        if self.large:
            size = (size - 1) // 2 + 1
        for block in self.blocks:
            assert isinstance(block, BasicBlock)
            total += block.flops(size)
            size = block.convolution1.size_after(size)
        return total + _linear_flops(self.head)


class ViTBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), every token with every other.  [B, T, d] -> [B, T, d]."""

    def __init__(
        self, d: int, n_heads: int, hidden: int, eps: float, backend: str, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(d, eps)
        self.attention = MultiHead(
            d, n_heads, bias=True, out_bias=True, causal=False, backend=backend, generator=generator
        )
        self.mlp_norm = LayerNorm(d, eps)
        self.mlp = MLP(d, hidden, "gelu", generator=generator, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class ViT(nn.Module):
    """A vision transformer (see the top of this file).

    Args:
        image_size: side of the images that the positions are laid out for. patch: side of a patch.
        d_model, n_layers, n_heads, mlp_hidden: the shape of the blocks; mlp_hidden is 4 d_model by default.
            768, 12, 12 with patches of 16 is ViT-B/16.
        pooling: "class", a token of its own is what the head sees; or "mean" over all patches (appendix D.3).
        eps: of the layer norms. backend: of attention (`nn/attention/backends.py`).

    Raises:
        ConfigError: a setting that makes no network; when called, images that patches do not divide.
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
        mlp_hidden: int | None = None,
        pooling: Literal["class", "mean"] = "class",
        eps: float = LAYER_NORM_EPS,
        backend: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * d_model if mlp_hidden is None else mlp_hidden
        _at_least_one(channels=channels, classes=classes, mlp_hidden=hidden)
        _at_least_one(d_model=d_model, n_layers=n_layers, n_heads=n_heads)
        if pooling not in ("class", "mean"):
            raise ConfigError(f"pooling is {pooling!r}", expected="'class' or 'mean'")
        if d_model % n_heads:
            raise ConfigError(f"n_heads is {n_heads}", expected=f"a divisor of d_model, {d_model}")
        self.channels, self.patch = channels, patch
        self.grid = patch_grid(image_size, image_size, patch)[0]
        self.embedding = PatchEmbedding(channels, patch, d_model, generator=generator)
        self.class_token = (
            nn.Parameter(torch.randn(d_model, generator=generator) * 0.02) if pooling == "class" else None
        )
        n_tokens = self.grid**2 + (pooling == "class")
        self.positions = nn.Parameter(torch.randn(n_tokens, d_model, generator=generator) * POSITION_STD)
        self.blocks = nn.ModuleList(
            [ViTBlock(d_model, n_heads, hidden, eps, backend, generator) for _ in range(n_layers)]
        )
        self.norm = LayerNorm(d_model, eps)
        self.head = Linear(d_model, classes, std=0.0, bias=True)

    def positions_for(self, rows: int, columns: int) -> Tensor:
        """[T, d_model] positions of a grid of patches, the class token's first if there is one.

        Of another grid than the model's own: stretched (bicubic), as in section 3.2 of the paper.
        """
        if rows == columns == self.grid:
            return self.positions
        own, patches = self.positions[: -(self.grid**2)], self.positions[-(self.grid**2) :]
        square = patches.T.reshape(1, -1, self.grid, self.grid)
        stretched = F.interpolate(square, (rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([own, stretched[0].flatten(1).T])

    def features(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, d_model], what the head sees."""
        _check_images(images, self.channels)
        x: Tensor = self.embedding(images)  # [B, N, d_model]
        if self.class_token is not None:
            x = torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        grid = patch_grid(images.shape[2], images.shape[3], self.patch)
        x = x + self.positions_for(*grid).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x.mean(1) if self.class_token is None else x[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> logits [B, classes], fp32."""
        return cast(Tensor, self.head(self.features(images))).float()

    def params(self) -> dict[str, int]:
        """Parameters: total; embedding (of patches, with the class token); positions; blocks; norm; head."""
        found = _params(self, embedding=self.embedding, blocks=self.blocks, norm=self.norm, head=self.head)
        found["embedding"] += 0 if self.class_token is None else self.class_token.numel()
        return {**found, "positions": self.positions.numel()}

    def flops(self, image_size: int) -> float:
        """Forward operations of the products for one image of that side."""
        rows, columns = patch_grid(image_size, image_size, self.patch)
        n_patches = rows * columns
        n_tokens = n_patches + (self.class_token is not None)
        total = n_patches * _linear_flops(self.embedding.linear) + _linear_flops(self.head)
        for block in self.blocks:
            assert isinstance(block, ViTBlock)
            a, m = block.attention, block.mlp
            per_token = [_linear_flops(w) for w in (a.q, a.k, a.v, a.out, m.up, m.down)]
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


class MLPMixer(nn.Module):
    """Patches mixed by perceptrons alone (see the top of this file).

    Args:
        image_size: side of the images, the only one it takes. patch: side of a patch.
        d_model, n_layers: width and number of blocks. token_hidden, mlp_hidden: hidden widths of the two perceptrons, by
            default d_model / 2 and 4 d_model. 768 and 12 with patches of 16 is Mixer-B/16.

    Raises:
        ConfigError: a setting that makes no network; when called, images of another size.
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
        _at_least_one(channels=channels, classes=classes, d_model=d_model, n_layers=n_layers)
        _at_least_one(token_hidden=token_hidden, mlp_hidden=hidden)
        self.image_size, self.channels = image_size, channels
        self.n_tokens = patch_grid(image_size, image_size, patch)[0] ** 2
        self.embedding = PatchEmbedding(channels, patch, d_model, generator=generator)
        self.blocks = nn.ModuleList(
            [MixerBlock(self.n_tokens, d_model, token_hidden, hidden, generator) for _ in range(n_layers)]
        )
        self.norm = LayerNorm(d_model, LAYER_NORM_EPS)
        self.head = Linear(d_model, classes, std=0.0, bias=True)

    def features(self, images: Tensor) -> Tensor:
        """[B, C, image_size, image_size] -> [B, d_model], the mean over all patches."""
        _check_images(images, self.channels)
        for side in images.shape[2:]:
            self._check_size(side)
        x: Tensor = self.embedding(images)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.norm(x)).mean(1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, image_size, image_size] -> logits [B, classes], fp32."""
        return cast(Tensor, self.head(self.features(images))).float()

    def params(self) -> dict[str, int]:
        """Parameters: total; embedding; blocks; norm; head."""
        return _params(self, embedding=self.embedding, blocks=self.blocks, norm=self.norm, head=self.head)

    def flops(self, image_size: int) -> float:
        """Forward operations of the products for one image, which must be of the model's size."""
        self._check_size(image_size)
        total = self.n_tokens * _linear_flops(self.embedding.linear) + _linear_flops(self.head)
        for block in self.blocks:
            assert isinstance(block, MixerBlock)
            d = self.norm.weight.numel()
            total += d * sum(_linear_flops(w) for w in (block.token_mlp.up, block.token_mlp.down))
            total += self.n_tokens * sum(_linear_flops(w) for w in (block.mlp.up, block.mlp.down))
        return total

    def _check_size(self, size: int) -> None:
        if size != self.image_size:
            raise ConfigError(
                f"an image has a side of {size}",
                expected=f"image_size = {self.image_size}: a mixer takes no other",
            )


def _linear_flops(linear: Linear | None) -> float:
    """For one row."""
    assert linear is not None  # attention to a context has no keys of its own; here there is none
    return 2.0 * linear.weight.numel()


def _params(model: nn.Module, **parts: nn.Module) -> dict[str, int]:
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    return {"total": count(model), **{name: count(part) for name, part in parts.items()}}


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}", expected="at least 1")


def _check_images(images: Tensor, channels: int) -> None:
    if images.ndim != 4 or images.shape[1] != channels:
        raise ConfigError(f"images are {list(images.shape)}", expected=f"[batch, {channels}, height, width]")
