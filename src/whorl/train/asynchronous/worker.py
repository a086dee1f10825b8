"""Workers: producers of gradients, of the change in local steps, or of steps on shared tables.

    gradient        at the weights of the board, for a parameter server
    local steps     H steps of a learner from the board's weights; the record is start minus end (local SGD: Stich 2019,
                    arXiv:1805.09767; DiLoCo: Douillard et al. 2023, arXiv:2311.08105, algorithm 1)
    no lock         rows of tables are moved on the board itself by sparse Adagrad, while others read and move them (Niu et
                    al. 2011, "Hogwild!", arXiv:1106.5730); the record has the gradient of the other parameters

Tables stay in the board's memory and are not copied, apart from local steps: a batch has few rows, a table is large.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whorl.slots import Board, BoardReader, Slot
from whorl.train.asynchronous.gradient import Gradient
from whorl.train.asynchronous.methods import AsynchronousMethod
from whorl.train.asynchronous.problems import Problem
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.lm.precision import muon_dtype
from whorl.train.optim.optimizers import SparseAdagrad

DONE = "progress"  # on the board, [1]: synchronous steps done, of which the schedule is a function


def optimizer_dtype(network: nn.Module) -> torch.dtype:
    """Return the type of an optimizer's large products."""
    return muon_dtype(getattr(network, "dtype", torch.float32))


@dataclass
class Worker:
    """A producer of `Gradient` records. slowdown: its time as a multiple, as of a slower machine."""

    problem: Problem
    method: AsynchronousMethod
    workers: int
    slowdown: float = 1.0

    def setup(self, board: Board, sequence: int) -> None:
        """Make the network for records from `sequence` on."""
        self.steps = max(1, self.method.local_steps)
        clock, number = divmod(sequence, self.workers)
        self.batches = self.problem.batches(clock * self.steps, number, self.workers)
        network, self.update = self.problem.make()
        named, whole = dict(network.named_parameters()), self.method.sends_changes
        self.tables = {} if whole else {n: named[n] for n in self.update.names_for("sparse_adagrad")}
        self.dense = [named[name] for name in self.update.param_optims if name not in self.tables]
        for name, table in self.tables.items():
            table.data = board.tensor(name)
        if whole:
            shared = SharedState.allocate(network, self.update.param_optims, 1, self.problem.max_rows)
            self.learner = Learner(network, [self.update], shared, dtype=optimizer_dtype(network))
        self.pulled = {n: p.data for n, p in named.items() if n not in self.tables} | {DONE: torch.zeros(1)}
        if self.method.unlocked:
            tables = [(n, t.data) for n, t in self.tables.items()]
            lr = self.update.param_optims[tables[0][0]].lr
            self.adagrad = SparseAdagrad(tables, lr, allocate=lambda name, shape: board.tensor(name))

    def fill(self, slot: Slot[Gradient], weights: BoardReader, rng: object) -> int:
        """Write a record, and return its number of targets."""
        if not hasattr(self, "steps"):
            self.setup(weights.board, slot.sequence)
        began = time.perf_counter()
        weights.version = weights.board.read(self.pulled)
        record, changes = slot.tensors(), self.method.sends_changes
        loss, count = (self._change if changes else self._gradient)(record, weights.board)
        record["loss"].fill_(loss / max(count, 1.0) if changes else loss)
        record["count"].fill_(1.0 if changes else count)  # changes have equal weights
        seconds = time.perf_counter() - began
        time.sleep((self.slowdown - 1) * seconds)
        record["seconds"].fill_(self.slowdown * seconds)
        return int(count)

    def _gradient(self, record: dict[str, Tensor], board: Board) -> tuple[float, float]:
        """Write the gradient of a batch; without a lock, that of several, after each of which the tables are moved."""
        loss_sum = count_sum = 0.0
        record["n_rows"].zero_()
        for _ in range(self.steps):
            count, parts = 0.0, {name: list[tuple[Tensor, Tensor]]() for name in self.tables}
            for micro_batch in next(self.batches):
                loss = self.update.objective(micro_batch)
                loss.total.backward()  # type: ignore[no-untyped-call]
                loss_sum, count = loss_sum + float(loss.total.detach()), count + float(loss.count)
                # Autograd would add sparse gradients in another order.
                for name, table in self.tables.items():
                    assert table.grad is not None
                    parts[name].append((table.grad._indices()[0], table.grad._values()))
                    table.grad = None
            count_sum += count
            for t, (name, found) in enumerate(parts.items()):
                rows, values = (torch.cat(columns) for columns in zip(*found, strict=True))
                if self.method.unlocked:
                    record["n_rows"][t] += self._move(name, rows, values / max(count, 1.0), board)
                else:
                    n = record["n_rows"][t] = len(rows)
                    record["rows"][t, :n], record["row_gradients"][t, :n] = rows, values
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.dense]
        record["dense"][:] = torch.cat([g.flatten() for g in gradients]) if gradients else 0.0
        for p in self.dense:
            p.grad = None
        return loss_sum, count_sum

    def _lr_scale(self, local_step: int = 0) -> float:
        return self.problem.lr_scale(float(self.pulled[DONE]) + local_step)

    def _move(self, name: str, rows: Tensor, values: Tensor, board: Board) -> int:
        """Move the rows of a table on the board, without a lock; return their number, 0 for gradients with NaN."""
        if not values.isfinite().all():
            return 0
        self.adagrad.step(name, self.tables[name].data, rows, values, self._lr_scale())
        moved = torch.unique(rows)
        board.tensor(f"{name}/moved").index_add_(0, moved, torch.ones(len(moved)))
        return len(moved)

    def _change(self, record: dict[str, Tensor], board: Board) -> tuple[float, float]:
        """Take local steps, and write start minus end of all weights."""
        before = torch.cat([p.data.flatten() for p in self.dense])
        (update,), loss, count = self.learner.updates, 0.0, 0.0
        for i in range(self.steps):
            for micro_batch in next(self.batches):
                update.accumulate(update.objective(micro_batch))
            metrics = update.step(self._lr_scale(i))
            loss, count = loss + metrics["loss"] * metrics["loss_tokens"], count + metrics["loss_tokens"]
        torch.sub(before, torch.cat([p.data.flatten() for p in self.dense]), out=record["dense"])
        return loss, count
