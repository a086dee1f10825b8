"""Linear attention: a kernel takes the place of the softmax, so the past fits in a matrix of fixed size.

Katharopoulos et al. 2020, Transformers are RNNs, arXiv:2006.16236. Told as the difference from softmax attention: the
weight of key j for query i is not exp(q_i k_j) but phi(q_i) phi(k_j), with phi(x) = elu(x) + 1 > 0 (their eq. 7). The
sum over j can then be taken before the query is known (eq. 9), and is a recurrence (eqs. 16 to 20):

    S_i = g S_(i-1) + phi(k_i) [v_i, 1]^T           y_i = (phi(q_i)^T S_i)[:-1] / (phi(q_i)^T S_i)[-1]

The 1 appended to each value makes the divisor one more column of the same sum. g is 1 in the paper; `decay` learns one
g in (0, 1) for each head, as the fixed g of RetNet (Sun et al. 2023, arXiv:2307.08621, eq. 6), from whose values it
starts: without it a head cannot forget, and nothing tells near from far.

Three forms that a test holds together:

- `linear_attention_reference`: all T^2 weights, the definition;
- `linear_attention`, for training: rows are cut into chunks of C; inside of a chunk the C^2 weights, between chunks S.
  The work is T C d inside and T d^2 between: linear in T, and all but sums of T / C matrices in batched products;
- `linear_attention_step`, for decoding: one position, one update of S.

The subtle parts. S sums thousands of positive terms, so it is fp32 whatever comes in: in bf16 it would stop growing
after some 256 of them. And documents of a packed row: S must be emptied at a border, but borders fall inside of chunks.
Positions are numbered by the run of equal segments they lie in; a chunk hands on what its last run has summed, and
what came from before reaches only the positions of the same run.

Shapes: q, k [B, H, T, d] after phi; v [B, H, T, dv]; memory S [B, H, d, dv + 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.linear import Linear
from whorl.nn.mixer import check_state

CHUNK = 64  # the quadratic part of a chunk costs as much as the rest where C is about d
EPS = 1e-6


def elu_features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1, in fp32: x + 1 above 0 and e^x below (elu's own e^x - 1 + 1 would round small ones to 0)."""
    x = x.float()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, segments: Tensor | None = None
) -> Tensor:
    """The definition: weights q_i k_j g^(i-j) of every allowed pair, divided by their sum.

    q, k: [B, H, T, d] positive; v: [B, H, T, dv]; log_decay: [H] log g, or None; segments: [B, T] -> [B, H, T, dv] fp32.
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
    """The same outputs in time linear in T.  -> ([B, H, T, dv] fp32, the memory behind the last position).

    q, k, v, log_decay: as in the reference; memory: [B, H, d, dv + 1] fp32, what came before (zeros at a start);
    runs: [B, T] integers that never fall, the number of borders up to each position: run 0 continues the memory.
    """
    q, k, v = q.float(), k.float(), F.pad(v.float(), (0, 1), value=1.0)
    length = q.shape[2]
    whole = length - length % chunk
    parts = []
    before = (
        None if document_ids is None else torch.zeros_like(document_ids[:, 0])
    )  # the run that the memory belongs to
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
    """T / size whole chunks at once; only the sums between them are a loop.  -> (y [B, H, T, dv + 1], memory)."""
    n = q.shape[2] // size
    q, k, v = (t.view(*t.shape[:2], n, size, -1) for t in (q, k, v))  # [B, H, N, C, ...]
    step = torch.arange(size, device=q.device)
    weights = (q @ k.transpose(-1, -2)).tril()  # [B, H, N, C, C]
    kept: Tensor | None = (
        None  # the share of the memory before a chunk that is left behind it: [B or 1, H, N, 1, 1]
    )
    arriving, leaving = q, k
    if log_decay is not None:
        log_g = log_decay.float()[:, None, None]  # [H, 1, 1]
        distance = (step[:, None] - step).clamp(min=0)
        weights = weights * (log_g * distance).exp()[:, None]
        arriving = q * (log_g * (step + 1)[:, None]).exp()[:, None]
        leaving = k * (log_g * (size - 1 - step)[:, None]).exp()[:, None]
        kept = (log_g * size).exp()[None, :, :, None].expand(-1, -1, n, -1, -1)
    if runs is not None:
        assert before is not None
        runs = runs.view(-1, n, size)  # [B, N, C]
        last = runs[:, :, -1:]
        previous = torch.cat([before[:, None, None], last[:, :-1]], dim=1)  # [B, N, 1]
        weights = weights * (runs[..., :, None] == runs[..., None, :])[:, None]
        arriving = arriving * (runs == previous)[:, None, ..., None]
        leaving = leaving * (runs == last)[:, None, ..., None]
        same = (last == previous)[:, None, ..., None].to(q.dtype)
        kept = same if kept is None else kept * same
    sums = leaving.transpose(-1, -2) @ v  # [B, H, N, d, dv + 1]
    memories = []
    for i in range(n):
        memories.append(memory)
        memory = sums[:, :, i] + (memory if kept is None else memory * kept[:, :, i])
    y = weights @ v + arriving @ torch.stack(memories, dim=2)
    return y.flatten(2, 3), memory


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One position.  q, k: [B, H, d]; v: [B, H, dv] -> ([B, H, dv] fp32, the new memory)."""
    if log_decay is not None:
        state = state * log_decay.float().exp()[:, None, None]
    state = state + k.float()[..., :, None] * F.pad(v.float(), (0, 1), value=1.0)[..., None, :]
    y = (q.float()[..., None, :] @ state).squeeze(-2)
    return y[..., :-1] / (y[..., -1:] + EPS), state


@dataclass
class LinearState:
    """memory: [B, H, head_dim, head_dim + 1] fp32, of one size whatever the length; segment: [B] of the newest position,
    once one was named."""

    recurrent_state: Tensor
    length: int = 0
    segment: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        return self.recurrent_state.nbytes + (0 if self.segment is None else self.segment.nbytes)


class LinearAttention(nn.Module):
    """A `Mixer` with kernel weights.  x: [B, T, d_model] -> [B, T, d_model].

    Args:
        head_dim: by default d_model / n_heads.
        decay: a learned g for each head, started at RetNet's 1 - 2^-(5+h).
        chunk: positions a chunk in training.

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
        # sigmoid of it is g
        start = torch.logit(1 - 2.0 ** (-5 - torch.arange(n_heads, dtype=torch.float64)))
        self.decay = nn.Parameter(start.float()) if decay else None

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> LinearState:
        """Empty; capacity and dtype are of no account: the state never grows, and is a sum, kept in fp32."""
        return LinearState(torch.zeros(batch, self.n_heads, self.head_dim, self.head_dim + 1, device=device))

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: LinearState | None = None,
    ) -> Tensor:
        """As `Mixer` says; positions are of no account (order is in the sums and the decay). The state carries no gradient.

        A border is where a segment differs from the one before it: an id that returns is a new document. As in
        `KeyValueState`, what a state took in before the first named segment is of segment 0, and without a name it goes on
        in its last document.
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
        """segments: [B, T] -> [B, T] how many borders lie between the state and each position."""
        if state is None or not state.length:
            first = segments[:, :1]
        else:
            first = torch.zeros_like(segments[:, :1]) if state.segment is None else state.segment[:, None]
        before = torch.cat([first, segments[:, :-1]], dim=1)
        return (segments != before).cumsum(dim=1)
