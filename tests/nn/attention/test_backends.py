"""Attention backends against an explicit loop, torch, and each other, with gradients."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.nn.checks import gen, randn
from torch import Tensor
from torch.nn import functional as F

from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask

B, H, T, D, DV = 2, 4, 9, 8, 6
SEGMENTS = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3, 3], [7, 7, 7, 7, 7, 7, 8, 8, 8]])
PADDED = torch.tensor([[False] * 9, [False, False] + [True] * 7])  # one row is padding only
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
}


def inputs(kv_heads: int, mask: Mask, grad: bool = True) -> list[Tensor]:
    shapes = [(B, H, T - mask.offset, D), (B, kv_heads, T, D), (B, kv_heads, T, DV)]
    return [torch.randn(*s, generator=gen(i)).requires_grad_(grad) for i, s in enumerate(shapes)]


def attend_by_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return attention one query at a time, over its allowed keys."""
    allowed = mask.dense(q.shape[2], k.shape[2]).expand(B, H, -1, -1)
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for i in range(q.shape[2]):
                seen = allowed[b, h, i].nonzero().flatten().tolist()
                total, sum_ = torch.zeros(v.shape[-1]), 0.0 if sink is None else math.exp(float(sink[h]))
                for j in seen:
                    s = float(q[b, h, i] @ k[b, g, j]) / math.sqrt(D)
                    s = s if softcap is None else softcap * math.tanh(s / softcap)
                    if bias is not None:
                        s += float(-bias[h] * abs(i + mask.offset - j) if bias.dim() == 1 else bias[h, i, j])
                    total, sum_ = total + math.exp(s) * v[b, g, j], sum_ + math.exp(s)
                if seen:
                    out[b, h, i] = total / sum_
    return out


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attend_backends_agree_with_gradients(name: str, kv_heads: int) -> None:
    mask = MASKS[name]
    q, k, v = inputs(kv_heads, mask)
    with torch.no_grad():
        want = attend_by_loop(q, k, v, mask)
        torch.testing.assert_close(attend(q, k, v, mask, backend="flex"), want, atol=1e-5, rtol=1e-4)
    upstream = torch.randn(want.shape, generator=gen(9))
    gradients = []
    for backend in ("reference", "sdpa", "auto"):
        y = attend(q, k, v, mask, backend=backend)
        torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-4)
        gradients.append(torch.autograd.grad(y, (q, k, v), upstream))
    for other in gradients[1:]:
        for ours, theirs in zip(other, gradients[0], strict=True):
            assert not ours.isnan().any()
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["causal", "window", "padded", "decoding"])
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_attend_supports_bias_softcap_and_sink(name: str, kind: str) -> None:
    mask = MASKS[name]
    q, k, v = inputs(2, mask)
    q = (q * 3).detach().requires_grad_()  # large enough for the cap to have an effect
    bias = torch.rand(H, generator=gen(4))
    if kind == "table":
        bias = torch.randn(H, T - mask.offset, T, generator=gen(4))
    bias.requires_grad_()
    sink = torch.randn(H, generator=gen(5), requires_grad=True)
    with torch.no_grad():
        for options in ({"softcap": 1.5}, {"sink": sink}, {"softcap": 1.5, "sink": sink}, {}):
            want = attend_by_loop(q, k, v, mask, bias, **options)  # type: ignore[arg-type]
            for backend in ("reference", "flex", "auto", *(() if options else ("sdpa",))):
                y = attend(q, k, v, mask, bias=bias, backend=backend, **options)  # type: ignore[arg-type]
                torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-4)
    plain = [torch.autograd.grad(attend(q, k, v, mask, bias=bias, backend=b).square().sum(), (q, k, v, bias))
             for b in ("reference", "sdpa")]  # fmt: skip
    for ours, theirs in zip(*plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    y = attend(q, k, v, mask, bias=bias, softcap=1.5, sink=sink)
    for gradient in torch.autograd.grad(y.square().sum(), (q, k, v, bias, sink)):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


def test_softcap_and_sink_gradients_match_differences() -> None:
    q, k, v = inputs(2, Mask())
    sink, step = torch.randn(H, generator=gen(5), requires_grad=True), 1e-2

    def loss(q: Tensor, sink: Tensor) -> Tensor:
        return attend(q, k, v, Mask(), softcap=1.5, sink=sink).square().sum()

    d_q, d_sink = torch.autograd.grad(loss(q, sink), (q, sink))
    along_q, along_sink = torch.randn(q.shape, generator=gen(6)), randn(H, seed=7)
    with torch.no_grad():
        up, down = (float(loss(q + s * along_q, sink + s * along_sink)) for s in (step, -step))
    want = float((d_q * along_q).sum() + (d_sink * along_sink).sum())
    assert (up - down) / (2 * step) == pytest.approx(want, rel=2e-2)


def test_rows_without_allowed_keys_are_zero_with_gradients() -> None:
    mask = MASKS["padded"]
    for backend in ("reference", "sdpa"):
        q, k, v = inputs(2, mask)
        y = attend(q, k, v, mask, backend=backend)
        assert (y[0] == 0).all() and (y[1, :, :2] == 0).all() and (y[1, :, 2:] != 0).any()
        d_q, d_k, d_v = torch.autograd.grad(y.sum(), (q, k, v))
        assert (d_q[0] == 0).all() and (d_k[0] == 0).all() and (d_v[0] == 0).all()
        assert (d_v[1, :, :2] == 0).all() and d_v.isfinite().all() and d_k.isfinite().all()


def test_attend_computes_softmax_in_fp32_for_bf16() -> None:
    q, k, v = (t.detach().bfloat16() for t in inputs(2, Mask()))
    want = attend(q.float(), k.float(), v.float(), Mask(), backend="reference")
    for backend in ("reference", "sdpa", "flex"):
        y = attend(q, k, v, Mask(), backend=backend)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), want, atol=2e-2, rtol=2e-2)
    exact = attend(q, k, v, Mask(), backend="reference")
    assert torch.equal(exact, want.bfloat16())
    blocked = attend(q, k, v, Mask(), backend="blocked")  # its scores are rounded to bf16
    torch.testing.assert_close(blocked.float(), want, atol=3e-2, rtol=3e-2)
    loud = attend(q * 8, k * 8, v, Mask(), backend="blocked").float()
    exactly = attend(q.float() * 8, k.float() * 8, v.float(), Mask(), backend="reference")
    assert (loud - exactly).abs().max() < 0.3 and (loud - exactly).square().mean().sqrt() < 0.03


def test_attend_matches_torch_with_scale() -> None:
    q, k, v = inputs(4, Mask(), grad=False)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(attend(q, k, v, Mask(), scale=0.3, backend="reference"), want)
    torch.testing.assert_close(attend(q, k, v, None), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("name", ["causal", "packed", "decoding"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocked_backend_matches_loop_and_reference(name: str, kv_heads: int) -> None:
    found = []
    for backend in ("blocked", "reference", "auto"):
        tensors = inputs(kv_heads, MASKS[name])
        y = attend(*tensors, MASKS[name], backend=backend)
        y.square().sum().backward()
        found.append((y.detach(), *(t.grad for t in tensors)))
    assert torch.allclose(
        found[0][0], attend_by_loop(*inputs(kv_heads, MASKS[name], False), MASKS[name]), atol=1e-5
    )
    for one, two, three in zip(*found, strict=True):
        assert one is not None and two is not None and three is not None
        assert torch.allclose(one, two, atol=1e-5) and torch.equal(one, three)  # "auto" selects "blocked"
