"""Recurrent layers: RNN, LSTM and GRU.

With x[t] the input, h[t] the hidden state and output, s the logistic sigmoid and * elementwise:

- `RNN` (Elman 1990, Finding Structure in Time):  h[t] = tanh(W x[t] + U h[t-1] + b). Its gradients shrink or grow
  geometrically with distance.
- `LSTM` (Hochreiter & Schmidhuber 1997, Long Short-Term Memory; with the forget gate of Gers et al. 2000, Learning to
  Forget): an additive cell state c, through which gradients last.
      i, f, o = s(W x[t] + U h[t-1] + b), g = tanh(W_g x[t] + U_g h[t-1] + b_g)
      c[t] = f * c[t-1] + i * g                        h[t] = o * tanh(c[t])
- `GRU` (Cho et al. 2014, arXiv:1406.1078, eq. 5 to 8): one state; the write gate (1 - z) is the complement of the keep gate.
      r, z = s(W x[t] + U h[t-1] + b)                  n = tanh(W_n x[t] + b_n + r * (U_n h[t-1] + b'_n))
      h[t] = (1 - z) * n + z * h[t-1]
  The paper has U_n (r * h[t-1]). Here r comes after the product, as in all fast kernels, so one product computes all three.

The input products of all positions are one matrix product. The loop over time is the definition. torch's fused kernels
are used where no document begins inside a row. Types below fp32 are computed in fp32, because rounding errors
accumulate.

Two subtle parts. The state is reset to 0 at every document of a packed row. The forget gate's bias starts at 1 (Gers et
al., sec. 4), because at 0 half of the cell state would be lost at each step.

Shapes: x [B, T, d_model]; gates [B, T, n_gates * d_hidden]; hidden states [B, d_hidden] each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError, one_of
from whorl.nn.compiler import eager_only
from whorl.nn.linear import Linear
from whorl.nn.mixer import StateCacheSpec

RecurrentBackend = Literal["auto", "loop", "fused"]


def upcast(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def document_starts(segments: Tensor | None, last: Tensor | None, length: int) -> Tensor | None:
    """Return [B, T], True where a document begins after another one, or None if no state must be reset.

    An id that returns after another one is a new document.

    Args:
        segments: [B, T] or None: every row continues its document.
        last: [B] the segment of the position before the first, or None without earlier segments.
        length: number of earlier positions; they have segment 0 until the first segments.
    """
    if segments is None:
        return None
    if last is None:
        last = torch.zeros_like(segments[:, 0]) if length else segments[:, 0]
    return segments != torch.cat([last[:, None], segments[:, :-1]], dim=1)


@dataclass
class RecurrentState:
    """State of one layer. hidden: one tensor [B, d_hidden] per state (h; for an LSTM h and c), of fixed size.

    segment: [B] of the newest position, after the first segments.
    """

    hidden: tuple[Tensor, ...]
    length: int = 0
    segment: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(m.nbytes for m in self.hidden) + (0 if self.segment is None else self.segment.nbytes)


class Recurrent(nn.Module, ABC):
    """Base of the recurrent layers, a `Mixer`: x [B, T, d_model] -> [B, T, d_model].

    Weights: `inward` [n_gates * d_hidden, d_model] with a bias, `recurrent` [n_gates * d_hidden, d_hidden]; gates in torch's
    order. `out`, back to d_model, exists only where d_hidden differs; it starts at 0.

    Args:
        d_hidden: features of the hidden state; d_model by default.
        backend: "loop" (the definition), "fused" (torch's kernels), "auto": fused unless a document begins inside a row.
        generator: of the initial weights; the recurrent ones are orthogonal (Saxe et al. 2013, arXiv:1312.6120), so that
            the hidden state keeps its norm.

    Raises:
        ConfigError: d_hidden is below 1, or the backend is unknown. In `forward`: x does not fit, the state has other
            rows, or the backend is "fused" and a state must be reset inside a row.
    """

    n_gates: ClassVar[int]
    n_hidden_states: ClassVar[int] = 1
    recurrent_bias: ClassVar[bool] = False

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        *,
        backend: RecurrentBackend = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        d_hidden = d_model if d_hidden is None else d_hidden
        if d_hidden < 1:
            raise ConfigError(f"d_hidden is {d_hidden}", expected="1 or more features")
        if backend not in get_args(RecurrentBackend):
            raise ConfigError(f"backend is {backend!r}", expected=one_of(backend, get_args(RecurrentBackend)))
        self.d_model, self.d_hidden, self.backend = d_model, d_hidden, backend
        gates = self.n_gates * d_hidden
        self.inward = Linear(d_model, gates, std=d_model**-0.5, bias=True, generator=generator)
        self.recurrent = Linear(d_hidden, gates, std=0.0, bias=self.recurrent_bias)
        for gate in range(self.n_gates):
            block = self.recurrent.weight.detach()[gate * d_hidden : (gate + 1) * d_hidden]
            nn.init.orthogonal_(block, generator=generator)
        self.out = Linear(d_hidden, d_model, std=0.0) if d_hidden != d_model else None

    def cache_spec(self) -> StateCacheSpec:
        """Return that a sequence has one state, of fixed size."""
        return StateCacheSpec()

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> RecurrentState:
        """Return an empty state. Capacity is ignored; dtype counts only if it is wider than fp32."""
        dtype = torch.promote_types(dtype, torch.float32)
        return RecurrentState(self._zero_state(batch, dtype, torch.device(device)))

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: RecurrentState | None = None,
    ) -> Tensor:
        """Return the layer's output, as in `Mixer`. Positions are ignored. The state carries no gradient.

        With a state and without segments, each row continues its last document.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ConfigError(f"x has the shape {list(x.shape)}", expected=f"[B, T, {self.d_model}]")
        if state is not None and state.hidden[0].shape[0] != x.shape[0]:
            raise ConfigError(
                f"the state is of {state.hidden[0].shape[0]} rows and x of {x.shape[0]}",
                expected="the same number of rows",
            )
        x_wide = upcast(x)
        if state is None:
            memory, begins = (
                self._zero_state(len(x), x_wide.dtype, x.device),
                document_starts(segments, None, 0),
            )
        else:
            memory = tuple(m.to(x_wide.dtype) for m in state.hidden)
            begins = document_starts(segments, state.segment, state.length)
        y, memory = self._run_sequence(x_wide, memory, begins)
        if state is not None:
            state.hidden = tuple(m.detach() for m in memory)
            state.length += x.shape[1]
            state.segment = state.segment if segments is None else segments[:, -1].clone()
        y = y.to(x.dtype)
        out: Tensor = y if self.out is None else self.out(y)
        return out

    def _zero_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(batch, self.d_hidden, dtype=dtype, device=device) for _ in range(self.n_hidden_states)
        )

    @eager_only  # a compiler would write the loop out, T times
    def _run_sequence(
        self, x: Tensor, memory: tuple[Tensor, ...], begins: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return h of all positions and the last hidden states. begins: [B, T], True where a state is reset."""
        resets = begins is not None and bool(begins.any())
        if self.backend == "loop" or resets:
            if self.backend == "fused":
                raise ConfigError(
                    "backend is 'fused' and a document begins inside a row",
                    expected="backend 'auto' or 'loop'",
                )
            return self._loop(x, memory, begins if resets else None)
        return self._fused(x, memory)

    def _loop(
        self, x: Tensor, memory: tuple[Tensor, ...], begins: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs by the definition."""
        weight, own = self.recurrent.weight.to(x.dtype).t(), self.recurrent.bias
        bias: Tensor = x.new_zeros(()) if own is None else own.to(x.dtype)
        keeps = (
            None if begins is None else (~begins).to(x.dtype).t().unsqueeze(-1).unbind(0)
        )  # T times [B, 1]
        outputs = []
        for t, from_input in enumerate(self.inward(x).unbind(1)):
            if keeps is not None:
                memory = tuple(m * keeps[t] for m in memory)
            from_memory = torch.addmm(bias, memory[0], weight)
            memory = self._cell(from_input, from_memory, memory)
            outputs.append(memory[0])
        return torch.stack(outputs, dim=1), memory

    @abstractmethod
    def _cell(
        self, from_input: Tensor, from_memory: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the new hidden states after one step. from_input, from_memory: [B, n_gates * d_hidden], with biases."""

    def _fused(self, x: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs by torch's kernel."""
        assert self.inward.bias is not None
        own = self.recurrent.bias
        second: Tensor = torch.zeros_like(self.inward.bias) if own is None else own
        weights = [
            w.to(x.dtype) for w in (self.inward.weight, self.recurrent.weight, self.inward.bias, second)
        ]
        held = [m[None] for m in memory]
        # has_biases, layers, dropout, training, bidirectional, batch_first
        how = (True, 1, 0.0, self.training, False, True)
        y, *memory_out = self._kernel(x, held, weights, how)
        return y, tuple(m[0] for m in memory_out)

    @abstractmethod
    def _kernel(
        self, x: Tensor, held: list[Tensor], weights: list[Tensor], how: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        """Return the result of torch's kernel: outputs, then the last hidden states."""


class RNN(Recurrent):
    """h[t] = tanh(W x[t] + U h[t-1] + b)."""

    n_gates = 1

    def _cell(
        self, from_input: Tensor, from_memory: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return (torch.tanh(from_input + from_memory),)

    def _kernel(
        self, x: Tensor, held: list[Tensor], weights: list[Tensor], how: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        return torch.rnn_tanh(x, held[0], weights, *how)


class LSTM(Recurrent):
    """Gates i, f, g, o; the hidden states are (h, c)."""

    n_gates = 4
    n_hidden_states = 2

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        *,
        backend: RecurrentBackend = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(d_model, d_hidden, backend=backend, generator=generator)
        assert self.inward.bias is not None
        self.inward.bias.detach()[self.d_hidden : 2 * self.d_hidden] = 1.0  # forget gate

    def _cell(
        self, from_input: Tensor, from_memory: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        i, f, g, o = (from_input + from_memory).chunk(4, dim=-1)
        c = f.sigmoid() * memory[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def _kernel(
        self, x: Tensor, held: list[Tensor], weights: list[Tensor], how: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        return torch.lstm(x, held, weights, *how)


class GRU(Recurrent):
    """Gates r, z, n. `recurrent` has a bias too, because r multiplies it in n."""

    n_gates = 3
    recurrent_bias = True

    def _cell(
        self, from_input: Tensor, from_memory: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        hidden = from_input.shape[-1] // 3
        r, z = (from_input[:, : 2 * hidden] + from_memory[:, : 2 * hidden]).sigmoid().chunk(2, dim=-1)
        n = torch.tanh(from_input[:, 2 * hidden :] + r * from_memory[:, 2 * hidden :])
        return (n + z * (memory[0] - n),)

    def _kernel(
        self, x: Tensor, held: list[Tensor], weights: list[Tensor], how: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        return torch.gru(x, held[0], weights, *how)
