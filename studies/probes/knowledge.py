"""What SFT on facts does to made-up answers: facts that the model knows against facts that it does not; and refusal.

The claim (Gekhman et al. 2024, arXiv:2405.05904): examples that say what the model does not know are fitted later than those
that say what it knows, and as they are fitted, it answers worse what it did know and makes more up: it has been taught to
speak without knowing. The world is `data/biographies.py`, where it is certain what a model was told. Two lessons of the
same size,

    "known"   questions about people of pretraining, their facts as answers         + refusals about strangers
    "new"     questions about people that it never met, facts all the same          + the same refusals

and over the course of SFT, on questions of no lesson:

    made_up       share of strangers' questions that are answered at all (the right answer is "I do not know.")
    right         accuracy on people of pretraining
    refused       over-refusal: share of *their* questions that are refused

Refusal is told by the same figures: with ever more refusals in a lesson `made_up` falls and `refused` rises, and a model is
better than another only if it is on both (`refusal`).

The subtle part is a lesson without refusals, in which nothing was ever said but facts: everything is answered, so `made_up`
is 1 from the first steps on, whatever the facts were. What shows then is the accuracy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from studies.probes.biographies import Biographies, FactScores, Question, score_answers
from studies.probes.greedy_answers import GreedyAnswers

from whorl.align.config import SFTConfig
from whorl.align.model.example import ExampleTokenizer
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.sft import fine_tune
from whorl.errors import ConfigError
from whorl.tracking.seeds import numpy_rng

Facts = Literal["known", "new"]


@dataclass(frozen=True)
class LessonScores:
    """taught: the lesson's own questions, so how far it is fitted; asked: those of no lesson."""

    step: int
    epoch: float
    train_scores: FactScores
    test_scores: FactScores


@dataclass(frozen=True)
class RefusalRates:
    """Of a lesson with this share of refusals: how often the model refuses what nobody could answer, and what it could."""

    refusal_fraction: float
    unanswerable: float
    answerable: float
    correct: float


def make_lesson(
    world: Biographies, facts: Facts, n: int, refusal_fraction: float, seed: int = 0
) -> list[Question]:
    """n questions with answers, of which this share refuses.

    Raises:
        ConfigError: the world has not as many.
    """
    refused = round(n * refusal_fraction)
    wanted = (
        ("known_train" if facts == "known" else "new", n - refused),
        ("stranger_train", refused),
    )
    found: list[Question] = []
    for group, count in wanted:
        there = world.questions(group)  # type: ignore[arg-type]
        if count > len(there):
            raise ConfigError(
                f"a lesson of {n} with {refusal_fraction:.0%} refusals needs {count} questions of {group}, and there are "
                f"{len(there)}",
                do="take more people, other shares, or a smaller lesson",
            )  # fmt: skip
        order = numpy_rng(seed, "lesson", group).permutation(len(there))[:count]
        found += [there[int(i)] for i in order]
    return found


def track_sft(
    network: PolicyModel,
    example_tokenizer: ExampleTokenizer,
    train_questions: Sequence[Question],
    test_questions: Sequence[Question],
    config: SFTConfig,
    *,
    pad_id: int,
    every: int,
) -> list[LessonScores]:
    """Trains on `taught`; -> what became of `taught` and `asked`, before, after each `every` steps, and at the end.

    Raises:
        DataError: as `fine_tune`.
    """
    both = [*train_questions, *test_questions]
    asker = GreedyAnswers(
        network, example_tokenizer, [[{"role": "user", "content": q.question}] for q in both]
    )
    texts = [example_tokenizer.conversation(q.conversation().messages) for q in train_questions]
    found: list[LessonScores] = []

    def look(step: int, epoch: float) -> None:
        said = asker(network)
        split = len(train_questions)
        found.append(
            LessonScores(
                step,
                epoch,
                score_answers(train_questions, said[:split]),
                score_answers(test_questions, said[split:]),
            )
        )

    def observe(step: int, metrics: dict[str, float]) -> None:
        last.update(step=step, epoch=metrics["epoch"])
        if step % every == 0:
            look(step, metrics["epoch"])

    last = {"step": 0.0, "epoch": 0.0}
    look(0, 0.0)
    fine_tune(network, texts, config, pad_id=pad_id, callback=observe)
    if found[-1].step != last["step"]:
        look(int(last["step"]), last["epoch"])
    return found


def refusal_rates(
    base: Callable[[], PolicyModel],
    example_tokenizer: ExampleTokenizer,
    world: Biographies,
    refusal_fractions: Sequence[float],
    n: int,
    config: SFTConfig,
    *,
    pad_id: int,
    facts: Facts = "known",
) -> list[RefusalRates]:
    """What lessons of n questions with these shares of refusals make of `base()`, which gives the network anew each time.

    Raises:
        ConfigError: the world has not as many questions.
    """
    asked = world.questions("known_test", "stranger_test")
    found = []
    for share in refusal_fractions:
        taught = make_lesson(world, facts, n, share, config.seed)
        end = track_sft(base(), example_tokenizer, taught, asked, config, pad_id=pad_id, every=1 << 30)[
            -1
        ].test_scores
        found.append(RefusalRates(share, 1.0 - end.hallucinated, end.refused, end.correct))
    return found
