"""Checks of the options and arguments of `MultiHeadAttention` (`multi_head.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.state import KeyValues
from whorl.nn.rotary import Rotary

Projections = Literal["separate", "fused", "shared"]


def check_heads(
    d_model: int, n_heads: int, n_kv_heads: int, head_dim: int | None, rotary: Rotary | None
) -> int:
    """Return the width of a head, by default d_model / n_heads.

    Raises:
        ConfigError: sizes that do not fit.
    """
    if n_heads < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ConfigError(
            f"n_heads is {n_heads} and n_kv_heads is {n_kv_heads}",
            expected="n_heads a multiple of n_kv_heads, both at least 1",
        )
    if head_dim is None:
        if d_model % n_heads:
            raise ConfigError(
                f"d_model is {d_model} and n_heads is {n_heads}",
                expected="d_model a multiple of n_heads",
                do="or give head_dim",
            )
        head_dim = d_model // n_heads
    if rotary is not None and rotary.head_dim != head_dim:
        raise ConfigError(
            f"head_dim is {head_dim}, and rotary.head_dim is {rotary.head_dim}",
            expected="the same head_dim",
        )
    return head_dim


def check_cross_attention(given: Mapping[str, object]) -> None:
    """Raise ConfigError where one of the given options has a value: they do not go with `context_dim`."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} and context_dim are both given",
                expected="only one: positions of two sequences have no distance",
            )


def check_projections(projections: str, needs_keys: bool, cross: bool) -> None:
    """Raise ConfigError unless the projections are known and fit the other options.

    needs_keys: the layer has smear or context_dim; cross: it has context_dim.
    """
    if projections not in get_args(Projections):
        raise ConfigError(
            f"projections is {projections!r}", expected=one_of(projections, get_args(Projections))
        )
    if projections == "shared" and needs_keys:
        raise ConfigError(
            'projections is "shared", with smear or context_dim',
            expected='"separate": smear and context_dim need a key projection',
        )
    if projections == "fused" and cross:
        raise ConfigError(
            'projections is "fused", with context_dim', expected='"separate": keys come from another sequence'
        )


def check_shared_kv(keys: KeyValues, shape: tuple[int, int, int], length: int) -> None:
    """Raise ConfigError unless another layer's keys fit. shape: (rows, n_kv_heads, head_dim); length: of the queries."""
    have = keys.k.shape
    if len(have) != 4 or (have[0], have[1], have[3]) != shape or have[2] < length:
        raise ConfigError(
            f"shared_kv has keys of the shape {list(have)}",
            expected=f"[{shape[0]}, {shape[1]}, at least {length}, {shape[2]}]",
            do="share keys between layers of equal n_kv_heads and head_dim",
        )


def check_context(context: Tensor, batch: int, context_dim: int | None) -> None:
    """Raise ConfigError unless the context has the shape [batch, Tc, context_dim]."""
    if context.dim() != 3 or context.shape[0] != batch or context.shape[2] != context_dim:
        raise ConfigError(
            f"context has the shape {list(context.shape)}", expected=f"[{batch}, Tc, {context_dim}]"
        )


def check_new_state(batch: int, capacity: int, *, causal: bool) -> None:
    """Raise ConfigError unless a state of this size can be decoded with. causal: no key comes after its query."""
    if not causal:
        raise ConfigError(
            "causal is False",
            expected="causal=True: decoding appends positions and never sees later ones",
        )
    for name, value in (("batch", batch), ("capacity", capacity)):
        if value < 1:
            raise ConfigError(f"{name} is {value}", expected="at least 1")


def mask_of_keys(
    mask: Mask, keys: KeyValues, segments: Tensor | None, offset: int, length: int, *, cross: bool
) -> Mask:
    """Return a layer's mask with the segments and padding of these queries and keys.

    Args:
        segments: [B, T] of the queries, or [B, T, T] the pairs that attend. offset: position of the first query among the
            keys. length: T.
        cross: the keys come from another sequence.

    Raises:
        ConfigError: segments of queries or keys are missing.
    """
    query_segments, key_segments = segments, keys.segments
    if segments is not None and segments.dim() == 3:
        pairs = segments[:, None]
        return replace(mask, causal=False, block=None, allowed=pairs, key_allowed=keys.allowed, offset=offset)
    if cross:
        if key_segments is not None and query_segments is None:
            raise ConfigError(
                "the context has segments and x has none",
                expected="segments of x, to match with those of the context",
            )
        query_segments = None if key_segments is None else query_segments
    elif key_segments is not None and query_segments is None:
        # the state's: each row continues its last document
        query_segments = key_segments[:, offset : offset + length]
    elif key_segments is None and query_segments is not None:
        if offset > 0:
            raise ConfigError(
                "segments are given, and shared_kv has none of its earlier positions",
                expected="shared_kv as a KeyValues with segments",
            )
        key_segments = query_segments
    return replace(
        mask,
        query_segments=query_segments,
        key_segments=key_segments,
        key_allowed=keys.allowed,
        offset=offset,
    )
