"""The built-in optimizers; each stores its state by parameter name. `train/config.py` has the table of all.

- `Muon` for the matrices of the blocks (Jordan et al. 2024, "Muon: An optimizer for hidden layers"): momentum, then the
  nearest orthogonal matrix, so every direction of the update has equal size. The iteration is Polar Express (Amsel et al.
  2025, arXiv:2505.16932), which has the optimal quintic for each round. Matrices of equal shape are batched.
- `AdamW` (Loshchilov & Hutter 2019, arXiv:1711.05101) for embeddings, head, gains and scalars.
- `SparseAdagrad` for n-gram tables: updates only the rows of the batch, each with its step size (Duchi et al. 2011, one
  accumulator per row as in recommendation models). Dense Adam would move hundreds of megabytes per step to change a few
  thousand rows. Every replica updates the rows r with r mod replicas = rank, from the lists of all replicas.

All take gradients of the *mean* loss and update weights in place. `state` holds tensors by "name/moment", the names in
a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.nn.cpu import update
from whorl.nn.cpu.orthogonalize import choose_orthogonalize, orthogonalize_
from whorl.train.optim.flat_views import flatten_alike
from whorl.train.optim.optimizer import Allocator, Optimizer, OptimizerInputs, OptimizerSettings, Shape
from whorl.train.optim.stochastic_rounding import Rounding

NamedTensors = list[tuple[str, Tensor]]

# Polar Express with three rounds, for singular values from 1e-2 to 1 (arXiv:2505.16932, algorithm 1, with a 1% margin).
# Five rounds reach 1e-3 and cost two thirds more; over three seeds the final loss was no lower (LOG.md). Directions
# below a hundredth of the strongest are mostly noise.
POLAR_EXPRESS = ((7.9103, -22.0788, 15.8691), (3.6073, -2.6467, 0.5110), (2.6713, -1.9853, 0.4535))


def zeros_like_named(_name: str, shape: tuple[int, ...]) -> Tensor:
    """The default allocator of optimizer state: zeros."""
    return torch.zeros(shape)


def greedy_balance(costs: list[tuple[str, float]], parts: int) -> list[set[str]]:
    """Assign items, largest cost first, to the least loaded part (Graham 1969: at most 4/3 of the optimum).

    Ties are broken by name, so every replica computes the same.
    """
    load, names = [0.0] * parts, [set[str]() for _ in range(parts)]
    for name, cost in sorted(costs, key=lambda item: (-item[1], item[0])):
        least = load.index(min(load))
        load[least] += cost
        names[least].add(name)
    return names


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrix (U V^T of the singular value decomposition).

    matrices: [n, rows, columns], rows <= columns, in the dtype of the products; overwritten. Returns the same shape.
        Singular values above a hundredth of the norm become 0.7 to 1.3, weaker ones stay smaller.
    """
    x = matrices.div_(matrices.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    gram, polynomial = x.new_empty(2, x.shape[0], x.shape[1], x.shape[1])
    spare = torch.empty_like(x)
    for a, b, c in POLAR_EXPRESS:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, alpha=1.0, out=spare)
        x, spare = spare, x
    return x


