"""The products of a training step and of a decoding step, and the bound of each.

Two kinds: what training and the engine choose by timing when they begin (attention, MLP, head, Muon, the optimizer's passes,
the engine's step), and the linear layers. A linear layer with a weight [n, k] and m tokens has three products in training,
each of 2 m n k FLOPs:

    forward           y  = x W^T     [m, k] [k, n]
    input gradient    dx = dy W      [m, n] [n, k]
    weight gradient   dW = dy^T x    [n, m] [m, k]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from whorl.engine.cache.layer_cache import page_windows
from whorl.engine.cpu import unsupported_reason
from whorl.engine.cpu.candidates import WEIGHT_DTYPES
from whorl.engine.cpu.runner import make_runner
from whorl.machine.device_probe import DTYPE_ABBREVIATIONS
from whorl.machine.kernel_choice import ChoiceRequest, listed_requests
from whorl.models import TransformerConfig, make_model
from whorl.models.transformer_cost import linear_shapes
from whorl.nn import mlp
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.compiler import meta_device
from whorl.nn.cpu.orthogonalize import choose_orthogonalize
from whorl.train.lm.kernels import choose_step_kernels
from whorl.train.optim.optimizers import POLAR_EXPRESS, orthogonalize

Way = Callable[[], object]
PAGE_SIZE, PAGES, ROWS = 16, 8, 8  # of the engine's timed steps


@dataclass(frozen=True)
class MatrixProduct:
    """One product of a linear layer.

    Attributes:
        name: operation, layer and sizes. calls: a step's number of such products.
        flops, bytes: of one call; bytes are the operands and the result, once.
        ways: that in which the layer runs, first, and in fp32 with the casts of operands and result, for another type.
    """

    name: str
    calls: int
    flops: float
    bytes: float
    ways: dict[str, Way] = field(repr=False, compare=False)


def linear_products(model: TransformerConfig, tokens: int, dtype: str) -> Iterator[MatrixProduct]:
    """Yield the products of the linear layers of a training step on `tokens` tokens. dtype: of activations."""
    kind: torch.dtype = getattr(torch, dtype)
    for layer, (n, k, calls) in linear_shapes(model).items():
        x, w, dy = (torch.randn(*shape).to(kind) for shape in ((tokens, k), (n, k), (tokens, n)))
        for operation, a, b in (
            ("forward", x, w.t()),
            ("input_gradient", dy, w),
            ("weight_gradient", dy.t(), x),
        ):
            sizes = *a.shape, b.shape[1]
            ways: dict[str, Way] = {"direct": partial(torch.matmul, a, b)}
            if kind != torch.float32:
                ways["fp32"] = partial(_product_in_fp32, a, b)
            yield MatrixProduct(
                f"{operation} {layer} {'x'.join(map(str, sizes))} {DTYPE_ABBREVIATIONS[dtype]}", calls,
                2.0 * prod(sizes), float(kind.itemsize * (a.numel() + b.numel() + len(a) * b.shape[1])), ways,
            )  # fmt: skip


def _product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def training_choices(
    model: TransformerConfig, rows: int, length: int, muon_every: int, dtype: torch.dtype
) -> list[tuple[ChoiceRequest, int]]:
    """Return the choices of one replica's step on `rows` of `length` tokens, with the number of calls in a step.

    dtype: bf16 or fp32.
    0 calls: part of another choice (the loss, of the head), or no matrix product (the optimizer's passes).
    """
    with meta_device():
        network = make_model(model, dtype=dtype)
    with listed_requests() as requests:
        choose_step_kernels(network, rows, length)
        for batch in muon_batches(model, muon_every):
            choose_orthogonalize(batch, POLAR_EXPRESS, dtype, orthogonalize)
    layers = Counter(
        f"attention {rows}x{mixer.n_heads}x{length}x{mixer.head_dim}"
        for mixer in network.layer_mixers()
        if isinstance(mixer, MultiHeadAttention)
    )
    layers.update(
        f"mlp {rows * length}x{part.up.weight.shape[1]}x{part.up.weight.shape[0]}"
        for part in network.modules()
        if isinstance(part, mlp.MLP) and part.is_plain_relu2
    )
    once = ("head", "orthogonalize")
    return [
        (request, layers[" ".join(request.name.split()[:2])] or int(request.name.startswith(once)))
        for request in requests
    ]


def engine_choices(model: TransformerConfig) -> list[ChoiceRequest]:
    """Return the engine's choices between torch and the native step, for whole steps with each type of weights."""
    with listed_requests() as requests:
        for kind in WEIGHT_DTYPES:
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            network = make_model(model, torch.Generator().manual_seed(0), dtype).eval().requires_grad_(False)
            if unsupported_reason(network) is not None:
                break
            windows = page_windows(mixer.cache_spec() for mixer in network.layer_mixers()) or [None]
            make_runner(
                network, dict.fromkeys(windows, PAGES), PAGE_SIZE, ROWS, PAGES * PAGE_SIZE,
                weight_dtype="int8" if kind == "int8" else None,
            )  # fmt: skip
    return requests


def muon_batches(model: TransformerConfig, muon_every: int) -> list[tuple[int, int, int]]:
    """Return the batches of matrices of one shape that a step orthogonalizes: number, shorter side, longer side."""
    shapes: dict[tuple[int, int], int] = {}
    for n, k, calls in linear_shapes(model).values():
        shapes[min(n, k), max(n, k)] = shapes.get((min(n, k), max(n, k)), 0) + calls
    return [(max(1, round(count / muon_every)), *sides) for sides, count in shapes.items()]


@dataclass(frozen=True)
class Bounds:
    """GEMM rates by type in FLOP/s, and bytes/s of a copy by its bytes (read and written), with a number of threads."""

    flops: dict[str, float]
    bandwidth: dict[int, float]

    def seconds(self, flops: float, n_bytes: float, dtypes: Iterable[str]) -> float:
        """Return the least time of a product that may run in any of these types."""
        return max(
            flops / max(self.flops[kind] for kind in dtypes), n_bytes / self.bandwidth[self.size(n_bytes)]
        )

    def size(self, n_bytes: float) -> int:
        """Return the measured size to use for a product of this many bytes."""
        return min((size for size in self.bandwidth if size >= n_bytes), default=max(self.bandwidth))

    def at_least(self, other: Bounds) -> Bounds:
        """Return the better of both: on busy cores several threads may have measured less than one."""
        flops = {kind: max(rate, other.flops[kind]) for kind, rate in self.flops.items()}
        return Bounds(
            flops, {size: max(rate, other.bandwidth[size]) for size, rate in self.bandwidth.items()}
        )
