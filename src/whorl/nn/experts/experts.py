"""E two-layer MLPs, each applied to the tokens routed to it: the definition and a fast path.

    y_n = sum over experts e that hold token n of  w_ne * down_e(act(up_e x_n))

Dropless experts as grouped products (MegaBlocks, Gale et al. 2022, arXiv:2211.15841): assignments are sorted by expert, so
each expert's tokens are one contiguous slice without padding. `apply_experts_reference` is the definition;
`apply_experts` has a hand-written backward and does less work:

- One expert's work is done while its slice is in cache: up, activation, down, add to y. The backward keeps the sorted
  tokens and the hidden activations before the nonlinearity.
- The router's weight w multiplies the *hidden* activations a: w (D a) = D (w a). Its gradient is <dy, D a> = <D^T dy, a>,
  and D^T dy is needed anyway, so the outputs of single experts are never stored.
- Frozen experts skip the products of their gradients. fp32 products use the library that was timed to be faster on
  this machine (`matmul`).

The subtle part: each expert has separate matrices, not one stacked [E, ...] parameter. Products are per expert anyway, and
`train/learner/update.py` selects optimizers by parameter name. `experts.up.3` can have a separate learning rate, be
frozen, or use Muon, which takes matrices. `stacked` converts to the stacked layout.

Shapes: x [N, d]; up_e [W, d] with W = 2 hidden if gated (gate first) else hidden; down_e [d, hidden]; A assignments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from whorl.errors import ConfigError, one_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _ExpertActivation:
    """A nonlinearity f, its backward (upstream, input) -> gradient, and whether it is gated: f(gate) * up."""

    f: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    gated: bool


def _relu2(h: Tensor) -> Tensor:
    return F.relu(h).square()


def _relu2_backward(upstream: Tensor, h: Tensor) -> Tensor:
    return 2 * upstream * F.relu(h)


_gelu_tanh = partial(F.gelu, approximate="tanh")
_gelu_tanh_backward = partial(aten.gelu_backward, approximate="tanh")

EXPERT_ACTIVATIONS: dict[str, _ExpertActivation] = {
    "swiglu": _ExpertActivation(F.silu, aten.silu_backward, True),
    "geglu": _ExpertActivation(_gelu_tanh, _gelu_tanh_backward, True),  # as in `nn/mlp.py`
    "relu2": _ExpertActivation(_relu2, _relu2_backward, False),
    "gelu": _ExpertActivation(F.gelu, aten.gelu_backward, False),
    "gelu_tanh": _ExpertActivation(_gelu_tanh, _gelu_tanh_backward, False),
}


def apply_experts_reference(
    x: Tensor, tokens: Tensor, weights: Tensor, counts: Tensor, ups: Sequence[Tensor], downs: Sequence[Tensor], kind: str
) -> Tensor:  # fmt: skip
    """Return the outputs by the definition. Shapes as in `apply_experts`."""
    y = torch.zeros_like(x)
    sizes = counts.tolist()
    parts = zip(torch.split(tokens, sizes), torch.split(weights, sizes), ups, downs, strict=True)
    for chosen, weight, up, down in parts:
        h = F.linear(x[chosen], up.to(x.dtype))
        if EXPERT_ACTIVATIONS[kind].gated:
            gate, h = h.chunk(2, dim=-1)
            h = EXPERT_ACTIVATIONS[kind].f(gate) * h
        else:
            h = EXPERT_ACTIVATIONS[kind].f(h)
        y = y.index_add(0, chosen, F.linear(h, down.to(x.dtype)) * weight[:, None].to(x.dtype))
    return y


MIN_SPEEDUP = (
    1.2  # required speedup; timing noise must not decide, or two runs would differ in their last bits
)


forced_library: Literal["mkl", "onednn"] | None = (
    None  # the library of fp32 products; None selects the faster one
)


@cache
def _onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies fp32 matrices clearly faster here than the default library; timed once, 5 ms.

    On some processors with AVX-512 the default (MKL) uses AVX2 only.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    left, right = torch.ones(128, 256), torch.ones(512, 256)

    def seconds(onednn: bool) -> float:
        times = []
        for _ in range(9):
            began = time.perf_counter()
            _onednn_matmul(left, right.t()) if onednn else left @ right.t()
            times.append(time.perf_counter() - began)
        return min(times)

    with torch.no_grad():
        return MIN_SPEEDUP * seconds(True) < seconds(False)


def _onednn_matmul(left: Tensor, right: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    return made


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right for matrices, exact in its type. fp32 uses the faster library of this processor."""
    fp32 = left.dtype == torch.float32 and left.device.type == "cpu"
    if fp32 and (_onednn_is_faster() if forced_library is None else forced_library == "onednn"):
        return _onednn_matmul(left, right)
    return left @ right


