"""E two-layer perceptrons, each applied to the tokens that a router sent it; the fast path and its definition.

    y_n = sum over experts e that hold token n of  w_ne * down_e(act(up_e x_n))

Dropless experts as grouped products (MegaBlocks, Gale et al. 2022, arXiv:2211.15841): assignments are sorted by expert, so
each expert's tokens are one contiguous slice, and nothing is padded and nothing dropped. `apply_experts_reference` is
the definition, a loop that autograd differentiates; `apply_experts` has its own backward and does less:

- All of one expert's work is done while its slice is in cache: up, activation, down, add to y. Kept for the backward are the
  sorted tokens and the hidden activations before the non-linearity.
- The router's weight w multiplies the *hidden* activations a: w (D a) = D (w a). Its gradient is <dy, D a> = <D^T dy, a>,
  and D^T dy is needed anyway, so the outputs of single experts are never stored.
- Experts that are frozen skip the products of their gradients, and fp32 products go through the library that is fast on
  this machine (`product`, timed on the spot). On an AMD one that halves their time; `Linear` does not do so yet.

Why each expert has its own matrices, and not one stacked [E, ...] parameter. Products are per expert anyway, so a stack buys
no speed, and `train/learner/update.py` treats parameters by name: `experts.up.3` can have its own learning rate, be frozen, or
go to Muon, which wants matrices. Scaling slices of a stacked gradient would not do that: Adam and Muon divide the
scale out again. `stacked` and `load_stacked` convert to and from the layout of others.

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
    """A non-linearity f, its backward (upstream, input) -> gradient, and whether it gates: f(gate) * up."""

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
    """The definition. Shapes as in `apply_experts`."""
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
    1.2  # times as fast: what is only noise must not decide, or two runs would differ in their last bits
)


forced_library: Literal["mkl", "onednn"] | None = (
    None  # the library of fp32 products; None: whichever is faster
)


@cache
def _onednn_is_faster() -> bool:
    """Whether oneDNN, also in torch, multiplies fp32 matrices clearly faster here than the usual library; timed once, 5 ms.

    On some processors with AVX-512 the usual one (MKL) keeps to AVX2.
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
    """left @ right for matrices, exact in its type; in fp32 through whichever library is fast on this processor."""
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
        matrices = tuple(m.to(x.dtype) for m in matrices)  # where types differ, one cast for both directions
        ups, downs = matrices[:n], matrices[n:]
        hidden = downs[0].shape[1]
        scale = weights.to(x.dtype)[:, None]  # [A, 1]
        y = torch.zeros_like(x)
        gathered = x.index_select(0, tokens)  # [A, d]
        before: list[Tensor] = []  # for each expert with tokens: hidden activations before the non-linearity
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
        # an expert without tokens has a gradient of zero, not none
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
    """Each token through its experts.

    Args:
        x: [N, d]; tokens, weights: [A], sorted by expert; counts: [E], summing to A (see `Routing`).
        ups: E of [W, d]; downs: E of [d, hidden]; kind: a key of `KINDS`.

    Returns:
        [N, d] in the type of x; zero where a token has no expert.
    """
    bounds = [0]
    for count in counts.tolist():
        bounds.append(bounds[-1] + count)
    return _GroupedExperts.apply(x, tokens, weights, bounds, kind, *ups, *downs)  # type: ignore[no-any-return, no-untyped-call]


class Experts(nn.Module):
    """The matrices of E experts: `up.e` [W, d] and `down.e` [d, hidden].

    `down` starts at zero, as in `MLP`: a new layer outputs nothing.

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
        """Copies: up [E, W, d], down [E, d, hidden]."""
        return torch.stack([p.detach() for p in self.up]), torch.stack([p.detach() for p in self.down])

    @torch.no_grad()
    def load_stacked(self, up: Tensor, down: Tensor) -> None:
        """The reverse of `stacked`.

        Raises:
            ConfigError: another shape.
        """
        for name, own, given in (("up", self.up, up), ("down", self.down, down)):
            want = (len(own), *own[0].shape)
            if tuple(given.shape) != want:
                raise ConfigError(f"stacked {name} has shape {tuple(given.shape)}", expected=f"{want}")
            for parameter, value in zip(own, given, strict=True):
                parameter.copy_(value)
