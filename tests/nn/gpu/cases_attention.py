"""Attention in Triton's interpreter: every part of a mask, against the reference, with gradients (see `test_kernels.py`)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.nn.checks import gen, randn
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.nn.attention import MultiHeadAttention, attend
from whorl.nn.attention.mask import Mask
from whorl.nn.gpu.attention import attention, attention_with_lse, supports
from whorl.nn.gpu.mask_bounds import PADDING_DOCUMENT, document_bounds
from whorl.nn.gpu.tiled_attention import tiled_attention

B, H, T, D, DV = 2, 4, 37, 24, 17
SEGMENTS = torch.tensor([[1] * 5 + [2] * 20 + [3] * 12, [9] * 16 + [4] * 14 + [9] * 7])  # an id may return
PADDED = torch.ones(B, T, dtype=torch.bool)
PADDED[0, :18] = False  # a whole block and part of one
PADDED[1] = False  # a row of padding only
MASKS = {
    "causal": Mask(),
    "open": Mask(causal=False),
    "window of two": Mask(window=2),  # one score per block: a bound that is off by one loses it
    "window both ways": Mask(window=9, causal=False),
    "padded": Mask(key_allowed=PADDED),
    "packed and padded": Mask(query_segments=SEGMENTS, key_segments=SEGMENTS, key_allowed=PADDED),
    "decoding": Mask(offset=20),
    "packed window": Mask(offset=20, window=4, query_segments=SEGMENTS[:, 20:], key_segments=SEGMENTS),
}


def draw(mask: Mask, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = gen(7)
    shapes = [(B, 2 * kv_heads, T - mask.offset, D), (B, kv_heads, T, D), (B, kv_heads, T, DV)]
    return [torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in shapes]


def with_gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [y, *torch.autograd.grad(y, inputs, randn(*y.shape, seed=8).to(y.dtype))]


@pytest.mark.parametrize("name", MASKS)
def test_attention_matches_reference_for_every_mask(name: str) -> None:
    mask = MASKS[name]
    inputs = draw(mask, kv_heads=1)
    ours = with_gradients(attention(*inputs, mask, D**-0.5, (16, 16)), inputs)
    theirs = with_gradients(attend(*inputs, mask, backend="reference"), inputs)
    assert all(t.any() and not t.isnan().any() for t in ours)
    assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    y, lse = attention_with_lse(*inputs, mask, D**-0.5, (16, 16))
    assert torch.equal(y, ours[0])
    assert_close(lse, tiled_attention(*inputs, mask)[1], atol=1e-5, rtol=1e-4)  # in nats; -inf without a key
    if name == "padded":  # queries without allowed keys: exact zeros, and no gradient
        for a in (ours[0][0, :, :18], ours[0][1], ours[1][0, :, :18], ours[1][1], ours[2][1], ours[3][1]):
            assert not a.any()


@pytest.mark.parametrize(("dtype", "digit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_attention_half_types_have_small_errors(dtype: torch.dtype, digit: float) -> None:
    """Compare with fp32 on the same numbers. (The interpreter truncates to bf16: see `triton_support.py`.)"""
    inputs = draw(Mask(), 1, dtype)
    exact_inputs = [t.detach().float().requires_grad_() for t in inputs]
    exact = with_gradients(attend(*exact_inputs, Mask(), backend="reference"), exact_inputs)
    ours = with_gradients(attention(*inputs, Mask(), D**-0.5, (32, 16)), inputs)
    for a, want in zip(ours, exact, strict=True):
        assert a.dtype == dtype
        assert float((a.float() - want).detach().norm()) < 2 * digit * float(want.detach().norm())


@given(
    sizes=st.tuples(st.integers(1, 35), st.integers(0, 20), st.integers(1, 33), st.integers(1, 20)),
    group=st.sampled_from([1, 3]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 40),
    documents=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_attention_matches_reference_for_any_sizes(
    sizes: tuple[int, ...], group: int, causal: bool, window: int | None, documents: bool, seed: int
) -> None:
    queries, more, d, dv = sizes
    g = gen(seed)
    keys = queries + more
    numbers = torch.randint(-1, 3, (1, keys), generator=g) if documents else None
    own = None if numbers is None else numbers[:, more:]
    mask = Mask(causal=causal, window=window, offset=more, key_segments=numbers, query_segments=own)
    # Memory [B, T, H, d] as in layers, so that strides differ from those of the shape.
    shapes = [(1, queries, group, d), (1, keys, 1, d), (1, keys, 1, dv)]
    inputs = [torch.randn(*s, generator=g).transpose(1, 2).requires_grad_() for s in shapes]
    ours = with_gradients(attention(*inputs, mask, 0.3, (16, 16)), inputs)
    theirs = with_gradients(attend(*inputs, mask, scale=0.3, backend="reference"), inputs)
    assert_close(ours, theirs, atol=2e-5, rtol=1e-3)


def test_attention_large_scores_do_not_overflow() -> None:
    """Scores of a thousand, and a last block of keys with a single valid key."""
    q, k, v = ((t.detach() * 8)[:1, :2, :33].requires_grad_() for t in draw(Mask(), 4))
    one, other = (with_gradients(attention(q, k, v, Mask(), 1.0, b), [q, k, v]) for b in ((16, 32), (32, 16)))
    for a, b in zip(one, other, strict=True):
        assert float((a - b).detach().norm()) < 1e-3 * float(b.detach().norm())  # also false for NaN
    # Log sums of -14,000: exp2(0 - L) is infinite.
    very_low = torch.full((1, 1, 17, 16), -30.0, requires_grad=True)
    y = attention(very_low, -very_low.detach(), very_low.detach(), Mask(), 1.0, (16, 16))
    assert_close(y, very_low)
    assert torch.autograd.grad(y.sum(), very_low)[0].isfinite().all()


def test_document_bounds_are_safe_and_tight() -> None:
    g = gen(0)
    ours, theirs = torch.randint(0, 4, (3, 50), generator=g), torch.randint(0, 4, (3, 70), generator=g)
    theirs[0, 16:40] = PADDING_DOCUMENT
    of_queries, of_keys = document_bounds(ours.int(), theirs.int(), (16, 8))
    for b, i, j in (ours[:, :, None] == theirs[:, None, :]).nonzero().tolist():
        first, stop = of_queries[b, i // 16].tolist()
        assert first <= j < stop
        first, stop = of_keys[b, j // 8].tolist()
        assert first <= i < stop
    packed = torch.arange(8).repeat_interleave(16)[None].int()  # eight documents of one block each
    keys, queries = document_bounds(packed, packed, (16, 16))
    want = torch.stack([torch.arange(0, 128, 16), torch.arange(16, 129, 16)], -1).int()[None]
    assert torch.equal(keys, want) and torch.equal(queries, want)
    empty, _ = document_bounds(packed[:, :16], packed[:, 16:32], (16, 16))
    assert empty.tolist() == [[[0, 0]]]


def test_multi_head_triton_backend_matches_reference() -> None:
    g = gen(3)
    layer = MultiHeadAttention(32, 4, n_kv_heads=2, backend="triton", generator=g)
    torch.nn.init.normal_(layer.out.weight, std=0.1, generator=g)
    x = torch.randn(2, 19, 32, generator=g)
    found = []
    for backend in ("triton", "reference"):
        layer.backend = backend
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        found.append([y, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    assert len(found[0]) == len(list(layer.parameters())) + 1
    assert_close(*found, atol=1e-5, rtol=1e-4)


def test_attention_raises_for_unsupported_options() -> None:
    q, k, v = draw(Mask(), 2)
    for mask in (Mask(stride=3), Mask(causal=False, block=4), Mask(allowed=torch.ones(T, T) > 0)):
        assert not supports(q, k, v, mask)
        with pytest.raises(ConfigError, match="no stride, block or allowed"):
            attend(q, k, v, mask, backend="triton")
    for more in ({"softcap": 2.0}, {"sink": torch.zeros(H)}, {"bias": torch.ones(H)}):
        with pytest.raises(ConfigError, match="without bias, softcap and sink"):
            attend(q, k, v, Mask(), backend="triton", **more)
    with pytest.raises(ConfigError, match="query_segments"):
        attend(q, k, v, Mask(query_segments=SEGMENTS[:, 1:], key_segments=SEGMENTS), backend="triton")
    assert not supports(q, k.double(), v, Mask())
    assert attention(q, k, v, Mask(), 1.0).isfinite().all()
