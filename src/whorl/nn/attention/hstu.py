"""HSTU, pointwise attention for sequence recommenders (Zhai et al. 2024, arXiv:2402.17152, section 3).

Difference from softmax attention: weights are not divided by their sum, so the output keeps how often a user did
something. The gate, values, queries and keys come from one matrix (eqs. 1 to 3):

    U, V, Q, K = split(SiLU(x W))
    A_ij = SiLU(scale q_i k_j + position_bias[i - j] + time_bias[bucket(t_i - t_j)]) / n_i     for allowed j <= i
    y = (norm(A V) * U) W_out

`norm` is a layer norm over all heads, without gains (W_out has them). Time differences fall into doubling buckets:
bucket(s) = floor(log2(1 + s)). A minute and a month are 16 buckets apart, and 32 buckets cover a century in seconds.
(The authors use 128 buckets that grow by e^0.301 = 1.35.)

The subtle part is n. The authors' program divides by the padded length. The same row would then give other outputs in
another batch, because of the eps of the norm. Here n_i counts the positions that i may attend to, so rows in pieces,
packed rows and single rows give equal outputs. The norm removes any factor of a position.

Shapes: x [B, T, D]; q, k [B, H, T, dk]; v, U [B, H, T, dv]; position_bias [H, P]; time_bias [H, K]; times [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.state import extend_segments
from whorl.nn.linear import Linear
from whorl.nn.mixer import StateCacheSpec, check_state

QUERY_BLOCK = (
    256  # queries per block; each block uses the keys up to its end, so half of all pairs are skipped
)
EPS = 1e-6


def time_buckets(seconds: Tensor, n_buckets: int) -> Tensor:
    """Return floor(log2(1 + seconds)) as integers, 0 .. n_buckets - 1. seconds: time differences, any shape.

    Negative differences count as 0; those beyond the last bucket fall into it.
    """
    # Compares with the bounds, because a logarithm may round 2^k down to k - 1, depending on the device.
    bounds = torch.exp2(torch.arange(1, n_buckets, device=seconds.device, dtype=torch.float32)) - 1
    return torch.bucketize(seconds.float(), bounds, right=True)


def hstu_attention_reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, allowed: Tensor) -> Tensor:
    """Return SiLU(q k^T + bias) / n over allowed keys, in fp32, times v: the definition. -> [B, H, Tq, dv], type of q.

    q: [B, H, Tq, dk], already scaled; k: [B, H, Tk, dk]; v: [B, H, Tk, dv]; bias: [B, H, Tq, Tk];
    allowed: [B, 1, Tq, Tk], True = attend. Rows without an allowed key return 0.
    """
    weights = F.silu(q.float() @ k.float().transpose(-1, -2) + bias) * allowed
    return (weights / allowed.sum(-1, keepdim=True).clamp(min=1) @ v.float()).to(q.dtype)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: Tensor,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    segments: Tensor | None = None,
    block: int = QUERY_BLOCK,
) -> Tensor:
    """Return causal HSTU attention, [B, H, Tq, dv]. Biases and masks are made for one block of queries at a time.

    q: [B, H, Tq, dk], the newest Tq of the Tk positions; k: [B, H, Tk, dk]; v: [B, H, Tk, dv].
    position_bias: [H, P]; its last entry serves all distances from P - 1 on. time_bias: [H, K].
    times, segments: [B, Tk] or None.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    offset = n_keys - n_queries
    out = []
    for start in range(0, n_queries, block):
        rows = slice(start + offset, min(start + block, n_queries) + offset)  # the positions of these queries
        stop = rows.stop
        step = torch.arange(stop, device=q.device)
        distance = step[rows, None] - step[None, :]  # [t, s]
        # The gradients of index_select and embedding are sums over rows; that of an index runs element by element.
        near = distance.clamp(0, position_bias.shape[1] - 1)
        bias = (
            position_bias.float().index_select(1, near.flatten()).view(-1, *near.shape)[None]
        )  # [1, H, t, s]
        if time_bias is not None and times is not None:
            elapsed = (
                times[:, rows, None] - times[:, None, :stop]
            )  # [B, t, s], subtracted before rounding to fp32
            bucket = time_buckets(elapsed, time_bias.shape[1])
            bias = bias + F.embedding(bucket, time_bias.float().t()).permute(0, 3, 1, 2)
        allowed = (distance >= 0)[None, None]  # [1 or B, 1, t, s]
        if segments is not None:
            allowed = allowed & (segments[:, None, rows, None] == segments[:, None, None, :stop])
        scores = (q[:, :, start : start + block] @ k[:, :, :stop].transpose(-1, -2)).float() + bias
        weight = allowed / allowed.sum(-1, keepdim=True)  # every position may attend to its own key: never 0
        out.append((F.silu(scores) * weight).to(v.dtype) @ v[:, :, :stop])
    return torch.cat(out, dim=2)


