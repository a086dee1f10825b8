"""Linear attention: a kernel replaces the softmax, so the past is a matrix of fixed size.

Katharopoulos et al. 2020, Transformers are RNNs, arXiv:2006.16236. Difference from softmax attention: the weight of
key j for query i is phi(q_i) phi(k_j) with phi(x) = elu(x) + 1 > 0 (eq. 7), not exp(q_i k_j). The sum over j then
becomes a recurrence (eqs. 9, 16 to 20):

    S_i = g S_(i-1) + phi(k_i) [v_i, 1]^T           y_i = (phi(q_i)^T S_i)[:-1] / (phi(q_i)^T S_i)[-1]

The 1 appended to each value makes the divisor one more column. g is 1 in the paper. `decay` learns one g in (0, 1)
per head, initialized as the fixed g of RetNet (Sun et al. 2023, arXiv:2307.08621, eq. 6).

Three equal forms:

- `linear_attention_reference`: all T^2 weights, the definition;
- `linear_attention`, for training: chunks of C positions with C^2 weights inside and S between chunks. The work is
  T C d inside and T d^2 between, in batched products;
- `linear_attention_step`, for decoding: one position, one update of S.

Two subtle parts. S is fp32 for any input type: in bf16 it would stop growing after about 256 positive terms. And S
must be reset at document borders, which fall inside chunks. Positions therefore have the number of their run of equal
segments; a chunk passes on the sum of its last run, and an earlier sum reaches positions of the same run only.

Shapes: q, k [B, H, T, d] after phi; v [B, H, T, dv]; state S [B, H, d, dv + 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.linear import Linear
from whorl.nn.mixer import StateCacheSpec, check_state

CHUNK = 64  # at C = d, the quadratic part of a chunk costs as much as the rest
EPS = 1e-6


def elu_features(x: Tensor) -> Tensor:
    """Return phi(x) = elu(x) + 1 in fp32: x + 1 above 0 and e^x below (e^x - 1 + 1 would round small values to 0)."""
    x = x.float()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, segments: Tensor | None = None
) -> Tensor:
    """Return the weighted mean of v by weights q_i k_j g^(i-j) of every allowed pair: the definition. -> [B, H, T, dv] fp32.

    q, k: [B, H, T, d] positive; v: [B, H, T, dv]; log_decay: [H] log g, or None; segments: [B, T].
    """
    length = q.shape[2]
    step = torch.arange(length, device=q.device)
    distance = step[:, None] - step[None, :]
    weights = (q.float() @ k.float().transpose(-1, -2)).masked_fill(distance < 0, 0.0)
    if log_decay is not None:
        weights = weights * (log_decay.float()[:, None, None] * distance.clamp(min=0)).exp()
    if segments is not None:
        weights = weights * (segments[:, None, :, None] == segments[:, None, None, :])
    return (weights @ v.float()) / (weights.sum(-1, keepdim=True) + EPS)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, T, dv] fp32 and the state after the last position, in time linear in T.

    q, k, v, log_decay: as in the reference. state: [B, H, d, dv + 1] fp32, zeros at a start. document_ids: [B, T]
    non-decreasing integers, the number of borders up to each position. Document 0 continues the state.
    """
    q, k, v = q.float(), k.float(), F.pad(v.float(), (0, 1), value=1.0)
    length = q.shape[2]
    whole = length - length % chunk
    parts = []
    before = (
        None if document_ids is None else torch.zeros_like(document_ids[:, 0])
    )  # the document of the state
    for start, stop, size in ((0, whole, chunk), (whole, length, length - whole)):
        if start == stop:
            continue
        q_, k_, v_ = (t[:, :, start:stop] for t in (q, k, v))
        runs_ = None if document_ids is None else document_ids[:, start:stop]
        y, state = _chunks(q_, k_, v_, state, log_decay, runs_, before, size)
        before = None if runs_ is None else runs_[:, -1]
        parts.append(y)
    y = torch.cat(parts, dim=2)
    return y[..., :-1] / (y[..., -1:] + EPS), state


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    log_decay: Tensor | None,
    runs: Tensor | None,
    before: Tensor | None,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, dv + 1] and the state over T / size whole chunks at once; the state is a loop."""
    n = q.shape[2] // size
    q, k, v = (t.view(*t.shape[:2], n, size, -1) for t in (q, k, v))  # [B, H, N, C, ...]
    step = torch.arange(size, device=q.device)
    weights = (q @ k.transpose(-1, -2)).tril()  # [B, H, N, C, C]
    carry: Tensor | None = None  # factor of the previous state after a chunk: [B or 1, H, N, 1, 1]
    arriving, leaving = q, k
    if log_decay is not None:
        log_g = log_decay.float()[:, None, None]  # [H, 1, 1]
        distance = (step[:, None] - step).clamp(min=0)
        weights = weights * (log_g * distance).exp()[:, None]
        arriving = q * (log_g * (step + 1)[:, None]).exp()[:, None]
        leaving = k * (log_g * (size - 1 - step)[:, None]).exp()[:, None]
        carry = (log_g * size).exp()[None, :, :, None].expand(-1, -1, n, -1, -1)
    if runs is not None:
        assert before is not None
        runs = runs.view(-1, n, size)  # [B, N, C]
        last = runs[:, :, -1:]
        previous = torch.cat([before[:, None, None], last[:, :-1]], dim=1)  # [B, N, 1]
        weights = weights * (runs[..., :, None] == runs[..., None, :])[:, None]
        arriving = arriving * (runs == previous)[:, None, ..., None]
        leaving = leaving * (runs == last)[:, None, ..., None]
        same = (last == previous)[:, None, ..., None].to(q.dtype)
        carry = same if carry is None else carry * same
    sums = leaving.transpose(-1, -2) @ v  # [B, H, N, d, dv + 1]
    memories = []
    for i in range(n):
        memories.append(memory)
        memory = sums[:, :, i] + (memory if carry is None else memory * carry[:, :, i])
    y = weights @ v + arriving @ torch.stack(memories, dim=2)
    return y.flatten(2, 3), memory


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, dv] fp32 and the new state for one position. q, k: [B, H, d]; v: [B, H, dv]."""
    if log_decay is not None:
        state = state * log_decay.float().exp()[:, None, None]
    state = state + k.float()[..., :, None] * F.pad(v.float(), (0, 1), value=1.0)[..., None, :]
    y = (q.float()[..., None, :] @ state).squeeze(-2)
    return y[..., :-1] / (y[..., -1:] + EPS), state


