"""Recurrent layers: a past of fixed size, taken in one position at a time.

With x[t] the input, h[t] what is carried on (and is the output), s the logistic sigmoid and * elementwise:

- `RNN` (Elman 1990, Finding Structure in Time):  h[t] = tanh(W x[t] + U h[t-1] + b). Through the products with U the
  gradient of an early position shrinks or grows geometrically.
- `LSTM` (Hochreiter & Schmidhuber 1997, Long Short-Term Memory; with the forget gate of Gers et al. 2000, Learning to
  Forget): a second memory c, which is added to and not multiplied by a matrix, so that gradients last.
      i, f, o = s(W x[t] + U h[t-1] + b), g = tanh(the same of its own)
      c[t] = f * c[t-1] + i * g                        h[t] = o * tanh(c[t])
- `GRU` (Cho et al. 2014, arXiv:1406.1078, eq. 5 to 8): the LSTM with one memory: what is written (1 - z) is what is let go.
      r, z = s(W x[t] + U h[t-1] + b)                  n = tanh(W_n x[t] + b_n + r * (U_n h[t-1] + b'_n))
      h[t] = (1 - z) * n + z * h[t-1]
  The paper has U_n (r * h[t-1]). Here r comes after the product, as in every fast kernel: all three products are then one.

The products with x of all positions are one matrix product; the loop over time has the one with U. That loop is the
definition. Where no document begins inside of a row, torch's own kernels walk through time in C++; a test holds the two
together. Everything runs in fp32 at least: a recurrence feeds its rounding errors back to itself.

The subtle parts. Memory starts at zero for every document of a packed row: what arrives at its first position is
multiplied by 0. The forget gate starts with a bias of 1 (Gers et al., sec. 4): at 0 half of the memory would go at each
step.

Shapes: x [B, T, d_model]; gates [B, T, n_gates * d_hidden]; memory [B, d_hidden] each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError, one_of
from whorl.nn.linear import Linear

RecurrentBackend = Literal["auto", "loop", "fused"]


def upcast(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def document_starts(segments: Tensor | None, last: Tensor | None, length: int) -> Tensor | None:
    """[B, T] True where a document begins and something else came before, or None if that is nowhere asked for.

    An id that returns after another one is a new document.

    Args:
        segments: [B, T] or None: every row goes on with what it was in.
        last: [B] the segment of the position before the first, or None if none has been named.
        length: positions before; as in every mixer they lie in segment 0 until one is named.
    """
    if segments is None:
        return None
    if last is None:
        last = torch.zeros_like(segments[:, 0]) if length else segments[:, 0]
    return segments != torch.cat([last[:, None], segments[:, :-1]], dim=1)


@dataclass
class RecurrentState:
    """memory: one tensor [B, d_hidden] for each thing carried on (h; for an LSTM h and c), of one size whatever the length;
    segment: [B] of the newest position, once segments have been given."""

    hidden: tuple[Tensor, ...]
    length: int = 0
    segment: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(m.nbytes for m in self.hidden) + (0 if self.segment is None else self.segment.nbytes)


class Recurrent(nn.Module):
    """What the three share: a `Mixer`.  x: [B, T, d_model] -> [B, T, d_model].

    Weights: `inward` [n_gates * d_hidden, d_model] with a bias, `recurrent` [n_gates * d_hidden, d_hidden]; gates in torch's
    order. `out`, back to d_model, only where d_hidden differs; it starts at 0 as the last layer of every branch here.

    Args:
        d_hidden: features carried on; d_model by default.
        path: "loop" (the definition), "fused" (torch's kernels), "auto": fused where no document begins inside of a row.
        generator: of the initial weights; the recurrent ones are orthogonal (Saxe et al. 2013, arXiv:1312.6120), so that
            what goes around neither grows nor shrinks.

    Raises:
        ConfigError: d_hidden is below 1, or the path is unknown. In `forward`: x does not fit, the state is of other rows,
            or the path is "fused" and a memory must be emptied inside of a row.
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
            raise ConfigError(f"path is {backend!r}", expected=one_of(backend, get_args(RecurrentBackend)))
        self.d_model, self.d_hidden, self.backend = d_model, d_hidden, backend
        gates = self.n_gates * d_hidden
        self.inward = Linear(d_model, gates, std=d_model**-0.5, bias=True, generator=generator)
        self.recurrent = Linear(d_hidden, gates, std=0.0, bias=self.recurrent_bias)
        for gate in range(self.n_gates):
            block = self.recurrent.weight.detach()[gate * d_hidden : (gate + 1) * d_hidden]
            nn.init.orthogonal_(block, generator=generator)
        self.out = Linear(d_hidden, d_model, std=0.0) if d_hidden != d_model else None

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> RecurrentState:
        """Empty. Capacity is of no account; dtype only if it is wider than fp32."""
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
        """As `Mixer` says; positions are of no account. What the state keeps carries no gradient. Behind a state, no
        segments mean that each row goes on in its last document."""
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ConfigError(f"x has the shape {list(x.shape)}", expected=f"[B, T, {self.d_model}]")
        if state is not None and state.hidden[0].shape[0] != x.shape[0]:
            raise ConfigError(
                f"the state is of {state.hidden[0].shape[0]} rows and x of {x.shape[0]}",
                expected="as many rows",
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would write the loop out, T times
    def _run_sequence(
        self, x: Tensor, memory: tuple[Tensor, ...], begins: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x: [B, T, d_model]; begins: [B, T] where memory is emptied first -> (h of all positions, the last memory)."""
        resets = begins is not None and bool(begins.any())
        if self.backend == "loop" or resets:
            if self.backend == "fused":
                raise ConfigError(
                    "path is 'fused' and a document begins inside of a row", expected="path 'auto' or 'loop'"
                )
            return self._loop(x, memory, begins if resets else None)
        return self._fused(x, memory)

    def _loop(
        self, x: Tensor, memory: tuple[Tensor, ...], begins: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The definition."""
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

    def _cell(
        self, from_input: Tensor, from_memory: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """One step.  from_input, from_memory: [B, n_gates * d_hidden], biases in them -> the new memory."""
        raise NotImplementedError

    def _fused(self, x: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same by torch's kernel."""
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

    def _kernel(
        self, x: Tensor, held: list[Tensor], weights: list[Tensor], how: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError


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
    """Gates i, f, g, o; the memory is (h, c)."""

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
        self.inward.bias.detach()[self.d_hidden : 2 * self.d_hidden] = 1.0  # f

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
    """Gates r, z, n. `recurrent` has a bias too: in n it stands inside of what r multiplies."""

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
