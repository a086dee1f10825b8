"""The register of verifiers, and the verdicts of a batch.

    exact, numeric, format      answers.py      texts
    compiles                    programs.py     parses
    doctest, unittest           programs.py     runs, in the sandbox
    custom:module:function      custom.py       a function of one's own, in a process

A task names its verifier. It may weigh several: "0.1 format(<answer>) + 0.9 numeric" gives 0.1 for the form and 0.9 for the
number; in brackets stands what a part compares with, where that is not the task's answer. The whole has passed when every
part has.

Nothing stops a batch. A verifier that raises, hangs or judges NaN gives 0, a reason and the mark `failed`; `tally` counts
reasons. All programs of a batch run together, over the sandbox's workers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.verify import program_verifiers as programs
from whorl.evals.verify import text_verifiers as answers
from whorl.evals.verify.custom_verifier import verify_custom
from whorl.evals.verify.program_verifiers import SandboxVerifier
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.sandbox import Program, Sandbox

Verifier = Callable[[VerifiableTask, str], Verdict] | SandboxVerifier
VERIFIERS: dict[str, Verifier] = {
    "exact": answers.exact,
    "numeric": answers.numeric,
    "format": answers.format_match,
    "compiles": programs.compiles,
    "doctest": programs.doctest_verifier,
    "unittest": programs.unittest_verifier,
}
_VERIFIER_PATTERN = re.compile(
    r"(?:(?P<weight>\d+(?:\.\d*)?|\.\d+)\s*\*?\s+)?(?P<name>\w+(?::[\w.]+:\w+)?)(?:\((?P<answer>.*)\))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class WeightedVerifier:
    """One verifier of a task: weight, name, and what it compares with (None: the task's answer)."""

    weight: float
    name: str
    answer: str | None


@cache
def parse_verifiers(verifier: str) -> tuple[WeightedVerifier, ...]:
    """The verifiers that a task's `verifier` names, with their weights.

    Raises:
        ConfigError: it cannot be read, or names one that is not in the register.
    """
    found = []
    for text in re.split(r"\s\+\s(?![^()]*\))", verifier.strip()):
        match = _VERIFIER_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"verifier {text!r} cannot be read", expected="0.1 format(<answer>) + 0.9 numeric, say"
            )
        name = match["name"]
        if name not in VERIFIERS and not name.startswith("custom:"):
            raise ConfigError(
                f"no verifier is called {name!r}",
                expected=one_of(name, [*VERIFIERS, "custom:module:function"]),
            )
        found.append(WeightedVerifier(float(match["weight"] or 1.0), name, match["answer"]))
    return tuple(found)


def verify_all(
    tasks: Sequence[VerifiableTask], completions: Sequence[str], sandbox: Sandbox | None = None
) -> list[Verdict]:
    """A verdict for each completion of the task at its place.

    Args:
        sandbox: for doctest and unittest; without one these raise, before any verdict.

    Raises:
        DataError: as many tasks as completions are needed.
        ConfigError: a verifier that is not in the register; one that needs the sandbox, and there is none.
    """
    if len(tasks) != len(completions):
        raise DataError(
            f"{len(tasks)} tasks with {len(completions)} completions", expected="one completion for each task"
        )
    jobs = [(at, part) for at, task in enumerate(tasks) for part in parse_verifiers(task.verifier)]
    for at, part in jobs:
        if sandbox is None and isinstance(VERIFIERS.get(part.name), SandboxVerifier):
            raise ConfigError(
                f"task {tasks[at].id!r}: {part.name} runs programs",
                expected="a sandbox",
                do="pass sandbox=Sandbox()",
            )
    verdicts: list[Verdict | None] = [None] * len(jobs)
    to_run: list[tuple[int, SandboxVerifier, VerifiableTask, str, Program]] = []
    to_call: list[tuple[int, tuple[str, VerifiableTask, str]]] = []
    for job, (at, part) in enumerate(jobs):
        task = tasks[at] if part.answer is None else replace(tasks[at], answer=part.answer)
        verifier, text = VERIFIERS.get(part.name), completions[at]
        if verifier is None:
            to_call.append((job, (part.name.removeprefix("custom:"), task, text)))
        elif isinstance(verifier, SandboxVerifier):
            program = _build_program(verifier, task, text)
            if isinstance(program, Verdict):
                verdicts[job] = program
            else:
                to_run.append((job, verifier, task, text, program))
        else:
            verdicts[job] = _verify_safely(verifier, task, text)
    if to_run and sandbox is not None:
        outcomes = sandbox.run_all([program for *_, program in to_run])
        for (job, runs, task, text, _), outcome in zip(to_run, outcomes, strict=True):
            verdicts[job] = _verify_safely(partial(runs.grade, outcome), task, text)
    for (job, _), verdict in zip(to_call, verify_custom([call for _, call in to_call]), strict=True):
        verdicts[job] = verdict
    by_task: list[list[tuple[WeightedVerifier, Verdict]]] = [[] for _ in tasks]
    for (at, part), judged in zip(jobs, verdicts, strict=True):
        assert judged is not None
        by_task[at].append((part, judged))
    return [_combine(found) for found in by_task]


def verdict_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Metrics of a batch: mean reward, share passed, and how often each kind of reason was given ("reason/timeout")."""
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
    except Exception as error:  # one broken task does not end a training
        return _error_verdict(error)


def _error_verdict(error: Exception) -> Verdict:
    return Verdict(0.0, False, f"raised: {type(error).__name__}: {error}".splitlines()[0][:300], failed=True)


def _combine(found: Sequence[tuple[WeightedVerifier, Verdict]]) -> Verdict:
    found = [(part, _finite_verdict(verdict)) for part, verdict in found]
    if len(found) == 1:
        part, verdict = found[0]
        return replace(verdict, reward=part.weight * verdict.reward)
    found.sort(key=lambda pair: not pair[1].failed)  # a failure is told before a wrong part
    wrong = [v.reason if ":" in v.reason else f"{v.reason}: {p.name}" for p, v in found if not v.passed]
    reward = sum(p.weight * v.reward for p, v in found)
    return Verdict(reward, not wrong, wrong[0] if wrong else "passed", found[0][1].failed)


def _finite_verdict(verdict: Verdict) -> Verdict:
    if math.isfinite(verdict.reward):
        return verdict
    return Verdict(0.0, False, f"raised: a reward of {verdict.reward}", failed=True)
