"""The server: a learner that trains on the records of workers.

A step on the gradient of one of W workers has a W-th of the batch. Its learning rate is that of the whole batch over sqrt(W)
(the square-root rule of Adam: Malladi et al. 2022, arXiv:2205.10287). Local steps keep the rate: the mean of W workers has
the noise of the whole batch.

A run ends after a number of batches, or after seconds; the schedule follows the same measure. Evaluation does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whorl.slots import Board, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.train.asynchronous.gradient import Gradient, gradient_spec, received_loss
from whorl.train.asynchronous.reader import ClockReader
from whorl.train.asynchronous.worker import DONE, Worker, optimizer_dtype
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import StopTraining, Stopwatch, train_loop
from whorl.train.learner.update import ParamOptim


class Nesterov:
    """Gradient descent with Nesterov's momentum, as `torch.optim.SGD` computes it; `Update.apply`.

    tables: [P], which numbers are of sparse tables. Their changes are added, since a mean would halve the change of a row
    that one of two workers has moved. records: whose mean the gradient is.
    """

    def __init__(self, lr: float, momentum: float, tables: Tensor) -> None:
        self.lr, self.momentum, self.tables = lr, momentum, tables
        self.velocity, self.records = torch.zeros(()), 1

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], gradient: Tensor) -> dict[str, float]:
        """Move the parameters by their flat gradient [P]."""
        self.velocity = self.momentum * self.velocity + gradient
        step = self.lr * (gradient + self.momentum * self.velocity)
        step = torch.where(self.tables, self.records * gradient, step)
        for p, part in zip(parameters, torch.split(step, [p.numel() for p in parameters]), strict=True):
            p.sub_(part.view_as(p))
        return {}


class Server:
    """The learner, and the board of its weights. `train` runs it.

    curve: tokens, seconds and value of each evaluation. moved: rows that workers moved without a lock.
    """

    def __init__(self, workers: Sequence[Worker], steps: int, seconds: float | None) -> None:
        self.problem, self.method, self.n = workers[0].problem, workers[0].method, len(workers)
        self.total, self.limit, self.curve = steps, seconds, list[dict[str, float]]()
        self.records = self.arrived = self.tokens = self.moved = self.steps = 0
        self.began = self.paused = 0.0
        self.network, update = self.problem.make()
        named, whole = dict(self.network.named_parameters()), self.method.sends_changes
        self.tables = [] if whole else update.names_for("sparse_adagrad")
        self.unlocked = self.tables if self.method.unlocked else []
        tables = [named[name] for name in self.tables]
        dense = [named[name] for name in update.param_optims if name not in self.tables]
        kinds = [(name, kind) for name in self.unlocked for kind in ("square", "moved")]
        extra = {f"{name}/{kind}": torch.zeros(len(named[name])) for name, kind in kinds} | {
            DONE: torch.zeros(1)
        }
        self.board = Board.from_tensors({n: p.detach() for n, p in named.items()} | extra)
        max_rows = 1 if self.unlocked else self.problem.max_rows
        self.ring: SlotRing[Gradient] = SlotRing(gradient_spec(dense, tables, max_rows), self.n)
        objective: Any = partial(received_loss, dense, [] if self.unlocked else tables)
        optims = {name: optim for name, optim in update.param_optims.items() if name not in self.unlocked}
        own = replace(update, objective=objective, param_optims=optims)
        if whole:
            optims = dict.fromkeys(optims, ParamOptim("adamw", 1.0))
            is_table = [
                torch.full((named[n].numel(),), n in update.names_for("sparse_adagrad")) for n in optims
            ]
            self.outer = Nesterov(self.method.outer_lr, self.method.momentum, torch.cat(is_table))
            own = replace(own, param_optims=optims, clip_norm=math.inf, apply=self.outer)
        rows, stateless = max_rows * self.n, optims if whole else ()
        shared = SharedState.allocate(self.network, optims, 1, rows, stateless=stateless)
        for name in self.tables:  # a worker reads rows where the server writes them
            shared.weights[name] = self.board.tensor(name)
        own_updates, dtype = [own] if dense else [], optimizer_dtype(self.network)
        self.learner = Learner(self.network, own_updates, shared, dtype=dtype)

    def elapsed(self) -> float:
        """Seconds since the work on the first records began, without evaluation."""
        return time.perf_counter() - self.began - self.paused if self.began else 0.0

    def done(self) -> float:
        """Return the synchronous steps done."""
        if self.limit is not None:
            return self.elapsed() / self.limit * self.total
        return self.records * max(1, self.method.local_steps) / self.n

    def minibatches(self, slots: list[Slot[Gradient]]) -> list[list[dict[str, Tensor]]]:
        """Return the records of a step."""
        self.began = self.began or time.perf_counter() - max(float(slot.data.seconds) for slot in slots)
        self.arrived, self.steps = len(slots), self.steps + 1
        if self.method.sends_changes:
            self.outer.records = len(slots)
        self.tokens += sum(slot.length for slot in slots)
        self.moved += rows_moved(slots) if self.unlocked else 0
        return [[slot.tensors() for slot in slots]]

    def lr_scale(self, step: int) -> float:
        """Return the factor on the learning rate of the step in progress."""
        share = self.n**-0.5 if self.method.staleness != 0 else 1.0
        return 1.0 if self.method.sends_changes else share * self.problem.lr_scale(self.done())

    def publish(self, step: int) -> None:
        """Publish the weights; tables are on the board already."""
        self.records += self.arrived
        named = {n: t for n, t in self.learner.weights.items() if n not in self.tables}
        self.board.publish({**named, DONE: torch.tensor([self.done()])}, step)

    def figures(self, reader: ClockReader) -> dict[str, Any]:
        """Return what `train` returns."""
        of_server = {name: getattr(self, name) for name in ("curve", "tokens", "steps", "moved")}
        of_reader = {name: dict(getattr(reader, name)) for name in ("lags", "refused", "left_out")}
        waited = reader.idle / (reader.idle + reader.busy)
        lost = self.moved - sum(int(self.board.tensor(f"{name}/moved").sum()) for name in self.unlocked)
        return {**of_server, **of_reader, "waited": waited, "lost": lost, "seconds": self.elapsed()}


def rows_moved(slots: Sequence[Slot[Gradient]]) -> int:
    """Return how many rows the workers of these records moved."""
    return sum(int(slot.data.n_rows.sum()) for slot in slots)


def train(
    workers: Sequence[Worker],
    steps: int,
    *,
    seconds: float | None = None,
    evaluate: Callable[[nn.Module], float] = lambda network: 0.0,
    evaluations: int = 1,
    serial: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train by the method of the workers; return the network and the figures of the run.

    Args:
        steps: batches of all workers together. seconds: in their place; then `steps` is the length of the schedule.
        evaluate: called `evaluations` times; "curve" has its values, with tokens and seconds.
        serial: the workers take turns in this process; one worker gives the bits of the synchronous learner.

    Returns:
        "lags": records by staleness in versions. "refused", "left_out": as in `ClockReader`. "waited": share of the workers'
        time. "moved", "lost": rows moved without a lock, and those of them that another's write has undone.

    Raises:
        ProducerError: no worker is left.
    """
    server = Server(workers, steps, seconds)
    start: Any = SerialProducer if serial else ProducerProcess
    handles = [start(server.ring, worker, number=n, board=server.board) for n, worker in enumerate(workers)]
    reader = ClockReader(server.ring, handles, server.method.staleness, server.board, log)

    def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        ended = server.done() >= steps
        if ended or server.done() * evaluations / steps >= len(server.curve) + 1:
            at = {"tokens": float(server.tokens), "seconds": server.elapsed()}
            before = time.perf_counter()
            server.curve.append({**at, "value": evaluate(server.network)})
            server.paused += time.perf_counter() - before
        if ended:
            raise StopTraining

    try:
        with suppress(StopTraining):
            train_loop(
                server.learner, reader, server.minibatches, last=1 << 62, lr_scale=server.lr_scale,
                sync_weights=server.publish, on_step_end=after,
            )  # fmt: skip
        if server.unlocked:
            server.moved += rows_moved(reader.unread())
    finally:
        reader.close()
    return server.network, server.figures(reader)
