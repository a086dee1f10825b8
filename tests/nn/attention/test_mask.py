"""The attention mask against a loop over all pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from whorl.nn.attention.mask import Mask

SEGMENTS = torch.tensor([[3, 3, 3, 3, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5]])  # one of length 1
LAYOUT = torch.tensor(
    [[1, 0, 1, 0, 1], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
).bool()


def by_loop(mask: Mask, n_queries: int, n_keys: int) -> Tensor:
    rows = mask.batch_size or 1
    allowed = torch.zeros(rows, 1, n_queries, n_keys, dtype=torch.bool)
    for b, q, k in itertools.product(range(rows), range(n_queries), range(n_keys)):
        i = x = q + mask.offset
        y, distance = k, abs(i - k)
        parts = [not mask.causal or k <= i, mask.window is None or distance < mask.window]
        parts.append(mask.stride is None or distance < mask.stride or distance % mask.stride == 0)
        if mask.key_segments is not None:  # segments here are runs: the first index is the start
            ids = mask.key_segments[b].tolist()
            parts.append(ids[i] == ids[k])
            x, y = i - ids.index(ids[i]), k - ids.index(ids[k])
        if mask.block is not None:
            x, y = x // mask.block, y // mask.block
            parts.append(x == y if mask.layout is None else bool(mask.layout[x, y]))
        parts.append(mask.key_allowed is None or bool(mask.key_allowed[b, k]))
        allowed[b, 0, q, k] = all(parts)
    return allowed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "parts",
    [{}, {"window": 1}, {"window": 3}, {"stride": 3}, {"block": 2}, {"block": 2, "layout": LAYOUT},
     {"window": 5, "stride": 2, "block": 4}],
)  # fmt: skip
def test_mask_dense_and_mask_mod_match_a_loop(causal: bool, offset: int, packed: bool, parts: Any) -> None:
    n_queries = 9 - offset
    if packed:
        parts = parts | {"query_segments": SEGMENTS[:, offset:], "key_segments": SEGMENTS}
        parts |= {"key_allowed": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 9]).bool()}
    mask = Mask(causal=causal, offset=offset, **parts)  # type: ignore[arg-type]
    want = by_loop(mask, n_queries, 9)
    assert torch.equal(mask.dense(n_queries, 9), want)
    flex = create_mask(mask.mask_mod(), mask.batch_size, None, n_queries, 9, device="cpu")
    assert torch.equal(flex, want)
    assert not want.all() or (not causal and not parts)


def test_mask_allows_all_for_open_rows() -> None:
    assert Mask(offset=6).allows_all(1, 7) and Mask(causal=False).allows_all(5, 7)
    assert not Mask().allows_all(7, 7) and not Mask(offset=6, window=3).allows_all(1, 7)
