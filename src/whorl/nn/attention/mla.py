"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; unchanged in DeepSeek-V3, arXiv:2412.19437).

Told as the difference from multi-head attention: keys and values of all heads are made from one latent c of `kv_rank`
features a position, and only c is cached. With h for a head and t for a position (eqs. 9 to 19 of V2):

    c_t = norm(kv_a x_t)              k_th = [W_k^h c_t ; r_t]        v_th = W_v^h c_t        kv_b = W_k^1, W_v^1, W_k^2, ...
    r_t = rotate(kv_a' x_t)           q_th = [n_th ; rotate(p_th)]    from q_b norm(q_a x_t), or straight from q x_t
    y_t = out [ sum_s softmax_s(scale q_th k_sh) v_sh ]_h             scale = (nope_dim + rope_dim)^-1/2

A rotation stands between W_k and the query, and differs from key to key, so positions get features of their own: r,
`rope_dim` of them, shared by all heads and cached beside c.

Two forms of the same sums, which a test holds together:

- expanded, for training: keys and values are made of c, then plain attention;
- absorbed, for decoding: n W_k c = (W_k^T n) c, and sum_s p_s W_v c_s = W_v (sum_s p_s c_s). So W_k moves into the query
  and W_v behind the sum, and every head attends to the cache itself: one key head of kv_rank + rope_dim features,
  whose first kv_rank are the values too. Nothing the length of the row is ever expanded.

The subtle part is which to take. A pair of positions costs nope + rope + v products a head expanded, and 2 kv_rank +
rope absorbed, some four times as many in DeepSeek's shapes; but expanding costs kv_rank (nope + v) for each key of the
past. So single positions want the absorbed form and long pieces the other: `_expand_pays` counts.

Checkpoints of DeepSeek-V2 and V3 map one to one: q_proj, q_a_proj, q_a_layernorm, q_b_proj -> q, q_a, q_a_norm, q_b;
kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj -> kv_a, kv_a_norm, kv_b; o_proj -> out. Their rotary pairs are interleaved
(`Rotary(..., layout="interleaved")`), and where YaRN stretched them their scale has its factor: give `scale`.

Shapes: x [B, T, d_model]; cache [B, capacity, kv_rank + rope_dim].
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
from whorl.nn.mixer import check_state
from whorl.nn.norm import RMSNorm
from whorl.nn.positions.rotary import Rotary


@dataclass
class LatentState:
    """rows: [B, capacity, kv_rank + rope_dim], `length` of them filled: the normed latent, then the turned shared key, in
    one tensor because together they are the absorbed form's keys. segments: [B, capacity] once one was named."""

    cache: Tensor
    segments: Tensor | None = None
    length: int = 0

    @property
    def n_bytes(self) -> int:
        return self.cache.nbytes + (0 if self.segments is None else self.segments.nbytes)


class MultiHeadLatentAttention(nn.Module):
    """A `Mixer` that caches a latent.  x: [B, T, d_model] -> [B, T, d_model].

    Args:
        kv_rank: features of the latent of keys and values.
        q_rank: of the latent of queries, which saves parameters and nothing else; None for one matrix.
        nope_dim, rope_dim, v_dim: features a head of queries and keys without and with rotation, and of values.
        rotary: over `rope_dim` features; None leaves the shared key unturned, and the layer without positions.
        eps: of the two norms.
        scale: of the products; (nope_dim + rope_dim)^-1/2 by default.

    `form` forces "expanded" or "absorbed"; "auto" takes the one with fewer products.

    Raises:
        ConfigError: a size is below 1; the rotary tables are of another width than rope_dim.
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
        """As `Mixer` says.

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
            if start:  # else the new ones are all there is, and carry gradients
                rows = state.cache[:, :stop].to(x.dtype)
        mask = Mask(query_segments=segments, key_segments=documents, offset=start)
        expand = self._expanded_is_cheaper(length, start) if self.form == "auto" else self.form == "expanded"
        y = (self._expanded if expand else self._absorbed)(query, rows, mask)  # [B, T, H, v_dim]
        out: Tensor = self.out(y.flatten(2))
        return out

    def _forward_paged(self, x: Tensor, positions: Tensor | None, state: PagedLatent) -> Tensor:
        """The forward of rows one behind another, whose past is in pages.  x: [1, N, d_model]."""
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
        """x -> queries [B, T, H, nope_dim + rope_dim] and what is cached of x, [B, T, kv_rank + rope_dim]."""
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
        """Whether `length` queries behind `start` positions of the past cost fewer products expanded than absorbed."""
        if not start:
            return (
                True  # no past to expand, and plain attention is the form that devices have fused kernels for
            )
        narrow = self.nope_dim + self.v_dim
        # The piece's own latents are expanded in the place of folding its queries and outputs: the same count.
        expanding = self.kv_rank * narrow * start
        pairs = length * start + length * (length + 1) // 2
        return expanding <= pairs * (2 * self.kv_rank - narrow)

    def _expanded(self, q: Tensor, rows: Tensor, mask: Mask) -> Tensor:
        """q: [B, T, H, nope_dim + rope_dim]; rows: [B, S, kv_rank + rope_dim] -> [B, T, H, v_dim]."""
        batch, n_keys, _ = rows.shape
        latent, shared = rows[..., : self.kv_rank], rows[..., self.kv_rank :]
        k, v = (
            self.kv_b(latent).view(batch, n_keys, self.n_heads, -1).split([self.nope_dim, self.v_dim], dim=-1)
        )
        k = torch.cat([k, shared[:, :, None].expand(-1, -1, self.n_heads, -1)], dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attend(q, k, v, mask, scale=self.scale).transpose(1, 2)

    def _absorbed(self, q: Tensor, rows: Tensor, mask: Mask) -> Tensor:
        """The same, with kv_b in the query and behind the sum. Heads are further queries of the one key head, so that the
        cache is read once for all of them."""
        batch, length, heads, _ = q.shape
        n_keys = rows.shape[1]
        weight = self.kv_b.weight.to(q.dtype).view(heads, -1, self.kv_rank)
        w_k, w_v = weight[:, : self.nope_dim], weight[:, self.nope_dim :]  # [H, nope or v, kv_rank]
        plain, turned = q[..., : self.nope_dim], q[..., self.nope_dim :]
        folded = torch.cat([torch.einsum("bthn,hnr->bhtr", plain, w_k), turned.transpose(1, 2)], dim=-1)
        folded = folded.reshape(batch, heads * length, -1)
        # The cache on the left: a product that wants it transposed copies all of it first (bf16, on a CPU).
        scores = (rows @ folded.transpose(1, 2)).transpose(1, 2)  # [B, H T, S]
        scores = scores.float().reshape(batch, heads, length, n_keys) * self.scale
        if not mask.allows_all(length, n_keys):
            scores = scores.masked_fill(~mask.dense(length, n_keys, q.device), float("-inf"))
        p = scores.softmax(dim=-1).to(q.dtype).reshape(batch, heads * length, n_keys)
        summed = (p @ rows[..., : self.kv_rank]).view(batch, heads, length, self.kv_rank)
        return torch.einsum("bhtr,hvr->bthv", summed, w_v)
