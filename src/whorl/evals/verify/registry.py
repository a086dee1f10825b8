"""Registry of verifiers, and verdicts of batches.

    exact, numeric, choice      text_verifiers.py       compare answers
    format                      text_verifiers.py       compare the form
    compiles                    program_verifiers.py    parse
    doctest, unittest           program_verifiers.py    run in the sandbox
    custom:module:function      custom_verifier.py      call a user's function in a separate process, outside the sandbox

A record comes from anyone, so it may name a function only if a recipe or a command line does (`whorl.registry`).

A task names its verifier, or a weighted sum: "0.1 format(<answer>) + 0.9 numeric" gives 0.1 for the form and 0.9 for
the number. The text in parentheses replaces the task's answer for that term. A sum has passed if every term has.

An error does not stop a batch. A verifier that raises, hangs or returns NaN gives reward 0, a reason, and
`failed=True`; `verdict_metrics` counts reasons. All programs of a batch run in parallel on the sandbox's workers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.verify import program_verifiers as programs
from whorl.evals.verify import text_verifiers as answers
from whorl.evals.verify.custom_verifier import verify_custom
from whorl.evals.verify.program_verifiers import SandboxVerifier
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.registry import check_permitted
from whorl.sandbox import Program, Sandbox

Verifier = Callable[[VerifiableTask, str], Verdict] | SandboxVerifier
VERIFIERS: dict[str, Verifier] = {
    "exact": answers.exact,
    "numeric": answers.numeric,
    "choice": answers.choice,
    "format": answers.format_match,
    "compiles": programs.compiles,
    "doctest": programs.doctest_verifier,
    "unittest": programs.unittest_verifier,
}
PASS_CRITERIA = {
    "exact": "the answer equals the expected text",
    "numeric": "the number equals the expected one",
    "choice": "the chosen letter is the expected one",
    "format": "the text has the required form",
    "compiles": "the code parses and has an effect, right or wrong",
    "doctest": "the examples of the docstring give the expected output",
    "unittest": "all tests of the task succeed",
}
OWN_CUSTOM = frozenset({"custom:whorl.align.data.reasoning_gym:score_completion"})
_VERIFIER_PATTERN = re.compile(
    r"(?:(?P<weight>\d+(?:\.\d*)?|\.\d+)\s*\*?\s+)?(?P<name>\w+(?::[\w.]+:\w+)?)(?:\((?P<answer>.*)\))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class WeightedVerifier:
    """One term of a task's verifier: weight, name, and the answer to compare with (None: the task's answer)."""

    weight: float
    name: str
    answer: str | None


def parse_verifiers(verifier: str, named_by: str = "") -> tuple[WeightedVerifier, ...]:
    """Return the verifiers named by a task's `verifier`, with their weights.

    named_by: the task, for the message.

    Raises:
        ConfigError: the text cannot be parsed, or names an unknown verifier or code that is not permitted.
    """
    found = _parse(verifier)
    for term in found:
        if term.name.startswith("custom:") and term.name not in OWN_CUSTOM:
            check_permitted(term.name.removeprefix("custom:"), f"{named_by}verifier {verifier!r}")
    return found


@lru_cache(4096)  # a set of tasks may give each task its own answer
def _parse(verifier: str) -> tuple[WeightedVerifier, ...]:
    verifiers = []
    for text in re.split(r"\s\+\s(?![^()]*\))", verifier.strip()):
        match = _VERIFIER_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"verifier {text!r} cannot be parsed",
                expected="for example 0.1 format(<answer>) + 0.9 numeric",
            )
        name = match["name"]
        if name not in VERIFIERS and not name.startswith("custom:"):
            raise ConfigError(
                f"unknown verifier {name!r}",
                expected=one_of(name, [*VERIFIERS, "custom:module:function"]),
            )
        verifiers.append(WeightedVerifier(float(match["weight"] or 1.0), name, match["answer"]))
    return tuple(verifiers)


def pass_criterion(tasks: Sequence[VerifiableTask]) -> str:
    """Return what passing means for these tasks, in words, with the number of tasks if there are several kinds."""
    kinds = Counter(
        " and ".join(
            PASS_CRITERIA.get(term.name, f"{term.name} passes") for term in parse_verifiers(task.verifier)
        )
        for task in tasks
    )
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{text} ({n} tasks)" for text, n in kinds.most_common())


def verify_all(
    tasks: Sequence[VerifiableTask], completions: Sequence[str], sandbox: Sandbox | None = None
) -> list[Verdict]:
    """Return the verdict of each completion on the task at the same index.

    Args:
        sandbox: required by doctest and unittest.

    Raises:
        DataError: the numbers of tasks and completions differ.
        ConfigError: a verifier is unknown, or requires the sandbox and none is given. Raised before any verdict.
    """
    if len(tasks) != len(completions):
        raise DataError(
            f"{len(tasks)} tasks with {len(completions)} completions", expected="one completion for each task"
        )
    jobs = [
        (i, term)
        for i, task in enumerate(tasks)
        for term in parse_verifiers(task.verifier, f"task {task.id!r}: ")
    ]
    for i, term in jobs:
        if sandbox is None and isinstance(VERIFIERS.get(term.name), SandboxVerifier):
            raise ConfigError(
                f"task {tasks[i].id!r}: {term.name} runs programs",
                expected="a sandbox",
                do="pass sandbox=Sandbox()",
            )
    verdicts: list[Verdict | None] = [None] * len(jobs)
    to_run: list[tuple[int, SandboxVerifier, VerifiableTask, str, Program]] = []
    to_call: list[tuple[int, tuple[str, VerifiableTask, str]]] = []
    for job, (i, term) in enumerate(jobs):
        task = tasks[i] if term.answer is None else replace(tasks[i], answer=term.answer)
        verifier, text = VERIFIERS.get(term.name), completions[i]
        if verifier is None:
            to_call.append((job, (term.name.removeprefix("custom:"), task, text)))
        elif isinstance(verifier, SandboxVerifier):
            program = _build_program(verifier, task, text)
            if isinstance(program, Verdict):
                verdicts[job] = program
            else:
                to_run.append((job, verifier, task, text, program))
        else:
            verdicts[job] = _verify_safely(verifier, task, text)
    if to_run and sandbox is not None:
        results = sandbox.run_all([program for *_, program in to_run])
        for (job, runs, task, text, _), result in zip(to_run, results, strict=True):
            verdicts[job] = _verify_safely(partial(runs.grade, result), task, text)
    for (job, _), verdict in zip(to_call, verify_custom([call for _, call in to_call]), strict=True):
        verdicts[job] = verdict
    by_task: list[list[tuple[WeightedVerifier, Verdict]]] = [[] for _ in tasks]
    for (i, term), graded in zip(jobs, verdicts, strict=True):
        assert graded is not None
        by_task[i].append((term, graded))
    return [_combine(results) for results in by_task]


def verdict_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return mean reward, accuracy, and the count of each kind of reason ("reason/timeout") over a batch."""
    n = max(len(verdicts), 1)
    kinds = Counter(v.reason.split(":")[0] or "passed" for v in verdicts)
    shares = {"reward": sum(v.reward for v in verdicts) / n, "accuracy": sum(v.passed for v in verdicts) / n}
    return shares | {f"reason/{kind}": float(count) for kind, count in sorted(kinds.items())}


