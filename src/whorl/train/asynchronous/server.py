"""The server: a learner that trains on the records of workers, and the table of methods.

A step on the gradient of one of W workers has a W-th of the batch. Its learning rate is that of the whole batch over sqrt(W)
(the square-root rule of Adam: Malladi et al. 2022, arXiv:2205.10287), as is that of a worker's local steps.

A run ends after a number of batches, or after seconds; the schedule follows the same measure. Evaluation does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whorl.slots import Board, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.train.asynchronous.gradient import Gradient, Layout, is_finite, received_loss
from whorl.train.asynchronous.reader import ClockReader
from whorl.train.asynchronous.worker import DONE, Method, Problem, Worker
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import StopTraining, Stopwatch, train_loop
from whorl.train.learner.update import ParamOptim, Update

METHODS = {
    "synchronous": Method("parameter server with a barrier: one step on the mean of all gradients"),
    "bounded": Method("parameter server with bounded staleness: at most 2 clocks apart", staleness=2),
    "asynchronous": Method("parameter server: one step on each gradient when it is ready", staleness=None),
    "hogwild": Method("tables moved by the workers without a lock, the rest as synchronous", unlocked=True),
    "local_sgd": Method("16 local steps, then the mean of the weights", local_steps=16),
    "diloco": Method(
        "16 local steps, then a Nesterov step on the mean change", local_steps=16, outer_lr=0.7, momentum=0.9
    ),
}
FOREVER = 1 << 62


@dataclass
class Trained:
    """A trained network and its figures.

    curve: tokens, seconds and result of each evaluation. lags: records by staleness in versions.
    moved, lost: rows that workers moved without a lock, and those of them that another's write has undone.
    refused: records that were not finite, by worker. left_out: why, by worker. waited: share of the workers' time.
    """

    network: nn.Module
    curve: list[dict[str, float]] = field(default_factory=list)
    lags: Mapping[int, int] = field(default_factory=dict)
    refused: Mapping[int, int] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    moved: int = 0
    lost: int = 0


class Server:
    """The learner of a problem and the board of its weights."""

    def __init__(self, problem: Problem, method: Method, workers: int) -> None:
        self.problem, self.method = problem, method
        self.network = problem.network()
        update = problem.update(self.network)
        self.layout = Layout.of(update, whole=method.sends_changes)
        tables = self.layout.tables
        tensors = {n: p.detach() for n, p in self.network.named_parameters()} | {DONE: torch.zeros(1)}
        if method.unlocked:
            sizes = {name: len(tensors[name]) for name in tables}
            tensors |= {f"{name}/{kind}": torch.zeros(n) for name, n in sizes.items() for kind in ("square", "moved")}
        self.board = Board.from_tensors(tensors)
        own = self._update(update)
        stateless = own.param_optims if own.apply is not None else ()
        rows = problem.max_rows * workers
        shared = SharedState.allocate(self.network, own.param_optims, 1, rows, stateless=stateless)
        for name in tables:  # a worker reads rows where the server writes them
            shared.weights[name] = self.board.tensor(name)
        self.learner = Learner(self.network, [own] if own.param_optims else [], shared, dtype=problem.dtype)

    def _update(self, update: Update) -> Update:
        sent = replace(self.layout, tables=[]) if self.method.unlocked else self.layout
        objective: Any = partial(received_loss, self.network, sent)
        if self.method.sends_changes:
            optims = {name: ParamOptim("adamw", 1.0) for name in self.layout.dense}
            outer = Nesterov(self.method.outer_lr, self.method.momentum)
            return replace(update, objective=objective, param_optims=optims, clip_norm=math.inf, apply=outer)
        kept = {n: p for n, p in update.param_optims.items() if n in (*sent.dense, *sent.tables)}
        return replace(update, objective=objective, param_optims=kept)

    def publish(self, version: int, done: float) -> None:
        """Publish the weights, apart from tables, which are on the board."""
        named = {n: t for n, t in self.learner.weights.items() if n not in self.layout.tables}
        self.board.publish({**named, DONE: torch.tensor([done])}, version)


class Nesterov:
    """Gradient descent with Nesterov's momentum, as `torch.optim.SGD` computes it; `Update.apply`."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity: Tensor | None = None

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], gradient: Tensor) -> dict[str, float]:
        """Move the parameters by their flat gradient [P]."""
        self.velocity = gradient.clone() if self.velocity is None else self.velocity.mul_(self.momentum).add_(gradient)
        step = torch.add(gradient, self.velocity, alpha=self.momentum)
        for p, part in zip(parameters, torch.split(step, [p.numel() for p in parameters]), strict=True):
            p.data.sub_(part.view_as(p), alpha=self.lr)
        return {}


