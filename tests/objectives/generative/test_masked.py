"""Masked diffusion: the loss is the exact bound, its draws are spread, blocks of a packed row are those of its documents."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest
import torch
from tests.support.train.model_shapes import HEADS, disturbed, shape
from torch import Tensor

from whorl.models import LanguageModel, make_model
from whorl.objectives.generative import masked
from whorl.objectives.next_token import next_token

LENGTH, MASK = 8, 6


def network(block: int | None) -> LanguageModel:
    made = shape(HEADS, vocab_size=MASK + 1, masked={"mask_id": MASK, "block": block})
    model: LanguageModel = disturbed(make_model(made, torch.Generator().manual_seed(0)), 0.5)
    return model.requires_grad_(False)


def losses(model: LanguageModel, ids: Tensor, weight: Tensor, **packed: Tensor) -> Tensor:
    """The objective of each row [N, T]."""
    hidden = model(*masked.inputs(ids, weight, model.config.masked, **packed))[:, : ids.shape[1]]
    return torch.stack(
        [next_token(h, model.head_weight, x, w).total for h, x, w in zip(hidden, ids, weight, strict=True)]
    )


def masks(n: int) -> Tensor:
    """All non-empty masks of n ids, [2^n - 1, n]."""
    return torch.tensor(list(product([False, True], repeat=n)))[1:]


def table(model: LanguageModel, ids: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """All masks of positions [first, stop) of one text, and the nll of each id there under each mask, by plain forwards."""
    hidden_ids = masks(stop - first)
    rows = ids[:stop].repeat(len(hidden_ids), 1)
    rows[:, first:] = torch.where(hidden_ids, MASK, rows[:, first:])
    log_probs = model.logits(model(rows))[:, first:].log_softmax(-1)
    return hidden_ids, -log_probs.gather(-1, ids[first:stop].expand(len(rows), -1)[..., None])[..., 0]


def bound_by_quadrature(hidden_ids: Tensor, nll: Tensor) -> float:
    """The integral over t of 1/t times the expected loss; a polynomial, so Gauss-Legendre is exact."""
    n, k = hidden_ids.shape[1], hidden_ids.sum(1).double()
    nodes, factors = np.polynomial.legendre.leggauss(n)
    total = 0.0
    for t, factor in zip((nodes + 1) / 2, factors / 2, strict=True):
        chance = t**k * (1 - t) ** (n - k)
        total += float(factor / t * (chance * (nll * hidden_ids).double().sum(1)).sum())
    return total


def mean_of_orders(hidden_ids: Tensor, nll: Tensor) -> float:
    """The mean over all orders of the summed loss: before id i, the ids of a set are known in |set|! (n-1-|set|)! orders."""
    n = hidden_ids.shape[1]
    shares = torch.tensor([1 / (n * comb(n - 1, n - int(k))) for k in hidden_ids.sum(1)])
    return float((shares[:, None] * (nll * hidden_ids).double()).sum())


@pytest.mark.parametrize("block", [None, 4, 2, 8])
def test_expected_loss_equals_enumeration_and_mean_of_orders(block: int | None) -> None:
    model, ids = network(block), torch.randint(0, MASK, (LENGTH,), generator=torch.Generator().manual_seed(1))
    size, expected = block or LENGTH, 0.0
    for first in range(0, LENGTH, size):
        parts = table(model, ids, max(first, 1), first + size)  # the first id is given
        by_orders = mean_of_orders(*parts)
        assert bound_by_quadrature(*parts) == pytest.approx(by_orders, rel=1e-5)
        expected += by_orders
    predicted = masked.targets(torch.ones(1, LENGTH, dtype=torch.bool))
    found = 0.0
    for first in range(0, LENGTH, size):  # every mask of one block, as draws, with its probability
        own = masks(size - (first == 0))
        n, k = own.shape[1], own.sum(1)
        time, order = torch.zeros(2, len(own), LENGTH, dtype=torch.float64)
        time[:, first] = (k - 0.5) / n
        order[:, first + size - n : first + size] = torch.where(own, 0.1, 0.9)
        every = predicted.expand(len(own), -1)
        weight = masked.weights(every, (time, order), block)
        assert torch.equal(weight[:, first + size - n : first + size] > 0, own)
        weight[:, :first] = weight[:, first + size :] = 0
        shares = torch.tensor([1 / (n * comb(n, int(m))) for m in k])
        found += float((shares * losses(model, ids.repeat(len(own), 1), weight)).double().sum())
    assert found == pytest.approx(expected, rel=1e-5)


def test_weights_of_each_block_sum_to_its_targets_and_times_are_spread() -> None:
    rng = torch.Generator().manual_seed(0)
    time, order = masked.draws(16, 24, rng)
    assert torch.equal((time * 16).long().sort(0).values, torch.arange(16)[:, None].expand(16, 24))
    segments = torch.tensor([[1] * 7 + [2] * 13 + [0] * 4]).expand(16, 24)
    positions = torch.tensor([[*range(7), *range(13), *range(4)]]).expand(16, 24)
    predicted = masked.targets((segments == segments.roll(-1, 1)) & (segments > 0))
    for block in (None, 4):
        weight = masked.weights(predicted, (time, order), block, segments, positions)
        number = segments * 100 + (positions // block if block else 0)
        for group in number.unique():
            own = number == group
            torch.testing.assert_close(weight[own].view(16, -1).sum(1), (predicted & own).sum(1).float())
        assert not weight[~predicted].any()


@pytest.mark.parametrize("block", [None, 4])
def test_loss_of_packed_row_is_that_of_its_documents(block: int | None) -> None:
    model, rng = network(block), torch.Generator().manual_seed(2)
    ids = torch.randint(0, MASK, (1, 13), generator=rng)
    segments, positions = torch.tensor([[1] * 7 + [2] * 6]), torch.tensor([[*range(7), *range(6)]])
    predicted = masked.targets(segments == segments.roll(-1, 1))
    weight = masked.weights(predicted, masked.draws(1, 13, rng), block, segments, positions)
    packed = losses(model, ids, weight, segments=segments, positions=positions)
    parts = [losses(model, ids[:, s], weight[:, s]) for s in (slice(0, 7), slice(7, 13))]
    torch.testing.assert_close(packed, sum(parts))
