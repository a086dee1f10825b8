"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; unchanged in DeepSeek-V3, arXiv:2412.19437).

Difference from multi-head attention: keys and values of all heads come from one latent c of `kv_rank` features per
position, and only c is cached. For head h and position t (eqs. 9 to 19 of V2):

    c_t = norm(kv_a x_t)              k_th = [W_k^h c_t ; r_t]        v_th = W_v^h c_t        kv_b = W_k^1, W_v^1, W_k^2, ...
    r_t = rotate(kv_a' x_t)           q_th = [n_th ; rotate(p_th)]    from q_b norm(q_a x_t), or directly from q x_t
    y_t = out [ sum_s softmax_s(scale q_th k_sh) v_sh ]_h             scale = (nope_dim + rope_dim)^-1/2

Positions use separate features r, `rope_dim` of them, shared by all heads and cached with c.

Two equal forms:

- expanded, for training: keys and values are computed from c, then plain attention;
- absorbed, for decoding: n W_k c = (W_k^T n) c, and sum_s p_s W_v c_s = W_v (sum_s p_s c_s). Every head attends to the
  cache directly, as one key head of kv_rank + rope_dim features whose first kv_rank are the values.

The subtle part is the choice. A pair of positions costs nope + rope + v products per head expanded and 2 kv_rank + rope
absorbed. Expanding costs kv_rank (nope + v) per past key. `_expanded_is_cheaper` compares both.

Checkpoints of DeepSeek-V2 and V3 map one to one: q_proj, q_a_proj, q_a_layernorm, q_b_proj -> q, q_a, q_a_norm, q_b;
kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj -> kv_a, kv_a_norm, kv_b; o_proj -> out. Their rotary pairs are interleaved
(`Rotary(..., layout="interleaved")`). With YaRN, pass their scale as `scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedLatent
from whorl.nn.attention.state import extend_segments
from whorl.nn.linear import Linear
from whorl.nn.mixer import LatentCacheSpec, check_state
from whorl.nn.norm import RMSNorm
from whorl.nn.rotary import Rotary


@dataclass
class LatentState:
    """State of one layer. cache: [B, capacity, kv_rank + rope_dim], `length` positions filled.

    The normed latent and the rotated shared key are one tensor, because together they are the absorbed form's keys.
    segments: [B, capacity] from the first call with segments.
    """

    cache: Tensor
    segments: Tensor | None = None
    length: int = 0

    @property
    def n_bytes(self) -> int:
        return self.cache.nbytes + (0 if self.segments is None else self.segments.nbytes)


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention layer, a `Mixer` that caches a latent: x [B, T, d_model] -> [B, T, d_model].

    Args:
        kv_rank: features of the latent of keys and values.
        q_rank: features of the latent of queries, which saves parameters only; None for one matrix.
        nope_dim, rope_dim, v_dim: features per head of queries and keys without and with rotation, and of values.
        rotary: over `rope_dim` features; None gives a layer without positions.
        eps: of the two norms.
        scale: of the products; (nope_dim + rope_dim)^-1/2 by default.

    `form` forces "expanded" or "absorbed"; "auto" uses the form with fewer products.

    Raises:
        ConfigError: a size is below 1; the rotary tables have another width than rope_dim.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        kv_rank: int,
        q_rank: int | None = None,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        rotary: Rotary | None,
        eps: float = 1e-6,
        scale: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "kv_rank": kv_rank,
            "q_rank": q_rank,
            "nope_dim": nope_dim,
            "rope_dim": rope_dim,
            "v_dim": v_dim,
        }
        for name, size in {"d_model": d_model, "n_heads": n_heads, **sizes}.items():
            if size is not None and size < 1:
                raise ConfigError(f"{name} is {size}", expected="1 or more")
        if rotary is not None and rotary.head_dim != rope_dim:
            raise ConfigError(
                f"rotary turns {rotary.head_dim} features and rope_dim is {rope_dim}",
                expected="a Rotary over rope_dim features: the others carry no position",
            )
        self.n_heads, self.kv_rank, self.nope_dim, self.rope_dim, self.v_dim = (
            n_heads,
            kv_rank,
            nope_dim,
            rope_dim,
            v_dim,
        )
        self.rotary = rotary
        self.scale = (nope_dim + rope_dim) ** -0.5 if scale is None else scale
        self.form: Literal["auto", "expanded", "absorbed"] = "auto"

        def linear(d_in: int, d_out: int) -> Linear:
            return Linear(d_in, d_out, std=d_in**-0.5, generator=generator)

        self.q = self.q_a = self.q_a_norm = self.q_b = None
        if q_rank is None:
            self.q = linear(d_model, n_heads * (nope_dim + rope_dim))
        else:
            self.q_a, self.q_a_norm = linear(d_model, q_rank), RMSNorm(q_rank, eps)
            self.q_b = linear(q_rank, n_heads * (nope_dim + rope_dim))
        self.kv_a, self.kv_a_norm = linear(d_model, kv_rank + rope_dim), RMSNorm(kv_rank, eps)
        self.kv_b = linear(kv_rank, n_heads * (nope_dim + v_dim))
        self.out = Linear(n_heads * v_dim, d_model, std=0.0)

    def cache_spec(self) -> LatentCacheSpec:
        """Return the latent of a token: the normed latent and the rotated shared key."""
        return LatentCacheSpec(width=self.kv_rank + self.rope_dim)

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> LatentState:
        return LatentState(
            torch.zeros(batch, capacity, self.kv_rank + self.rope_dim, dtype=dtype, device=device)
        )

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: LatentState | PagedLatent | None = None,
    ) -> Tensor:
        """Return attention over x and the state, as in `Mixer`.

        Raises:
            ConfigError: the state is full.
        """
        if isinstance(state, PagedLatent):
            return self._forward_paged(x, positions, state)
        length = x.shape[1]
        start = 0 if state is None else state.length
        if state is not None:
            check_state(len(x), length, len(state.cache), start, state.cache.shape[1])
        query, new = self._project(x, positions, start)
        rows, documents = new, segments  # of all positions so far
        if state is not None:
            stop, capacity = start + length, state.cache.shape[1]
            state.segments = extend_segments(state.segments, segments, start, length, capacity)
            state.cache[:, start:stop] = new.detach()
            state.length = stop
            documents = None if state.segments is None else state.segments[:, :stop]
            segments = None if documents is None else documents[:, start:]
            if start:  # without a past, the new rows are used directly and carry gradients
                rows = state.cache[:, :stop].to(x.dtype)
        mask = Mask(query_segments=segments, key_segments=documents, offset=start)
        expand = self._expanded_is_cheaper(length, start) if self.form == "auto" else self.form == "expanded"
        y = (self._expanded if expand else self._absorbed)(query, rows, mask)  # [B, T, H, v_dim]
        out: Tensor = self.out(y.flatten(2))
        return out

    def _forward_paged(self, x: Tensor, positions: Tensor | None, state: PagedLatent) -> Tensor:
        """Return the forward of concatenated rows with a paged cache. x: [1, N, d_model]."""
        query, new = self._project(x, positions, 0)
        state.write(new)
        y = query.new_empty(*query.shape[:3], self.v_dim)
        for where, rows, mask in state.attention_groups():
            expand = self.form == "expanded" or (
                self.form == "auto"
                and self._expanded_is_cheaper(where.shape[1], rows.shape[1] - where.shape[1])
            )
            y[0, where] = (self._expanded if expand else self._absorbed)(query[0, where], rows, mask)
        out: Tensor = self.out(y.flatten(2))
        return out

    def _project(self, x: Tensor, positions: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Return queries [B, T, H, nope_dim + rope_dim] and the new cache entries [B, T, kv_rank + rope_dim]."""
        batch, length, _ = x.shape
        if self.q is not None:
            q = self.q(x)
        else:
            assert self.q_a is not None and self.q_a_norm is not None and self.q_b is not None
            q = self.q_b(self.q_a_norm(self.q_a(x)))
        q = q.view(batch, length, self.n_heads, -1)
        latent, shared = self.kv_a(x).split([self.kv_rank, self.rope_dim], dim=-1)
        if self.rotary is not None:
            rotary, stop = self.rotary, start + length
            tables = (
                rotary.tables_between(start, stop, x.device)
                if positions is None
                else rotary.tables_at(positions)
            )
            plain, turning = q.split([self.nope_dim, self.rope_dim], dim=-1)
            q = torch.cat([plain, rotary.rotate(turning, tables).to(x.dtype)], dim=-1)
            shared = rotary.rotate(shared[:, :, None], tables)[:, :, 0].to(x.dtype)
        return q, torch.cat([self.kv_a_norm(latent), shared], dim=-1)

    def _expanded_is_cheaper(self, length: int, start: int) -> bool:
        """Return whether `length` queries after `start` past positions need fewer products expanded than absorbed."""
        if not start:
            return True  # no past to expand, and plain attention has fused kernels
        narrow = self.nope_dim + self.v_dim
        # Expanding the new latents costs as much as folding their queries and outputs.
        expanding = self.kv_rank * narrow * start
        pairs = length * start + length * (length + 1) // 2
        return expanding <= pairs * (2 * self.kv_rank - narrow)

    def _expanded(self, q: Tensor, rows: Tensor, mask: Mask) -> Tensor:
        """Return the expanded form, [B, T, H, v_dim].

        q: [B, T, H, nope_dim + rope_dim]; rows: [B, S, kv_rank + rope_dim].
        """
        batch, n_keys, _ = rows.shape
        latent, shared = rows[..., : self.kv_rank], rows[..., self.kv_rank :]
        k, v = (
            self.kv_b(latent).view(batch, n_keys, self.n_heads, -1).split([self.nope_dim, self.v_dim], dim=-1)
        )
        k = torch.cat([k, shared[:, :, None].expand(-1, -1, self.n_heads, -1)], dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attend(q, k, v, mask, scale=self.scale).transpose(1, 2)

    def _absorbed(self, q: Tensor, rows: Tensor, mask: Mask) -> Tensor:
        """Return the absorbed form, with kv_b in the query and after the sum.

        Heads become extra queries of the one key head, so the cache is read once for all heads.
        """
        batch, length, heads, _ = q.shape
        n_keys = rows.shape[1]
        weight = self.kv_b.weight.to(q.dtype).view(heads, -1, self.kv_rank)
        w_k, w_v = weight[:, : self.nope_dim], weight[:, self.nope_dim :]  # [H, nope or v, kv_rank]
        plain, turned = q[..., : self.nope_dim], q[..., self.nope_dim :]
        folded = torch.cat([torch.einsum("bthn,hnr->bhtr", plain, w_k), turned.transpose(1, 2)], dim=-1)
        folded = folded.reshape(batch, heads * length, -1)
        # The cache is the left operand: as a transposed right operand it would be copied first (bf16, on a CPU).
        scores = (rows @ folded.transpose(1, 2)).transpose(1, 2)  # [B, H T, S]
        scores = scores.float().reshape(batch, heads, length, n_keys) * self.scale
        if not mask.allows_all(length, n_keys):
            scores = scores.masked_fill(~mask.dense(length, n_keys, q.device), float("-inf"))
        p = scores.softmax(dim=-1).to(q.dtype).reshape(batch, heads * length, n_keys)
        summed = (p @ rows[..., : self.kv_rank]).view(batch, heads, length, self.kv_rank)
        return torch.einsum("bhtr,hvr->bthv", summed, w_v)
