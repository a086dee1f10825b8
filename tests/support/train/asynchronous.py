"""Workers that fail, importable by a process, and producers whose order a test decides."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import torch

from whorl.objectives.next_token import Loss
from whorl.slots import SerialProducer
from whorl.train.asynchronous.problems import LanguageModelProblem
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


class NaNBatches(LanguageModelProblem):
    """The batches of worker 1 have a loss of NaN."""

    def make(self) -> Any:
        network, update = super().make()
        objective = update.objective

        def with_nan(batch: Any) -> Loss:
            loss = objective(batch)
            return Loss(loss.total * batch["scale"], loss.count, loss.metrics)

        return network, replace(update, objective=with_nan)

    def batches(self, first: int, worker: int, workers: int) -> Any:
        scale = torch.tensor(float("nan") if worker else 1.0)
        for batch in super().batches(first, worker, workers):
            yield [{**micro_batch, "scale": scale} for micro_batch in batch]


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
