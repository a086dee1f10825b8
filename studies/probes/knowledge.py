"""Effect of SFT on made-up answers: training on known facts against unknown facts, and refusal.

The claim (Gekhman et al. 2024, arXiv:2405.05904): SFT examples with unknown facts are fitted later than those with
known facts. As they are fitted, the model recalls less and invents more. The population is `biographies.py`, where
the model's knowledge is certain. Two training sets of equal size:

    "known"   questions about people of pretraining, answered          + refusals about unknown people
    "new"     questions about people not in pretraining, answered      + the same refusals

Measured during SFT on questions outside both sets:

    hallucinated  fraction of unanswerable questions that are answered (the correct answer is "I do not know.")
    correct       accuracy on people of pretraining
    refused       over-refusal: fraction of their questions that are refused

With more refusals in a training set `hallucinated` falls and `refused` rises. A model is better only if both improve
(`refusal_rates`).

The subtle point is a training set without refusals: the model then answers everything, so `hallucinated` is 1 from the
first steps. Only the accuracy is informative there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from studies.probes.fact_scores import FactScores, score_answers
from studies.probes.greedy_answers import GreedyAnswers

from whorl.align.config import SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.sft import fine_tune
from whorl.errors import ConfigError
from whorl.evals.suites.biographies import Biographies, Question
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.seeds import numpy_rng

Facts = Literal["known", "new"]


@dataclass(frozen=True)
class LessonScores:
    """train_scores: the questions of the training set, which show how far it is fitted.

    test_scores: the other questions.
    """

    step: int
    epoch: float
    train_scores: FactScores
    test_scores: FactScores


@dataclass(frozen=True)
class RefusalRates:
    """Refusal rates after SFT with this fraction of refusals: on unanswerable and on answerable questions."""

    refusal_fraction: float
    unanswerable: float
    answerable: float
    correct: float


def make_lesson(
    world: Biographies, facts: Facts, n: int, refusal_fraction: float, seed: int = 0
) -> list[Question]:
    """Return n questions with answers, of which this fraction are refusals.

    Raises:
        ConfigError: the population has too few questions.
    """
    refused = round(n * refusal_fraction)
    groups = (
        ("known_train" if facts == "known" else "new", n - refused),
        ("stranger_train", refused),
    )
    found: list[Question] = []
    for group, count in groups:
        available = world.questions(group)  # type: ignore[arg-type]
        if count > len(available):
            raise ConfigError(
                f"a training set of {n} with {refusal_fraction:.0%} refusals needs {count} questions of {group}, and "
                f"there are {len(available)}",
                do="use more people, other fractions, or a smaller training set",
            )  # fmt: skip
        order = numpy_rng(seed, "lesson", group).permutation(len(available))[:count]
        found += [available[int(i)] for i in order]
    return found


def track_sft(
    network: PolicyModel,
    encoder: TokenEncoder,
    train_questions: Sequence[Question],
    test_questions: Sequence[Question],
    config: SFTConfig,
    *,
    pad_id: int,
    every: int,
) -> list[LessonScores]:
    """Train on `train_questions`; return the scores before, after each `every` steps, and at the end.

    Raises:
        DataError: as `fine_tune`.
    """
    both = [*train_questions, *test_questions]
    answerer = GreedyAnswers(network, encoder, [[{"role": "user", "content": q.question}] for q in both])
    texts = [encoder.conversation(q.messages()) for q in train_questions]
    found: list[LessonScores] = []

    def evaluate(step: int, epoch: float) -> None:
        answers = answerer(network)
        split = len(train_questions)
        found.append(
            LessonScores(
                step,
                epoch,
                score_answers(train_questions, answers[:split]),
                score_answers(test_questions, answers[split:]),
            )
        )

    def observe(step: int, metrics: dict[str, float]) -> None:
        last.update(step=step, epoch=metrics["epoch"])
        if step % every == 0:
            evaluate(step, metrics["epoch"])

    last = {"step": 0.0, "epoch": 0.0}
    evaluate(0, 0.0)
    fine_tune(network, texts, config, pad_id=pad_id, callback=observe)
    if found[-1].step != last["step"]:
        evaluate(int(last["step"]), last["epoch"])
    return found


def refusal_rates(
    base: Callable[[], PolicyModel],
    encoder: TokenEncoder,
    world: Biographies,
    refusal_fractions: Sequence[float],
    n: int,
    config: SFTConfig,
    *,
    pad_id: int,
    facts: Facts = "known",
) -> list[RefusalRates]:
    """Return the refusal rates of training sets of n questions; `base()` returns a new copy of the initial network.

    Raises:
        ConfigError: the population has too few questions.
    """
    test_questions = world.questions("known_test", "stranger_test")
    found = []
    for share in refusal_fractions:
        train_questions = make_lesson(world, facts, n, share, config.seed)
        scores = track_sft(
            base(), encoder, train_questions, test_questions, config, pad_id=pad_id, every=1 << 30
        )[-1].test_scores
        found.append(RefusalRates(share, 1.0 - scores.hallucinated, scores.refused, scores.correct))
    return found
