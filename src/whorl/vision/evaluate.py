"""Measurements on held-out images: accuracy, recall@1 of captions, captions that are exactly right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.data.images import Pixels
from whorl.vision.image_set import Preprocessing
from whorl.vision.train import normalize

BATCH = 256  # images computed together


@torch.no_grad()
def batched(
    images: Pixels, preprocessing: Preprocessing, function: Callable[[Tensor], Tensor], device: str = "cpu"
) -> Tensor:
    """Return `function` of all images uint8 [N, H, W, C], computed in batches: [N, ...] on the CPU."""
    return torch.cat([function(part).cpu() for part in batches(images, preprocessing, device)])


def batches(images: Pixels, preprocessing: Preprocessing, device: str = "cpu") -> Iterator[Tensor]:
    """Yield the input of a network for images uint8 [N, H, W, C] in batches."""
    for first in range(0, len(images), BATCH):
        pixels = torch.from_numpy(np.array(images[first : first + BATCH]))
        yield normalize(pixels.to(device), preprocessing)


def confusion_matrix(probabilities: Tensor, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often class i was predicted as class j, [K, K], of probabilities [N, K] and labels [N]."""
    k = probabilities.shape[1]
    pairs = labels * k + probabilities.argmax(dim=1).numpy()
    return np.bincount(pairs, minlength=k * k).reshape(k, k)


def recall_at_1(
    images: NDArray[np.float32], texts: NDArray[np.float32], captions: Sequence[str], expected: Sequence[str]
) -> float:
    """Return the fraction of images whose nearest text is their caption.

    Args:
        images: vectors [N, d]. texts: vectors [M, d] of the distinct `captions`. expected: N captions.
    """
    nearest = (images @ texts.T).argmax(axis=1)
    right = [captions[int(i)] == text for i, text in zip(nearest, expected, strict=True)]
    return sum(right) / len(right)


def exact_fraction(found: Sequence[str], expected: Sequence[str]) -> float:
    """Return the fraction of captions that equal the expected ones in every character."""
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
