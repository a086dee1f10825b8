"""From logits to tokens, for a batch of rows with their own settings.

`distribution` defines the sampling distribution in a few lines of torch: sort, mask, cut, normalize. `Sampler` samples from
it. On a GPU it uses `distribution`, without the sort where rows have only a temperature. On a CPU, `cpu_sampler.py` computes
the same without the sort, and `cpu/sampling.h` in C++ for rows without masks, biases and penalties.

The subtle point is batch invariance. The random number u of a row is a hash of (seed, number of tokens drawn), not the next
number of a shared stream (counters as in Salmon et al. 2011, doi:10.1145/2063384.2063405). The hash is SplitMix64 (Steele
et al. 2014, doi:10.1145/2660193.2660195). On a CPU, each row's floating-point operations run in an order that the batch
does not change (`cpu_sampler.py`). So equal logits and seeds give bit-identical tokens and log-probabilities in any batch;
a test checks it. Where the logits differ in their last bits, u is still the same.

A `Token` has log_prob under `distribution` (0 for a greedy row), raw_log_prob under softmax(logits) over all ids before any
processing, and the raw log-probabilities of the most likely alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.engine.request import Token
from whorl.engine.sampling.cpu_sampler import (
    CPUSampler,
    DrawPlain,
    Summarize,
    clamped_temperature,
    normalize,
    sample_inverse_cdf,
    top_p_bound,
)
from whorl.engine.sampling.penalties import TokenCounts, apply_logit_bias, apply_penalties
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import DataError
from whorl.tracking.seeds import splitmix64

__all__ = ["NoValidTokenError", "Sampler", "SamplerRow", "SamplingParams", "distribution", "uniforms"]

Array = NDArray[Any]
Floats = NDArray[np.float32]
UINT64_MASK = (1 << 64) - 1
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
ZERO, NEG_INF = np.float32(0), np.float32(-np.inf)
STREAM_MULTIPLIER = 0xD1B54A32D192ED03


class NoValidTokenError(DataError):
    """Rows without a valid token: logits that are not finite, or a mask that allows nothing. Other rows are unaffected.

    rows: their numbers in the batch.
    """

    rows: tuple[int, ...] = ()


@dataclass
class SamplerRow:
    """One sequence at one output position, as input of the sampler.

    seed, n_drawn: input of the hash: the request's seed and the number of tokens drawn so far.
    prompt, output: ids; read only if the settings have penalties. `output` may be the sequence's own list.
    allowed_mask: ids that a constraint allows: [V] bool, or bits packed little-endian in int32 [ceil(V / 32)].
    top_log_probs: number of alternatives to return.
    token_counts: counts kept with the sequence; None counts again in every step.
    """

    sampling: SamplingParams
    seed: int = 0
    n_drawn: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed_mask: Array | None = None
    top_log_probs: int = 0
    token_counts: TokenCounts | None = None


def uniforms(seeds: Sequence[int], counters: Sequence[int], stream: int = 0) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, counter): [n]. Any integers; `stream` selects an independent stream."""
    start = np.array([(seed + stream * STREAM_MULTIPLIER) & UINT64_MASK for seed in seeds], np.uint64)
    steps = np.array([counter & UINT64_MASK for counter in counters], np.uint64) * GOLDEN_GAMMA
    state = splitmix64(start + GOLDEN_GAMMA) + steps
    return (splitmix64(state + GOLDEN_GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def distribution(
    logits: Tensor, rows: Sequence[SamplerRow], banned_ids: Sequence[int] | Array = ()
) -> Tensor:
    """Sampling distribution of each row: the reference.

    Args:
        logits: [W, V] fp32.
        rows: their settings.
        banned_ids: ids that no row may sample.

    Returns:
        Probabilities [W, V] fp32; one-hot for a greedy row.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    settings = [row.sampling for row in rows]
    z = logits.clone()
    _apply_logit_processors(z, rows, banned_ids, lambda array: torch.as_tensor(array, device=z.device))
    temperature = column([clamped_temperature(s) for s in settings]).float()
    weights = ((z - z.amax(dim=-1, keepdim=True)) / temperature).exp().double()  # the largest weight is 1
    # Of equal logits the smaller id ranks first.
    weights, ids = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[1], device=z.device)
    weights *= rank < column([s.top_k or z.shape[1] for s in settings])
    before = weights.cumsum(dim=-1) - weights
    weights *= before < column([top_p_bound(s) for s in settings]) * weights.sum(dim=-1, keepdim=True)
    weights *= weights >= column([s.min_p for s in settings]).float()
    weights *= (rank == 0) | (column([s.temperature for s in settings]) > 0)
    weights /= weights.sum(dim=-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, ids, weights.float())


def _apply_logit_processors(z: Any, rows: Sequence[SamplerRow], banned_ids: Any, to_backend: Any) -> None:
    """Apply masks, biases and penalties to logits z [W, V] in place: an array, or a tensor with its `to_backend`."""
    size = z.shape[1]
    if len(banned_ids):
        z[:, to_backend(np.asarray(banned_ids, np.int64))] = -torch.inf
    for number, row in enumerate(rows):
        if row.allowed_mask is not None:
            z[number] += to_backend(np.where(_unpack_mask(row.allowed_mask, size), ZERO, NEG_INF))
    biases = [(n, i, bias) for n, row in enumerate(rows) for i, bias in row.sampling.logit_bias.items()]
    if biases:
        apply_logit_bias(z, biases, to_backend)
    penalties = []
    for number, row in enumerate(rows):
        if row.sampling.has_penalties:
            token_counts = row.token_counts or TokenCounts(row.prompt)
            token_counts.update(row.output)  # at once, because rows of one sequence share the counts
            penalties.append((number, token_counts.penalties(row.sampling)))
    if penalties:
        apply_penalties(z, penalties, to_backend)


def _unpack_mask(allowed: Array, size: int) -> NDArray[np.bool_]:
    """Convert a mask of either form to [V] bool."""
    if allowed.dtype != np.bool_:
        allowed = np.unpackbits(allowed.view(np.uint8), count=size, bitorder="little").view(np.bool_)
    return allowed


class Sampler:
    """Samples one token per row.

    Args:
        vocab_size: V of the logits.
        banned_ids: ids that are never sampled nor returned as alternatives (pad, bos, padding rows of the output matrix).
        device: of the logits. On other devices than a CPU the reference runs; its tokens equal those of the CPU up to the
            rounding of sums.
        summarize: as of `CPUSampler`.

    Attributes:
        draw_plain: a faster way for rows without masks, biases and penalties on a CPU, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        banned_ids: Sequence[int] = (),
        device: str | torch.device = "cpu",
        summarize: Summarize | None = None,
    ) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        banned = np.unique(np.asarray(list(banned_ids), np.int64))
        self._cpu_sampler = CPUSampler(vocab_size, banned, summarize)
        self.draw_plain: DrawPlain | None = None

    @property
    def is_banned(self) -> NDArray[np.bool_]:
        """[V], whether an id is never sampled."""
        return self._cpu_sampler.is_banned

    def __call__(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Token]:
        """Return the next token of each of W rows, given logits [W, V] fp32 (not changed). The caller sets `version`.

        Raises:
            NoValidTokenError: some row has no valid token.
        """
        if not rows:
            return []
        draw = self._sample_cpu if self.device.type == "cpu" else self._sample_reference
        ids, log_probs, raw, log_sums = draw(logits.detach(), rows)
        told = zip(ids.tolist(), log_probs.tolist(), raw.tolist(), strict=True)
        best = [
            self._top_log_probs(logits[n].detach().cpu().numpy() - log_sums[n], row.top_log_probs)
            if row.top_log_probs
            else ()
            for n, row in enumerate(rows)
        ]
        return [Token(*one, alternatives) for one, alternatives in zip(told, best, strict=True)]

    def sample_or_none(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Token | None]:
        """As `__call__`, with None for a row without a valid token."""
        try:
            return list(self(logits, rows))
        except NoValidTokenError as error:
            alive = [n for n in range(len(rows)) if n not in error.rows]
            tokens = iter(self(logits[alive], [rows[n] for n in alive]))
            return [None if n in error.rows else next(tokens) for n in range(len(rows))]

    def distribution(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """`distribution` of these rows [W, V] fp32, computed as the samples are.

        Raises:
            NoValidTokenError: some row has no valid token.
        """
        if self.device.type != "cpu" or not rows:
            return distribution(logits, rows, self._cpu_sampler.banned_ids)
        z, best, highest, _ = self._process_logits(logits.detach().numpy(), rows)
        out = np.zeros(z.shape, np.float32)
        out[np.arange(len(rows)), best] = 1
        sampled = _non_greedy_rows(rows)
        if len(sampled):
            out[sampled] = normalize(self._weights(z, highest, rows, sampled))[:, : self.vocab_size]
        return torch.from_numpy(out)

    def _sample_cpu(self, logits: Tensor, rows: Sequence[SamplerRow]) -> tuple[Array, Array, Array, Array]:
        """Return (ids, log-probabilities, raw log-probabilities, log-sum-exp of the raw logits), each [W]."""
        told = logits.numpy()
        plain = np.array([self.draw_plain is not None and not r.top_log_probs and is_plain(r) for r in rows])
        if self.draw_plain is None or not plain.any():
            return self._sample_others(told, rows)
        numbers, others = np.flatnonzero(plain), np.flatnonzero(~plain)
        some = [rows[n] for n in numbers.tolist()]
        settings = [row.sampling for row in some]
        drawn = self.draw_plain(told[numbers] if len(others) else told, _row_uniforms(some), settings)
        values = np.zeros(len(rows))
        values[numbers[drawn[0] < 0]] = np.nan
        if not len(others):
            _check_finite(values)
            return *drawn, np.zeros(0)  # the log-sum-exp is needed for alternatives only
        try:
            rest = self._sample_others(told[others], [rows[n] for n in others.tolist()])
        except NoValidTokenError as error:
            values[others[list(error.rows)]] = np.nan
        _check_finite(values)
        found = tuple(np.zeros(len(rows), part.dtype) for part in rest)
        for whole, part, other in zip(found, (*drawn, 0), rest, strict=True):
            whole[numbers], whole[others] = part, other
        return found[0], found[1], found[2], found[3]

    def _sample_others(self, told: Floats, rows: Sequence[SamplerRow]) -> tuple[Array, Array, Array, Array]:
        """The same by numpy, for any options."""
        z, ids, highest, log_sums = self._process_logits(told, rows)
        log_probs, sampled = np.zeros(len(rows)), _non_greedy_rows(rows)
        if len(sampled):
            weights = self._weights(z, highest, rows, sampled)
            ids[sampled], shares = sample_inverse_cdf(weights, _row_uniforms([rows[n] for n in sampled]))
            log_probs[sampled] = np.log(shares)
        return ids, log_probs, told[np.arange(len(rows)), ids] - log_sums, log_sums

    def _weights(self, z: Floats, max_logits: Floats, rows: Sequence[SamplerRow], sampled: Array) -> Floats:
        """`CPUSampler.weights` of some of the rows."""
        selected = z if len(sampled) == len(rows) else z[sampled]
        return self._cpu_sampler.weights(selected, max_logits[sampled], [rows[n].sampling for n in sampled])

    def _sample_reference(
        self, logits: Tensor, rows: Sequence[SamplerRow]
    ) -> tuple[Array, Array, Array, Array]:
        """The same for logits on any device."""
        if all(is_plain(row) and not _has_cuts(row.sampling) for row in rows):
            return self._sample_plain(logits, rows)
        probabilities = distribution(logits, rows, self._cpu_sampler.banned_ids)
        log_sums = logits.logsumexp(dim=-1)
        cumulative = probabilities.double().cumsum(dim=-1)
        _check_finite((cumulative[:, -1] + log_sums).cpu().numpy())
        u = torch.from_numpy(_row_uniforms(rows)).to(cumulative.device)[:, None]
        ids = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        parts = (ids, probabilities.gather(-1, ids).log(), logits.gather(-1, ids) - log_sums[:, None])
        found = [part[:, 0].cpu().numpy() for part in parts]
        return found[0], found[1], found[2], log_sums.cpu().numpy()

    def _sample_plain(self, logits: Tensor, rows: Sequence[SamplerRow]) -> tuple[Array, Array, Array, Array]:
        """The same for rows with a temperature and no other option: without a sort, and with one copy each way."""
        settings = [row.sampling for row in rows]
        values = (
            _row_uniforms(rows),
            [clamped_temperature(s) for s in settings],
            [s.temperature for s in settings],
        )
        u, divisor, temperature = torch.from_numpy(np.array(values)).to(logits.device)[..., None].unbind()
        banned = torch.from_numpy(self.is_banned).to(logits.device)
        z = logits.masked_fill(banned, -torch.inf)
        highest, best = z.max(dim=-1, keepdim=True)
        scaled = (z - highest) / divisor.float()
        cumulative = scaled.exp().double().cumsum(dim=-1)
        total = cumulative[:, -1:]
        target = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))
        sampled = torch.searchsorted(cumulative, target, right=True)
        sampled = sampled.clamp_max(self.vocab_size - 1)  # of NaN, which is found below
        greedy = temperature <= 0
        ids = torch.where(greedy, best, sampled)
        log_probs = torch.where(greedy, 0.0, scaled.gather(-1, ids) - total.log())
        log_sums = logits.logsumexp(dim=-1, keepdim=True)
        raw = logits.gather(-1, ids) - log_sums
        found = (
            torch.cat([ids.double(), log_probs, raw.double(), log_sums.double(), total], dim=1).cpu().numpy()
        )
        _check_finite(found[:, 3] + found[:, 4])
        return found[:, 0].astype(np.int64), found[:, 1], found[:, 2], found[:, 3].astype(np.float32)

    def _process_logits(
        self, logits: Floats, rows: Sequence[SamplerRow]
    ) -> tuple[Floats, Array, Array, Array]:
        """Return (logits after masks, biases and penalties [W, V], argmax [W], its logit [W], log-sum-exp before [W])."""
        z = logits
        if any(
            row.allowed_mask is not None or row.sampling.logit_bias or row.sampling.has_penalties
            for row in rows
        ):
            z = logits.copy()
            _apply_logit_processors(z, rows, (), np.asarray)
        best, log_sums = self._cpu_sampler.summarize(logits)
        if z is not logits:
            best = self._cpu_sampler.argmax(z)
        highest = z[np.arange(len(rows)), best]
        _check_finite(highest)
        return z, best, highest, log_sums

    def _top_log_probs(self, raw: Floats, n: int) -> tuple[tuple[int, float], ...]:
        """The `n` most likely ids that are not banned, by the raw log-probabilities [V], most likely first."""
        n = min(n, self.vocab_size - len(self._cpu_sampler.banned_ids))
        raw = np.where(self._cpu_sampler.is_banned, -np.inf, raw)
        ids = np.flatnonzero(raw >= np.partition(raw, -n)[-n])
        ids = ids[np.argsort(-raw[ids], kind="stable")[:n]]
        return tuple(zip(ids.tolist(), raw[ids].tolist(), strict=True))


def is_plain(row: SamplerRow) -> bool:
    """Whether nothing changes a row's logits: no mask, biases and penalties."""
    s = row.sampling
    return not (row.allowed_mask is not None or s.logit_bias or s.has_penalties)


def _has_cuts(s: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p leave out ids."""
    return s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)


def _non_greedy_rows(rows: Sequence[SamplerRow]) -> Array:
    """Indices of the rows that are not greedy."""
    return np.flatnonzero([row.sampling.temperature > 0 for row in rows])


def _row_uniforms(rows: Sequence[SamplerRow]) -> NDArray[np.float64]:
    return uniforms([row.seed for row in rows], [row.n_drawn for row in rows])


def _check_finite(values: Array) -> None:
    """Raise if a value of `values` [W] is not finite."""
    dead = tuple(np.flatnonzero(~np.isfinite(values)).tolist())
    if dead:
        error = NoValidTokenError(
            f"nothing can be drawn from row {', '.join(map(str, dead))} of the batch",
            expected="finite logits, and at least one id that is neither banned nor masked",
        )
        error.rows = dead
        raise error
