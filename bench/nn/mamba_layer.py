"""Training time (forward and backward) of one Mamba layer against the row length, compared with softmax attention.

    python bench/nn/mamba_layer.py [--quick]

Both layers are complete, of equal width, with one row per batch, so that only the length varies. Linear means: the
slope of log time over log length is at most 1.1 from the second length on; at the first length call overhead matters.
The claim's ratio is attention's time over Mamba's at the longest row, in this machine's compute type. The samples hold
both types, the length from which Mamba is faster, and the speed-up of the scan over the reference loop under autograd.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse_quick
from torch import Tensor, nn

from whorl.machine.device_probe import probe
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.mamba import Mamba, selective_scan, selective_scan_reference
from whorl.nn.rotary import Rotary, rotary_tables

D_MODEL, HEAD_DIM = 256, 64


def milliseconds(call: Callable[[], Tensor], leaves: list[Tensor], times: int) -> float:
    """Median of forward and backward, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        y = call()
        torch.autograd.grad(y, leaves, torch.ones_like(y))
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken[1:])[times // 2]


def crossing(lengths: list[int], ours: list[float], peer: list[float]) -> float | None:
    """The length from which on ours is faster, by straight lines in the logarithms; None if it never is."""
    gaps = [math.log(p / o) for p, o in zip(peer, ours, strict=True)]
    if gaps[-1] < 0:
        return None
    last = max((i for i, g in enumerate(gaps) if g < 0), default=-1)
    if last < 0:
        return float(lengths[0])
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share


def layers(length: int, dtype: torch.dtype, times: int) -> tuple[float, float]:
    """Milliseconds of (Mamba, attention) on one row."""
    generator = torch.Generator().manual_seed(0)
    mamba = Mamba(D_MODEL, generator=generator)
    heads = D_MODEL // HEAD_DIM
    attention = MultiHeadAttention(
        D_MODEL, heads, head_dim=HEAD_DIM, rotary=Rotary(HEAD_DIM, 10_000.0, dtype), qk_norm=1e-6, scale="learned",
        projections="fused", backend="blocked", generator=generator,
    )  # fmt: skip
    for out in (mamba.out, attention.out):
        nn.init.normal_(out.weight, std=0.02, generator=generator)
    tables = rotary_tables(torch.arange(length), HEAD_DIM, dtype=dtype)
    x = torch.randn(1, length, D_MODEL, generator=generator).to(dtype).requires_grad_()
    return (
        milliseconds(lambda: mamba(x), [x, *mamba.parameters()], times),
        milliseconds(lambda: attention(x, tables), [x, *attention.parameters()], times),
    )


def scans(times: int) -> tuple[float, float]:
    """Milliseconds of (the chunked scan, its definition) on 8 rows of 256."""
    generator = torch.Generator().manual_seed(0)
    x, step = (torch.randn(8, 256, 2 * D_MODEL, generator=generator) for _ in range(2))
    b, c = (torch.randn(8, 256, 16, generator=generator) for _ in range(2))
    a = -torch.arange(1.0, 17.0).repeat(2 * D_MODEL, 1)
    leaves = [t.requires_grad_() for t in (x, nn.functional.softplus(step - 4), a, b, c)]
    memory = torch.zeros(8, 16, 2 * D_MODEL)
    chunked, loop = (
        milliseconds(lambda scan=scan: scan(*leaves, memory)[0], leaves, times)
        for scan in (selective_scan, selective_scan_reference)
    )
    return chunked, loop


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    machine.apply()
    lengths = [256, 512, 1024] if quick else [256, 512, 1024, 2048, 4096]
    times = 3 if quick else 9
    samples, measured = [], {}
    for dtype in dict.fromkeys((torch.float32, machine.torch_dtype)):
        ours, peer = [], []
        for length in lengths:
            mamba, attention = layers(length, dtype, times)
            ours.append(mamba), peer.append(attention)
            samples.append({"dtype": str(dtype), "length": length, "mamba": mamba, "attention": attention})
            print(
                f"{dtype} {length:5d} positions: mamba {mamba:.1f} ms, attention {attention:.1f} ms",
                flush=True,
            )
        slope = math.log(ours[-1] / ours[1]) / math.log(lengths[-1] / lengths[1])
        cross = crossing(lengths, ours, peer)
        samples.append({"dtype": str(dtype), "slope": slope, "crossing": cross})
        print(f"{dtype} slope {slope:.2f}; Mamba is faster from {cross} positions on", flush=True)
        measured[dtype] = ours[-1], peer[-1], slope
    chunked, loop = scans(times)
    samples.append({"scan": chunked, "scan_by_loop": loop})
    print(f"scan {chunked:.1f} ms, its definition {loop:.1f} ms")
    last, attention, slope = measured[machine.torch_dtype]
    ratio = attention / last
    claim(
        f"Mamba trains in linear time, and faster than softmax attention at {lengths[-1]} positions of width {D_MODEL}",
        ours=last, peer=attention, unit="ms", ratio=ratio, bar=1.0, ok=ratio >= 1.0 and slope <= 1.1,
        samples=samples, quick=quick, peer_name="softmax attention",
    )  # fmt: skip


if __name__ == "__main__":
    main()