class _GroupedExperts(torch.autograd.Function):
    """The fast path (see the top of this file). `matrices` are all ups, then all downs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: Tensor, weights: Tensor, bounds: list[int], kind: str, *matrices: Tensor
    ) -> Tensor:
        n, act = len(bounds) - 1, EXPERT_ACTIVATIONS[kind]
        ctx.bounds, ctx.kind, ctx.n_tokens, ctx.kept = bounds, kind, len(x), matrices[0].dtype
        matrices = tuple(
            m.to(x.dtype) for m in matrices
        )  # where types differ, one cast serves both directions
        ups, downs = matrices[:n], matrices[n:]
        hidden = downs[0].shape[1]
        scale = weights.to(x.dtype)[:, None]  # [A, 1]
        y = torch.zeros_like(x)
        gathered = x.index_select(0, tokens)  # [A, d]
        before: list[Tensor] = []  # for each expert with tokens: hidden activations before the nonlinearity
        for e, (a, b) in enumerate(pairwise(bounds)):
            if a == b:
                continue
            h = matmul(gathered[a:b], ups[e].t())  # [a:b, W]
            active = act.f(h[:, :hidden])
            if act.gated:
                active.mul_(h[:, hidden:])
            active.mul_(scale[a:b])
            y.index_add_(0, tokens[a:b], matmul(active, downs[e].t()))
            before.append(h)
        ctx.save_for_backward(gathered, tokens, weights, *matrices, *before)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gathered, tokens, weights, *rest = ctx.saved_tensors
        bounds, act = ctx.bounds, EXPERT_ACTIVATIONS[ctx.kind]
        n, dtype = len(bounds) - 1, gathered.dtype
        ups, downs, before = rest[:n], rest[n : 2 * n], iter(rest[2 * n :])
        hidden = downs[0].shape[1]
        scale = weights.to(dtype)[:, None]
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        wants_up, wants_down = ctx.needs_input_grad[5 : 5 + n], ctx.needs_input_grad[5 + n :]
        dx = gathered.new_zeros(ctx.n_tokens, gathered.shape[1]) if wants_x else None
        d_weights = torch.zeros_like(weights) if wants_weight else None
        # An expert without tokens gets a gradient of zero, not None.
        d_ups, d_downs = (
            [torch.zeros_like(m, dtype=ctx.kept) if want and a == b else None for m, want, (a, b) in group]
            for group in (
                zip(ups, wants_up, pairwise(bounds), strict=True),
                zip(downs, wants_down, pairwise(bounds), strict=True),
            )
        )
        for e, (a, b) in enumerate(pairwise(bounds)):
            if a == b:
                continue
            chosen, h, w = tokens[a:b], next(before), scale[a:b]
            dy_e = dy.index_select(0, chosen)
            g = matmul(dy_e, downs[e])  # D^T dy, [a:b, hidden]
            f = act.f(h[:, :hidden])
            active = f * h[:, hidden:] if act.gated else f
            if d_weights is not None:
                d_weights[a:b] = (g * active).sum(dim=1, dtype=torch.float32)
            if wants_down[e]:
                d_downs[e] = matmul(dy_e.t(), active * w).to(ctx.kept)
            if not wants_x and not wants_up[e]:
                continue
            g.mul_(w)
            if act.gated:
                dh = torch.empty_like(h)
                torch.mul(g, f, out=dh[:, hidden:])
                dh[:, :hidden] = act.backward(g.mul_(h[:, hidden:]), h[:, :hidden])
            else:
                dh = act.backward(g, h)
            if wants_up[e]:
                d_ups[e] = matmul(dh.t(), gathered[a:b]).to(ctx.kept)
            if dx is not None:
                dx.index_add_(0, chosen, matmul(dh, ups[e]))
        return dx, None, d_weights, None, None, *d_ups, *d_downs


def apply_experts(
    x: Tensor, tokens: Tensor, weights: Tensor, counts: Tensor, ups: Sequence[Tensor], downs: Sequence[Tensor], kind: str
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, [N, d] in the type of x; zero where a token has no expert.

    Args:
        x: [N, d]; tokens, weights: [A], sorted by expert; counts: [E], summing to A (see `Routing`).
        ups: E of [W, d]; downs: E of [d, hidden]; kind: a key of `EXPERT_ACTIVATIONS`.
    """
    bounds = [0]
    for count in counts.tolist():
        bounds.append(bounds[-1] + count)
    return _GroupedExperts.apply(x, tokens, weights, bounds, kind, *ups, *downs)  # type: ignore[no-any-return, no-untyped-call]


class Experts(nn.Module):
    """The matrices of E experts: `up.e` [W, d] and `down.e` [d, hidden].

    `down` starts at zero, as in `MLP`, so that the first output of a new layer is 0.

    Raises:
        ConfigError: an unknown `kind`.
    """

    def __init__(
        self,
        n_experts: int,
        d: int,
        hidden: int,
        kind: str = "swiglu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if kind not in EXPERT_ACTIVATIONS:
            raise ConfigError(f"kind is {kind!r}", expected=one_of(kind, list(EXPERT_ACTIVATIONS)))
        if hidden < 1 or d < 1:
            raise ConfigError(f"d is {d}, hidden is {hidden}", expected="at least 1 each")
        self.kind = kind
        width = 2 * hidden if EXPERT_ACTIVATIONS[kind].gated else hidden
        self.up = nn.ParameterList(
            torch.randn(width, d, generator=generator) * 0.6 * d**-0.5 for _ in range(n_experts)
        )
        self.down = nn.ParameterList(torch.zeros(d, hidden) for _ in range(n_experts))

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, x: Tensor, tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        return apply_experts(x, tokens, weights, counts, list(self.up), list(self.down), self.kind)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return copies: up [E, W, d], down [E, d, hidden]."""
        return torch.stack([p.detach() for p in self.up]), torch.stack([p.detach() for p in self.down])
