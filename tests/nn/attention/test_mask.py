"""The attention mask against a loop over all pairs."""

from __future__ import annotations

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
    for b in range(rows):
        ids = None if mask.key_segments is None else mask.key_segments[b].tolist()
        for q in range(n_queries):
            for k in range(n_keys):
                i = q + mask.offset
                parts = [not mask.causal or k <= i]
                parts.append(mask.window is None or abs(i - k) < mask.window)
                parts.append(mask.stride is None or abs(i - k) < mask.stride or (i - k) % mask.stride == 0)
                if ids is not None:
                    parts.append(ids[i] == ids[k])
                if mask.block is not None:
                    x, y = i, k
                    if ids is not None:  # segments here are runs: the first index is the start
                        x, y = i - ids.index(ids[i]), k - ids.index(ids[k])
                    x, y = x // mask.block, y // mask.block
                    parts.append(x == y if mask.layout is None else bool(mask.layout[x, y]))
                if mask.key_allowed is not None:
                    parts.append(bool(mask.key_allowed[b, k]))
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
def test_mask_dense_and_mask_mod_match_a_loop(
    causal: bool, offset: int, packed: bool, parts: dict[str, object]
) -> None:
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


def test_mask_stride_reaches_all_keys_in_two_layers() -> None:
    seen = Mask(stride=4).dense(16, 16)[0, 0].float()
    assert not seen.bool().equal(torch.ones(16, 16).tril().bool())
    assert ((seen @ seen) > 0).equal(torch.ones(16, 16).tril().bool())


def test_mask_allows_all_for_open_rows() -> None:
    assert Mask(offset=6).allows_all(1, 7) and Mask(causal=False).allows_all(5, 7)
    assert not Mask().allows_all(7, 7) and not Mask(offset=6, window=3).allows_all(1, 7)
