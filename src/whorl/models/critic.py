"""A critic of rows, vectors or pictures: one value per row or patch, higher for data than for samples.

    h = layers(x),      D(x) = w . h,      D(x, y) = D(x) + class[y] . h

The layers are linear, or 3 x 3 convolutions that halve the sides down to 4; a leaky ReLU follows each. A vector also enters
by sin and cos of its coordinates at FREQUENCIES: without them an MLP is slow to bend where modes are narrow (Tancik et al.
2020, arXiv:2006.10739). The class enters by projection (Miyato & Koyama 2018, arXiv:1802.05637, eq. 3). No layer couples
the rows of a batch: the gradient penalty needs D of a row to depend on that row alone. The last layer has no bias, because
with the Wasserstein loss its gradient is 0. With `patches` it takes each place alone (Isola et al. 2017, arXiv:1611.07004).

With `spectral`, every weight is divided by its largest singular value (Miyato et al. 2018, arXiv:1802.05957), a kernel as a
matrix [c_out, c_in k k], and the features of a vector by their Lipschitz constant. D of a vector without classes then has
a constant of at most 1. The singular vector comes from repeated squaring of the Gram matrix, which is 2^SQUARINGS power
iterations. The paper's single iteration needs a state that is kept between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from whorl.models.vector_denoiser import wave_features
from whorl.nn.convolution import Conv2d, he_std
from whorl.nn.linear import Linear

SQUARINGS = 7
LEAK = 0.2
LEAST_SIDE = 4
FREQUENCIES = (1.0, 2.0, 4.0)  # radians per unit of standardised data


def largest_singular_value(weight: Tensor) -> Tensor:
    """Return the spectral norm of weight [m, n]; differentiable, with u v^T as its gradient."""
    with torch.no_grad():
        gram = weight @ weight.T if weight.shape[0] < weight.shape[1] else weight.T @ weight
        for _ in range(SQUARINGS):
            gram = gram / gram.norm().clamp_min(1e-30)
            gram = gram @ gram
        vector = gram[:, gram.norm(dim=0).argmax()]  # nearly a multiple of the singular vector
        if weight.shape[0] < weight.shape[1]:
            vector = weight.T @ vector
        right = F.normalize(vector, dim=0)
        left = F.normalize(weight @ right, dim=0)
    return left @ weight @ right


class SpectralNorm(nn.Module):
    """Divide a weight by its spectral norm: a parametrization of a layer."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / largest_singular_value(weight.flatten(1)).clamp_min(1e-12)


class Critic(nn.Module):
    """Map rows [B, *shape] and classes [B] to values [B], or with `patches` pictures to [B, places].

    Args:
        shape: [d], or [C, H, W] of pictures. width: units or channels. depth: layers before the last.
        n_classes: 0 for none. spectral: normalize the weights.
    """

    def __init__(
        self, shape: Sequence[int], width: int, depth: int, n_classes: int = 0, *, spectral: bool = False,
        patches: bool = False, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList()
        size, side = shape[0], shape[1] if len(shape) == 3 else 1
        self.is_vector, self.feature_scale = len(shape) == 1, 1.0
        if self.is_vector:
            size *= 1 + 2 * len(FREQUENCIES)
            self.feature_scale = (1 + sum(f**2 for f in FREQUENCIES)) ** -0.5 if spectral else 1.0
        for number in range(depth):
            if self.is_vector:
                layer: nn.Module = Linear(size, width, std=he_std(size), bias=True, generator=generator)
            else:
                stride = 2 if number and side > LEAST_SIDE else 1
                layer = Conv2d(size, width, 3, stride=stride, bias=True, generator=generator)
                side = layer.output_size(side)
            self.layers.append(layer)
            size = width
        self.patches, features = patches, width * (1 if patches else side**2)
        self.head = Linear(features, 1, std=features**-0.5, generator=generator)
        table = torch.randn(n_classes, features, generator=generator) * features**-0.5
        self.classes = nn.Parameter(table) if n_classes else None
        if spectral:
            for layer in (*self.layers, self.head):
                parametrize.register_parametrization(layer, "weight", SpectralNorm())

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.feature_scale * wave_features(x, FREQUENCIES) if self.is_vector else x
        for layer in self.layers:
            h = F.leaky_relu(layer(h), LEAK)
        h = h.flatten(2).transpose(1, 2) if self.patches else h.flatten(1)
        values: Tensor = self.head(h).squeeze(-1)
        if self.classes is None or labels is None:
            return values
        return values + (F.embedding(labels, self.classes) * h).sum(1)
