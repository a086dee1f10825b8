"""Residual networks: x = relu(x + f(x)) with f two 3 x 3 convolutions (He et al. 2015, arXiv:1512.03385, eq. 1).

The default order is that of 2015. `pre_activation` is that of 2016 (arXiv:1603.05027, figure 4e): norm and ReLU precede
each convolution, so the path from the last block to the first has only sums.

Each residual branch starts at 0, as in `models/vision/vit.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledModule
from whorl.models.vision.vit import check_images, check_positive, count_params, linear_flops
from whorl.nn.convolution import Conv2d
from whorl.nn.linear import Linear
from whorl.nn.norm import BatchNorm


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut.  [B, c_in, H, W] -> [B, c_out, H / stride, W / stride].

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
        """Return the forward FLOPs for an input of side `size`."""
        after = self.convolution1.output_size(size)
        shortcut = 0.0 if self.shortcut is None else self.shortcut.flops(size)
        return self.convolution1.flops(size) + self.convolution2.flops(after) + shortcut


class ResNet(ProfiledModule):
    """A residual network of basic blocks (see the top of this file).

    Args:
        channels: of the images. classes: width of the head.
        widths: channels of each stage; every stage but the first halves the sides. depths: blocks in each stage.
            (64, 128, 256, 512) with (2, 2, 2, 2) and a large stem is ResNet-18; (16, 32, 64) with (3, 3, 3) and a
            small stem is ResNet-20 for CIFAR.
        stem: "small", a 3 x 3 convolution, or "large", 7 x 7 at stride 2 and a 3 x 3 maximum at stride 2.
        pre_activation: the order of 2016.

    Raises:
        ConfigError: invalid sizes; when called, images of another shape.
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
        check_positive(channels=channels, classes=classes)
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
        # 2015: after the stem; 2016: after the last block, whose sum is not normalized yet.
        self.norm = BatchNorm(c_in if pre_activation else widths[0])
        self.pre_activation = pre_activation
        self.head = Linear(c_in, classes, std=0.01, bias=True, generator=generator)

    def features(self, images: Tensor) -> Tensor:
        """Compute features [B, C, H, W] -> [B, last width]: the mean over all positions."""
        check_images(images, self.channels)
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
        """Compute fp32 logits [B, classes] of images [B, C, H, W]."""
        return cast(Tensor, self.head(self.features(images))).float()

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return images of side `size`."""
        return (torch.zeros(batch, self.channels, size, size, device=device),)

    def params(self) -> dict[str, int]:
        """Count parameters: total; stem; blocks; head; norm (the one outside the blocks)."""
        return {"embedding": 0} | count_params(
            self, stem=self.stem, blocks=self.blocks, norm=self.norm, head=self.head
        )

    def flops(self, image_size: int) -> float:
        """Return the forward FLOPs of the matrix products for one image of that side."""
        total, size = self.stem.flops(image_size), self.stem.output_size(image_size)
        if self.large:
            size = (size - 1) // 2 + 1
        for block in self.blocks:
            assert isinstance(block, BasicBlock)
            total += block.flops(size)
            size = block.convolution1.output_size(size)
        return total + linear_flops(self.head)
