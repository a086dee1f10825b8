"""Exposure bias of a policy, with its adapter and its banned ids (`evals/side_effects/exposure.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from whorl.align.model.batch import pad
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import DataError
from whorl.evals.model.example import ExampleTokenizer, TokenizedExample
from whorl.evals.side_effects.exposure import Exposure, TokenScorer, exposure


def policy_exposure(
    network: PolicyModel,
    example_tokenizer: ExampleTokenizer,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    pad_id: int,
    evaluator: PolicyModel | None = None,
    **options: Any,
) -> Exposure:
    """Return the loss on own samples and on data.

    Args:
        network: at temperature 1, with the banned ids of its engine (`ExampleTokenizer.banned_ids`).
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
        network.eval_copy(), example_tokenizer, prompts, continuations, _scorer(network, pad_id),
        evaluator=None if evaluator is None else _scorer(evaluator, pad_id), **options,
    )  # fmt: skip


def _scorer(network: PolicyModel, pad_id: int) -> TokenScorer:
    def score(texts: Sequence[TokenizedExample]) -> list[ArrayLike]:
        part = pad(texts, pad_id)
        log_probs, mask = network.score(part)["log_prob"], part["loss_mask"]
        return [row[own].double().numpy() for row, own in zip(log_probs, mask, strict=True)]

    return score