@dataclass
class LinearState:
    """State of one layer. recurrent_state: [B, H, head_dim, head_dim + 1] fp32, of the same size at any length.

    segment: [B] of the newest position, from the first call with segments.
    """

    recurrent_state: Tensor
    length: int = 0
    segment: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        return self.recurrent_state.nbytes + (0 if self.segment is None else self.segment.nbytes)


class LinearAttention(nn.Module):
    """Linear attention layer, a `Mixer`: x [B, T, d_model] -> [B, T, d_model].

    Args:
        head_dim: d_model / n_heads by default.
        decay: a learned g per head, initialized to RetNet's 1 - 2^-(5+h).
        chunk: positions per chunk in training.

    Raises:
        ConfigError: n_heads does not divide d_model and no head_dim is given; chunk is below 1.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        decay: bool = False,
        chunk: int = CHUNK,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % n_heads:
            raise ConfigError(
                f"n_heads is {n_heads} and d_model is {d_model}",
                expected="n_heads that divides d_model, or a head_dim",
            )
        if chunk < 1:
            raise ConfigError(f"chunk is {chunk}", expected="1 or more positions")
        self.n_heads, self.head_dim, self.chunk = n_heads, head_dim or d_model // n_heads, chunk
        width = n_heads * self.head_dim
        self.q, self.k, self.v = (
            Linear(d_model, width, std=d_model**-0.5, generator=generator) for _ in range(3)
        )
        self.out = Linear(width, d_model, std=0.0)
        # sigmoid(decay) = g
        start = torch.logit(1 - 2.0 ** (-5 - torch.arange(n_heads, dtype=torch.float64)))
        self.decay = nn.Parameter(start.float()) if decay else None

    def cache_spec(self) -> StateCacheSpec:
        """Return that a sequence has one state, of fixed size."""
        return StateCacheSpec()

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> LinearState:
        """Return an empty state. capacity and dtype are ignored: the state never grows, and is an fp32 sum."""
        return LinearState(torch.zeros(batch, self.n_heads, self.head_dim, self.head_dim + 1, device=device))

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: LinearState | None = None,
    ) -> Tensor:
        """Return linear attention, as in `Mixer`. Positions are ignored. The state carries no gradient.

        A border is a change of segment: an id that returns is a new document. As in `KeyValueState`, positions before
        the first segments have segment 0, and a call without segments continues the last document.
        """
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.n_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = elu_features(q), elu_features(k)
        log_decay = None if self.decay is None else F.logsigmoid(self.decay.float())
        if state is None:
            memory = torch.zeros(batch, self.n_heads, self.head_dim, self.head_dim + 1, device=x.device)
        else:
            check_state(batch, length, len(state.recurrent_state), state.length)
            memory = state.recurrent_state
        runs = None if segments is None else self._document_ids(segments, state)
        if state is not None and length == 1:
            if runs is not None:
                memory = memory * (runs[:, :, None, None] == 0)
            y, memory = linear_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], memory, log_decay)
            y = y[:, :, None]
        else:
            y, memory = linear_attention(q, k, v, memory, log_decay, runs, self.chunk)
        if state is not None:
            state.recurrent_state = memory.detach()
            state.length += length
            state.segment = state.segment if segments is None else segments[:, -1].clone()
        out: Tensor = self.out(y.to(x.dtype).transpose(1, 2).reshape(batch, length, -1))
        return out

    @staticmethod
    def _document_ids(segments: Tensor, state: LinearState | None) -> Tensor:
        """Return the number of borders between the state and each position, [B, T]. segments: [B, T]."""
        if state is None or not state.length:
            first = segments[:, :1]
        else:
            first = torch.zeros_like(segments[:, :1]) if state.segment is None else state.segment[:, None]
        before = torch.cat([first, segments[:, :-1]], dim=1)
        return (segments != before).cumsum(dim=1)
