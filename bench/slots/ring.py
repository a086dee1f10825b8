"""Slots through two processes: the rate of small ones, and the bytes per second of large ones against memcpy.

    python bench/slots/ring.py

A producer in a separate process fills slots, and the reader takes them. Small slots have 64 bytes and measure the
protocol alone. Large slots have 1 MB: the producer copies it in, and the reader copies it out. The peer is memcpy in
one process between arrays larger than every cache, which measures the machine's memory. A slot moves each byte twice,
in two processes at the same time, and mostly in caches.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.slots._ring_producers import Bytes, Copies

from whorl.slots import FIFOReader, ProducerProcess, SlotRing, Spec

ROUNDS, COPIES = sized(5, 1), sized(256, 16)


def slots_a_second(n: int, n_slots: int, count: int, out: NDArray[np.uint8]) -> float:
    """Slots of n bytes a second, each copied out."""
    ring = SlotRing(Spec.from_dataclass(Bytes, N=n), n_slots)
    with FIFOReader(ring, [ProducerProcess(ring, Copies(n))]) as records:
        for _ in range(n_slots * 2):
            out[:] = next(records).data.values
        began = time.perf_counter()
        for _ in range(count):
            out[:] = next(records).data.values
        return count / (time.perf_counter() - began)


def main() -> None:
    parse(__doc__)
    small = [slots_a_second(64, 64, sized(30_000, 500), np.empty(64, np.uint8)) for _ in range(ROUNDS)]
    middle = sorted(small)[ROUNDS // 2]
    claim(
        "small slots through two processes", ours=round(middle), peer=15_000,
        peer_name="bar", variant="small", unit="slots/s", ratio=middle / 15_000, bar=1.0,
        ok=middle >= 15_000, samples=[round(s) for s in small],
    )  # fmt: skip
    size, out = 1 << 20, np.empty(1 << 20, np.uint8)
    pairs = []
    for _ in range(ROUNDS):
        source, target = (np.ones((COPIES, size), np.uint8) for _ in range(2))  # larger than every cache
        began = time.perf_counter()
        for _ in range(4):
            np.copyto(target, source)
        copied = 4 * COPIES * size / (time.perf_counter() - began)
        pairs.append((slots_a_second(size, 8, sized(4000, 40), out) * size, copied))
    ours, peer = sorted(pairs, key=lambda p: p[0] / p[1])[ROUNDS // 2]
    claim(
        "1 MB slots through two processes against memcpy", ours=round(ours / 1e9, 2), peer=round(peer / 1e9, 2),
        peer_name="memcpy", variant="large", unit="GB/s",
        ratio=ours / peer, bar=0.6, ok=ours / peer >= 0.6,
        samples=[[round(a / 1e9, 2), round(b / 1e9, 2)] for a, b in pairs],
    )  # fmt: skip


if __name__ == "__main__":
    main()
