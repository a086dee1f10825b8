"""Workers that fail, importable by a process, and producers whose order a test decides."""

from __future__ import annotations

import os
import signal
from typing import Any

from whorl.slots import SerialProducer
from whorl.train.asynchronous.worker import Worker


class KilledWorker(Worker):
    """The worker of odd records ends at its third one."""

    def fill(self, slot: Any, weights: Any, rng: Any) -> int:
        if slot.sequence == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fill(slot, weights, rng)


class NaNWorker(Worker):
    """The worker of odd records sends NaN from its third one on."""

    def fill(self, slot: Any, weights: Any, rng: Any) -> int:
        count = super().fill(slot, weights, rng)
        if slot.sequence % 2 and slot.sequence >= 5:
            slot.data.dense[0] = float("nan")
        return count


class AllNaNWorker(Worker):
    """Every record has a loss that is not finite."""

    def fill(self, slot: Any, weights: Any, rng: Any) -> int:
        count = super().fill(slot, weights, rng)
        slot.data.loss[...] = float("inf")
        return count


class FastFirst(SerialProducer):
    """Worker 0 is ready whenever it has a request; the others only if it has none."""

    @staticmethod
    def first_ready(producers: Any, timeout: float) -> Any:
        return sorted((p for p in producers if p._asked), key=lambda p: p.number)[:1]
