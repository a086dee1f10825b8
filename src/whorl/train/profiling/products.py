"""The matrix products of a training step and of a decoding step of a transformer, with the ways to compute each.

A linear layer with a weight [n, k] and m tokens has three products in training, each of 2 m n k FLOPs:

    forward           y  = x W^T     [m, k] [k, n]
    input gradient    dx = dy W      [m, n] [n, k]
    weight gradient   dW = dy^T x    [n, m] [m, k]

The head and its loss work by chunks of tokens (`objectives/next_token.py`), attention by blocks of queries in batches of
rows times heads (`nn/attention/causal.py`), Muon by batches of matrices of equal shape (`train/optim/optimizers.py`).

The subtle point: a candidate pays for all it needs. The copy of a transposed operand, and the casts of operands and result
to another type, are part of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.machine.device_probe import DTYPE_ABBREVIATIONS
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.models.transformer_cost import attention_layers, linear_shapes
from whorl.nn.attention.causal import QUERY_BLOCK
from whorl.objectives.next_token import CHUNK_LOGITS, MIN_CHUNK_TOKENS
from whorl.train.optim.optimizers import POLAR_EXPRESS, orthogonalize

Way = Callable[[], object]
HEAD_CHUNKS = (128, 256, 512, 1024)
MAX_HEAD_TOKENS = 2048  # timed tokens of the head: its time is proportional to them


@dataclass(frozen=True)
class MatrixProduct:
    """One product, or a group that is chosen together.

    Attributes:
        name: operation, operand and sizes; the name of its choice.
        shape: rows x inner x outer, with the batch before.
        dtype: of the operands.
        calls: a step's number of such products.
        flops, bytes: of one call; bytes are the operands and the result, once.
        ways: makes the candidates by name, the default first, when the product is timed.
    """

    name: str
    shape: str
    dtype: str
    calls: int
    flops: float
    bytes: float
    ways: Callable[[], dict[str, Way]] = field(repr=False, compare=False)


def training_products(
    model: TransformerConfig, rows: int, length: int, dtype: str, muon_every: int = 1
) -> Iterator[MatrixProduct]:
    """Yield the products of one replica's training step on `rows` of `length` tokens.

    Args:
        dtype: of activations.
        muon_every: steps in which each matrix is orthogonalized once.
    """
    tokens = rows * length
    layers = linear_shapes(model)
    for name, (n, k, calls) in layers.items():
        yield from _linear(name, tokens, n, k, dtype, calls)
    yield _head(model, tokens, dtype)
    heads = attention_layers(model)
    for mixer in dict.fromkeys(heads):
        yield from _attention(mixer, rows, length, dtype, heads.count(mixer))
    for count, short, long in muon_batches(model, muon_every):
        yield _muon(count, short, long, dtype)


def muon_batches(model: TransformerConfig, muon_every: int) -> list[tuple[int, int, int]]:
    """Return the batches of matrices of one shape that a step orthogonalizes: number, shorter side, longer side."""
    shapes: dict[tuple[int, int], int] = {}
    for n, k, calls in linear_shapes(model).values():
        shapes[min(n, k), max(n, k)] = shapes.get((min(n, k), max(n, k)), 0) + calls
    return [(max(1, round(count / muon_every)), *sides) for sides, count in shapes.items()]


def _name(operation: str, operand: str, shape: str, dtype: str) -> str:
    return f"{operation} {operand} {shape} {DTYPE_ABBREVIATIONS[dtype]}"


def _product(
    operation: str,
    operand: str,
    sizes: tuple[int, ...],
    dtype: str,
    calls: int,
    ways: Callable[[], dict[str, Way]],
) -> MatrixProduct:
    """sizes: batch (may be left out), rows, inner, outer."""
    batch, (m, k, n) = (sizes[0] if len(sizes) == 4 else 1), sizes[-3:]
    item = getattr(torch, dtype).itemsize
    shape = "x".join(map(str, sizes))
    flops, n_bytes = 2.0 * batch * m * k * n, float(item * batch * (m * k + k * n + m * n))
    return MatrixProduct(_name(operation, operand, shape, dtype), shape, dtype, calls, flops, n_bytes, ways)


def _randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def _linear(operand: str, m: int, n: int, k: int, dtype: str, calls: int) -> Iterator[MatrixProduct]:
    kind: torch.dtype = getattr(torch, dtype)

    def forward() -> dict[str, Way]:
        x, w = _randn(m, k, dtype=kind), _randn(n, k, dtype=kind)
        return _with_fp32(
            kind,
            {"direct": lambda: F.linear(x, w), "transposed": lambda: x @ w.t().contiguous()},
            lambda: F.linear(x.float(), w.float()).to(kind),
        )

    def input_gradient() -> dict[str, Way]:
        dy, w = _randn(m, n, dtype=kind), _randn(n, k, dtype=kind)
        return _with_fp32(
            kind,
            {"direct": lambda: dy @ w, "transposed": lambda: F.linear(dy, w.t().contiguous())},
            lambda: (dy.float() @ w.float()).to(kind),
        )

    def weight_gradient() -> dict[str, Way]:
        dy, x = _randn(m, n, dtype=kind), _randn(m, k, dtype=kind)
        ways: dict[str, Way] = {
            "direct": lambda: dy.t() @ x,
            "transposed": lambda: dy.t().contiguous() @ x,
            "transposed result": lambda: (x.t() @ dy).t(),
            "both transposed": lambda: F.linear(dy.t().contiguous(), x.t().contiguous()),
        }
        return _with_fp32(kind, ways, lambda: dy.float().t() @ x.float())

    yield _product("forward", operand, (m, k, n), dtype, calls, forward)
    yield _product("input_gradient", operand, (m, n, k), dtype, calls, input_gradient)
    yield _product("weight_gradient", operand, (n, m, k), dtype, calls, weight_gradient)


def _with_fp32(kind: torch.dtype, ways: dict[str, Way], wide: Way) -> dict[str, Way]:
    return ways if kind == torch.float32 else {**ways, "fp32": wide}


def _head(model: TransformerConfig, tokens: int, dtype: str) -> MatrixProduct:
    """The head's three products by chunks of tokens, without the softmax between them."""
    kind: torch.dtype = getattr(torch, dtype)
    m, n, k = min(tokens, MAX_HEAD_TOKENS), model.vocab_size, model.d_model
    shape = f"{m}x{k}x{n}"

    def ways() -> dict[str, Way]:
        h, w = _randn(m, k, dtype=kind), _randn(n, k, dtype=kind)

        def by_chunks(size: int) -> Way:
            def work() -> object:
                d_head = torch.zeros(n, k)
                for at in range(0, m, size):
                    part = h[at : at + size]
                    logits = F.linear(part, w)
                    d_hidden = logits @ w
                    d_head += logits.t() @ part
                return d_hidden, d_head

            return work

        default = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // n)
        sizes = dict.fromkeys([min(default, m), *(size for size in HEAD_CHUNKS if size <= m)])
        return {str(size): by_chunks(size) for size in sizes}

    calls = -(-tokens // m)
    item = kind.itemsize
    n_bytes = float(item * (2 * m * k + 2 * n * k) + 4 * n * k)
    return MatrixProduct(
        _name("head", "chunks", shape, dtype), shape, dtype, calls, 6.0 * m * n * k, n_bytes, ways
    )


def _attention(
    mixer: AttentionConfig, rows: int, length: int, dtype: str, calls: int
) -> Iterator[MatrixProduct]:
    """The products of one block of queries against all keys of a row, forward and backward."""
    kind: torch.dtype = getattr(torch, dtype)
    batch, d, queries = rows * mixer.n_heads, mixer.head_dim, min(QUERY_BLOCK, length)
    calls *= -(-length // queries)
    layouts = {  # operation -> (rows, inner, outer), left transposed, right transposed
        "scores": ((queries, d, length), False, True),
        "values": ((queries, length, d), False, False),
        "d_probabilities": ((queries, d, length), False, True),
        "d_queries": ((queries, length, d), False, False),
        "d_values": ((length, queries, d), True, False),
        "d_keys": ((length, queries, d), True, False),
    }

    for operation, (sizes, left, right) in layouts.items():

        def ways(
            sizes: tuple[int, int, int] = sizes, left: bool = left, right: bool = right
        ) -> dict[str, Way]:
            m, k, n = sizes
            a = _randn(batch, k, m, dtype=kind).mT if left else _randn(batch, m, k, dtype=kind)
            b = _randn(batch, n, k, dtype=kind).mT if right else _randn(batch, k, n, dtype=kind)
            out = torch.empty(batch, m, n, dtype=kind)
            found: dict[str, Way] = {
                "batched": lambda: torch.bmm(a, b),
                "looped": lambda: [torch.mm(x, y, out=z) for x, y, z in zip(a, b, out, strict=True)],
            }
            if left or right:
                found["transposed"] = lambda: torch.bmm(a.contiguous(), b.contiguous())
            return _with_fp32(kind, found, lambda: torch.bmm(a.float(), b.float()).to(kind))

        yield _product("attention_product", operation, (batch, *sizes), dtype, calls, ways)


def _muon(count: int, short: int, long: int, dtype: str) -> MatrixProduct:
    """The orthogonalization of `count` matrices of one shape."""
    kind: torch.dtype = getattr(torch, dtype)
    flops = 2.0 * count * len(POLAR_EXPRESS) * short * short * (2 * long + short)

    def ways() -> dict[str, Way]:
        source = _randn(count, short, long, dtype=kind)

        def looped() -> object:
            return [orthogonalize(matrix.clone()) for matrix in source.unsqueeze(1)]

        return _with_fp32(
            kind,
            {"batched": lambda: orthogonalize(source.clone()), "looped": looped},
            lambda: orthogonalize(source.float()),
        )

    shape = f"{count}x{short}x{long}"
    n_bytes = float(kind.itemsize * count * (3 * short * long + 2 * short * short) * len(POLAR_EXPRESS))
    return MatrixProduct(_name("muon", "orthogonalize", shape, dtype), shape, dtype, 1, flops, n_bytes, ways)


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
