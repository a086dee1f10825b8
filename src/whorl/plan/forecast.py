"""How long the steps after the plan will take, from the speed that the plan has measured.

The plan contains the seconds of pretraining and the tokens per second of a training step. Another step is estimated as a
number of tokens at a multiple of that speed. The tokens of a suite of tasks are those of its items, which are drawn for the
estimate. Compressors and the tokenizer, which do not depend on the model, take a time
per megabyte. The multiples were fitted to one quickstart on two cores (4 x 192, 30,000 tokens/s), to about a third. A step
of any other kind has no estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from whorl.errors import WhorlError

if TYPE_CHECKING:
    from whorl.evals.suites.cost import SuiteCost

BYTES_PER_TOKEN = 2.8
STEP_SECONDS = 2.0  # of every step that loads a model
BASELINE_SECONDS = 0.4  # per megabyte of training text and core: primed PPMd and the n-gram model
READ_COST, GENERATED_COST = 0.5, 4.0  # of a token of a suite that the engine reads, or generates in a batch
REQUEST_SECONDS = 0.0005  # added for each request
TOKENIZE_SECONDS = 0.1  # per megabyte: learn merges, encode all splits


@dataclass(frozen=True)
class RunInputs:
    """Inputs of the estimates, at the time of the plan.

    expected: figures of the plan. train_bytes, test_bytes: of the splits. task_bytes: of the texts that `sft` trains on.
    test_tasks: held-out tasks. documents: returns (path, text) of the test split.
    """

    expected: Mapping[str, float]
    train_bytes: float
    test_bytes: float
    task_bytes: float
    test_tasks: float
    cores: int
    documents: Callable[[], Sequence[tuple[str, str]]] = tuple

    def seconds(self, tokens: float) -> float:
        """Return the seconds in which training passes over so many tokens."""
        return tokens / self.expected["tokens_per_second"]


def _evaluate(config: Any, known: RunInputs) -> float:
    from whorl.evals.suites.cost import SuiteCost

    tokens = 1.45 * known.test_bytes * config.held_out_fraction / BYTES_PER_TOKEN
    cost = _suite_cost(config, known) if config.items else SuiteCost()
    tokens += READ_COST * cost.read_bytes / BYTES_PER_TOKEN + GENERATED_COST * cost.generated_tokens
    read = known.train_bytes * config.baseline_train_fraction if config.baselines else 0.0
    fixed = STEP_SECONDS + REQUEST_SECONDS * cost.requests
    return fixed + known.seconds(tokens) + BASELINE_SECONDS * read / 1e6 / known.cores


def _suite_cost(config: Any, known: RunInputs) -> SuiteCost:
    """Return the size of the suite of `evaluate`; zeros if it cannot be made, which the step reports."""
    from whorl.evals.baselines import spread
    from whorl.evals.suites import SuiteInputs, load_suite
    from whorl.evals.suites.cost import SuiteCost, suite_cost

    def documents() -> Sequence[tuple[str, str]]:
        return spread(known.documents(), config.held_out_fraction)

    try:
        return suite_cost(
            load_suite(config.suite, SuiteInputs(documents, config.items, config.seed, run_programs=False))
        )
    except WhorlError:
        return SuiteCost()


def _sft(config: Any, known: RunInputs) -> float:
    texts = known.task_bytes / BYTES_PER_TOKEN * config.data.epochs / (1 - config.data.replay_fraction)
    answers = 2 * min(config.eval_tasks, known.test_tasks) * config.max_completion_tokens
    return STEP_SECONDS + known.seconds(2.0 * texts + 3.0 * answers)


def _rl(config: Any, known: RunInputs) -> float:
    length = config.max_completion_tokens / 2 + config.max_seq_len / 4  # of a prompt and its completion
    answers = config.steps * config.prompts_per_step * config.group_size + 4 * known.test_tasks
    return STEP_SECONDS + known.seconds(2.8 * length * answers)


ESTIMATES: Mapping[str, Callable[[Any, RunInputs], float]] = {
    "tokenizer": lambda config, known: TOKENIZE_SECONDS * known.train_bytes / 1e6,
    "tokens": lambda config, known: TOKENIZE_SECONDS * known.train_bytes / 1e6,
    "pretrain": lambda config, known: known.expected["seconds"],
    "evaluate": _evaluate,
    "sft": _sft,
    "rl": _rl,
    "report": lambda config, known: 0.5,
}


def forecast(steps: Mapping[str, tuple[str, BaseModel]], known: RunInputs) -> dict[str, float | None]:
    """Return step name -> expected seconds, None for a kind without an estimate; empty for a plan that timed nothing.

    Args:
        steps: name -> (kind, configuration) of the steps to come.
    """
    if not known.expected.get("tokens_per_second"):
        return {}
    return {
        name: ESTIMATES[kind](config, known) if kind in ESTIMATES else None
        for name, (kind, config) in steps.items()
    }
