"""Properties of every mixer: decoding in pieces, packed rows, causality, trained parameters, bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.engine.additive_attention import AdditiveAttention
from tests.support.nn.checks import assert_all_parameters_trained, draw_zero_parameters, gen, in_pieces, randn
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.nn.attention import HSTUAttention, LinearAttention, MultiHeadAttention, MultiHeadLatentAttention
from whorl.nn.mamba import Mamba
from whorl.nn.norm import QKNorm
from whorl.nn.recurrent import GRU, LSTM, RNN
from whorl.nn.rotary import Rotary

D, T, CAPACITY = 24, 12, 15
ROTARY = Rotary(6, 10_000.0, torch.float32)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-query": {"n_kv_heads": 1, "bias": True, "out_bias": True},
    "grouped rotary": {"n_kv_heads": 2, "rotary": ROTARY, "qk_norm": QKNorm(1e-6, 1.0)},
    "norm of all heads": {"n_kv_heads": 2, "rotary": ROTARY, "qk_norm": QKNorm(1e-6, all_heads=True)},
    "window": {"window": 3, "rotary": ROTARY, "smear": True},
    "window 1": {"window": 1},
    "window sink": {"window": 4, "sink": True, "softcap": 5.0, "n_kv_heads": 2},
    "stride": {"stride": 3, "alibi": True},
    "window stride alibi": {"window": 7, "stride": 2, "alibi": True},
    "block": {"block": 3, "rotary": ROTARY},
    "block window": {"block": 4, "window": 3, "qk_norm": 1e-5},
    "smear": {"smear": True, "n_kv_heads": 2, "rotary": ROTARY, "scale": 0.5, "head_dim": 6},
}


def mla(form: str, q_rank: int | None = None) -> MultiHeadLatentAttention:
    sizes = {"kv_rank": 20, "nope_dim": 8, "rope_dim": 4, "v_dim": 6, "generator": gen()}
    layer = MultiHeadLatentAttention(D, 3, q_rank=q_rank, rotary=Rotary(4, 100.0, torch.float32), **sizes)
    layer.form = form  # type: ignore[assignment]
    return layer


def heads(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(D, 4, generator=gen(), **options)


HSTU: dict[str, Any] = {"head_dim": 6, "v_dim": 5, "max_distance": 7}
MIXERS: dict[str, Callable[[], Any]] = {
    "hstu": lambda: HSTUAttention(D, 3, n_time_buckets=0, generator=gen(), **HSTU),
    "hstu timed": lambda: HSTUAttention(D, 3, n_time_buckets=12, generator=gen(), **HSTU),
    "linear": lambda: LinearAttention(D, 3, chunk=4, generator=gen()),
    "linear decay": lambda: LinearAttention(D, 3, chunk=4, decay=True, generator=gen()),
    "mla expanded": lambda: mla("expanded"),
    "mla absorbed": lambda: mla("absorbed"),
    "mla auto": lambda: mla("auto", q_rank=14),
    "mamba": lambda: Mamba(D, chunk=4, generator=gen()),
    "rnn": lambda: RNN(D, generator=gen()),
    "lstm": lambda: LSTM(D, generator=gen()),
    "gru": lambda: GRU(D, generator=gen()),
}
MIXERS |= {f"heads {name}": partial(heads, **options) for name, options in HEADS.items()}
MIXERS |= {
    f"tokens window {w}": lambda w=w: AdditiveAttention(D, window=w, generator=gen()) for w in (None, 1, 3)
}
ATTENTION = ("hstu", "mla", "heads", "tokens")
EVERY_MIXER = pytest.mark.parametrize("kind", MIXERS)


def make(kind: str) -> Any:
    layer = MIXERS[kind]()
    draw_zero_parameters(layer)
    return layer


def times_of(kind: str, length: int = T, rows: int = 2) -> dict[str, Tensor]:
    """Times as a keyword argument: seconds of this decade, which fp32 cannot resolve."""
    if kind != "hstu timed":
        return {}
    return {"times": 1_780_000_000 + torch.randint(0, 200, (rows, length), generator=gen(4)).cumsum(1)}


def segments_of(kind: str) -> Tensor:
    """Documents of two packed rows. A recurrent layer treats an id that returns as a new document."""
    if kind.startswith(ATTENTION):
        return torch.tensor([[3] * 5 + [4] * 7, [0] * T])
    return torch.tensor([[1, 2, 1, 2, 2, 2, 2, 1, 1, 1, 3, 3], [5] * T])


def state_bytes(kind: str, packed: bool) -> int | None:
    """Bytes of a state of 2 rows, where they have a closed form."""
    if kind.startswith("hstu"):
        return 2 * CAPACITY * (3 * (6 + 5) * 4 + 8 * ("timed" in kind) + 8 * packed)
    if kind.startswith("mla"):
        return 2 * CAPACITY * (24 * 4 + 8 * packed)
    return 2 * (3 * 8 * 9 * 4 + 8 * packed) if kind.startswith("linear") else None


@EVERY_MIXER
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pieces", [(1, 3, 8), (1,) * T, (T,), (7, 5)], ids=str)
def test_mixer_pieces_equal_the_row(kind: str, packed: bool, pieces: tuple[int, ...]) -> None:
    layer, x = make(kind), randn(2, T, D, seed=3)
    options = times_of(kind) | ({"segments": segments_of(kind)} if packed else {})
    expected = (make("mla expanded") if kind == "mla absorbed" else layer)(x, **options)
    for with_grad in (False, True):
        state, parts, sizes = layer.new_state(2, CAPACITY), [], set()
        for n in pieces:
            part = {name: t[:, state.length : state.length + n] for name, t in {"x": x, **options}.items()}
            with torch.set_grad_enabled(with_grad):
                parts.append(layer(**part, state=state))
            sizes.add(state.n_bytes)
        assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4)
        assert state.length == T and sizes == {state_bytes(kind, packed) or state.n_bytes}
    # Not HSTU and MLA: their states are written in place, without a copy for gradients.
    if kind.startswith(("heads", "tokens")):
        torch.cat(parts, 1).sum().backward()
    tensors = [t for value in vars(state).values() for t in (value if isinstance(value, tuple) else (value,))]
    assert not any(t.requires_grad for t in tensors if isinstance(t, Tensor))


@pytest.mark.parametrize("kind", [kind for kind in MIXERS if kind.startswith(ATTENTION)])
def test_mixer_full_state_raises_and_stays_unchanged(kind: str) -> None:
    layer, x, times = make(kind), randn(2, T, D), times_of(kind)
    state = layer.new_state(2, T)
    layer(x, state=state, **times)
    with pytest.raises(ConfigError, match="capacity is 12"):
        layer(x[:, :1], state=state, **{name: t[:, :1] for name, t in times.items()})
    assert state.length == T


@EVERY_MIXER
def test_mixer_packed_row_equals_documents(kind: str) -> None:
    layer, lengths = make(kind), (5, 1, 6)
    x = randn(1, T, D, seed=5).requires_grad_()
    last = 3 if kind.startswith(ATTENTION) else 1  # the first document's id again
    segments = torch.tensor([[1] * 5 + [2] + [last] * 6])
    options: dict[str, Any] = times_of(kind, rows=1)
    if kind.startswith(("mla", "heads")):
        options["positions"] = torch.cat([torch.arange(n) for n in lengths])
    packed, documents, start = layer(x, segments=segments, **options), [], 0
    for n in lengths:
        cut = {name: t[..., start : start + n] for name, t in options.items()}
        documents.append(layer(x[:, start : start + n], **cut))
        start += n
    assert_close(packed, torch.cat(documents, 1), atol=1e-5, rtol=1e-4)
    (reached,) = torch.autograd.grad(packed[:, 6:].sum(), x)
    assert (reached[:, 6:] != 0).any(-1).all() and (reached[:, :6] == 0).all()


@EVERY_MIXER
def test_mixer_state_continues_last_document(kind: str) -> None:
    layer, x, times = make(kind), randn(1, 8, D, seed=1), times_of(kind, 8, rows=1)
    segments, state = torch.tensor([[1] * 3 + [2] * 5]), layer.new_state(1, 8)
    head, tail = ({name: t[:, part] for name, t in times.items()} for part in (slice(0, 5), slice(5, 8)))
    first = layer(x[:, :5], segments=segments[:, :5], state=state, **head)
    pieces = torch.cat([first, layer(x[:, 5:], state=state, **tail)], 1)
    assert_close(pieces, layer(x, segments=segments, **times), atol=1e-5, rtol=1e-4)


@EVERY_MIXER
def test_mixer_is_causal_and_trains_every_parameter(kind: str) -> None:
    layer, x, times = make(kind), randn(2, T, D, seed=3), times_of(kind)
    y, changed = layer(x, **times), x.clone()
    changed[:, 6:] += 1
    other = layer(changed, **times)
    assert_close(other[:, :6], y[:, :6])
    assert not torch.allclose(other[:, 6:], y[:, 6:])
    # A single key has weight 1, and the softmax removes a key's bias.
    assert_all_parameters_trained(
        layer, y, without=("q.", "k.", "score.") if kind.endswith("window 1") else ("k.bias",)
    )


@EVERY_MIXER
def test_mixer_bf16_decoding_is_close_to_fp32(kind: str) -> None:
    layer, x, times = make(kind), randn(2, T, D, seed=5).bfloat16(), times_of(kind)
    with torch.no_grad():
        full = layer(x.float(), **times)
        state = layer.new_state(2, T, dtype=torch.bfloat16)
        low = in_pieces(layer, x, (1,) * T, state, **times)
    assert low.dtype == torch.bfloat16
    if kind.startswith(("mla", "heads")):
        dtypes = {t.dtype for t in vars(state).values() if isinstance(t, Tensor)}
        assert torch.bfloat16 in dtypes and torch.float32 not in dtypes
    assert float((low.float() - full).norm() / full.norm()) < 0.03
