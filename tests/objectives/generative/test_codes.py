"""Vector quantisation: nearest codes, straight-through gradient, moving averages as gradients, restarts, usage."""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.objectives.generative.codes import (
    codes_of,
    commitment,
    follow,
    nearest,
    restarts,
    statistics,
    straight_through,
    usage,
)

CODES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(moments: Tensor, wanted: Tensor, count: int, decay: float) -> Tensor:
    """The step of length 1 - decay along the gradient of |moments - statistics|^2 / 2."""
    trained = moments.clone().requires_grad_()
    loss = follow(trained, wanted, count)
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert float(loss.total.detach()) == 0 and trained.grad is not None
    return moments.lerp(-trained.grad / loss.count, 1 - decay)


def test_codes_are_the_nearest_ones() -> None:
    latents = normal(50, 4, 2)
    distances = torch.cdist(latents.flatten(0, 1), CODES)
    assert torch.equal(nearest(latents, CODES), distances.argmin(1).view(50, 4))


def test_straight_through_gives_latents_the_gradient() -> None:
    latents, goal = normal(6, 2).requires_grad_(), normal(6, 2, seed=1)
    found = CODES[nearest(latents, CODES)]
    q = straight_through(latents, found)
    torch.testing.assert_close(q, found)
    ((q - goal).square().sum() + 0.25 * commitment(latents, found).sum()).backward()  # type: ignore[no-untyped-call]
    assert latents.grad is not None
    torch.testing.assert_close(latents.grad, 2 * (found - goal) + 0.5 * (latents.detach() - found))


def test_step_of_the_moments_is_the_moving_average() -> None:
    latents, numbers, decay = normal(8, 2), torch.tensor([0, 0, 1, 0, 1, 1, 1, 1]), 0.9
    moments = torch.cat([torch.full((3, 1), 0.3), 0.3 * CODES], 1)
    halves = [statistics(latents[i : i + 4], numbers[i : i + 4], 3) for i in (0, 4)]  # of two replicas
    found = stepped(moments, halves[0] + halves[1], 8, decay)
    share, total = 0.9 * 0.3 + 0.1 * 3 / 8, 0.9 * 0.3 * CODES[0] + 0.1 * latents[numbers == 0].sum(0) / 8
    torch.testing.assert_close(found[0], torch.cat([torch.tensor([share]), total]))
    torch.testing.assert_close(found[2], 0.9 * moments[2])  # unused: its share falls, its place stays
    torch.testing.assert_close(codes_of(found)[2], CODES[2])


def test_dead_codes_restart_at_their_candidates() -> None:
    latents, candidates, decay = normal(4, 2), torch.tensor([-1, 2, 0, -1]), 0.9
    moments = torch.cat(
        [torch.tensor([[0.5], [0.01], [0.01]]), torch.tensor([[0.5], [0.01], [0.01]]) * CODES], 1
    )
    halves = [restarts(moments, latents[i : i + 2], candidates[i : i + 2], decay, 4) for i in (0, 2)]
    found = stepped(moments, halves[0] + halves[1], 4, decay)
    torch.testing.assert_close(codes_of(found)[2], latents[1])
    assert abs(float(found[2, 0]) - 1 / 3) < 1e-6
    torch.testing.assert_close(found[:2], decay * moments[:2])  # 0 is alive, 1 has no candidate


def test_usage_is_perplexity_and_share() -> None:
    perplexity, share = usage(torch.tensor([[0, 1], [1, 0]]), 4)
    assert abs(perplexity - 2) < 1e-9 and share == 0.5
