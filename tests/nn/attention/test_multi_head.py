"""Multi-head attention against torch, cross-attention, shared keys, state sizes; short mixing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, copy_values, gen, randn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.attention.short_conv import ShortConvolution, Smear
from whorl.nn.rotary import Rotary

D, H, T = 32, 4, 11
ROTARY = Rotary(8, 10_000.0, torch.float32)


def make_layer(seed: int = 0, **options: Any) -> MultiHeadAttention:
    made = MultiHeadAttention(D, H, generator=gen(seed), **options)
    for name, p in made.named_parameters():
        if name.startswith("out") or not p.any():  # parameters that start at 0 would hide errors
            nn.init.normal_(p, std=0.3, generator=gen(seed + 1))
    return made


def rows(length: int = T, seed: int = 5) -> Tensor:
    return randn(2, length, D, seed=seed)


def test_segments_may_start_in_a_later_piece() -> None:
    mixer, x = make_layer(rotary=ROTARY, smear=True, window=4), rows()
    segments = torch.tensor([[0] * 6 + [1] * 5, [0] * 8 + [1] * 3])
    state = mixer.new_state(2, T)
    parts = [mixer(x[:, :3], state=state), mixer(x[:, 3:], None, segments[:, 3:], state)]
    assert_close(torch.cat(parts, 1), mixer(x, None, segments), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_matches_torch_with_gradients(causal: bool) -> None:
    theirs = nn.MultiheadAttention(D, H, batch_first=True)
    ours = MultiHeadAttention(D, H, bias=True, out_bias=True, causal=causal)
    nn.init.normal_(theirs.in_proj_bias)
    for i, linear in enumerate((ours.q, ours.k, ours.v)):
        weight, bias = theirs.in_proj_weight.chunk(3)[i], theirs.in_proj_bias.chunk(3)[i]
        copy_values({linear.weight: weight, linear.bias: bias})
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    x = rows().requires_grad_()
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0, 8:] = True
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None
    want = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)[0]
    assert_same_with_gradients(ours(x, key_allowed=~padding), want, [x], grad_atol=1e-4)


def test_cross_attention_matches_torch_and_decodes() -> None:
    theirs = nn.MultiheadAttention(D, H, kdim=12, vdim=12, batch_first=True, bias=False)
    ours = MultiHeadAttention(D, H, context_dim=12)
    weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight, theirs.out_proj.weight)
    copy_values(
        dict(zip((layer.weight for layer in (ours.q, ours.k, ours.v, ours.out)), weights, strict=True))
    )
    x, context = rows(), randn(2, 6, 12, seed=3)
    allowed = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    want = theirs(x, context, context, key_padding_mask=~allowed, need_weights=False)[0]
    whole = ours(x, context=context, context_allowed=allowed)
    assert_close(whole, want, atol=1e-5, rtol=1e-4)
    state = ours.new_state(2, T)
    parts = [ours(x[:, :3], state=state, context=context, context_allowed=allowed)]
    parts += [ours(x[:, t : t + 1], state=state) for t in range(3, T)]
    assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    assert state.length == T and state.n_bytes == 2 * 2 * 6 * D * 4 + allowed.nbytes
    # Packed: each document attends to its context; a document without context gets 0.
    ids, context_ids = torch.tensor([[1] * 5 + [2] * 4 + [3] * 2]), torch.tensor([[1, 1, 2, 2, 2, 2]])
    segments = {"segments": ids.expand(2, -1), "context_segments": context_ids.expand(2, -1)}
    packed = ours(x, context=context, **segments)
    assert_close(packed[:, :5], ours(x[:, :5], context=context[:, :2]), atol=1e-5, rtol=1e-4)
    assert_close(packed[:, 5:9], ours(x[:, 5:9], context=context[:, 2:]), atol=1e-5, rtol=1e-4)
    assert (packed[:, 9:] == 0).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fused_projections_equal_separate_ones(kv_heads: int) -> None:
    options: dict[str, Any] = {"rotary": ROTARY, "n_kv_heads": kv_heads, "smear": True, "bias": True}
    fused, separate = make_layer(projections="fused", **options), make_layer(**options)
    rows_of = [H * 8, kv_heads * 8, kv_heads * 8]
    assert fused.qkv is not None
    for name, weight, bias in zip(
        "qkv", fused.qkv.weight.split(rows_of), fused.qkv.bias.split(rows_of), strict=True
    ):
        copy_values({getattr(separate, name).weight: weight, getattr(separate, name).bias: bias})
    x = rows().requires_grad_()
    assert_same_with_gradients(fused(x), separate(x), [x], grad_atol=1e-4)
    state = fused.new_state(2, T)
    parts = torch.cat([fused(x[:, :4], state=state), fused(x[:, 4:], state=state)], 1)
    assert_close(parts, separate(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_learned_scale_is_a_temperature_per_head(backend: str) -> None:
    layer = make_layer(qk_norm=1e-6, scale="learned", backend=backend)
    assert layer.temperature is not None
    nn.init.uniform_(layer.temperature, 0.5, 2.0, generator=gen(3))
    x = rows()

    def heads(t: Tensor) -> Tensor:
        return t.view(2, T, H, 8).transpose(1, 2)

    q, k = (F.normalize(heads(made(x)), dim=-1) * 8**0.5 for made in (layer.q, layer.k))
    scores = layer.temperature[:, :, None] * (q @ k.transpose(-1, -2))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    want = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ heads(layer.v(x))
    assert_close(layer(x), layer.out(want.transpose(1, 2).reshape(2, T, D)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
def test_shared_kv_uses_keys_of_another_layer(window: int | None) -> None:
    options: dict[str, Any] = {"rotary": ROTARY, "n_kv_heads": 2, "qk_norm": 1e-6, "window": window}
    first, second = make_layer(0, **options), make_layer(7, projections="shared", **options)
    x = rows()
    shared = first.project_kv(x)
    y = first(x, shared_kv=shared)
    assert_close(y, first(x))
    z = second(y, shared_kv=shared)
    assert_close(second(y, shared_kv=(shared.k, shared.v)), z)
    # The second layer's queries attend to the first layer's keys of the first layer's input.

    def heads(t: Tensor, rotate: bool, norm: nn.Module | None) -> Tensor:
        t = t.view(2, T, -1, 8)
        t = t if norm is None else norm(t)
        return (ROTARY.rotate(t, ROTARY.tables_between(0, T, t.device)) if rotate else t).transpose(1, 2)

    q = heads(second.q(y), True, second.q_norm)
    k, v = heads(first.k(x), True, first.k_norm), heads(first.v(x), False, None)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert_close(z, second.out(want.transpose(1, 2).reshape(2, T, -1)), atol=1e-5, rtol=1e-4)

    states, parts = (first.new_state(2, T), second.new_state(2, T)), []
    for piece in x.split([1, 3, 6, 1], dim=1):
        shared = first.project_kv(piece, state=states[0])
        parts.append(second(first(piece, shared_kv=shared), shared_kv=shared, state=states[1]))
    assert_close(torch.cat(parts, 1), z, atol=1e-5, rtol=1e-4)
    assert states[1].n_bytes == 0 and states[0].length == states[1].length == T
    z.square().sum().backward()
    for name, p in [*first.named_parameters(), *second.named_parameters()]:
        assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_new_layer_outputs_zero_and_follows_the_seed() -> None:
    a, b = MultiHeadAttention(D, H, generator=gen(1)), MultiHeadAttention(D, H, generator=gen(1))
    assert (a(rows()) == 0).all()
    for name, weight in a.state_dict().items():
        assert torch.equal(weight, b.state_dict()[name])


def test_window_state_keeps_window_positions_only() -> None:
    state = make_layer(window=4).new_state(2, 1_000_000)
    assert state.k.shape == (2, 4, 3, 8) and state.n_bytes == 2 * state.k.nbytes
    assert make_layer().new_state(2, 10).n_bytes == 2 * 2 * 10 * D * 4


def test_bias_is_added_to_scores() -> None:
    mixer, x = make_layer(causal=False), rows()
    bias = torch.full((H, T, T), float("-inf")).masked_fill(torch.ones(T, T).tril().bool(), 0.0)
    assert_close(mixer(x, bias=bias), make_layer()(x), atol=1e-5, rtol=1e-4)


# ---- short mixing


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_short_convolution_matches_torch_with_gradients(width: int, residual: bool) -> None:
    mixer = ShortConvolution(D, width, bias=True, residual=residual, generator=gen())
    nn.init.normal_(mixer.bias, generator=gen(1))
    x = rows().requires_grad_()
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    want = F.conv1d(padded, mixer.weight.flip(1)[:, None], mixer.bias, groups=D).transpose(1, 2)
    want = want + x if residual else want
    assert_same_with_gradients(mixer(x), want, (x, mixer.weight, mixer.bias), grad_atol=1e-4)


@pytest.mark.parametrize("pieces", [[1, 3, 7], [1] * T])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_short_mixing_pieces_and_packed_rows(pieces: list[int], width: int) -> None:
    conv, smear = ShortConvolution(D, width, generator=gen()), Smear(H)
    nn.init.normal_(smear.share, generator=gen(1))
    x, ids = rows(), torch.tensor([[3] * 4 + [1] + [2] * 6, [0] * T])

    def smeared(x: Tensor, ids: Tensor | None = None, state: Any = None) -> Tensor:
        return smear(x.unflatten(-1, (H, -1)), ids, state).flatten(-2)

    for mix, state in ((conv, conv.new_state(2)), (smeared, smear.new_state(2, D // H))):
        whole = mix(x, ids)
        alone = torch.cat([mix(x[:1, a:b]) for a, b in ((0, 4), (4, 5), (5, 11))], 1)
        assert_close(whole, torch.cat([alone, mix(x[1:])]))
        parts = [mix(a, i, state) for a, i in zip(x.split(pieces, 1), ids.split(pieces, 1), strict=True)]
        assert_close(torch.cat(parts, 1), whole)
        assert state.length == T and state.n_bytes == state.past.nbytes + state.segments.nbytes
        more = mix(rows(2, seed=6), None, state)  # continues the last documents
        on = torch.cat([ids, ids[:, -1:].expand(-1, 2)], 1)
        assert_close(more, mix(torch.cat([x, rows(2, seed=6)], 1), on)[:, T:])


def test_smear_averages_with_predecessor() -> None:
    smear, x = Smear(2), randn(1, 3, 2, 4)
    assert_close(smear(x)[:, 1:], (x[:, 1:] + x[:, :-1]) / 2)
    assert torch.equal(smear(x)[:, 0], x[:, 0])
