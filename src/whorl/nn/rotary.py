"""Rotary positions (Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34).

Feature pairs of queries and keys are rotated by an angle proportional to the position, so that their product
depends on the distance only. Angles are computed in fp32: at position 10,000, bf16 cannot distinguish neighbors.

Layouts: "half" pairs feature i with i + head_dim / 2, as in the Llama family's checkpoints; "interleaved" pairs
2 i with 2 i + 1, as in the paper. They differ in the order of features only, so weights can be converted
(`to_interleaved`). A checkpoint read in the wrong layout runs with wrong results.

With `rotary_dim` below `head_dim`, only the first `rotary_dim` features rotate (GPT-J, GPT-NeoX, Phi). The tables are
then `rotary_dim` wide.

`RopeScaling` slows the angles down, so that a model reads rows longer than those it was trained on.

`Rotary` caches the tables. If they were computed inside a compiled region, they would be fused into every kernel that
rotates (2 ms of a 50 ms step of the quickstart's model).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.nn.gpu import dispatch

Layout = Literal["half", "interleaved"]
RopeScalingKind = Literal["linear", "ntk", "yarn", "llama3"]
Positions = Tensor | tuple[Tensor, Tensor] | None  # integers, or their rotary tables; None: 0, 1, ...


@dataclass(frozen=True)
class RopeScaling:
    """Change of frequencies for rows up to `factor` times longer than in training.

    - `linear`: every frequency divided by `factor` (Chen et al. 2023, arXiv:2306.15595): positions are squeezed into
      the old range.
    - `ntk`: a larger base, base * factor^(d / (d - 2)) (Peng et al. 2023, arXiv:2309.00071, sec. 3.1): the slowest wave
      is divided by `factor`, the fastest stays.
    - `llama3`: by parts (ibid., sec. 3.2, eq. 17 to 20). r = original_length / wavelength counts the turns of a wave in
      training. Waves with r > `high` stay, waves with r < `low` are divided by `factor`, and between them the kept
      fraction rises linearly with r. Defaults low = 1, high = 4 as Llama 3.1 (arXiv:2407.21783).
    - `yarn`: by parts, low = 1 and high = 32, and scores grow by 1 / t, sqrt(1 / t) = 0.1 ln(factor) + 1 (ibid., sec. 3.4),
      one root in the queries' tables and one in the keys'. The ramp is that of the authors' program and checkpoints,
      not the paper's: linear in the index of the wave, between the (rounded) indices where r = high and r = low.

    Args:
        kind, factor: above; factor >= 1.
        original_length: longest row of training; needed by `yarn` and `llama3`.
        low, high: bounds of the ramp in turns (the papers' alpha and beta; `beta_slow` and `beta_fast`; `low_freq_factor`
            and `high_freq_factor`); None for the kind's default.
        attention_factor: factor of cos and sin; None for the kind's default (1 except for `yarn`). Scores of rotated
            features grow by its square.
        truncate: `yarn` only: round the ramp's ends outwards to whole indices.

    Raises:
        ConfigError: a field is out of its range or missing.
    """

    kind: RopeScalingKind
    factor: float
    original_length: int | None = None
    low: float | None = None
    high: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeScalingKind):
            raise ConfigError(
                f"scaling kind is {self.kind!r}", expected=one_of(self.kind, get_args(RopeScalingKind))
            )
        if not self.factor >= 1.0:
            raise ConfigError(f"scaling factor is {self.factor}", expected="at least 1")
        if self.kind in ("yarn", "llama3"):
            if self.original_length is None or self.original_length < 1:
                raise ConfigError(
                    f"original_length is {self.original_length}",
                    expected=f"the longest row of training, for {self.kind} scaling",
                )
            low, high = self.ramp
            if not 0.0 < low < high:
                raise ConfigError(f"low is {low} and high is {high}", expected="0 < low < high")

    @property
    def ramp(self) -> tuple[float, float]:
        """Return (low, high) in turns, with defaults filled in."""
        low = 1.0 if self.low is None else self.low
        high = (32.0 if self.kind == "yarn" else 4.0) if self.high is None else self.high
        return low, high

    @property
    def attention_scaling(self) -> float:
        """Return the factor of cos and sin: sqrt(1 / t) for `yarn`."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0


