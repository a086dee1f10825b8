"""Multi-head attention with the options of published decoders and encoders, and its KV cache.

Differences from Vaswani et al. 2017 (arXiv:1706.03762, sec. 3.2.2), each an argument of `MultiHeadAttention`:

- n_kv_heads: fewer key heads than query heads; 1 is multi-query (Shazeer 2019, arXiv:1911.02150), other values are
  grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)
- rotary, alibi: rotary positions (arXiv:2104.09864), or a bias by distance (arXiv:2108.12409)
- qk_norm: RMS norm of queries and keys over head_dim, with gains (arXiv:2010.04245; as in Qwen 3, Gemma 3)
- softcap, sink: changes of the scores (`nn/attention/backends.py`)
- window, stride, block, causal: the mask (`nn/attention/mask.py`)
- smear: each key is mixed with the previous key (`nn/attention/short_conv.py`)
- context_dim: keys and values come from another sequence, `context` (cross-attention, sec. 3.2.3)
- has_kv_proj=False: keys and values of another layer are used (Brandon et al. 2024, arXiv:2405.12981)

Order: project, smear keys, norm, rotate, attend, project. Cached keys are already smeared, normed and rotated.

To share keys between layers, split the forward of the first layer and pass its keys to both:

    shared = first.project_kv(x, positions=p, segments=s, state=state)     # extends the state of `first`
    y = first(x, positions=p, segments=s, shared_kv=shared)
    z = second(y, positions=p, segments=s, shared_kv=shared)               # built with has_kv_proj=False
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError, one_of
from whorl.nn.attention.backends import BACKENDS, attend
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedState
from whorl.nn.attention.short_conv import Smear
from whorl.nn.attention.state import KeyValues, KeyValueState
from whorl.nn.linear import Linear
from whorl.nn.norm import RMSNorm
from whorl.nn.positions.absolute import alibi_slopes
from whorl.nn.positions.rotary import Rotary


class MultiHeadAttention(nn.Module):
    """Multi-head attention layer: x [B, T, d_model] -> [B, T, d_model]. Weights: `q`, `k`, `v`, `out`; `out` starts at 0.

    Args:
        d_model: width of x.
        n_heads: query heads.
        n_kv_heads: key and value heads, a divisor of n_heads; None is n_heads.
        head_dim: width of a head; None is d_model / n_heads.
        rotary: rotates queries and keys by `positions`.
        bias, out_bias: whether q, k and v have a bias; whether out has one.
        qk_norm: eps of the norm of queries and keys, with gains `q_norm`, `k_norm`; None is no norm.
        norm_offset: 1.0 for gains 1 + w, as in Gemma.
        scale: factor of the products; None is head_dim^-0.5.
        softcap: bound of the scores.
        window, stride, block: limits of the mask, in positions (`Mask`).
        sink: a learned logit per head, 0 at first, in the denominator only.
        alibi: bias by distance, with fixed slopes.
        smear: mixes keys with their predecessors.
        causal: no key after the query; no effect in cross-attention.
        context_dim: width of `context`, the source of keys and values; None is self-attention.
        backend: of `attend`.
        generator: of the initial weights.
        has_kv_proj: False for a layer without k and v, which gets `shared_kv` of another layer.

    Raises:
        ConfigError: sizes that do not fit; options that exclude each other.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        norm_offset: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        stride: int | None = None,
        block: int | None = None,
        sink: bool = False,
        alibi: bool = False,
        smear: bool = False,
        causal: bool = True,
        context_dim: int | None = None,
        backend: str = "auto",
        generator: torch.Generator | None = None,
        has_kv_proj: bool = True,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
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
        if backend not in BACKENDS:
            raise ConfigError(f"backend is {backend!r}", expected=one_of(backend, BACKENDS))
        if context_dim is not None:
            given = {"rotary": rotary, "window": window, "stride": stride, "block": block}
            given |= {"alibi": alibi or None, "smear": smear or None}
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(
                        f"{name} and context_dim are both given",
                        expected="only one: positions of two sequences have no distance",
                    )
        if not has_kv_proj and (smear or context_dim is not None):
            raise ConfigError(
                "has_kv_proj is False, with smear or context_dim",
                expected="has_kv_proj=True: smear and context_dim need a key projection",
            )
        self.d_model, self.n_heads, self.n_kv_heads, self.head_dim = d_model, n_heads, n_kv_heads, head_dim
        self.rotary, self.scale, self.softcap = rotary, scale, softcap
        self.backend, self.has_kv_proj, self.context_dim = backend, has_kv_proj, context_dim
        self.mask = Mask(causal=causal and context_dim is None, window=window, stride=stride, block=block)
        source = d_model if context_dim is None else context_dim
        width, kv_width, std = n_heads * head_dim, n_kv_heads * head_dim, 0.6 * source**-0.5
        self.q = Linear(d_model, width, std=0.6 * d_model**-0.5, bias=bias, generator=generator)
        self.k = Linear(source, kv_width, std=std, bias=bias, generator=generator) if has_kv_proj else None
        self.v = Linear(source, kv_width, std=std, bias=bias, generator=generator) if has_kv_proj else None
        self.out = Linear(width, d_model, std=0.0, bias=out_bias)
        normed = qk_norm is not None
        eps = qk_norm or 0.0
        self.q_norm = RMSNorm(head_dim, eps, norm_offset) if normed else None
        self.k_norm = RMSNorm(head_dim, eps, norm_offset) if normed and has_kv_proj else None
        self.sink = nn.Parameter(torch.zeros(n_heads)) if sink else None
        self.smear = Smear(n_kv_heads) if smear else None
        slopes = alibi_slopes(n_heads) if alibi else None
        self.slopes: Tensor | None
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: KeyValueState | PagedState | None = None,
        *,
        key_allowed: Tensor | None = None,
        context: Tensor | None = None,
        context_allowed: Tensor | None = None,
        context_segments: Tensor | None = None,
        shared_kv: KeyValues | PagedState | tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return attention of x over itself, the state or the context, [B, T, d_model].

        Args:
            positions: [T] or [B, T], for `rotary`; by default those after the state's.
            segments: [B, T] documents of a packed row; by default a state continues its last document.
            state: read, and extended by x.
            key_allowed: [B, T] bool, False where x is padding; only without a state (with one, pass padding as a segment).
            context: [B, Tc, context_dim] of cross-attention; with a state, needed at the first call only.
            context_allowed: [B, Tc] bool, False where the context is padding.
            context_segments: [B, Tc] documents of the context, matched with `segments`; None allows all.
            shared_kv: keys and values from another layer's `project_kv` (or a pair of tensors), instead of x's.
            bias: [H, T, Tk] or [B, H, T, Tk], added to the scores.

        Raises:
            ConfigError: arguments that the layer does not have or that do not fit; a full state.
        """
        batch, length = self._check(x)
        if bias is not None and self.slopes is not None:
            raise ConfigError("bias is given to a layer with alibi", expected="one bias")
        if isinstance(state, PagedState) or isinstance(shared_kv, PagedState):
            return self._forward_paged(
                x, positions, self.project_kv(x, positions, state=state) if shared_kv is None else shared_kv
            )
        if self.context_dim is not None:
            keys = self._context_kv(batch, length, state, context, context_allowed, context_segments)
        elif context is not None or context_allowed is not None or context_segments is not None:
            raise ConfigError(
                "context is given, and context_dim is not", expected="a layer built with context_dim"
            )
        elif shared_kv is not None:
            keys = KeyValues(*shared_kv)
            self._check_shared_kv(keys, batch, length)
            if state is not None and not self.has_kv_proj:
                state.check(batch, length)
                state.length += length  # equal in all layers; the keys are in the other layer's state
        else:
            keys = self.project_kv(x, positions, segments, state, key_allowed=key_allowed)  # type: ignore[assignment]
        offset = 0 if self.context_dim is not None else keys.k.shape[2] - length
        q = self._queries(x, positions, keys.start + offset)
        mask = self._mask(keys, segments, offset, length)
        y = attend(
            q.transpose(1, 2),
            keys.k.to(q.dtype),
            keys.v.to(q.dtype),
            mask,
            scale=self.scale,
            bias=self.slopes if bias is None else bias,
            softcap=self.softcap,
            sink=self.sink,
            backend=self.backend,
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _queries(self, x: Tensor, positions: Tensor | None, start: int) -> Tensor:
        """Return queries [B, T, n_heads, head_dim], normed and rotated."""
        q = self.q(x).view(*x.shape[:2], self.n_heads, self.head_dim)
        return self._rotate(q if self.q_norm is None else self.q_norm(q), positions, start)

    def _forward_paged(self, x: Tensor, positions: Tensor | None, keys: object) -> Tensor:
        """Return the attention of concatenated rows with a paged cache. x: [1, N, d_model]."""
        assert isinstance(keys, PagedState)
        q = self._queries(x, positions, 0).transpose(1, 2)
        y = keys.attend(q, self.mask, self.scale, self.slopes, self.softcap, self.sink, self.backend)
        out: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return out

    def project_kv(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: KeyValueState | PagedState | None = None,
        *,
        key_allowed: Tensor | None = None,
    ) -> KeyValues | PagedState:
        """Return the keys and values of the state, extended by those of x. Arguments as in `forward`.

        Raises:
            ConfigError: as `forward`; the layer has no key projection.
        """
        batch, length = self._check(x)
        if self.k is None or self.v is None:
            raise ConfigError(
                "shared_kv is missing", expected="keys of another layer, because has_kv_proj is False"
            )
        if segments is not None and segments.shape != (batch, length):
            raise ConfigError(
                f"segments has the shape {list(segments.shape)}", expected=f"[{batch}, {length}]"
            )
        start = 0
        smear_state = state if isinstance(state, PagedState) or state is None else state.smear_state
        if isinstance(state, KeyValueState):
            if key_allowed is not None:
                raise ConfigError(
                    "key_allowed is given with a state",
                    expected="segments: padding as a separate document",
                )
            state.check(batch, length)
            segments = state.resolve_segments(segments, batch, length)
            start = state.length
        k = self.k(x).view(batch, length, self.n_kv_heads, self.head_dim)
        v = self.v(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        if self.smear is not None:
            k = self.smear(k, segments, smear_state)
        if self.k_norm is not None:
            k = self.k_norm(k)
        k = self._rotate(k, positions, start).transpose(1, 2)
        if state is None:
            return KeyValues(k, v, segments, key_allowed)
        if isinstance(state, PagedState):
            state.write(k, v)
            return state
        return state.extend(k, v, segments)

    def new_state(
        self,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KeyValueState:
        """Return an empty state for `batch` rows of up to `capacity` positions; with a window it keeps window - 1.

        Raises:
            ConfigError: `batch` or `capacity` below 1; the layer is not causal, so later positions change earlier ones.
        """
        if self.context_dim is None and not self.mask.causal:
            raise ConfigError(
                "causal is False",
                expected="causal=True: decoding appends positions and never sees later ones",
            )
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", expected="at least 1")
        size = capacity
        if self.context_dim is not None or not self.has_kv_proj:
            size = 0
        elif self.mask.window is not None and self.mask.block is None and self.mask.causal:
            size = min(capacity, self.mask.window - 1)
        k, v = (
            torch.zeros(batch, self.n_kv_heads, size, self.head_dim, dtype=dtype, device=device) for _ in "kv"
        )
        smear_state = None
        if self.smear is not None:
            smear_state = self.smear.new_state(batch, self.head_dim, dtype=dtype, device=device)
        return KeyValueState(k, v, capacity, smear_state=smear_state)

    def _rotate(self, x: Tensor, positions: Tensor | None, start: int) -> Tensor:
        """Return x [B, T, heads, head_dim] rotated by `positions`, by default those from `start` on."""
        if self.rotary is None:
            return x
        stop = start + x.shape[1]
        tables = (
            self.rotary.tables_between(start, stop, x.device)
            if positions is None
            else self.rotary.tables_at(positions)
        )
        return self.rotary.rotate(x, tables).to(x.dtype)

    def _mask(self, keys: KeyValues, segments: Tensor | None, offset: int, length: int) -> Mask:
        """Return the layer's mask with the segments and padding of these queries and keys."""
        query_segments, key_segments = segments, keys.segments
        if self.context_dim is not None:
            if key_segments is not None and query_segments is None:
                raise ConfigError(
                    "the context has segments and x has none",
                    expected="segments of x, to match with those of the context",
                )
            query_segments = None if key_segments is None else query_segments
        elif key_segments is not None and query_segments is None:
            query_segments = key_segments[
                :, offset : offset + length
            ]  # the state's: each row continues its last document
        elif key_segments is None and query_segments is not None:
            if offset > 0:
                raise ConfigError(
                    "segments are given, and shared_kv has none of its earlier positions",
                    expected="shared_kv as a KeyValues with segments",
                )
            key_segments = query_segments
        return replace(
            self.mask,
            query_segments=query_segments,
            key_segments=key_segments,
            key_allowed=keys.allowed,
            offset=offset,
        )

    def _context_kv(
        self,
        batch: int,
        length: int,
        state: KeyValueState | None,
        context: Tensor | None,
        allowed: Tensor | None,
        segments: Tensor | None,
    ) -> KeyValues:
        """Return keys and values of the context, from the state if it has them."""
        assert self.k is not None and self.v is not None
        if state is not None:
            state.check(batch, length)
            state.length += length
        if context is None:
            if state is None or state.context is None:
                raise ConfigError("context is missing", expected="[B, Tc, context_dim]")
            return state.context
        if context.dim() != 3 or context.shape[0] != batch or context.shape[2] != self.context_dim:
            raise ConfigError(
                f"context has the shape {list(context.shape)}", expected=f"[{batch}, Tc, {self.context_dim}]"
            )
        k, v = (made(context).view(batch, -1, self.n_kv_heads, self.head_dim) for made in (self.k, self.v))
        if self.k_norm is not None:
            k = self.k_norm(k)
        keys = KeyValues(k.transpose(1, 2), v.transpose(1, 2), segments, allowed)
        if state is not None:
            state.context = keys
        return keys

    def _check(self, x: Tensor) -> tuple[int, int]:
        """Return (B, T)."""
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ConfigError(f"x has the shape {list(x.shape)}", expected=f"[B, T, {self.d_model}]")
        return x.shape[0], x.shape[1]

    def _check_shared_kv(self, keys: KeyValues, batch: int, length: int) -> None:
        have = keys.k.shape
        want = (batch, self.n_kv_heads, self.head_dim)
        if len(have) != 4 or (have[0], have[1], have[3]) != want or have[2] < length:
            raise ConfigError(
                f"shared_kv has keys of the shape {list(have)}",
                expected=f"[{batch}, {self.n_kv_heads}, at least {length}, {self.head_dim}]",
                do="share keys between layers of equal n_kv_heads and head_dim",
            )
