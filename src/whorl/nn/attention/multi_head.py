"""Multi-head attention with the options of published decoders and encoders, and its KV cache.

Differences from Vaswani et al. 2017 (arXiv:1706.03762, sec. 3.2.2), each an argument of `MultiHeadAttention`:

- n_kv_heads: fewer key heads than query heads; 1 is multi-query (Shazeer 2019, arXiv:1911.02150), other values are
  grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)
- rotary, alibi: rotary positions (arXiv:2104.09864), or a bias by distance (arXiv:2108.12409)
- qk_norm: RMS norm of queries and keys over head_dim (arXiv:2010.04245), or over all heads (OLMo 2, arXiv:2501.00656)
- scale="learned": one learned temperature per query head replaces 1/sqrt(head_dim) and the gains of qk_norm (ibid.,
  eq. 5, which has one for all heads). It bounds the scores at any learning rate
- softcap, sink: changes of the scores (`nn/attention/backends.py`)
- window, stride, block, causal: the mask (`nn/attention/mask.py`)
- smear: each key is mixed with the previous key (`nn/attention/short_conv.py`)
- context_dim: keys and values come from another sequence, `context` (cross-attention, sec. 3.2.3)
- projections: "fused", one matrix; "shared", keys and values of another layer (Brandon et al. 2024, arXiv:2405.12981)

Order: project, smear keys, norm, rotate, attend, project. Cached keys are already smeared, normed and rotated.

To share keys between layers, split the forward of the first layer and pass its keys to both:

    shared = first.project_kv(x, positions=p, segments=s, state=state)     # extends the state of `first`
    y = first(x, positions=p, segments=s, shared_kv=shared)
    z = second(y, positions=p, segments=s, shared_kv=shared)               # built with projections="shared"
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError, one_of
from whorl.nn.absolute_positions import alibi_slopes
from whorl.nn.attention.backends import BACKENDS, attend
from whorl.nn.attention.checks import (
    Projections,
    check_context,
    check_cross_attention,
    check_heads,
    check_new_state,
    check_projections,
    check_shared_kv,
    mask_of_keys,
)
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedState
from whorl.nn.attention.short_conv import Smear
from whorl.nn.attention.state import KeyValues, KeyValueState
from whorl.nn.cpu import attention as native
from whorl.nn.linear import Linear
from whorl.nn.mixer import KVCacheSpec, SharedCacheSpec
from whorl.nn.norm import QKNorm, RMSNorm, rms_norm
from whorl.nn.rotary import Positions, Rotary


class MultiHeadAttention(nn.Module):
    """Multi-head attention layer: x [B, T, d_model] -> [B, T, d_model].

    Weights: `q`, `k` and `v`, or `qkv` with their rows in this order; `out`, which starts at 0.

    Args:
        d_model: width of x.
        n_heads: query heads.
        n_kv_heads: key and value heads, a divisor of n_heads; None is n_heads.
        head_dim: width of a head; None is d_model / n_heads.
        rotary: rotates queries and keys by `positions`.
        bias, out_bias: whether q, k and v have a bias; whether out has one.
        qk_norm: norm of queries and keys, with gains `q_norm`, `k_norm`, or its eps; None is no norm.
        scale: factor of the products; None is head_dim^-0.5; "learned", which needs qk_norm, is `temperature` [n_heads, 1].
        softcap: bound of the scores.
        window, stride, block: limits of the mask, in positions (`Mask`).
        sink: a learned logit per head, 0 at first, in the denominator only.
        alibi: bias by distance, with fixed slopes.
        smear: mixes keys with their predecessors.
        causal: no key after the query; no effect in cross-attention.
        context_dim: width of `context`, the source of keys and values; None is self-attention.
        backend: of `attend`; "blocked" holds for rows without a state, others use "auto".
        generator: of the initial weights.
        projections: "separate", "fused", or "shared" for a layer without k and v, which gets `shared_kv` of another layer.

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
        qk_norm: QKNorm | float | None = None,
        scale: float | Literal["learned"] | None = None,
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
        projections: Projections = "separate",
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        head_dim = check_heads(d_model, n_heads, n_kv_heads, head_dim, rotary)
        if backend not in BACKENDS:
            raise ConfigError(f"backend is {backend!r}", expected=one_of(backend, BACKENDS))
        if context_dim is not None:
            positional = {"rotary": rotary, "window": window, "stride": stride, "block": block}
            check_cross_attention(positional | {"alibi": alibi or None, "smear": smear or None})
        check_projections(projections, smear or context_dim is not None, context_dim is not None)
        learned = scale == "learned"
        if learned and qk_norm is None:
            raise ConfigError(
                'scale is "learned" without qk_norm', expected="qk_norm, which bounds the products"
            )
        self.d_model, self.n_heads, self.n_kv_heads, self.head_dim = d_model, n_heads, n_kv_heads, head_dim
        self.rotary, self.softcap = rotary, softcap
        self.scale = 1.0 if scale == "learned" else scale
        self.backend, self.has_kv_proj, self.context_dim = backend, projections != "shared", context_dim
        self.mask = Mask(causal=causal and context_dim is None, window=window, stride=stride, block=block)
        # Products of queries and keys of RMS 1 reach head_dim; 1.2 starts attention mildly peaked.
        self.temperature = nn.Parameter(torch.full((n_heads, 1), 1.2)) if learned else None
        self.sink = nn.Parameter(torch.zeros(n_heads)) if sink else None
        width, kv_width = n_heads * head_dim, n_kv_heads * head_dim

        def linear(source: int, rows: int) -> Linear:
            return Linear(source, rows, std=0.6 * source**-0.5, bias=bias, generator=generator)

        fused, source = projections == "fused", d_model if context_dim is None else context_dim
        smearing = Smear(n_kv_heads) if smear else None
        if fused:  # first: initial values and sums over parameters depend on their order
            self.smear = smearing
        self.qkv = linear(d_model, width + 2 * kv_width) if fused else None
        self.q = None if fused else linear(d_model, width)
        self.k = linear(source, kv_width) if projections == "separate" else None
        self.v = linear(source, kv_width) if projections == "separate" else None
        self.out = Linear(width, d_model, std=0.0, bias=out_bias)
        gains = qk_norm is not None and not learned
        norm = qk_norm if isinstance(qk_norm, QKNorm) else QKNorm(qk_norm or 0.0)
        self.eps, offset, self.norm_all_heads = norm
        widths = (width, kv_width) if self.norm_all_heads else (head_dim, head_dim)
        self.q_norm = RMSNorm(widths[0], self.eps, offset) if gains else None
        self.k_norm = RMSNorm(widths[1], self.eps, offset) if gains and self.has_kv_proj else None
        self.smear = smearing
        self.slopes: Tensor | None
        self.register_buffer("slopes", alibi_slopes(n_heads) if alibi else None, persistent=False)

    def forward(
        self,
        x: Tensor,
        positions: Positions = None,
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
            positions: [T] or [B, T], for `rotary`, or their tables; by default those after the state's.
            segments: [B, T] documents of a packed row, by default a state's last; or [B, T, T] bool, the pairs that attend.
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
        joined = None if self.qkv is None else self._joined_qkv(x)
        plain = joined is not None and all(t is None for t in (state, shared_kv, key_allowed, bias))
        if plain and (y := self._native_attention(joined, positions, segments)) is not None:
            return self._project(y)
        fused = None if joined is None else self._split(joined)
        keys: KeyValues | PagedState
        if self.context_dim is not None:
            assert not isinstance(state, PagedState)
            keys = self._context_kv(batch, length, state, context, context_allowed, context_segments)
        elif context is not None or context_allowed is not None or context_segments is not None:
            raise ConfigError(
                "context is given, and context_dim is not", expected="a layer built with context_dim"
            )
        elif shared_kv is None or isinstance(shared_kv, PagedState):
            keys = shared_kv or self.project_kv(
                x, positions, segments, state, key_allowed=key_allowed, fused=fused
            )
        else:
            keys = KeyValues(*shared_kv)
            check_shared_kv(keys, (batch, self.n_kv_heads, self.head_dim), length)
            if isinstance(state, KeyValueState) and not self.has_kv_proj:
                state.check(batch, length)
                state.length += length  # equal in all layers; the keys are in the other layer's state
        if isinstance(keys, PagedState):
            return self._forward_paged(x, positions, keys, fused)
        offset = 0 if self.context_dim is not None else keys.k.shape[2] - length
        q = self._queries(x, positions, keys.start + offset, fused)
        mask = mask_of_keys(self.mask, keys, segments, offset, length, cross=self.context_dim is not None)
        y = attend(
            q.transpose(1, 2), keys.k.to(q.dtype), keys.v.to(q.dtype), mask, scale=self.scale,
            bias=self.slopes if bias is None else bias, softcap=self.softcap, sink=self.sink,
            backend="auto" if self.backend == "blocked" and state is not None else self.backend,
        )  # fmt: skip
        return self._project(y)

    def _native_attention(
        self, qkv: Tensor | None, positions: Positions, segments: Tensor | None
    ) -> Tensor | None:
        """Return the heads [B, H, T, head_dim] of a C++ kernel that also smears, norms and rotates; None where none fits."""
        rotary, smear, temperature = self.rotary, self.smear, self.temperature
        if qkv is None or temperature is None or smear is None or rotary is None:
            return None
        if not self.mask.causal or not self.mask.is_causal_only or self.softcap is not None:
            return None
        if self.sink is not None or self.slopes is not None or self.n_heads != self.n_kv_heads:
            return None
        halves = (rotary.layout, rotary.rotary_dim) == ("half", self.head_dim)
        if not halves or not isinstance(positions, tuple) or self.backend not in ("auto", "blocked"):
            return None
        return native.rotary_attention(qkv, temperature, smear.share, positions, segments, self.eps)

    def _joined_qkv(self, x: Tensor) -> Tensor:
        """Return the heads of queries, keys and values, [B, T, heads, head_dim], from one product."""
        assert self.qkv is not None
        joined: Tensor = self.qkv(x)
        return joined.view(*x.shape[:2], -1, self.head_dim)

    def _split(self, joined: Tensor) -> tuple[Tensor, ...]:
        return torch.split(joined, [self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)

    def _project(self, y: Tensor) -> Tensor:
        """Return the output of heads y [B, H, T, head_dim]."""
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _queries(
        self, x: Tensor, positions: Positions, start: int, fused: tuple[Tensor, ...] | None
    ) -> Tensor:
        """Return queries [B, T, n_heads, head_dim], normed and rotated."""
        if fused is not None:
            q = fused[0]
        else:
            assert self.q is not None
            q = self.q(x).view(*x.shape[:2], self.n_heads, self.head_dim)
        return self._rotate(self._norm_heads(q, self.q_norm, self.temperature), positions, start)

    def _forward_paged(
        self, x: Tensor, positions: Positions, keys: PagedState, fused: tuple[Tensor, ...] | None
    ) -> Tensor:
        """Return the attention of concatenated rows with a paged cache. x: [1, N, d_model]."""
        q = self._queries(x, positions, 0, fused).transpose(1, 2)
        backend = "auto" if self.backend == "blocked" else self.backend
        y = keys.attend(q, self.mask, self.scale, self.slopes, self.softcap, self.sink, backend)
        return self._project(y)

    def project_kv(
        self,
        x: Tensor,
        positions: Positions = None,
        segments: Tensor | None = None,
        state: KeyValueState | PagedState | None = None,
        *,
        key_allowed: Tensor | None = None,
        fused: tuple[Tensor, ...] | None = None,
    ) -> KeyValues | PagedState:
        """Return the keys and values of the state, extended by those of x. Arguments as in `forward`.

        fused: queries, keys and values of x, if one matrix has computed them already.

        Raises:
            ConfigError: as `forward`; the layer has no key projection.
        """
        batch, length = self._check(x)
        shapes = ((batch, length), (batch, length, length))
        if segments is not None and segments.shape not in shapes:
            raise ConfigError(f"segments has the shape {list(segments.shape)}", expected=str(list(shapes[0])))
        if key_allowed is not None and isinstance(state, KeyValueState):
            raise ConfigError(
                "key_allowed is given with a state", expected="segments: padding as a separate document"
            )
        start = 0
        smear_state = state if isinstance(state, PagedState) or state is None else state.smear_state
        if isinstance(state, KeyValueState):
            state.check(batch, length)
            segments = state.resolve_segments(segments, batch, length)
            start = state.length
        k, v = self._keys_and_values(x, fused)
        if self.smear is not None:
            k = self.smear(k, segments, smear_state)
        k = self._norm_heads(k, self.k_norm)
        k, v = self._rotate(k, positions, start).transpose(1, 2), v.transpose(1, 2)
        if state is None:
            return KeyValues(k, v, segments, key_allowed)
        if isinstance(state, PagedState):
            state.write(k, v)
            return state
        return state.extend(k, v, segments)

    def _keys_and_values(self, x: Tensor, fused: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of x [B, T, n_kv_heads, head_dim], as projected."""
        if self.qkv is not None:
            _, k, v = fused or self._split(self._joined_qkv(x))
            return k, v
        if self.k is None or self.v is None:
            raise ConfigError(
                "shared_kv is missing", expected='keys of another layer, because projections is "shared"'
            )
        k, v = (project(x).view(*x.shape[:2], self.n_kv_heads, self.head_dim) for project in (self.k, self.v))
        return k, v

    def _norm_heads(self, x: Tensor, norm: RMSNorm | None, gain: Tensor | None = None) -> Tensor:
        """Return queries or keys x [B, T, heads, head_dim], normed. gain: of the queries, with a learned temperature."""
        if self.temperature is not None:  # applied in fp32, before the norm casts back
            return rms_norm(x, gain, self.eps)
        given = x.flatten(2) if self.norm_all_heads else x
        return x if norm is None else norm(given).view(x.shape)

    def cache_spec(self) -> KVCacheSpec | SharedCacheSpec:
        """Return the keys and values of a token. Blocks are counted from the row's start, so they keep all keys."""
        if not self.has_kv_proj:
            return SharedCacheSpec()
        window = self.mask.window if self.mask.block is None else None
        return KVCacheSpec(
            window, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim, raw_keys=self.smear is not None
        )

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> KeyValueState:  # fmt: skip
        """Return an empty state for `batch` rows of up to `capacity` positions; with a window it keeps window - 1.

        Raises:
            ConfigError: `batch` or `capacity` below 1; the layer is not causal, so later positions change earlier ones.
        """
        ordered = self.mask.causal or self.mask.earlier_blocks  # with blocks, a state grows by whole ones
        check_new_state(batch, capacity, causal=ordered or self.context_dim is not None)
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

    def _rotate(self, x: Tensor, positions: Positions, start: int) -> Tensor:
        """Return x [B, T, heads, head_dim] rotated by `positions`, by default those from `start` on."""
        if self.rotary is None:
            return x
        return self.rotary.rotate(x, self.rotary.tables_of(positions, start, x)).to(x.dtype)

    def _context_kv(
        self, batch: int, length: int, state: KeyValueState | None,
        context: Tensor | None, allowed: Tensor | None, segments: Tensor | None,
    ) -> KeyValues:  # fmt: skip
        """Return keys and values of the context, from the state if it has them."""
        assert self.k is not None and self.v is not None
        if state is not None:
            state.check(batch, length)
            state.length += length
        if context is None:
            if state is None or state.context is None:
                raise ConfigError("context is missing", expected="[B, Tc, context_dim]")
            return state.context
        check_context(context, batch, self.context_dim)
        k, v = (made(context).view(batch, -1, self.n_kv_heads, self.head_dim) for made in (self.k, self.v))
        k = self._norm_heads(k, self.k_norm)
        keys = KeyValues(k.transpose(1, 2), v.transpose(1, 2), segments, allowed)
        if state is not None:
            state.context = keys
        return keys

    def _check(self, x: Tensor) -> tuple[int, int]:
        """Return (B, T)."""
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ConfigError(f"x has the shape {list(x.shape)}", expected=f"[B, T, {self.d_model}]")
        return x.shape[0], x.shape[1]