@dataclass
class HSTUState:
    """State of one layer. k: [B, H, capacity, dk]; v: [B, H, capacity, dv], `length` positions filled.

    times: [B, capacity] if the first piece has times; segments: [B, capacity] from the first call with segments.
    """

    k: Tensor
    v: Tensor
    times: Tensor | None = None
    segments: Tensor | None = None
    length: int = 0

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.times, self.segments) if t is not None)

    def extend_times(self, times: Tensor | None, start: int) -> None:
        """Write the times of new positions. Raises ConfigError when only some pieces of a row have times."""
        if start and (self.times is None) != (times is None):
            raise ConfigError(
                "times are given with some pieces of a row and not with others",
                expected="times with every piece of a row, or with none",
            )
        if times is None:
            return
        if self.times is None:
            self.times = times.new_zeros(times.shape[0], self.k.shape[2])
        self.times[:, start : start + times.shape[1]] = times


class HSTUAttention(nn.Module):
    """HSTU layer, a `Mixer`: x [B, T, d_model] -> [B, T, d_model]. The block adds the residual and the norm of x.

    Args:
        head_dim, v_dim: features per head of queries and keys, and of values; both d_model / n_heads by default.
        max_distance: number of distances with a separate bias (P).
        n_time_buckets: K; 0 for a layer without times.
        scale: of q k^T; 1 as in the paper (the authors' fused kernels use head_dim^-1/2).

    Raises:
        ConfigError: n_heads does not divide d_model and a dimension is not given; max_distance is below 1;
            n_time_buckets is negative.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        v_dim: int | None = None,
        max_distance: int = 512,
        n_time_buckets: int = 32,
        scale: float = 1.0,
        eps: float = EPS,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if (head_dim is None or v_dim is None) and d_model % n_heads:
            raise ConfigError(
                f"n_heads is {n_heads} and d_model is {d_model}",
                expected="n_heads that divides d_model, or a head_dim and a v_dim",
            )
        if max_distance < 1:
            raise ConfigError(f"max_distance is {max_distance}", expected="1 or more positions")
        if n_time_buckets < 0:
            raise ConfigError(f"n_time_buckets is {n_time_buckets}", expected="0 (no times) or more")
        self.n_heads, self.scale, self.eps = n_heads, scale, eps
        self.head_dim, self.v_dim = head_dim or d_model // n_heads, v_dim or d_model // n_heads
        # The order of the authors' program: gate, values, queries, keys.
        width = 2 * n_heads * (self.head_dim + self.v_dim)
        self.uvqk = Linear(d_model, width, std=d_model**-0.5, generator=generator)
        self.out = Linear(n_heads * self.v_dim, d_model, std=0.0)
        self.position_bias = nn.Parameter(torch.zeros(n_heads, max_distance))
        self.time_bias = nn.Parameter(torch.zeros(n_heads, n_time_buckets)) if n_time_buckets else None

    def cache_spec(self) -> StateCacheSpec:
        """Return that a sequence has one state, for its whole capacity: distances are counted along a row."""
        return StateCacheSpec()

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> HSTUState:
        k, v = (
            torch.zeros(batch, self.n_heads, capacity, d, dtype=dtype, device=device)
            for d in (self.head_dim, self.v_dim)
        )
        return HSTUState(k, v)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: HSTUState | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        """Return HSTU attention, as in `Mixer`. Distances are counted along the row, so positions are ignored.

        times: [B, T] time of each event in seconds (or any unit), as integers or fp64; None leaves the time bias out.
        fp32 cannot distinguish two minutes of this year.

        Raises:
            ConfigError: times are given to a layer without time buckets; the state is full; only some pieces of a row
                have times.
        """
        batch, length, _ = x.shape
        if times is not None and self.time_bias is None:
            raise ConfigError("times are given to a layer with n_time_buckets = 0", expected="no times")
        heads, v_width, k_width = self.n_heads, self.n_heads * self.v_dim, self.n_heads * self.head_dim
        mixed = F.silu(self.uvqk(x))
        gate, *qkv = torch.split(mixed, [v_width, v_width, k_width, k_width], dim=-1)
        v, q, k = (t.view(batch, length, heads, -1).transpose(1, 2) for t in qkv)
        if state is not None:
            start, stop, capacity = state.length, state.length + length, state.k.shape[2]
            check_state(batch, length, len(state.k), start, capacity)
            state.extend_times(times, start)
            state.segments = extend_segments(state.segments, segments, start, length, capacity)
            state.k[:, :, start:stop] = k.detach()
            state.v[:, :, start:stop] = v.detach()
            state.length = stop
            if start:  # without a past, the new keys and values are used directly and carry gradients
                k, v = state.k[:, :, :stop].to(x.dtype), state.v[:, :, :stop].to(x.dtype)
            times, segments = (None if t is None else t[:, :stop] for t in (state.times, state.segments))
        y = hstu_attention(q * self.scale, k, v, self.position_bias, self.time_bias, times, segments)
        y = y.transpose(1, 2).reshape(batch, length, v_width)
        y = F.layer_norm(y.float(), (v_width,), eps=self.eps).to(x.dtype)
        out: Tensor = self.out(y * gate)
        return out
