"""Attention backends against an explicit loop, torch, and each other, with gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen, randn
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.gpu.tiled_attention import tiled_attention

B, H, T, D, DV = 2, 4, 9, 8, 6
SEGMENTS = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3, 3], [7, 7, 7, 7, 7, 7, 8, 8, 8]])
PADDED = torch.tensor([[False] * 9, [False, False] + [True] * 7])  # one row is padding only
# Queries without a key: the second, and the fourth of the second head.
PAIRS = torch.rand(T, T, generator=gen(9)) > 0.4
PAIRS[1] = False
BY_HEAD = torch.rand(B, H, T, T, generator=gen(9)) > 0.4
BY_HEAD[:, 1, 3] = False
MASKS = {
    "causal": Mask(),
    "open": Mask(causal=False),
    "window": Mask(window=3),
    "stride": Mask(stride=3),
    "block": Mask(causal=False, block=4),
    "packed": Mask(query_segments=SEGMENTS, key_segments=SEGMENTS),
    "padded": Mask(key_allowed=PADDED),
    "decoding": Mask(offset=6),
    "newest": Mask(offset=8),
    "packed window": Mask(offset=6, window=2, query_segments=SEGMENTS[:, 6:], key_segments=SEGMENTS),
    "pairs": Mask(causal=False, allowed=PAIRS),
    "pairs by head": Mask(allowed=BY_HEAD),
    "pairs, packed": Mask(query_segments=SEGMENTS, key_segments=SEGMENTS, allowed=PAIRS[None]),
}

BLOCKED = ("causal", "packed", "decoding")


def inputs(kv_heads: int, mask: Mask, grad: bool = True) -> list[Tensor]:
    shapes = [(B, H, T - mask.offset, D), (B, kv_heads, T, D), (B, kv_heads, T, DV)]
    return [randn(*s, seed=i).requires_grad_(grad) for i, s in enumerate(shapes)]


def attend_by_loop(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, bias: Any = None, softcap: Any = None, sink: Any = None
) -> Tensor:
    """Return attention one query at a time, over its allowed keys."""
    allowed = mask.dense(q.shape[2], k.shape[2]).expand(B, H, -1, -1)
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for b, h, i in itertools.product(range(B), range(H), range(q.shape[2])):
        g, seen = h // (H // k.shape[1]), allowed[b, h, i].nonzero().flatten()
        s = k[b, g, seen] @ q[b, h, i] / math.sqrt(D)
        s = s if softcap is None else softcap * (s / softcap).tanh()
        if bias is not None:
            s = s + (bias[h, i, seen] if bias.dim() == 3 else -bias[h] * (i + mask.offset - seen).abs())
        if len(seen):
            total = s.exp().sum() + (0.0 if sink is None else sink[h].exp())
            out[b, h, i] = s.exp() @ v[b, g, seen] / total
    return out


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attend_backends_match_loop_with_gradients(name: str, kv_heads: int) -> None:
    mask = MASKS[name]
    leaves = inputs(kv_heads, mask)
    want = attend_by_loop(*leaves, mask)
    with torch.no_grad():
        assert_close(attend(*leaves, mask, backend="flex"), want, atol=1e-5, rtol=1e-4)
    for backend in ("reference", "sdpa", "tiled", "auto", *(("blocked",) if name in BLOCKED else ())):
        assert_same_with_gradients(attend(*leaves, mask, backend=backend), want, leaves)
    if name in BLOCKED:
        assert torch.equal(attend(*leaves, mask), attend(*leaves, mask, backend="blocked"))


@pytest.mark.parametrize("name", ["causal", "window", "padded", "decoding"])
@pytest.mark.parametrize("kind", ["slopes", "table"])
@pytest.mark.parametrize("options", [("softcap",), ("sink",), ("softcap", "sink"), ()], ids=str)
def test_attend_supports_bias_softcap_and_sink(name: str, kind: str, options: tuple[str, ...]) -> None:
    mask = MASKS[name]
    q, k, v = inputs(2, mask)
    q = (q * 3).detach().requires_grad_()  # large enough for the cap to have an effect
    table = randn(H, T - mask.offset, T, seed=4)
    bias = (torch.rand(H, generator=gen(4)) if kind == "slopes" else table).requires_grad_()
    sink = randn(H, seed=5, grad=True)
    more = {key: value for key, value in {"softcap": 1.5, "sink": sink}.items() if key in options}
    want = attend_by_loop(q, k, v, mask, bias=bias, **more)
    with torch.no_grad():
        flex = attend(q, k, v, mask, bias=bias, backend="flex", **more)
        assert_close(flex, want, atol=1e-5, rtol=1e-4)
    for backend in ("reference", "auto", *(() if options else ("sdpa",))):
        y = attend(q, k, v, mask, bias=bias, backend=backend, **more)
        assert_same_with_gradients(y, want, (q, k, v, bias, *([sink] if "sink" in options else [])))


@pytest.mark.parametrize("by", ["mask", "bias", "both"])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sink": torch.zeros(H)}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto", "flex", "tiled"])
def test_rows_without_allowed_keys_are_zero_with_gradients(backend: str, options: Any, by: str) -> None:
    """Query 4 has no key, by the mask or by a bias of -inf."""
    if (options and backend in ("sdpa", "tiled")) or (by != "mask" and backend == "tiled"):
        return  # not supported
    pairs = torch.ones(T, T, dtype=torch.bool)
    pairs[4, 3 if by == "both" else 0 :] = False
    bias = torch.zeros(H, T, T).index_put((torch.arange(H), torch.tensor(4)), torch.tensor(float("-inf")))
    given = dict(options) if by == "mask" else {**options, "bias": bias.requires_grad_(backend != "flex")}
    q, k, v = leaves = inputs(2, Mask(), grad=backend != "flex")
    y = attend(q, k, v, pairs if by != "bias" else None, backend=backend, **given)
    rest = [t[:, :, [0, 1, 2, 3, 5, 6, 7, 8]] for t in (q, y)]
    want = attend(rest[0], k, v, backend="reference", **options)
    assert (y[:, :, 4] == 0).all()
    assert_close(rest[1], want, atol=1e-5, rtol=1e-4)
    if backend != "flex":  # without a backward on a CPU
        upstream = randn(*y.shape, seed=6)
        found = torch.autograd.grad(y, [*leaves, *([bias] if "bias" in given else [])], upstream)
        assert all(g.isfinite().all() for g in found) and (found[0][:, :, 4] == 0).all()
        expected = torch.autograd.grad(want, leaves, upstream[:, :, [0, 1, 2, 3, 5, 6, 7, 8]])
        assert_close(found[:3], expected, atol=1e-5, rtol=1e-4)


def test_attend_takes_torchs_boolean_mask() -> None:
    q, k, v = inputs(4, Mask(), grad=False)
    for allowed in (PAIRS, BY_HEAD, PADDED[1, None, None, None, :], BY_HEAD[:1, :, :, :1]):
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        assert_close(attend(q, k, v, allowed), want.nan_to_num(), atol=1e-5, rtol=1e-4)
    for bad in (PAIRS.float(), PAIRS[0], PAIRS[:, 1:], BY_HEAD[:, 1:]):
        with pytest.raises(ConfigError, match=r"allowed|heads"):
            attend(q, k, v, bad)


def test_queries_of_other_documents_than_the_last_keys() -> None:
    """The blocked path reads the queries' documents from the keys, so "auto" must not select it here."""
    mask = Mask(query_segments=SEGMENTS.roll(1, 1), key_segments=SEGMENTS)
    leaves = inputs(2, mask)
    assert_same_with_gradients(attend(*leaves, mask), attend_by_loop(*leaves, mask), leaves)


