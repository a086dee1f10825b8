"""GAE over tokens against a recursion per sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.advantages.token_gae import token_gae, whiten

LENGTHS = (3, 0, 5, 1)


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (reward, value, sequence), each [9] in fp64, with the tokens of sequences interleaved."""
    g = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    sequence = sequence[torch.randperm(len(sequence), generator=g)]
    reward, value = torch.randn(2, len(sequence), generator=g, dtype=torch.float64)
    return reward, value, sequence


def gae_by_loops(reward: Tensor, value: Tensor, discount: float, decay: float) -> list[float]:
    """Return advantages of one sequence. value: one longer than reward."""
    out, following = [0.0] * len(reward), 0.0
    for t in reversed(range(len(reward))):
        following = float(reward[t] + discount * value[t + 1] - value[t]) + discount * decay * following
        out[t] = following
    return out


@pytest.mark.parametrize("bootstrapped", [False, True])
@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_token_gae_treats_sequences_separately(bootstrapped: bool, discount: float, decay: float) -> None:
    reward, value, sequence = drawn()
    beyond = torch.tensor([0.3, 9.0, 0.0, -1.0], dtype=torch.float64) * bootstrapped
    how: dict[str, Any] = {"bootstrap_value": beyond} if bootstrapped else {}
    advantage, target = token_gae(reward, value, sequence, discount=discount, lambda_=decay, **how)
    for s in range(4):
        here = sequence == s
        wanted = gae_by_loops(reward[here], torch.cat([value[here], beyond[s : s + 1]]), discount, decay)
        assert advantage[here].tolist() == pytest.approx(wanted)
    torch.testing.assert_close(target, advantage + value)


def test_token_gae_of_empty_batch() -> None:
    empty = torch.zeros(0)
    for beyond in (None, torch.ones(3)):
        assert token_gae(empty, empty, empty.long(), bootstrap_value=beyond)[0].shape == (0,)


def test_whiten_matches_formula() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert whiten(x, "none").tolist() == [-2, -1, 0, 3]
    torch.testing.assert_close(whiten(x), (x - 3) / x.std(correction=0))
    torch.testing.assert_close(whiten(x, "unbiased"), (x - 3) / x.std())
    assert not whiten(torch.full((3,), 0.1)).any() and whiten(torch.zeros(0)).shape == (0,)


def test_token_gae_rejects_invalid_shapes() -> None:
    reward, value, sequence = drawn()
    with pytest.raises(ConfigError):
        token_gae(reward[:2], value, sequence)
    with pytest.raises(ConfigError, match="bootstrap_value"):
        token_gae(reward, value, sequence, bootstrap_value=torch.zeros(2))
