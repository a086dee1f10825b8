"""Keys and values in int8: rounded row by row, attended to without being written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.engine.kv_int8 import attend, attend_reference, bytes_per_token, compress, restore


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.floats(-20, 20))
@settings(max_examples=40, deadline=None)
def test_each_position_and_head_is_rounded_by_itself(seed: int, power: float) -> None:
    kv = drawn(2, 3, 5, 16, seed=seed)
    kv[1, 2, 3] *= 2.0**power
    kept = compress(kv)
    assert kept.codes.dtype == torch.int8 and kept.scale.shape == (2, 3, 5)
    bound = kv.abs().amax(-1, keepdim=True) / 127 * 0.5001
    assert ((restore(kept) - kv).abs() <= bound).all()
    one = compress(kv[1, 2, 3])
    assert torch.equal(one.codes, kept.codes[1, 2, 3]) and torch.equal(one.scale, kept.scale[1, 2, 3])
    assert not restore(compress(torch.zeros(1, 4))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "n_kv"), [(4, 4), (6, 2)])
def test_attention_over_codes_is_attention_over_what_they_mean(
    heads: int, n_kv: int, dtype: torch.dtype
) -> None:
    q = drawn(2, heads, 3, 16).to(dtype)
    k, v = (compress(drawn(2, n_kv, 9, 16, seed=s) * (1 + torch.arange(9.0))[:, None]) for s in (1, 2))
    bias = torch.zeros(3, 9).masked_fill(torch.ones(3, 9).triu(7).bool(), float("-inf"))
    for more in ({}, {"bias": bias, "scale": 0.25}):
        want, found = attend_reference(q, k, v, **more), attend(q, k, v, **more)
        assert found.dtype == dtype
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_the_size_is_what_is_kept() -> None:
    k = compress(drawn(1, 2, 10, 64))
    assert 2 * 3 * k.n_bytes == 10 * bytes_per_token(3, 2, 64)
    assert bytes_per_token(3, 2, 64) < 0.54 * (2 * 3 * 2 * 64 * 2)