@pytest.mark.parametrize("name", MASKS)
def test_tiled_attention_returns_logsumexp_in_nats(name: str) -> None:
    mask = MASKS[name]
    leaves = inputs(2, mask)
    q, k, _ = leaves
    y, lse = tiled_attention(*leaves, mask, blocks=(2, 4))
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / math.sqrt(D)
    seen = mask.dense(q.shape[2], T)
    want = scores.masked_fill(~seen, -1e30).logsumexp(dim=-1)
    assert torch.equal(lse.isneginf(), (~seen.any(dim=-1)).expand_as(lse))
    both = [t.masked_fill(lse.isneginf(), 0.0) for t in (lse, want)]
    assert_same_with_gradients(both[0] + y.sum(-1), both[1] + attend(*leaves, mask).sum(-1), leaves)


def test_attend_computes_softmax_in_fp32_for_bf16() -> None:
    q, k, v = (t.detach().bfloat16() for t in inputs(2, Mask()))
    want = attend(q.float(), k.float(), v.float(), Mask(), backend="reference")
    for backend in ("reference", "sdpa", "flex"):
        y = attend(q, k, v, Mask(), backend=backend)
        assert y.dtype == torch.bfloat16
        assert_close(y.float(), want, atol=2e-2, rtol=2e-2)
    exact = attend(q, k, v, Mask(), backend="reference")
    assert torch.equal(exact, want.bfloat16())
    blocked = attend(q, k, v, Mask(), backend="blocked")  # its scores are rounded to bf16
    assert_close(blocked.float(), want, atol=3e-2, rtol=3e-2)
    loud = attend(q * 8, k * 8, v, Mask(), backend="blocked").float()
    exactly = attend(q.float() * 8, k.float() * 8, v.float(), Mask(), backend="reference")
    assert (loud - exactly).abs().max() < 0.3 and (loud - exactly).square().mean().sqrt() < 0.03


def test_attend_matches_torch_with_scale() -> None:
    q, k, v = inputs(4, Mask(), grad=False)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert_close(attend(q, k, v, Mask(), scale=0.3, backend="reference"), want)
    assert_close(attend(q, k, v, None), F.scaled_dot_product_attention(q, k, v))
