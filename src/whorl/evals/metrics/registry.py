"""Registry of the metrics of generated texts.

    exact, numeric, choice      answers.py          the final answer, strict and lenient
    constraints                 constraints/        the instructions of IFEval (arXiv:2311.07911), strict and loose
    program                     programs.py         tests of a program, in the sandbox
    refusal                     refusal.py          compliance with harmless prompts, refusal of harmful ones
    grid, patch                 structures.py       grids of ARC-AGI, patches
    parses                      evals.code          a completed function is valid Python
    safety                      evals.safety        the same under transformations, if the answer is about the request
    facts                       evals.suites        a known fact, or the statement that it is unknown
    repetition                  repetition.py       distinct n-grams and repeated lines
    reasoning_gym               evals.suites        an item of reasoning-gym is solved, by the package's own scorer

A metric is a function `(gold, text, *, finish, **options) -> Graded`: pure, and total over texts. A metric of a user is
"module:attribute". A `ProgramMetric` builds a program of each text, and all programs of a batch run in parallel.

    grade_all("numeric", golds, completions, form="mark")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.errors import ConfigError, DataError, WhorlError, one_of
from whorl.evals.metrics.result import Graded
from whorl.evals.model.requests import Completion
from whorl.registry import Registry
from whorl.sandbox import Program, ProgramResult, Sandbox

METRICS = Registry(
    "metric",
    {
        "exact": "whorl.evals.metrics.answers:exact",
        "numeric": "whorl.evals.metrics.answers:numeric",
        "choice": "whorl.evals.metrics.answers:choice",
        "constraints": "whorl.evals.metrics.constraints:constraints",
        "program": "whorl.evals.metrics.programs:program",
        "refusal": "whorl.evals.metrics.refusal:refusal",
        "facts": "whorl.evals.suites.side_effects:facts",
        "repetition": "whorl.evals.metrics.repetition:repetition",
        "grid": "whorl.evals.metrics.structures:grid",
        "patch": "whorl.evals.metrics.structures:patch",
        "parses": "whorl.evals.code.parse_rate:parses",
        "safety": "whorl.evals.safety.metric:safety",
        "reasoning_gym": "whorl.evals.suites.reasoning_gym:solved",
    },
)


@dataclass(frozen=True)
class ProgramMetric:
    """A metric that runs programs: `build` creates the program of a text, `grade` turns its result into scores.

    `build` returns a `Graded` for a text that has no program.
    """

    build: Callable[..., Program | Graded]
    grade: Callable[[ProgramResult], Graded]


def get_metric(name: str, options: Mapping[str, Any] | None = None, *, named_by: str = "") -> Any:
    """Return a metric by its name or "module:attribute", after a check of its options.

    named_by: see `Registry.get`.

    Raises:
        ConfigError: it does not exist, has no such option, or is code that data may not name.
    """
    metric = METRICS.get(name, named_by=named_by)
    function = metric.build if isinstance(metric, ProgramMetric) else metric
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "finish"]
        for option in options or {}:
            if option not in allowed:
                raise ConfigError(
                    f"the metric {name!r} has no option {option!r}", expected=one_of(option, allowed)
                )
    return metric


def needs_sandbox(name: str) -> bool:
    """Return whether a metric runs programs."""
    return isinstance(METRICS.get(name), ProgramMetric)


def grade_all(
    name: str,
    golds: Sequence[Any],
    completions: Sequence[Completion | str],
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    sandbox: Sandbox | None = None,
) -> list[Graded]:
    """Return the scores of each completion against the gold answer at the same index.

    A metric that raises on one item gives it the outcome "error" with the reason, and the batch continues.

    Args:
        options: keyword arguments of the metric, for all items or one mapping for each.
        sandbox: required by metrics that run programs.

    Raises:
        DataError: the numbers of golds, completions and options differ.
        ConfigError: the metric or an option is unknown, or the metric needs a sandbox. Raised before any scoring.
    """
    each = [options or {}] * len(golds) if options is None or isinstance(options, Mapping) else list(options)
    if not len(golds) == len(completions) == len(each):
        raise DataError(
            f"{len(golds)} gold answers, {len(completions)} completions, {len(each)} options",
            expected="one of each for each item",
        )
    names: dict[str, None] = {key: None for one in each for key in one}
    metric = get_metric(name, names)
    texts = [Completion(c) if isinstance(c, str) else c for c in completions]
    if not isinstance(metric, ProgramMetric):
        return [
            _safely(metric, gold, completion.text, finish=completion.finish, **more)
            for gold, completion, more in zip(golds, texts, each, strict=True)
        ]
    if sandbox is None:
        raise ConfigError(
            f"the metric {name!r} runs programs", expected="a sandbox", do="pass sandbox=Sandbox()"
        )
    built = [
        _safely(metric.build, gold, completion.text, finish=completion.finish, **more)
        for gold, completion, more in zip(golds, texts, each, strict=True)
    ]
    results = iter(sandbox.run_all([p for p in built if isinstance(p, Program)]))
    return [_safely(metric.grade, next(results)) if isinstance(p, Program) else p for p in built]


def _safely(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except Exception as error:  # one broken item must not stop an evaluation
        what = error.what if isinstance(error, WhorlError) else f"{type(error).__name__}: {error}"
        return Graded({}, "error", what.splitlines()[0][:300] if what else type(error).__name__)