class Muon(Optimizer):
    """Momentum and orthogonalization for matrices [rows, columns].

    Args:
        param_groups: matrices in groups. Step s updates group s mod (number of groups), with the learning rate times
            that number.
        learning_rate: peak, one for all or by name.
            An update has spectral norm learning_rate * groups * sqrt(max(1, rows / columns)).
        decay_scale: by name, times weight_decay; default 1.
        dtype: of the orthogonalization's products.
        rounding: of updates, for weights narrower than fp32.
        native: passes over memory in C++, for products in bf16 or fp32 and fp32 weights.

    Groups save time: momentum averages some twenty gradients, so the direction changes little per step. Orthogonalizing
    every matrix in every step would take a seventh of a small model's training time (LOG.md).
    """

    width_scaled = False

    @classmethod
    def state_spec(cls, shape: Shape) -> dict[str, Shape]:
        return {"momentum": shape}

    @classmethod
    def cost(cls, shape: Shape) -> float:
        """Return the FLOPs of the orthogonalization of one matrix."""
        short, long = sorted(shape)
        return 2.0 * len(POLAR_EXPRESS) * short * short * (2 * long + short)

    @classmethod
    def step_groups(cls, settings: OptimizerSettings, shapes: Mapping[str, Shape]) -> list[list[str]]:
        """Return `muon_every` groups of similar cost, independent of the number of replicas."""
        costs = [(name, cls.cost(shape)) for name, shape in shapes.items()]
        return [
            [name for name in shapes if name in turn] for turn in greedy_balance(costs, settings.muon_every)
        ]

    @classmethod
    def make(cls, inputs: OptimizerInputs) -> Muon:
        settings = inputs.settings
        groups = [
            [(name, inputs.params[name]) for name in turn if name in inputs.params]
            for turn in cls.step_groups(settings, inputs.shapes)
        ]
        return cls(
            groups, inputs.lr, momentum=settings.momentum, weight_decay=settings.weight_decay,
            decay_scale=inputs.decay_scale, dtype=inputs.dtype, allocate=inputs.allocate, rounding=settings.rounding,
            native=settings.native,
        )  # fmt: skip

    def __init__(
        self,
        param_groups: Sequence[NamedTensors],
        learning_rate: float | Mapping[str, float],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        decay_scale: Mapping[str, float] | None = None,
        dtype: torch.dtype = torch.float32,
        allocate: Allocator = zeros_like_named,
        rounding: Rounding | None = None,
        native: bool = False,
    ) -> None:
        self.rounding = rounding
        self.native = native and rounding is None and dtype in (torch.bfloat16, torch.float32)
        self._native_shapes: dict[
            tuple[int, int, int], bool
        ] = {}  # shape of a batch -> orthogonalized in C++
        self.momentum, self.dtype, self.steps = momentum, dtype, 0
        self.learning_rates: dict[str, float] = {}
        self.weight_decay: dict[str, float] = {}
        self.momentum_buffers: dict[str, Tensor] = {}
        self.param_groups: list[list[tuple[tuple[int, int], NamedTensors]]] = []
        for turn in param_groups:
            by_shape: dict[tuple[int, int], NamedTensors] = defaultdict(
                list
            )  # batches an MLP's up and down projections together
            for name, p in turn:
                self.momentum_buffers[name] = allocate(f"{name}/momentum", tuple(p.shape))
                self.learning_rates[name] = (
                    learning_rate[name] if isinstance(learning_rate, Mapping) else learning_rate
                )
                self.weight_decay[name] = weight_decay * (decay_scale or {}).get(name, 1.0)
                short, long = sorted(p.shape)
                by_shape[short, long].append((name, p))
            self.param_groups.append(list(by_shape.items()))

    @property
    def state(self) -> dict[str, Tensor]:
        return {f"{name}/momentum": moment for name, moment in self.momentum_buffers.items()}

    def step(self, gradients: Mapping[str, Tensor], lr_scale: float) -> None:
        """Apply one update; `lr_scale` multiplies the peak learning rate."""
        turns = len(self.param_groups)
        turn = self.param_groups[self.steps % turns]
        directions = {shape: self._empty_directions(shape, group) for shape, group in turn}
        into = {n: d for shape, group in turn for (n, _), d in zip(group, directions[shape], strict=True)}
        self._average(gradients, into)
        for shape, group in turn:
            for (name, p), direction in zip(group, self._orthogonalize(directions[shape]), strict=True):
                rows, columns = p.shape
                rate = self.learning_rates[name] * lr_scale * turns
                decayed = 1 - rate * self.weight_decay[name] if self.weight_decay[name] else 1.0
                self._apply(name, p, direction, decayed, rate * max(1.0, rows / columns) ** 0.5)
        self.steps += 1

    def _empty_directions(self, shape: tuple[int, int], group: NamedTensors) -> Tensor:
        return torch.empty(len(group), *shape, dtype=self.dtype, device=group[0][1].device)

    def _orthogonalize(self, directions: Tensor) -> Tensor:
        shape = (directions.shape[0], directions.shape[1], directions.shape[2])
        if self.native and shape not in self._native_shapes:
            self._native_shapes[shape] = choose_orthogonalize(shape, POLAR_EXPRESS, self.dtype, orthogonalize)
        if self._native_shapes.get(shape, False):
            return orthogonalize_(directions, POLAR_EXPRESS)
        return orthogonalize(directions)

    def _average(self, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor]) -> None:
        """Average the gradients into their momenta; write Nesterov's directions, transposed where a matrix is tall."""
        moments = self.momentum_buffers
        if self.native:
            for name, moment in moments.items():
                update.momentum_(moment, gradients[name], self.momentum, directions.get(name))
            return

        def lists(names: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            return [gradients[name] for name in names], [moments[name] for name in names]

        # All matrices in one call, which is one launch on a GPU. A replica may have no matrix, or none in this turn.
        if moments:
            own, averages = lists(moments)
            torch._foreach_lerp_(averages, own, 1 - self.momentum)
        if directions:
            nesterov = torch._foreach_lerp(*lists(directions), self.momentum)
            for direction, one in zip(directions.values(), nesterov, strict=True):
                direction.copy_(one if one.shape[0] == direction.shape[0] else one.mT)

    def _apply(self, name: str, p: Tensor, direction: Tensor, decayed: float, scale: float) -> None:
        if self.native:
            update.add_update_(p, direction, decayed, -scale)
            return
        wide = p if self.rounding is None else p.float()
        if decayed != 1.0:
            wide.mul_(decayed)
        wide.add_(direction if len(p) == len(direction) else direction.mT, alpha=-scale)
        if self.rounding is not None:
            self.rounding.write(p, wide, name, self.steps)


class _Group(NamedTuple):
    """Parameters with one peak learning rate and one weight decay. tensors: weights, mean and square of each."""

    peak_lr: float
    weight_decay: float
    names: list[str]
    tensors: tuple[list[Tensor], list[Tensor], list[Tensor]]


class AdamW(Optimizer):
    """Adam with decoupled weight decay, fp32, as in Kingma & Ba 2015, algorithm 1, and in torch:

        w -= lr (m / c1) / (sqrt(v / c2) + eps),   c1 = 1 - beta1^t,   c2 = 1 - beta2^t

    Most parameters are tiny, so each operation runs over all parameters of one learning rate at once. A test compares
    it with a plain reference.

    Args:
        learning_rate: peaks by name.
        decay_scale: by name, times weight_decay; default 1.
        fused: torch's fused kernel, one pass over memory instead of one per operation; the last bits differ. Default:
            on CUDA only.
    """

    @classmethod
    def state_spec(cls, shape: Shape) -> dict[str, Shape]:
        return {"mean": shape, "square": shape}

    @classmethod
    def make(cls, inputs: OptimizerInputs) -> AdamW:
        settings = inputs.settings
        return cls(
            list(inputs.params.items()), dict(inputs.lr), betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay, decay_scale=inputs.decay_scale, fused=settings.fused,
            allocate=inputs.allocate,
        )  # fmt: skip

    def __init__(
        self,
        params: NamedTensors,
        learning_rate: dict[str, float],
        *,
        betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        decay_scale: Mapping[str, float] | None = None,
        fused: bool | None = None,
        allocate: Allocator = zeros_like_named,
    ) -> None:
        self.betas, self.eps = betas, eps
        self.fused = any(p.is_cuda for _, p in params) if fused is None else fused
        self.state = {
            f"{name}/{moment}": allocate(f"{name}/{moment}", tuple(p.shape))
            for name, p in params
            for moment in ("mean", "square")
        }
        named: dict[tuple[float, float], NamedTensors] = defaultdict(list)
        for name, p in params:
            named[learning_rate[name], weight_decay * (decay_scale or {}).get(name, 1.0)].append((name, p))
        self.groups = [
            _Group(
                *peak_and_decay,
                [name for name, _ in group],
                (
                    [p for _, p in group],
                    [self.state[f"{name}/mean"] for name, _ in group],
                    [self.state[f"{name}/square"] for name, _ in group],
                ),
            )
            for peak_and_decay, group in named.items()
        ]
        self._seen: Mapping[str, Tensor] | None = None
        self._laid: list[list[list[Tensor]]] = []
        self.steps = 0

    def step(self, gradients: Mapping[str, Tensor], lr_scale: float) -> None:
        """Apply one update; `lr_scale` multiplies each parameter's peak learning rate."""
        self.steps += 1
        first, second = self.betas
        root = (1 - second**self.steps) ** 0.5  # sqrt(c2), which multiplies numerator and denominator
        correction = root / (1 - first**self.steps)
        if gradients is not self._seen:  # a single replica passes the same tensors in every step
            self._seen = gradients
            self._laid = [
                flatten_alike(*g.tensors, [gradients[name] for name in g.names]) for g in self.groups
            ]
        for (peak, decay, *_), (weights, mean, square, gradient) in zip(self.groups, self._laid, strict=True):
            rate = peak * lr_scale
            if self.fused:
                self._fused_step(weights, mean, square, gradient, rate, decay)
                continue
            torch._foreach_lerp_(mean, gradient, 1 - first)
            torch._foreach_mul_(square, second)
            torch._foreach_addcmul_(square, gradient, gradient, 1 - second)
            if decay:
                torch._foreach_mul_(weights, 1 - rate * decay)
            divisor = torch._foreach_sqrt(square)
            torch._foreach_add_(divisor, self.eps * root)
            torch._foreach_addcdiv_(weights, mean, divisor, -rate * correction)

    def _fused_step(
        self,
        weights: list[Tensor],
        mean: list[Tensor],
        square: list[Tensor],
        gradient: list[Tensor],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Apply the step in one pass."""
        taken = torch.tensor(float(self.steps), device=weights[0].device)
        torch._fused_adamw_(
            weights,
            gradient,
            mean,
            square,
            [],
            [taken] * len(weights),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class SparseAdagrad:
    """Adagrad with one accumulator per row, for lookup tables [rows, d] with sparse gradients."""

    def __init__(
        self,
        params: NamedTensors,
        learning_rate: float,
        *,
        eps: float = 1e-8,
        allocate: Allocator = zeros_like_named,
    ) -> None:
        self.params, self.learning_rate, self.eps = params, learning_rate, eps
        self.state = {f"{name}/square": allocate(f"{name}/square", (p.shape[0],)) for name, p in params}

    def step(self, name: str, table: Tensor, rows: Tensor, gradients: Tensor, lr_scale: float) -> None:
        """Update the given rows. rows: [n] row numbers, with repeats; gradients: [n, d], summed over repeats here."""
        touched, inverse = torch.unique(rows, return_inverse=True)
        total = gradients.new_zeros(len(touched), gradients.shape[1]).index_add_(0, inverse, gradients)
        squares = self.state[f"{name}/square"]
        square = squares[touched] + total.square().mean(dim=1)
        squares[touched] = square
        step = -self.learning_rate * lr_scale / (square.sqrt() + self.eps)
        table.index_add_(0, touched, total.mul_(step[:, None]))

    def step_native(
        self,
        name: str,
        table: Tensor,
        rows: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rank: int,
        divisor: float,
        lr_scale: float,
    ) -> None:
        """Update a rank's rows in C++, with gradients over `divisor`. rows, gradients: a list of each replica."""
        squares = self.state[f"{name}/square"]
        rate = self.learning_rate * lr_scale
        update.row_adagrad_(table, squares, rows, gradients, rank, divisor, rate, self.eps)


def own_rows(rows: Sequence[Tensor], gradients: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's rows and their gradients out of the lists of all replicas; the tensors themselves for one replica."""
    if len(rows) == 1:
        return rows[0], gradients[0]
    own = [each % len(rows) == rank for each in rows]
    kept = ([t[mask] for t, mask in zip(lists, own, strict=True)] for lists in (rows, gradients))
    ids, values = (torch.cat(parts) for parts in kept)
    return ids, values
