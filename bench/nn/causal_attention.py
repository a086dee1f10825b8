"""Blocked causal attention against torch's fused attention, forward and backward, on this CPU with all threads.

python bench/nn/causal_attention.py
python bench/nn/causal_attention.py --quick     # in the dtype of training alone
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse, sized, smoke
from torch.nn import functional as F

from whorl.machine.device_probe import probe
from whorl.nn import causal_attention


def milliseconds(attention, q, k, v, upstream) -> float:
    times = []
    for _ in range(sized(15, 1)):
        began = time.perf_counter()
        torch.autograd.grad(attention(q, k, v), (q, k, v), upstream)
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    a = parse(__doc__, quick={"quick": True})
    machine = probe()
    machine.apply()
    dtypes = (machine.torch_dtype,) if a.quick and not smoke() else (torch.float32, torch.bfloat16)
    rows = []
    for batch, heads, length, d in ((8, 3, 256, 64), (8, 4, 512, 32), (16, 6, 256, 64)):
        for dtype in dtypes:
            q, k, v = (
                torch.randn(batch, heads, length, d, dtype=dtype, requires_grad=True) for _ in range(3)
            )
            upstream = torch.randn_like(q)
            ours = milliseconds(causal_attention, q, k, v, upstream)
            peer = milliseconds(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0),
                q,
                k,
                v,
                upstream,
            )
            rows.append(
                {"shape": [batch, heads, length, d], "dtype": str(dtype), "ours": ours, "torch": peer}
            )
            print(f"{[batch, heads, length, d]} {dtype}: ours {ours:.2f} ms, torch {peer:.2f} ms", flush=True)
    chosen = next(r for r in rows if r["dtype"] == str(machine.torch_dtype))
    ratio = chosen["torch"] / chosen["ours"]
    claim(
        "causal attention at the planned shape", ours=chosen["ours"], peer=chosen["torch"],
        unit="ms", ratio=ratio, bar=1.0, ok=ratio >= 1.0, samples=rows,
        peer_name="torch fused kernel", quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