def _build_program(verifier: SandboxVerifier, task: VerifiableTask, text: str) -> Program | Verdict:
    try:
        return verifier.build_program(task, text)
    except Exception as error:
        return _error_verdict(error)


def _verify_safely(
    verifier: Callable[[VerifiableTask, str], Verdict], task: VerifiableTask, text: str
) -> Verdict:
    try:
        return verifier(task, text)
    except Exception as error:  # one broken task must not stop training
        return _error_verdict(error)


def _error_verdict(error: Exception) -> Verdict:
    return Verdict(0.0, False, f"raised: {type(error).__name__}: {error}".splitlines()[0][:300], failed=True)


def _combine(results: Sequence[tuple[WeightedVerifier, Verdict]]) -> Verdict:
    results = [(term, _finite_verdict(verdict)) for term, verdict in results]
    if len(results) == 1:
        term, verdict = results[0]
        return replace(verdict, reward=term.weight * verdict.reward)
    results.sort(key=lambda pair: not pair[1].failed)  # errors take precedence over wrong answers
    wrong = [v.reason if ":" in v.reason else f"{v.reason}: {p.name}" for p, v in results if not v.passed]
    reward = sum(p.weight * v.reward for p, v in results)
    return Verdict(reward, not wrong, wrong[0] if wrong else "passed", results[0][1].failed)


def _finite_verdict(verdict: Verdict) -> Verdict:
    if math.isfinite(verdict.reward):
        return verdict
    return Verdict(0.0, False, f"raised: the reward is {verdict.reward}", failed=True)