def rotary_frequencies(
    dim: int, base: float = 10_000.0, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Return radians per position for each pair of features, [dim / 2] fp32, fastest first.

    Raises:
        ConfigError: `dim` is odd, or too small for `ntk` scaling.
    """
    if dim % 2:
        raise ConfigError(f"head_dim is {dim}", expected="an even number: rotary rotates pairs of features")
    if scaling is not None and scaling.kind == "ntk":
        if dim < 4:
            raise ConfigError(f"head_dim is {dim}", expected="at least 4 rotated features for ntk scaling")
        base = base * scaling.factor ** (dim / (dim - 2))
    frequency = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if scaling is None or scaling.kind == "ntk":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    assert scaling.original_length is not None  # checked by the dataclass
    low, high = scaling.ramp
    if scaling.kind == "llama3":
        turns = scaling.original_length * frequency / (2 * math.pi)
        stays = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:
        # The (real) index of the wave with that many turns in training: r inverted.
        first, last = (
            dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (high, low)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The last bound is the authors' dim - 1, not the last index dim / 2 - 1: checkpoints depend on it.
        first, last = max(first, 0), min(last, dim - 1)
        index = torch.arange(dim // 2, device=device, dtype=torch.float32)
        stays = 1.0 - ((index - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return frequency * stays + frequency / scaling.factor * (1.0 - stays)


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    base: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
    scaling: RopeScaling | None = None,
    layout: Layout = "half",
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of positions [..., T], integers: each [..., T, 1, rotary_dim] in `dtype`.

    `sin` carries the signs of the rotation (minus at the first feature of each pair), so that `apply_rotary` needs
    no negation.

    Args:
        scaling: see `RopeScaling`; None leaves the frequencies unchanged.
        layout: which features make a pair; `apply_rotary` needs the same value.
        rotary_dim: how many of the first features rotate; None for all of `head_dim`.

    Raises:
        ConfigError: `head_dim` or `rotary_dim` is odd, `rotary_dim` is out of range, or `layout` is unknown.
    """
    _check_layout(layout)
    dim = _check_dim(head_dim, rotary_dim)
    frequency = rotary_frequencies(dim, base, scaling, positions.device)
    angle = positions[..., None].float() * frequency  # [..., T, dim / 2]
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None and scaling.attention_scaling != 1.0:
        cos, sin = cos * scaling.attention_scaling, sin * scaling.attention_scaling
    if layout == "half":
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    else:
        cos, sin = (torch.stack(pair, dim=-1).flatten(-2) for pair in ((cos, cos), (-sin, sin)))
    return cos.unsqueeze(-2).to(dtype), sin.unsqueeze(-2).to(dtype)


class Rotary:
    """Cached rotary tables.

    Args:
        head_dim, base, dtype, scaling, layout, rotary_dim: as in `rotary_tables`.

    Attributes:
        extended: tables with a scaling, for rows longer than its `original_length`; None: these serve all rows.

    Raises:
        ConfigError: as `rotary_tables`.
    """

    def __init__(
        self,
        head_dim: int,
        base: float,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
        layout: Layout = "half",
        rotary_dim: int | None = None,
    ) -> None:
        _check_layout(layout)
        self.rotary_dim = _check_dim(head_dim, rotary_dim)
        self.head_dim, self.base, self.dtype = head_dim, base, dtype
        self.scaling, self.layout = scaling, layout
        self.extended: Rotary | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def for_capacity(self, capacity: int) -> Rotary:
        """Return the tables for rows of up to `capacity` positions.

        They depend on the capacity of a row and not on its current length, since a cache holds rotated keys.
        """
        scaling = None if self.extended is None else self.extended.scaling
        if self.extended is None or scaling is None or capacity <= (scaling.original_length or 0):
            return self
        return self.extended

    def tables_upto(self, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of positions 0 .. at least `stop` - 1, each [>= stop, 1, rotary_dim]."""
        tables = self._tables
        if tables is None or tables[0].shape[0] < stop or tables[0].device != device:
            size = 1 << (stop - 1).bit_length()
            # Tables made while sampling must also serve a training step, which may not save inference tensors.
            with torch.inference_mode(False):
                tables = self._tables = self.tables_at(torch.arange(size, device=device))
        return tables

    def tables_between(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of positions start .. stop - 1, each [stop - start, 1, rotary_dim]."""
        cos, sin = self.tables_upto(stop, device)
        return cos[start:stop], sin[start:stop]

    def tables_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of `positions` [..., T], each [..., T, 1, rotary_dim]."""
        return rotary_tables(
            positions, self.head_dim, self.base, self.dtype, self.scaling, self.layout, self.rotary_dim
        )

    def tables_of(self, positions: Positions, start: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) for x [B, T, ...] at `positions`, by default start .. start + T - 1."""
        if isinstance(positions, tuple):
            return positions
        if positions is None:
            return self.tables_between(start, start + x.shape[1], x.device)
        return self.tables_at(positions)

    def rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return `apply_rotary` in this layout. x: [B, T, H, head_dim]; tables: from `tables_between` or `tables_at`."""
        return apply_rotary(x, *tables, layout=self.layout)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half") -> Tensor:
    """Return x [B, T, H, head_dim] rotated, same shape and dtype. cos, sin: [(B,) T, 1, rotary_dim].

    Features beyond `rotary_dim` stay unchanged. `layout` must be that of the tables. On a GPU it runs a Triton kernel
    where one was selected (`nn/gpu/autotune.py`), elsewhere `apply_rotary_reference`.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        plain = functools.partial(apply_rotary_reference, layout=layout)
        return dispatch.rotary(x, cos, sin, layout, plain)
    return apply_rotary_reference(x, cos, sin, layout)


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half") -> Tensor:
    """Return x rotated by the definition. Shapes as in `apply_rotary`."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([apply_rotary_reference(x[..., :dim], cos, sin, layout), x[..., dim:]], dim=-1)
    pairs, member = ((2, dim // 2), -2) if layout == "half" else ((dim // 2, 2), -1)
    x, cos, sin = (t.view(*t.shape[:-1], *pairs) for t in (x, cos, sin))
    # A flip, not two slices and a cat: compilers turn it into plain loads, while a cat needs a mask per element.
    return (x * cos + x.flip(member) * sin).flatten(-2)


def to_interleaved(weight: Tensor, n_heads: int, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Return a copy of a query or key projection with rows moved from the half-split to the interleaved order.

    Args:
        weight: [n_heads * head_dim, ...]: a matrix, a bias, or (n_heads = 1) the gain of a norm over a head's features.
        n_heads: of this matrix (for keys, the number of key heads).
        rotary_dim: as in `rotary_tables`; features beyond it keep their place.

    Raises:
        ConfigError: the rows are not n_heads * head_dim, or the dimensions are odd.
    """
    dim = _check_dim(head_dim, rotary_dim)
    if weight.shape[0] != n_heads * head_dim:
        raise ConfigError(
            f"weight has {weight.shape[0]} rows",
            expected=f"n_heads * head_dim = {n_heads} * {head_dim} = {n_heads * head_dim}",
        )
    heads = weight.view(n_heads, head_dim, *weight.shape[1:])
    turning = heads[:, :dim].reshape(n_heads, 2, dim // 2, *weight.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([turning, heads[:, dim:]], dim=1).reshape(weight.shape)


def _check_layout(layout: str) -> None:
    if layout not in get_args(Layout):
        raise ConfigError(f"layout is {layout!r}", expected=one_of(layout, get_args(Layout)))


def _check_dim(head_dim: int, rotary_dim: int | None) -> int:
    """Return how many features rotate."""
    dim = head_dim if rotary_dim is None else rotary_dim
    if dim % 2:
        name = "head_dim" if rotary_dim is None else "rotary_dim"
        raise ConfigError(f"{name} is {dim}", expected="an even number: rotary rotates pairs of features")
    if not 0 < dim <= head_dim:
        raise ConfigError(f"rotary_dim is {dim}", expected=f"between 2 and head_dim = {head_dim}")
    return dim
