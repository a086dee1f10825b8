"""Mamba: a selective state space layer (Gu & Dao 2023, arXiv:2312.00752, algorithm 2).

Difference from linear attention (`nn/attention/linear.py`): each of the E = expand * d_model features has a separate
state h of N numbers. Each of these has its own decay, which depends on the input through the step size delta (eq. 2
and 4, B discretized by Euler as in the authors' program):

    h[t] = exp(delta[t] A) * h[t-1] + delta[t] B[t] x[t]          y[t] = C[t] h[t] + D x[t]

A < 0 is learned; delta, B and C are computed from x. A large delta resets and writes, a small one skips the position.

x and a gate z come from one product. x passes a causal convolution of width 4 and a SiLU. The output is
out(y * silu(z)) (figure 3).

Three equal forms of the scan: `selective_scan_reference`, the definition as a loop; `selective_scan`, for training, in
chunks, which keeps only the states between chunks and recomputes the others in the backward; `selective_scan_step`.

The subtle parts. (1) A scan by prefix sums divides by products of decays, which underflow. Here nothing is divided and
each exponent is negative. An associative scan does log2(chunk) times the work. (2) The state is laid out as [N, E], with
the long axis inside. (3) The state is always fp32: bf16 has no number between 1 - 1/256 and 1. (4) At a document border
the decay is 0, and the convolution does not reach back over it.

Shapes: x, delta, y [B, T, E]; A [E, N]; b, c [B, T, N]; state [B, N, E]; keep [B, T], 0 where the state is reset
before the position, else 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.short_conv import ShortConvolution, ShortConvState
from whorl.nn.compiler import eager_only
from whorl.nn.linear import Linear
from whorl.nn.mixer import StateCacheSpec
from whorl.nn.recurrent import document_starts, upcast

CHUNK_ELEMENTS = (
    1 << 20
)  # state elements per chunk: 4 MB, so that the buffers of a chunk stay in the CPU cache
# State elements per step: enough to amortize the kernel call, and below the size at which torch uses several threads,
# which would synchronize at every position.
ROW_ELEMENTS = 1 << 15


def selective_scan_reference(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y and the state after the last position, by the definition (without D)."""
    outputs = []
    for t in range(x.shape[1]):
        if keep is not None:
            state = state * keep[:, t, None, None]
        y, state = selective_scan_step(x[:, t], delta[:, t], a, b[:, t], c[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def selective_scan_step(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y [B, E] and the new state for one position. x, delta: [B, E]; b, c: [B, N]."""
    decay = torch.exp(delta[:, None] * a.t())  # [B, N, E]
    state = decay * state + b[..., None] * (delta * x)[:, None]
    return (c[:, None] @ state).squeeze(1), state


def selective_scan(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    keep: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y and the state after the last position, for whole rows. Gradients reach x, delta, a, b and c, not the states.

    chunk: positions per chunk; None for the size that fits the cache.
    """
    out: tuple[Tensor, Tensor] = _scan(x, delta, a, b, c, state, keep, chunk)
    return out


@eager_only  # a compiler would write the loop out, T times
def _scan(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    memory: Tensor,
    keep: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    row = a.numel()
    rows = max(1, min(x.shape[0], ROW_ELEMENTS // row))
    chunk = chunk or max(8, min(64, CHUNK_ELEMENTS // (rows * row)))
    with torch.no_grad():
        # Time first: the rows of one position are adjacent in memory.
        keep_ = None if keep is None else keep.to(x.dtype).t()[..., None, None].contiguous()  # [T, B, 1, 1]
    first = [t.transpose(0, 1).contiguous() for t in (x, delta, b, c)]
    y, last = _Scan.apply(*first, a.t().contiguous(), keep_, memory, rows, chunk)  # type: ignore[no-untyped-call]
    return y.transpose(0, 1), last


class _Scan(torch.autograd.Function):
    """The scan with its backward. `rows` rows and `chunk` positions are processed at a time.

    x, delta, y: [T, B, E]; b, c: [T, B, N]; a: [N, E]; keep: [T, B, 1, 1].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        keep: Tensor | None,
        memory: Tensor,
        rows: int,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        length, batch, _ = x.shape
        chunks = list(range(0, length, chunk))
        before = x.new_empty(len(chunks), *memory.shape)  # the state at the start of each chunk
        y, last = torch.empty_like(x), torch.empty_like(memory)
        write = delta * x
        for r in _chunk_slices(batch, rows):
            now = memory[r]
            buffers = _ScanBuffers(chunk, now)
            for i, t in enumerate(_chunk_slices(length, chunk)):
                before[i, r] = now
                _, states = buffers.run_chunk(
                    write[t, r], delta[t, r], b[t, r], a, None if keep is None else keep[t, r], now
                )
                y[t, r] = (c[t, r, None] @ states[1:]).squeeze(-2)
                now = states[-1].clone()
            last[r] = now
        ctx.save_for_backward(x, delta, b, c, a, keep, before)
        ctx.sizes = rows, chunk
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, delta, b, c, a, keep, before = ctx.saved_tensors
        rows, chunk = ctx.sizes
        dy = gradients[0].contiguous()
        length, batch, _ = x.shape
        write = delta * x
        d_write, d_delta, d_b, d_c = (torch.empty_like(t) for t in (write, delta, b, c))
        d_a = torch.zeros_like(a)
        for r in _chunk_slices(batch, rows):
            buffers, arriving = _ScanBuffers(chunk, before[0, r]), torch.zeros_like(before[0, r])
            spare = torch.empty_like(buffers.decay)
            for i, t in reversed(list(enumerate(_chunk_slices(length, chunk)))):
                decay, states = buffers.run_chunk(
                    write[t, r], delta[t, r], b[t, r], a, None if keep is None else keep[t, r], before[i, r]
                )
                # d_h[t] = c[t] dy[t] + decay[t + 1] d_h[t + 1]: the same recurrence, from the end.
                d_h = torch.mul(c[t, r, :, None], dy[t, r, None], out=spare[: len(decay)])
                steps, decays = d_h.unbind(0), decay.unbind(0)
                steps[-1].add_(arriving)
                for s in range(len(steps) - 2, -1, -1):
                    steps[s].addcmul_(decays[s + 1], steps[s + 1])
                arriving = decays[0] * steps[0]
                # A row vector times a transposed matrix: as matrix times column it ran 12 times slower.
                d_c[t, r] = (dy[t, r, None] @ states[1:].transpose(-1, -2)).squeeze(-2)
                d_b[t, r] = (write[t, r, None] @ d_h.transpose(-1, -2)).squeeze(-2)
                d_write[t, r] = (b[t, r, None] @ d_h).squeeze(-2)
                d_exponent = d_h.mul_(decay).mul_(states[:-1])  # of decay = exp(delta a)
                d_delta[t, r] = torch.mul(d_exponent, a, out=decay).sum(-2)
                d_a += d_exponent.mul_(delta[t, r, None]).sum((0, 1))
        return d_write * delta, d_delta + d_write * x, d_b, d_c, d_a, None, None, None, None


class _ScanBuffers:
    """Buffers that all chunks reuse, because allocating them costs more than filling them."""

    def __init__(self, chunk: int, memory: Tensor) -> None:
        self.decay = memory.new_empty(chunk, *memory.shape)  # [C, B, N, E]
        self.memories = memory.new_empty(chunk + 1, *memory.shape)

    def run_chunk(
        self, write: Tensor, delta: Tensor, b: Tensor, a: Tensor, keep: Tensor | None, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return decay [C, B, N, E] and states [C + 1, B, N, E] (before the chunk, then after each position).

        write (delta x), delta: [C, B, E]; b: [C, B, N]; keep: [C, B, 1, 1]; memory: [B, N, E], the first state.
        The returned buffers are valid until the next call.
        """
        n = len(write)
        # exp(x) = 2^(x log2(e)): torch's exp2 took a fifth of the time of its exp.
        decay = torch.mul(delta[:, :, None], a * math.log2(math.e), out=self.decay[:n]).exp2_()
        if keep is not None:
            decay.mul_(keep)
        memories = self.memories[: n + 1]
        memories[0] = memory
        torch.mul(b[..., None], write[:, :, None], out=memories[1:])
        steps = memories.unbind(0)
        for t, kept in enumerate(decay.unbind(0)):
            steps[t + 1].addcmul_(kept, steps[t])
        return decay, memories


def _chunk_slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def causal_conv1d(x: Tensor, layer: ShortConvolution) -> Tensor:
    """Return `layer` applied to whole rows of one document each, [B, T, E]: one multiply-add per tap, in half the time."""
    assert layer.bias is not None
    length, width = x.shape[1], layer.width
    padded, weight = F.pad(x, (0, 0, width - 1, 0)), layer.weight.to(x.dtype).t().contiguous()
    y = layer.bias.to(x.dtype)
    for i, w in enumerate(weight.unbind(0)):  # the newest position first
        y = torch.addcmul(y, padded[:, width - 1 - i : width - 1 - i + length], w)
    return y


@dataclass
class MambaState:
    """State of one layer. ssm_state: [B, N, E]; conv_state: the last inputs of the convolution. Both fp32, of fixed size.

    segment, document: [B] the newest position's segment (after the first segments), and the number of earlier documents.
    """

    ssm_state: Tensor
    conv_state: ShortConvState
    length: int = 0
    segment: Tensor | None = None
    document: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        kept = (self.ssm_state, self.segment, self.document)
        return self.conv_state.n_bytes + sum(t.nbytes for t in kept if t is not None)


class Mamba(nn.Module):
    """Mamba layer, a `Mixer`: x [B, T, d_model] -> [B, T, d_model].

    Weights: `inward` [2 E, d_model] (x, then the gate); `convolution`; `selection` [rank + 2 N, E] (delta, b, c).
    `delta` [E, rank] with a bias; `a_log` [E, N] (A = -exp(a_log), from -1 .. -N: S4D-real, sec. 3.6); `d` [E].
    `out` [d_model, E], which starts at 0.

    Args:
        d_state: N, state numbers per feature.
        expand: E / d_model.
        width: of the convolution.
        delta_rank: rank of the projection to delta; d_model / 16 rounded up by default.
        delta_min, delta_max: range of softplus of delta's initial bias, uniform in the logarithm (sec. 3.6).
        chunk: as in `selective_scan`.

    Raises:
        ConfigError: a size is below 1, or not 0 < delta_min < delta_max. In `forward`: x does not fit, the state has
            other rows, or segments begin in the middle of a row.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        expand: int = 2,
        width: int = 4,
        delta_rank: int | None = None,
        delta_min: float = 1e-3,
        delta_max: float = 1e-1,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rank = math.ceil(d_model / 16) if delta_rank is None else delta_rank
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "delta_rank": rank, "chunk": chunk}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", expected="1 or more")
        if not 0.0 < delta_min < delta_max:
            raise ConfigError(
                f"delta_min is {delta_min} and delta_max is {delta_max}", expected="0 < delta_min < delta_max"
            )
        self.d_model, self.d_state, self.rank, self.chunk = d_model, d_state, rank, chunk
        self.d_inner = inner = expand * d_model
        self.inward = Linear(d_model, 2 * inner, std=d_model**-0.5, generator=generator)
        self.convolution = ShortConvolution(inner, width, bias=True, generator=generator)
        self.selection = Linear(inner, rank + 2 * d_state, std=inner**-0.5, generator=generator)
        # The paper's uniform within +- rank^-0.5 has this standard deviation.
        self.delta = Linear(rank, inner, std=(3 * rank) ** -0.5, bias=True, generator=generator)
        assert self.delta.bias is not None
        low, high = math.log(delta_min), math.log(delta_max)
        step = torch.exp(low + (high - low) * torch.rand(inner, generator=generator))
        self.delta.bias.detach().copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        self.a_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(inner, 1))
        self.d = nn.Parameter(torch.ones(inner))
        self.out = Linear(inner, d_model, std=0.0)

    def cache_spec(self) -> StateCacheSpec:
        """Return that a sequence has one state, of fixed size."""
        return StateCacheSpec()

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> MambaState:
        """Return an empty state. Capacity is ignored; dtype counts only if it is wider than fp32."""
        dtype = torch.promote_types(dtype, torch.float32)
        window = self.convolution.new_state(batch, dtype=dtype, device=device)
        return MambaState(torch.zeros(batch, self.d_state, self.d_inner, dtype=dtype, device=device), window)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: MambaState | None = None,
    ) -> Tensor:
        """Return the layer's output, as in `Mixer`. Positions are ignored. The state carries no gradient.

        With a state and without segments, each row continues its last document.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ConfigError(f"x has the shape {list(x.shape)}", expected=f"[B, T, {self.d_model}]")
        if state is not None and len(state.ssm_state) != len(x):
            raise ConfigError(
                f"the state is of {len(state.ssm_state)} rows and x of {len(x)}",
                expected="the same number of rows",
            )
        begins, documents = self._document_starts(segments, state)
        mixed, gate = self.inward(x).chunk(2, dim=-1)  # [B, T, E] each
        if documents is None and state is None:
            mixed = causal_conv1d(mixed, self.convolution)
        else:
            mixed = self.convolution(mixed, documents, None if state is None else state.conv_state)
        mixed = F.silu(mixed)
        y, memory = self._select_and_scan(mixed, begins, state)
        if state is not None:
            state.ssm_state = memory.detach()
            state.length += x.shape[1]
        out: Tensor = self.out(y * F.silu(gate))
        return out

    def _select_and_scan(
        self, x: Tensor, begins: Tensor | None, state: MambaState | None
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, T, E] and the state after it, for convolved x [B, T, E]."""
        low, b, c = self.selection(x).split([self.rank, self.d_state, self.d_state], dim=-1)
        assert self.delta.bias is not None
        # The bias is added in fp32: it starts near -6, where bf16 is too coarse for the exponent that follows.
        delta = F.softplus(upcast(F.linear(low, self.delta.weight.to(low.dtype))) + self.delta.bias)
        a, x_wide, b, c = -upcast(self.a_log).exp(), upcast(x), upcast(b), upcast(c)
        keep = None if begins is None else (~begins).to(x_wide.dtype)
        shape = len(x), self.d_state, self.d_inner
        memory = x_wide.new_zeros(shape) if state is None else state.ssm_state.to(x_wide.dtype)
        if state is not None and x.shape[1] == 1:
            y, memory = selective_scan_reference(x_wide, delta, a, b, c, memory, keep)
        else:
            y, memory = selective_scan(x_wide, delta, a, b, c, memory, keep, self.chunk)
        return (y + self.d * x_wide).to(x.dtype), memory

    @staticmethod
    def _document_starts(
        segments: Tensor | None, state: MambaState | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return [B, T] document starts, and the number of each position's document in its row.

        An id that returns after another is a new document, which the convolution could not derive from the ids.
        """
        if state is None:
            begins = document_starts(segments, None, 0)
            return begins, None if begins is None else begins.cumsum(1)
        begins = document_starts(segments, state.segment, state.length)
        if begins is None:
            return None, None
        assert segments is not None
        documents = begins.cumsum(1)
        if state.document is not None:
            documents = documents + state.document[:, None]
        state.segment, state.document = segments[:, -1].clone(), documents[:, -1].clone()
        return begins, documents
