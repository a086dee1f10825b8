"""Multi-head attention against torch, decoding in pieces, packed rows, shared keys; short mixing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.attention.short_conv import ShortConvolution, Smear
from whorl.nn.positions.rotary import Rotary

D, H, T = 32, 4, 11
ROTARY = Rotary(8, 10_000.0, torch.float32)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-query": {"n_kv_heads": 1, "bias": True, "out_bias": True},
    "grouped rotary": {"n_kv_heads": 2, "rotary": ROTARY, "qk_norm": 1e-6, "norm_offset": 1.0},
    "window": {"window": 3, "rotary": ROTARY, "smear": True},
    "window 1": {"window": 1},
    "window sink": {"window": 4, "sink": True, "softcap": 5.0, "n_kv_heads": 2},
    "stride": {"stride": 3, "alibi": True},
    "window stride alibi": {"window": 7, "stride": 2, "alibi": True},
    "block": {"block": 3, "rotary": ROTARY},
    "block window": {"block": 4, "window": 3, "qk_norm": 1e-5},
    "smear": {"smear": True, "n_kv_heads": 2, "rotary": ROTARY, "scale": 0.5, "head_dim": 8},
}


def make_layer(seed: int = 0, **options: Any) -> MultiHeadAttention:
    made = MultiHeadAttention(D, H, generator=gen(seed), **options)
    for name, p in made.named_parameters():
        if name.startswith("out") or not p.any():  # parameters that start at 0 would hide errors
            nn.init.normal_(p, std=0.3, generator=gen(seed + 1))
    return made


def rows(length: int = T, seed: int = 5) -> Tensor:
    return torch.randn(2, length, D, generator=gen(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[1, 3, 7], [1] * T, [5, 5, 1]])
def test_multi_head_pieces_equal_the_row(kind: str, pieces: list[int]) -> None:
    mixer, x = make_layer(**KINDS[kind]), rows()
    whole = mixer(x)
    for grad in (False, True):
        state = mixer.new_state(2, T)
        with torch.set_grad_enabled(grad):
            parts = [mixer(piece, state=state) for piece in x.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
        assert state.length == T
        with pytest.raises(ConfigError, match="capacity is 11"):
            mixer(x[:, :1], state=state)
        assert state.length == T  # a rejected call leaves the state unchanged
        if grad:
            torch.cat(parts, 1).sum().backward()  # gradients stop at the state


@pytest.mark.parametrize("kind", KINDS)
def test_multi_head_packed_row_equals_documents(kind: str) -> None:
    mixer = make_layer(**KINDS[kind])
    documents = [rows(n, seed=n) for n in (5, 1, 7)]
    segments = torch.tensor([[4] * 5 + [9] + [2] * 7]).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in (5, 1, 7)])
    packed, want = torch.cat(documents, 1), torch.cat([mixer(x) for x in documents], 1)
    torch.testing.assert_close(mixer(packed, positions, segments), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mixer(packed, None, segments), want, atol=1e-5, rtol=1e-4)
    state = mixer.new_state(2, 13)
    parts = [mixer(packed[:, a:b], positions[a:b], segments[:, a:b], state) for a, b in ((0, 4), (4, 8))]
    parts += [mixer(packed[:, t : t + 1], positions[t : t + 1], state=state) for t in range(8, 13)]
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-4)


def test_segments_may_start_in_a_later_piece() -> None:
    mixer, x = make_layer(rotary=ROTARY, smear=True, window=4), rows()
    segments = torch.tensor([[0] * 6 + [1] * 5, [0] * 8 + [1] * 3])
    state = mixer.new_state(2, T)
    parts = [mixer(x[:, :3], state=state), mixer(x[:, 3:], None, segments[:, 3:], state)]
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x, None, segments), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_matches_torch_with_gradients(causal: bool) -> None:
    theirs = nn.MultiheadAttention(D, H, batch_first=True)
    ours = MultiHeadAttention(D, H, bias=True, out_bias=True, causal=causal)
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        for i, linear in enumerate((ours.q, ours.k, ours.v)):
            assert linear is not None and linear.bias is not None
            linear.weight.copy_(theirs.in_proj_weight.chunk(3)[i])
            linear.bias.copy_(theirs.in_proj_bias.chunk(3)[i])
        ours.out.load_state_dict(theirs.out_proj.state_dict())
    x = rows().requires_grad_()
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0, 8:] = True
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None
    want = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)[0]
    y = ours(x, key_allowed=~padding)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-4)
    (d_ours,), (d_theirs,) = (torch.autograd.grad(t.square().sum(), x) for t in (y, want))
    torch.testing.assert_close(d_ours, d_theirs, atol=1e-4, rtol=1e-4)


def test_cross_attention_matches_torch_and_decodes() -> None:
    theirs = nn.MultiheadAttention(D, H, kdim=12, vdim=12, batch_first=True, bias=False)
    ours = MultiHeadAttention(D, H, context_dim=12)
    with torch.no_grad():
        for linear, weight in zip(
            (ours.q, ours.k, ours.v, ours.out),
            (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight, theirs.out_proj.weight),
            strict=True,
        ):
            assert linear is not None
            linear.weight.copy_(weight)
    x, context = rows(), torch.randn(2, 6, 12, generator=gen(3))
    allowed = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    want = theirs(x, context, context, key_padding_mask=~allowed, need_weights=False)[0]
    whole = ours(x, context=context, context_allowed=allowed)
    torch.testing.assert_close(whole, want, atol=1e-5, rtol=1e-4)
    state = ours.new_state(2, T)
    parts = [ours(x[:, :3], state=state, context=context, context_allowed=allowed)]
    parts += [ours(x[:, t : t + 1], state=state) for t in range(3, T)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    assert state.length == T and state.n_bytes == 2 * 2 * 6 * D * 4 + allowed.nbytes
    # Packed: each document attends to its context; a document without context gets 0.
    ids, context_ids = (
        torch.tensor([[1] * 5 + [2] * 4 + [3] * 2]).expand(2, -1),
        torch.tensor([[1, 1, 2, 2, 2, 2]]),
    )
    packed = ours(x, None, ids, context=context, context_segments=context_ids.expand(2, -1))
    torch.testing.assert_close(packed[:, :5], ours(x[:, :5], context=context[:, :2]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(packed[:, 5:9], ours(x[:, 5:9], context=context[:, 2:]), atol=1e-5, rtol=1e-4)
    assert (packed[:, 9:] == 0).all()


@pytest.mark.parametrize("window", [None, 3])
def test_shared_kv_uses_keys_of_another_layer(window: int | None) -> None:
    options: dict[str, Any] = {"rotary": ROTARY, "n_kv_heads": 2, "qk_norm": 1e-6, "window": window}
    first, second = make_layer(0, **options), make_layer(7, has_kv_proj=False, **options)
    x = rows()
    shared = first.project_kv(x)
    y = first(x, shared_kv=shared)
    torch.testing.assert_close(y, first(x))
    z = second(y, shared_kv=shared)
    torch.testing.assert_close(second(y, shared_kv=(shared.k, shared.v)), z)
    # What it means: a make_layer with its own queries, and the first one's keys of the first one's input.
    assert (
        first.k is not None and first.v is not None and first.k_norm is not None and second.q_norm is not None
    )

    def heads(t: Tensor, rotate: bool, norm: nn.Module | None) -> Tensor:
        t = t.view(2, T, -1, 8)
        t = t if norm is None else norm(t)
        return (ROTARY.rotate(t, ROTARY.tables_between(0, T, t.device)) if rotate else t).transpose(1, 2)

    q = heads(second.q(y), True, second.q_norm)
    k, v = heads(first.k(x), True, first.k_norm), heads(first.v(x), False, None)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(z, second.out(want.transpose(1, 2).reshape(2, T, -1)), atol=1e-5, rtol=1e-4)

    states, parts = (first.new_state(2, T), second.new_state(2, T)), []
    for piece in x.split([1, 3, 6, 1], dim=1):
        shared = first.project_kv(piece, state=states[0])
        parts.append(second(first(piece, shared_kv=shared), shared_kv=shared, state=states[1]))
    torch.testing.assert_close(torch.cat(parts, 1), z, atol=1e-5, rtol=1e-4)
    assert states[1].n_bytes == 0 and states[0].length == states[1].length == T
    z.square().sum().backward()
    for name, p in [*first.named_parameters(), *second.named_parameters()]:
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", [*KINDS, "cross"])
def test_multi_head_trains_every_parameter(kind: str) -> None:
    if kind == "cross":
        mixer = make_layer(context_dim=12, sink=True, qk_norm=1e-6)
        y = mixer(rows(), context=torch.randn(2, 5, 12, generator=gen(3)))
    else:
        mixer = make_layer(**KINDS[kind])
        y = mixer(rows())
    (y * torch.randn(y.shape, generator=gen(8))).sum().backward()
    for name, p in mixer.named_parameters():
        # A single key has weight 1; a key's bias shifts all scores equally, which the softmax removes.
        free = (kind == "window 1" and name[0] in "qk") or name == "k.bias"
        assert p.grad is not None and (free or p.grad.abs().sum() > 0), name


def test_new_layer_outputs_zero_and_follows_the_seed() -> None:
    a, b = MultiHeadAttention(D, H, generator=gen(1)), MultiHeadAttention(D, H, generator=gen(1))
    assert (a(rows()) == 0).all()
    for name, weight in a.state_dict().items():
        assert torch.equal(weight, b.state_dict()[name])


def test_padding_only_row_is_zero_without_nan() -> None:
    for options in ({}, {"sink": True}):
        mixer, x = make_layer(causal=False, **options), rows().requires_grad_()
        y = mixer(x, key_allowed=torch.tensor([[False] * T, [True] * T]))
        assert (y[0] == 0).all() and (y[1] != 0).any()
        y.sum().backward()
        assert x.grad is not None and (x.grad[0] == 0).all() and x.grad.isfinite().all()


def test_multi_head_decodes_from_bf16_state() -> None:
    mixer, x = make_layer(rotary=ROTARY, qk_norm=1e-6, smear=True), rows().bfloat16()
    state = mixer.new_state(2, T, dtype=torch.bfloat16)
    parts = torch.cat([mixer(piece, state=state) for piece in x.split([4, 6, 1], dim=1)], 1)
    assert parts.dtype == torch.bfloat16 and state.k.dtype == torch.bfloat16
    torch.testing.assert_close(parts.float(), mixer(x.float()), atol=0.1, rtol=0.1)


def test_window_state_keeps_window_positions_only() -> None:
    state = make_layer(window=4).new_state(2, 1_000_000)
    assert state.k.shape == (2, 4, 3, 8) and state.n_bytes == 2 * state.k.nbytes
    assert make_layer().new_state(2, 10).n_bytes == 2 * 2 * 10 * D * 4


def test_bias_is_added_to_scores() -> None:
    mixer, x = make_layer(causal=False), rows()
    bias = torch.full((H, T, T), float("-inf")).masked_fill(torch.ones(T, T).tril().bool(), 0.0)
    torch.testing.assert_close(mixer(x, bias=bias), make_layer()(x), atol=1e-5, rtol=1e-4)


# ---- short mixing


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_short_convolution_matches_torch_with_gradients(width: int, residual: bool) -> None:
    mixer = ShortConvolution(D, width, bias=True, residual=residual, generator=gen())
    assert mixer.bias is not None
    nn.init.normal_(mixer.bias, generator=gen(1))
    x = rows().requires_grad_()
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    want = F.conv1d(padded, mixer.weight.flip(1)[:, None], mixer.bias, groups=D).transpose(1, 2)
    want = want + x if residual else want
    torch.testing.assert_close(mixer(x), want, atol=1e-5, rtol=1e-4)
    inputs = (x, mixer.weight, mixer.bias)
    assert_same_with_gradients(mixer(x), want, inputs, grad_atol=1e-4)


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
        torch.testing.assert_close(whole, torch.cat([alone, mix(x[1:])]))
        parts = [mix(a, i, state) for a, i in zip(x.split(pieces, 1), ids.split(pieces, 1), strict=True)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        assert state.length == T and state.n_bytes == state.past.nbytes + state.segments.nbytes
        more = mix(rows(2, seed=6), None, state)  # continues the last documents
        on = torch.cat([ids, ids[:, -1:].expand(-1, 2)], 1)
        torch.testing.assert_close(more, mix(torch.cat([x, rows(2, seed=6)], 1), on)[:, T:])


def test_smear_averages_with_predecessor() -> None:
    smear, x = Smear(2), torch.randn(1, 3, 2, 4, generator=gen())
    torch.testing.assert_close(smear(x)[:, 1:], (x[:, 1:] + x[:, :-1]) / 2)
    assert torch.equal(smear(x)[:, 0], x[:, 0])
