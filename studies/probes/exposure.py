"""Exposure bias: a model is trained to continue real text and is then used to continue its own text.

    data_t = - mean log p(x_t  | x_<t )      x:  the real continuation of a prompt
    self_t = - mean log p(x^_t | x^_<t)      x^: the model's sample after the same prompt, at temperature 1

t counts from the first id after the prompt. If the model were the data source, self_t = data_t at every t. At t = 0
both have the same context, so a difference is miscalibration. Growth with t comes from the model's own earlier ids
(Ranzato et al. 2016, arXiv:1511.06732; whether it accumulates is disputed: He et al. 2021, arXiv:1905.10617).

    gap_t = self_t - data_t                  drift = gap at the last positions - gap at the first

By its own probabilities a model's samples may improve (repetition) while they get worse. So an optional evaluator, a
better model of the source, scores both: its gap is the extra cost of the samples.

`policy_exposure` measures a policy with its adapter and its banned ids. `whorl eval MODEL --suite side-effects` measures the
gap of any model or endpoint on held-out documents (`evals/kinds/exposure.py`).

The subtle point is the population at position t. Means are over the texts that reach it, so they come with counts, and
positions are grouped into bins with enough texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whorl.align.model.batch import pad
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import DataError
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.models import LanguageModel
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample, concat

# Log-probabilities of the ids in the loss of each text, in order, under the distribution that the engine samples from.
TokenScorer = Callable[[Sequence[TokenizedExample]], Sequence[ArrayLike]]


@dataclass(frozen=True)
class ExposureCurve:
    """Nats per token by position.

    data_nll, self_nll: [G] of positions start[g] up to start[g + 1]. n_data, n_self: token counts.
    """

    start: NDArray[np.int64]
    data_nll: NDArray[np.float64]
    self_nll: NDArray[np.float64]
    n_data: NDArray[np.int64]
    n_self: NDArray[np.int64]

    @property
    def gap(self) -> NDArray[np.float64]:
        """Return self - data, [G]; NaN for empty bins."""
        return self.self_nll - self.data_nll

    @property
    def drift(self) -> float:
        """Return the growth of the gap from the first bin to the last one that both reach."""
        there = np.flatnonzero((self.n_data > 0) & (self.n_self > 0))
        return float(self.gap[there[-1]] - self.gap[there[0]]) if len(there) else float("nan")


@dataclass(frozen=True)
class Exposure:
    """by_model: scored by the model. by_evaluator: scored by the evaluator, if there is one."""

    by_model: ExposureCurve
    by_evaluator: ExposureCurve | None


def exposure(
    model: LanguageModel,
    encoder: TokenEncoder,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    score: TokenScorer,
    *,
    n_positions: int,
    bin_size: int = 8,
    evaluator: TokenScorer | None = None,
    seed: int = 0,
) -> Exposure:
    """Return the loss on own samples and on data.

    Args:
        model: samples at temperature 1. score: of the same weights, without the banned ids of the engine.
        prompts: ids, bos first. continuations: the real continuation of each, with the end id where it ends.
        n_positions: ids after the prompt to measure. bin_size: positions per bin.
        evaluator: scores of a better model of the same vocabulary.

    Raises:
        DataError: no prompts, or numbers that differ.
    """
    if not prompts or len(prompts) != len(continuations):
        raise DataError(
            f"{len(prompts)} prompts and {len(continuations)} continuations",
            expected="equal numbers, at least one",
        )
    longest = max(map(len, prompts)) + n_positions + 1
    engine = open_engine(model, (64, longest), encoder, with_text=False)
    completions = sample_completions(
        engine,
        prompts,
        policy_sampling(1.0),
        max_tokens=n_positions,
        stop_ids=encoder.stop_ids,
        seed=seed,
    )
    sampled = [concat(p, a.ids) for p, a in zip(prompts, completions, strict=True)]
    data = [concat(p, list(c)[:n_positions]) for p, c in zip(prompts, continuations, strict=True)]

    def curve(scorer: TokenScorer) -> ExposureCurve:
        start = np.arange(0, n_positions, bin_size)
        sums = [_nll_by_position(scorer(texts), n_positions) for texts in (data, sampled)]
        (d, n_data), (o, n_own) = [
            (np.add.reduceat(nats, start), np.add.reduceat(count, start)) for nats, count in sums
        ]
        with np.errstate(invalid="ignore", divide="ignore"):
            return ExposureCurve(start, d / n_data, o / n_own, n_data, n_own)

    return Exposure(curve(score), None if evaluator is None else curve(evaluator))


def _nll_by_position(
    log_probs: Sequence[ArrayLike], n_positions: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return (nats [positions], tokens [positions]): sums over texts, by position after the prompt."""
    sums, counts = np.zeros(n_positions), np.zeros(n_positions, np.int64)
    for text in log_probs:
        values = np.asarray(text, np.float64)
        sums[: len(values)] -= values
        counts[: len(values)] += 1
    return sums, counts


def policy_exposure(
    network: PolicyModel,
    encoder: TokenEncoder,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    pad_id: int,
    evaluator: PolicyModel | None = None,
    **options: Any,
) -> Exposure:
    """Return the loss on own samples and on data.

    Args:
        network: at temperature 1, with the banned ids of its engine (`TokenEncoder.banned_ids`).
        evaluator: of the same vocabulary. options: further arguments of `exposure`.

    Raises:
        DataError: as `exposure`; an evaluator of another vocabulary.
    """
    if evaluator is not None and evaluator.model.config.vocab_size != network.model.config.vocab_size:
        raise DataError(
            f"the evaluator has {evaluator.model.config.vocab_size:,} ids, the model {network.model.config.vocab_size:,}",
            expected="networks of one tokenizer",
        )
    return exposure(
        network.eval_copy(), encoder, prompts, continuations, _scorer(network, pad_id),
        evaluator=None if evaluator is None else _scorer(evaluator, pad_id), **options,
    )  # fmt: skip


def _scorer(network: PolicyModel, pad_id: int) -> TokenScorer:
    def score(texts: Sequence[TokenizedExample]) -> list[ArrayLike]:
        part = pad(texts, pad_id)
        log_probs, mask = network.score(part)["log_prob"], part["loss_mask"]
        return [row[own].double().numpy() for row, own in zip(log_probs, mask, strict=True)]

    return score
