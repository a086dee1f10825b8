"""Training time of linear attention against length: its growth, and the length from which it beats softmax attention.

python bench/nn/linear_attention.py [--quick]
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse_quick

from whorl.machine.device_probe import probe
from whorl.nn import causal_attention
from whorl.nn.attention.linear import elu_features, linear_attention

HEADS, HEAD_DIM, DECAY = 4, 64, True


def linear(q, k, v):
    memory = torch.zeros(q.shape[0], HEADS, HEAD_DIM, HEAD_DIM + 1)
    log_decay = torch.full((HEADS,), -0.01) if DECAY else None
    y, _ = linear_attention(elu_features(q), elu_features(k), v, memory, log_decay)
    return y.to(q.dtype)


def softmax(q, k, v):
    return causal_attention(q * HEAD_DIM**-0.5, k, v)


def milliseconds(attention, length: int, dtype: torch.dtype, repeats: int) -> float:
    """Forward and backward of one row; the median."""
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn_like(q)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.autograd.grad(attention(q, k, v), (q, k, v), upstream)
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[repeats // 2]


def slope(lengths: list[int], times: list[float]) -> float:
    """Least squares in log-log: 1 is linear, 2 quadratic."""
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def crossing(lengths: list[int], ours: list[float], peer: list[float]) -> float:
    """Length from which on ours is faster, interpolated in log-log; infinite where it never is."""
    gap = [math.log(b / a) for a, b in zip(ours, peer, strict=True)]  # above 0: ours is faster
    if gap[-1] < 0:
        return math.inf
    last = max((i for i, g in enumerate(gap) if g < 0), default=None)
    if last is None:
        return float(lengths[0])
    share = -gap[last] / (gap[last + 1] - gap[last])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** share)


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    machine.apply()
    lengths = [256, 512, 1024] if quick else [256, 512, 1024, 2048, 4096, 8192, 16384]
    rows = []
    for length in lengths:
        repeats = 3 if quick else max(3, min(15, 30_000 // length))
        row = {"length": length}
        for name, attention in (("linear", linear), ("softmax", softmax)):
            row[name] = milliseconds(attention, length, machine.torch_dtype, repeats)
        rows.append(row)
        print(f"{length}: linear {row['linear']:.2f} ms, softmax {row['softmax']:.2f} ms", flush=True)
    ours, peer = ([row[name] for row in rows] for name in ("linear", "softmax"))
    tail = [
        i for i, n in enumerate(lengths) if quick or n >= 1024
    ]  # below, fixed costs are a part of the time
    slopes = [slope([lengths[i] for i in tail], [t[i] for i in tail]) for t in (ours, peer)]
    at = crossing(lengths, ours, peer)
    print(
        f"slopes: linear {slopes[0]:.2f}, softmax {slopes[1]:.2f}; linear is faster from {at:.0f} positions on"
    )
    claim(
        "exponent of linear attention's training time in the length", ours=slopes[0],
        peer=slopes[1], unit="exponent", ratio=slopes[0], bar=1.15, ok=slopes[0] <= 1.15, samples=rows, quick=quick,
        peer_name="softmax attention", variant="exponent",
    )  # fmt: skip
    longest = peer[-1] / ours[-1]
    claim(
        f"linear attention, forward and backward at {lengths[-1]} positions", ours=ours[-1],
        peer=peer[-1], unit="ms", ratio=longest, bar=1.0, ok=longest >= 1.0,
        samples=[{"faster_from": None if math.isinf(at) else round(at)}], quick=quick, peer_name="softmax attention",
    )  # fmt: skip


if __name__ == "__main__":
    main()
