"""Training time against the row length: Mamba and linear attention, each with softmax attention.

    python bench/nn/time_by_length.py [--quick]

One row, forward and backward, medians, so that only the length varies. Mamba is compared as a whole layer with a layer of
multi-head attention of equal width. Linear attention (4 heads of 64, with decay) is compared without projections. The
exponent is the slope of log time over log length, without short rows, where call overhead matters. The samples hold the
length from which the layer is faster than attention, and Mamba in both types.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse_quick
from torch import Tensor, nn

from whorl.machine.device_probe import probe
from whorl.nn import causal_attention
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.attention.linear import elu_features, linear_attention
from whorl.nn.mamba import Mamba
from whorl.nn.rotary import Rotary, rotary_tables

D_MODEL, HEAD_DIM, HEADS = 256, 64, 4
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384]
Pass = tuple[Callable[[], Tensor], list[Tensor]]  # forward, and the tensors that get gradients


def mamba_layers(length: int, dtype: torch.dtype) -> dict[str, Pass]:
    generator = torch.Generator().manual_seed(0)
    mamba = Mamba(D_MODEL, generator=generator)
    attention = MultiHeadAttention(
        D_MODEL, HEADS, head_dim=HEAD_DIM, rotary=Rotary(HEAD_DIM, 10_000.0, dtype), qk_norm=1e-6, scale="learned",
        projections="fused", backend="blocked", generator=generator,
    )  # fmt: skip
    for out in (mamba.out, attention.out):
        nn.init.normal_(out.weight, std=0.02, generator=generator)
    tables = rotary_tables(torch.arange(length), HEAD_DIM, dtype=dtype)
    x = torch.randn(1, length, D_MODEL, generator=generator).to(dtype).requires_grad_()
    return {
        "ours": (lambda: mamba(x), [x, *mamba.parameters()]),
        "softmax": (lambda: attention(x, tables), [x, *attention.parameters()]),
    }


def linear_layers(length: int, dtype: torch.dtype) -> dict[str, Pass]:
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(3))
    memory, log_decay = torch.zeros(1, HEADS, HEAD_DIM, HEAD_DIM + 1), torch.full((HEADS,), -0.01)

    def linear() -> Tensor:
        return linear_attention(elu_features(q), elu_features(k), v, memory, log_decay)[0].to(dtype)

    return {
        "ours": (linear, [q, k, v]),
        "softmax": (lambda: causal_attention(q * HEAD_DIM**-0.5, k, v), [q, k, v]),
    }


def milliseconds(step: Pass, times: int) -> float:
    """Median of forward and backward, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        y = step[0]()
        torch.autograd.grad(y, step[1], torch.ones_like(y))
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken[1:])[times // 2]


def exponent(lengths: Sequence[int], times: Sequence[float]) -> float:
    """Least squares in log-log: 1 is linear, 2 quadratic."""
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def crossing(lengths: Sequence[int], ours: Sequence[float], peer: Sequence[float]) -> float | None:
    """The length from which on ours is faster, by straight lines in the logarithms; None if it never is."""
    gaps = [math.log(p / o) for p, o in zip(peer, ours, strict=True)]
    if gaps[-1] < 0:
        return None
    last = max((i for i, g in enumerate(gaps) if g < 0), default=-1)
    if last < 0:
        return float(lengths[0])
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    machine.apply()
    own = machine.torch_dtype
    for variant, name, layers, longest, bar, dtypes in (
        ("mamba", "Mamba", mamba_layers, 4096, 1.1, [torch.float32, own]),
        ("linear", "linear attention", linear_layers, 16384, 1.15, [own]),
    ):
        lengths = [n for n in LENGTHS if n <= (1024 if quick else longest)]
        for dtype in dict.fromkeys(dtypes):
            rows = []
            for length in lengths:
                times = 3 if quick else max(3, min(15, 30_000 // length))
                row = {kind: milliseconds(step, times) for kind, step in layers(length, dtype).items()}
                rows.append({"length": length, **row})
                print(f"{name}, {dtype}, {rows[-1]}", flush=True)
            ours, peer = ([row[kind] for row in rows] for kind in ("ours", "softmax"))
            tail = [i for i, n in enumerate(lengths) if quick or n >= 1024]
            slopes = [exponent([lengths[i] for i in tail], [t[i] for i in tail]) for t in (ours, peer)]
            at = crossing(lengths, ours, peer)
            print(f"{name}, {dtype}: exponents {slopes}, faster from {at} positions on", flush=True)
        ratio = peer[-1] / ours[-1]
        claim(
            f"{name} trains in linear time, and faster than softmax attention at {lengths[-1]} positions", ours=ours[-1],
            peer=peer[-1], unit="ms", ratio=ratio, bar=1.0, ok=ratio >= 1.0 and slopes[0] <= bar, quick=quick,
            samples=[*rows, {"exponents": slopes, "faster_from": at}], peer_name="softmax attention", variant=variant,
        )  # fmt: skip


if __name__ == "__main__":
    main()