def train(
    problem: Problem,
    method: Method,
    workers: int,
    steps: int,
    *,
    seconds: float | None = None,
    slowdown: Sequence[float] = (),
    evaluate: Callable[[nn.Module], float] | None = None,
    evaluations: int = 8,
    serial: bool = False,
    worker: Callable[..., Any] = Worker,
    log: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Train by one method, and return the network and its figures.

    Args:
        steps: batches, each of all workers' shares. seconds: in their place; then `steps` is the length of the schedule.
        slowdown: of each worker, 1 by default.
        evaluate: measured `evaluations` times.
        serial: the workers take turns in this process; with one, the bits of the synchronous learner.

    Raises:
        ProducerError: no worker is left.
    """
    server = Server(problem, method, workers)
    board, layout = server.board, server.layout
    ring: SlotRing[Gradient] = SlotRing(layout.spec(server.network, 1 if method.unlocked else problem.max_rows), workers)
    slow = [*slowdown, *[1.0] * workers][:workers]
    made = [worker(problem, method, workers, factor) for factor in slow]
    start: Any = SerialProducer if serial else ProducerProcess
    handles = [start(ring, each, number=n, board=board) for n, each in enumerate(made)]
    reader = ClockReader(ring, handles, staleness=method.staleness, board=board, accept=is_finite, log=log)
    result = Trained(server.network)
    alone = method.staleness != 0  # a step has the gradient of one worker
    records = arrived = evaluated = 0
    began: float | None = None  # of the first records; the start of processes does not count
    paused = 0.0

    def elapsed() -> float:
        return 0.0 if began is None else time.perf_counter() - began - paused

    def done() -> float:
        return records * method.steps / workers if seconds is None else elapsed() / seconds * steps

    def minibatches(slots: list[Slot[Gradient]]) -> list[list[dict[str, Tensor]]]:
        nonlocal began, arrived
        began = began or time.perf_counter() - max(float(slot.data.seconds) for slot in slots)
        arrived = len(slots)
        result.tokens += sum(slot.length for slot in slots)
        if method.unlocked:
            result.moved += sum(int(slot.data.n_rows.sum()) for slot in slots)
        return [[slot.tensors() for slot in slots]]

    def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        nonlocal evaluated, paused
        result.steps, ended = step, done() >= steps
        if evaluate is not None and (ended or done() >= (evaluated + 1) * steps / evaluations):
            evaluated = int(done() * evaluations / steps)
            before = time.perf_counter()
            at = {"tokens": float(result.tokens), "seconds": elapsed()}
            result.curve.append({**at, "value": evaluate(server.network)})
            paused += time.perf_counter() - before
        if ended:
            raise StopTraining

    def sync(step: int) -> None:
        nonlocal records
        records += arrived
        server.publish(step, done())

    def scale(step: int) -> float:
        return problem.lr_scale(done()) * (workers**-0.5 if alone else 1.0)

    try:
        train_loop(
            server.learner, reader, minibatches, last=FOREVER, on_step_end=after, sync_weights=sync,
            lr_scale=(lambda step: 1.0) if method.sends_changes else scale,
        )  # fmt: skip
    except StopTraining:
        pass
    finally:
        reader.close()
    result.seconds = elapsed()
    stats = reader.stats
    result.waited = stats.idle / max(1e-9, stats.idle + stats.busy)
    result.lags, result.refused, result.left_out = reader.lags, reader.refused, reader.left_out
    if method.unlocked:
        result.lost = result.moved - sum(int(board.tensor(f"{n}/moved").sum()) for n in layout.tables)
    return result
