"""The learner: weights, gradients and optimiser state of one network, updated together by all replicas.

One step, told once for 1 or N replicas:

    each:     total, count, gradients of the *summed* loss of its share of the batch   (`accumulate`, any number of times)
    exchange: the global count divides the gradients, once
    each:     sums its share of the parameters over the replicas; exchange: the global gradient norm, for clipping
    each:     updates its share in place
    exchange: everybody sees the new weights

So 1 x 8, 2 x 4 and 8 x 1 micro-batches and any number of replicas take the same step up to the rounding of sums (a test).
Parameters are split by what their update costs; rows of n-gram tables by row number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.models import Decoder
from whorl.objectives import Loss
from whorl.train.config import OptimConfig
from whorl.train.optim import POLAR_EXPRESS, AdamW, Muon, RowAdagrad
from whorl.train.world import World


@dataclass
class Shared:
    """What all replicas see: tensors in shared memory, by name.

    weights and state: by parameter and by "parameter/moment"; gradients: [replicas, ...] for each dense parameter;
    row_ids: [replicas, capacity] and row_gradients: [replicas, capacity, d] for each sparse one.
    """

    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    row_ids: dict[str, Tensor]
    row_gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: Decoder, replicas: int, tokens: int) -> Shared:
        """Memory for `model`; `tokens` is the most that one replica sees in a step."""

        def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            tensor = torch.zeros(shape, dtype=dtype)
            if replicas > 1:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return tensor

        weights, gradients, ids, rows, state = {}, {}, {}, {}, {}
        for name, p in model.named_parameters():
            weights[name] = shared(*p.shape)
            weights[name].copy_(p.detach())
            kind = role(name, p)
            if kind == "memory":
                ids[name] = shared(replicas, tokens, dtype=torch.int64)
                rows[name] = shared(replicas, tokens, p.shape[1])
                state[f"{name}/square"] = shared(p.shape[0])
            else:
                gradients[name] = shared(replicas, *p.shape)
                for moment in ("momentum",) if kind == "matrix" else ("mean", "square"):
                    state[f"{name}/{moment}"] = shared(*p.shape)
        return cls(weights, state, gradients, ids, rows)


def role(name: str, p: Tensor) -> str:
    """Which optimiser a parameter belongs to: memory, matrix, embedding or scalar."""
    if name.startswith("memory."):
        return "memory"
    if name in ("embedding", "head"):
        return "embedding"
    return "matrix" if name.startswith("blocks.") and p.ndim == 2 and min(p.shape) > 1 else "scalar"


def turns(model: Decoder, every: int) -> list[set[str]]:
    """The matrices in `every` turns of about the same cost; the same on any number of replicas."""
    matrices = [(n, p) for n, p in model.named_parameters() if role(n, p) == "matrix"]
    return _even([(n, _cost(p)) for n, p in matrices], every)


def shares(model: Decoder, size: int, every: int) -> list[set[str]]:
    """Names of the dense parameters that each rank updates: those of each turn, and the rest, evenly by their cost."""
    named = dict(model.named_parameters())
    rest = {n for n, p in named.items() if role(n, p) in ("embedding", "scalar")}
    owned = [set[str]() for _ in range(size)]
    for names in (*turns(model, every), rest):
        cost = [(n, _cost(named[n]) if n not in rest else float(named[n].numel())) for n in names]
        for rank, mine in enumerate(_even(cost, size)):
            owned[rank] |= mine
    return owned


def _cost(p: Tensor) -> float:
    """FLOPs of orthogonalising a matrix."""
    short, long = sorted(p.shape)
    return 2.0 * len(POLAR_EXPRESS) * short * short * (2 * long + short)


def _even(costs: list[tuple[str, float]], parts: int) -> list[set[str]]:
    """Greedily, the costliest first, to the least loaded part."""
    load, names = [0.0] * parts, [set[str]() for _ in range(parts)]
    for name, cost in sorted(costs, key=lambda item: (-item[1], item[0])):
        least = load.index(min(load))
        load[least] += cost
        names[least].add(name)
    return names


class Learner:
    """One replica's view of the learner.

    Args:
        model: its parameters are re-bound to the shared weights.
        shared: made once by rank 0 with `Shared.of`.
        steps_done: updates taken before (a resumed run), for Adam's bias correction.
    """

    def __init__(
        self, model: Decoder, config: OptimConfig, shared: Shared, world: World, steps_done: int = 0
    ) -> None:
        self.model, self.config, self.shared, self.world = model, config, shared, world
        for name, p in model.named_parameters():
            p.data = shared.weights[name]
        self.owned = shares(model, world.size, config.matrix_every)[world.rank]
        named = [(n, p.data) for n, p in model.named_parameters()]
        mine = [(n, p) for n, p in named if n in self.owned]
        self.sparse = [(n, p) for n, p in named if role(n, p) == "memory"]

        def allocate(name: str, _shape: tuple[int, ...]) -> Tensor:
            return shared.state[name]

        self.muon = Muon(
            [[(n, p) for n, p in mine if n in turn] for turn in turns(model, config.matrix_every)],
            config.matrix_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            dtype=model.dtype,
            allocate=allocate,
        )
        rest = [(n, p) for n, p in mine if role(n, p) != "matrix"]
        rates = {
            n: config.embedding_rate if role(n, p) == "embedding" else config.scalar_rate for n, p in rest
        }
        self.adamw = AdamW(rest, rates, allocate=allocate)
        self.adamw.steps = self.muon.steps = steps_done
        self.rows = RowAdagrad(self.sparse, config.memory_rate, allocate=allocate)
        self._start()

    def _start(self) -> None:
        """Forgets the gradients: the next ones overwrite them."""
        self.empty = True
        self.totals = [0.0, 0.0, 0.0]  # loss, count, nll
        self.filled = {name: 0 for name, _ in self.sparse}

    def accumulate(self, loss: Loss) -> None:
        """Adds the gradients of a micro-batch's summed loss."""
        loss.total.backward()  # type: ignore[no-untyped-call]
        for name, p in self.model.named_parameters():
            gradient, p.grad = p.grad, None
            if name in self.shared.gradients:
                mine = self.shared.gradients[name][self.world.rank]
                if gradient is not None:
                    mine.copy_(gradient) if self.empty else mine.add_(gradient)
                elif self.empty:
                    mine.zero_()
            elif gradient is not None:
                rows, values = gradient._indices()[0], gradient._values()
                begin, end = self.filled[name], self.filled[name] + len(rows)
                self.shared.row_ids[name][self.world.rank, begin:end] = rows
                self.shared.row_gradients[name][self.world.rank, begin:end] = values
                self.filled[name] = end
        self.empty = False
        for place, value in enumerate((loss.total, loss.count, loss.metrics["nll"])):
            self.totals[place] += float(value.detach())

    @torch.no_grad()
    def step(self, factor: float) -> dict[str, float]:
        """The update from all that was accumulated, on every replica together.

        Returns:
            loss and nll (nats a token, the mean over the global batch), count, gradient_norm (before clipping).
        """
        filled = float(max(self.filled.values(), default=0))
        everybody = self.world.exchange(*self.totals, filled)
        loss, count, nll = (sum(column) for column in list(zip(*everybody, strict=True))[:3])
        divisor = max(count, 1.0)
        gradients = {name: self.shared.gradients[name].sum(dim=0) for name in sorted(self.owned)}
        dense = list(gradients.values())
        square = sum(float(norm) ** 2 for norm in torch._foreach_norm(dense))
        norm = self.world.total(square)[0] ** 0.5 / divisor
        torch._foreach_mul_(dense, min(1.0, self.config.clip_norm / max(norm, 1e-30)) / divisor)
        self.muon.step(gradients, factor)
        self.adamw.step(gradients, factor)
        sizes = [int(each[3]) for each in everybody]
        for name, table in self.sparse:
            self._step_rows(name, table, sizes, divisor, factor)
        self._start()
        self.world.exchange()
        return {"loss": loss / divisor, "nll": nll / divisor, "count": count, "gradient_norm": norm}

    def _step_rows(self, name: str, table: Tensor, sizes: list[int], divisor: float, factor: float) -> None:
        ids = torch.cat([self.shared.row_ids[name][rank, :n] for rank, n in enumerate(sizes)])
        if self.world.size == 1:
            values = self.shared.row_gradients[name][0, : sizes[0]]
        else:
            mine = (ids % self.world.size == self.world.rank).nonzero().squeeze(1)
            parts, begin = [], 0
            for rank, n in enumerate(sizes):
                inside = mine[(mine >= begin) & (mine < begin + n)] - begin
                parts.append(self.shared.row_gradients[name][rank][inside])
                begin += n
            ids, values = ids[mine], torch.cat(parts)
        if len(ids):
            self.rows.step(name, table, ids, values / divisor, factor)
