"""Workers: producers of gradients, of the change of local steps, or of steps on shared tables.

    gradient        of the weights of the board, for a parameter server
    local steps     H steps of an own learner from the board's weights; the record is the change, start minus end (local SGD:
                    Stich 2019, arXiv:1805.09767; DiLoCo: Douillard et al. 2023, arXiv:2311.08105, algorithm 1)
    no lock         the rows of tables are moved on the board itself by sparse Adagrad, while others read and move them
                    (Niu et al. 2011, "Hogwild!", arXiv:1106.5730); the record has the gradient of the other parameters

Tables stay in the board's memory in place of being copied, apart from local steps: a record's rows are few, a table is large.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from whorl.slots import Board, BoardReader, Slot
from whorl.train.asynchronous.gradient import Gradient, Layout
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.optim.optimizers import SparseAdagrad

DONE = "progress"  # name on the board, [1]: synchronous steps done, of which the schedule is a function


class Problem(Protocol):
    """What is trained. It pickles small: each worker makes its own network.

    max_rows: the most rows of one table in a worker's batch. dtype: of the optimizers' large products.
    """

    @property
    def max_rows(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def network(self) -> nn.Module:
        """Return the network; its bits are those of every other call."""
        ...

    def update(self, network: nn.Module) -> Update:
        """Return objective and optimizers."""
        ...

    def batches(self, first: int, worker: int, workers: int) -> Iterator[list[MicroBatch]]:
        """Yield a worker's share of batch `first` and of those that follow."""
        ...

    def lr_scale(self, step: float) -> float:
        """Return the factor on every learning rate."""
        ...


@dataclass(frozen=True)
class Method:
    """One method of the family.

    staleness: of the reader (`reader.py`). local_steps: of a record; 0: a gradient. unlocked: tables are moved by workers.
    outer_lr, momentum: of the server's Nesterov steps on the mean change; 1 and 0 are the average of the workers' weights.
    """

    about: str
    staleness: int | None = 0
    local_steps: int = 0
    unlocked: bool = False
    outer_lr: float = 1.0
    momentum: float = 0.0

    @property
    def steps(self) -> int:
        """Batches of a record."""
        return max(1, self.local_steps)

    @property
    def sends_changes(self) -> bool:
        """Whether a record is the change of all weights in local steps."""
        return self.local_steps > 0 and not self.unlocked


@dataclass
class Worker:
    """A producer of `Gradient` records. slowdown: its time as a multiple, as of a slower machine."""

    problem: Problem
    method: Method
    workers: int
    slowdown: float = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("problem", "method", "workers", "slowdown")}

    def setup(self, board: Board, sequence: int) -> None:
        """Make the network for records from `sequence` on; its tables are those of the board unless they are sent whole."""
        clock, number = divmod(sequence, self.workers)
        self.batches = self.problem.batches(clock * self.method.steps, number, self.workers)
        self.network = self.problem.network()
        self.update = self.problem.update(self.network)
        self.layout = Layout.of(self.update, whole=self.method.sends_changes)
        self.named = dict(self.network.named_parameters())
        if self.method.sends_changes:
            rows, optims = self.problem.max_rows, self.update.param_optims
            shared = SharedState.allocate(self.network, optims, 1, rows)
            self.learner = Learner(self.network, [self.update], shared, dtype=self.problem.dtype)
        for name in self.layout.tables:
            self.named[name].data = board.tensor(name)
        self.pulled = {n: p.data for n, p in self.named.items() if n not in self.layout.tables}
        self.pulled[DONE] = torch.zeros(1)
        rates = [self.update.param_optims[name].lr for name in self.layout.tables]
        if self.method.unlocked:
            self.adagrad = SparseAdagrad(
                [(n, self.named[n].data) for n in self.layout.tables], *rates[:1],
                allocate=lambda name, shape: board.tensor(name),
            )  # fmt: skip

    def fill(self, slot: Slot[Gradient], weights: BoardReader, rng: object) -> int:
        """Write a record, and return its number of targets."""
        if not hasattr(self, "network"):
            self.setup(weights.board, slot.sequence)
        began = time.perf_counter()
        weights.version = weights.board.read(self.pulled)
        record, changes = slot.tensors(), self.method.sends_changes
        loss, count = (self._change if changes else self._gradient)(record, weights.board)
        record["loss"].fill_(loss / max(count, 1.0) if changes else loss)
        record["count"].fill_(1.0 if changes else count)  # workers' changes have equal weights
        seconds = time.perf_counter() - began
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * seconds)
        record["seconds"].fill_(self.slowdown * seconds)
        return int(count)

    def _gradient(self, record: dict[str, Tensor], board: Board) -> tuple[float, float]:
        """Write the gradient of a batch; without a lock, of several, after each of which the tables are moved."""
        loss_sum = count_sum = 0.0
        record["n_rows"].zero_()
        for _ in range(self.method.steps):
            step_count, parts = 0.0, {name: [] for name in self.layout.tables}
            for micro_batch in next(self.batches):
                loss = self.update.objective(micro_batch)
                loss.total.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.total.detach())
                step_count += float(loss.count)
                for name, found in parts.items():  # autograd would add sparse gradients in another order
                    gradient, self.named[name].grad = self.named[name].grad, None
                    found += [] if gradient is None else [(gradient._indices()[0], gradient._values())]
            count_sum += step_count
            for t, (name, found) in enumerate(parts.items()):
                rows, values = (torch.cat(columns) for columns in zip(*found, strict=True))
                if self.method.unlocked:
                    record["n_rows"][t] += self._move(name, rows, values / max(step_count, 1.0), board)
                    continue
                record["rows"][t, : len(rows)] = rows
                record["row_gradients"][t, : len(rows)] = values
                record["n_rows"][t] = len(rows)
        dense = [self.named[name] for name in self.layout.dense]
        record["present"][: len(dense)] = torch.tensor([p.grad is not None for p in dense], dtype=torch.bool)
        if dense:
            flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in dense]
            torch.cat([g.flatten() for g in flat], out=record["dense"])
        else:
            record["dense"].zero_()
        for p in dense:
            p.grad = None
        return loss_sum, count_sum

    def _move(self, name: str, rows: Tensor, values: Tensor, board: Board) -> int:
        """Move the rows of a table on the board, without a lock; return their number."""
        scale = self.problem.lr_scale(float(self.pulled[DONE]))
        self.adagrad.step(name, self.named[name].data, rows, values, scale)
        moved = rows.unique()
        board.tensor(f"{name}/moved").index_add_(0, moved, torch.ones(len(moved)))
        return len(moved)

    def _change(self, record: dict[str, Tensor], board: Board) -> tuple[float, float]:
        """Take local steps, and write start minus end of all weights."""
        tensors = [self.named[name].data for name in self.layout.dense]
        before = torch.cat([t.flatten() for t in tensors])
        (update,), loss, count = self.learner.updates, 0.0, 0.0
        scale = self.workers**-0.5  # the square-root rule: `server.py`
        for i in range(self.method.local_steps):
            for micro_batch in next(self.batches):
                update.accumulate(update.objective(micro_batch))
            metrics = update.step(scale * self.problem.lr_scale(float(self.pulled[DONE]) + i))
            loss += metrics["loss"] * metrics["loss_tokens"]
            count += metrics["loss_tokens"]
        record["present"].fill_(True)
        torch.sub(before, torch.cat([t.flatten() for t in tensors]), out=record["dense"])
        return loss, count
