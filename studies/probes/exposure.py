"""Exposure bias: a model learns to go on after real text, and is then made to go on after its own.

    data_t = - mean log p(x_t  | x_<t )      x:  what really follows a prompt
    own_t  = - mean log p(x^_t | x^_<t)      x^: what the model samples after the same prompt, at temperature 1

t counts from the first id after the prompt. If the model were the source, own_t = data_t at each t. At t = 0 both have read
the same, so what differs there is calibration; what differs *more* as t grows comes from the model's own words before it
(Ranzato et al. 2016, arXiv:1511.06732; whether it snowballs is disputed: He et al. 2021, arXiv:1905.10617).

    gap_t = own_t - data_t                   drift = gap in the last places - gap in the first

In the model's own eyes its samples may look ever better (it repeats itself) while they get worse. So there may be a judge, a
network that knows the source better: its gap is what the samples cost *it* more than real text does.

The subtle part is who is still there at place t: means are over the texts that reach it, so they come with counts, and
places are put together until each group has enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.align.model.batch import pad
from whorl.align.model.example import ExampleTokenizer, TokenizedExample, concat
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import policy_sampling, rollout_engine, sample_completions
from whorl.errors import DataError


@dataclass(frozen=True)
class ExposureCurve:
    """Nats a token by place: data [G], own [G] of places start[g] up to start[g + 1]; counts of tokens behind each."""

    start: NDArray[np.int64]
    data_nll: NDArray[np.float64]
    self_nll: NDArray[np.float64]
    n_data: NDArray[np.int64]
    n_self: NDArray[np.int64]

    @property
    def gap(self) -> NDArray[np.float64]:
        """own - data, [G]; NaN where nobody is."""
        return self.self_nll - self.data_nll

    @property
    def drift(self) -> float:
        """How much the gap grows from the first group of places to the last that both reach."""
        there = np.flatnonzero((self.n_data > 0) & (self.n_self > 0))
        return float(self.gap[there[-1]] - self.gap[there[0]]) if len(there) else float("nan")


@dataclass(frozen=True)
class Exposure:
    """itself: in the model's own eyes; judged: in those of the judge, if there is one."""

    by_model: ExposureCurve
    by_evaluator: ExposureCurve | None


def exposure(
    network: PolicyModel,
    example_tokenizer: ExampleTokenizer,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    pad_id: int,
    n_positions: int,
    bin_size: int = 8,
    evaluator: PolicyModel | None = None,
    seed: int = 0,
) -> Exposure:
    """Loss on own samples against loss on data.

    Args:
        network: at temperature 1, with the ids forbidden that its engine never draws (`answers.never`).
        prompts: ids, bos first; continuations: of each, what really follows, the end included where it ends.
        places: ids after the prompt that are looked at; together: of one group.
        judge: of the same vocabulary.

    Raises:
        DataError: nothing to look at; prompts and continuations that do not match; a judge of another vocabulary.
    """
    if not prompts or len(prompts) != len(continuations):
        raise DataError(
            f"{len(prompts)} prompts and {len(continuations)} continuations",
            expected="as many of both, one at least",
        )
    if evaluator is not None and evaluator.model.config.vocab_size != network.model.config.vocab_size:
        raise DataError(
            f"the judge has {evaluator.model.config.vocab_size:,} ids, the model {network.model.config.vocab_size:,}",
            expected="networks of one tokenizer",
        )
    longest = max(map(len, prompts)) + n_positions + 1
    engine = rollout_engine(network.eval_copy(), example_tokenizer, sequences=64, max_length=longest)
    found = sample_completions(
        engine,
        prompts,
        policy_sampling(1.0),
        max_tokens=n_positions,
        stop_ids=example_tokenizer.stop_ids,
        seed=seed,
    )
    own = [concat(p, a.ids) for p, a in zip(prompts, found, strict=True)]
    data = [concat(p, list(c)[:n_positions]) for p, c in zip(prompts, continuations, strict=True)]

    def course(eyes: PolicyModel) -> ExposureCurve:
        start = np.arange(0, n_positions, bin_size)
        sums = [_nll_by_position(eyes, texts, pad_id, n_positions) for texts in (data, own)]
        (d, n_data), (o, n_own) = [
            (np.add.reduceat(nats, start), np.add.reduceat(count, start)) for nats, count in sums
        ]
        with np.errstate(invalid="ignore", divide="ignore"):
            return ExposureCurve(start, d / n_data, o / n_own, n_data, n_own)

    return Exposure(course(network), None if evaluator is None else course(evaluator))


def _nll_by_position(
    network: PolicyModel, texts: Sequence[TokenizedExample], pad_id: int, n_positions: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(nats [places], tokens [places]): sums over texts, by place after the prompt."""
    part = pad(texts, pad_id)
    mask = part["loss_mask"]
    place = (mask.long().cumsum(1) - 1)[mask].numpy()
    nats = -network.score(part)["log_prob"][mask].double().numpy()
    sums, counts = np.bincount(place, nats, n_positions), np.bincount(place, minlength=n_positions)
    return sums.astype(np.float64), counts.astype(np.int64)
