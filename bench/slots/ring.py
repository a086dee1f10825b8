"""Slots through two processes: small ones a second, and large ones in bytes a second against memcpy.

    .venv/bin/python bench/slots/ring.py

A producer in a process of its own fills slots, the reader takes them. Small: 64 bytes, the asking alone. Large: 1
MB, which the producer copies in and the reader copies out; memcpy of arrays beyond every cache, in one process, is what
the machine's memory gives; a slot moves each byte twice, by two processes at the same time, and mostly in caches.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.slots._ring_producers import Bytes, Copies

from whorl.slots import FIFOReader, ProducerProcess, SlotRing, Spec

ROUNDS = 5


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
    small = [slots_a_second(64, 64, 30_000, np.empty(64, np.uint8)) for _ in range(ROUNDS)]
    middle = sorted(small)[ROUNDS // 2]
    claim(
        "small slots through two processes", ours=round(middle), peer=15_000, unit="slots/s", ratio=middle / 15_000, bar=1.0,
        ok=middle >= 15_000, samples=[round(s) for s in small],
    )  # fmt: skip
    size, out = 1 << 20, np.empty(1 << 20, np.uint8)
    pairs = []
    for _ in range(ROUNDS):
        source, target = (
            np.ones((256, size), np.uint8) for _ in range(2)
        )  # beyond every cache, as memcpy's own figure is
        began = time.perf_counter()
        for _ in range(4):
            np.copyto(target, source)
        copied = 4 * 256 * size / (time.perf_counter() - began)
        pairs.append((slots_a_second(size, 8, 4000, out) * size, copied))
    ours, peer = sorted(pairs, key=lambda p: p[0] / p[1])[ROUNDS // 2]
    claim(
        "1 MB slots through two processes against memcpy", ours=round(ours / 1e9, 2), peer=round(peer / 1e9, 2), unit="GB/s",
        ratio=ours / peer, bar=0.6, ok=ours / peer >= 0.6,
        samples=[[round(a / 1e9, 2), round(b / 1e9, 2)] for a, b in pairs],
    )  # fmt: skip


if __name__ == "__main__":
    main()
