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
from whorl.evals.verify.program_verifiers import InSandbox
from whorl.evals.verify.task import Task, Verdict
from whorl.sandbox import Program, Sandbox

Verifier = Callable[[Task, str], Verdict] | InSandbox
VERIFIERS: dict[str, Verifier] = {
    "exact": answers.exact,
    "numeric": answers.numeric,
    "format": answers.form,
    "compiles": programs.compiles,
    "doctest": programs.doctested,
    "unittest": programs.unittested,
}
_PART = re.compile(
    r"(?:(?P<weight>\d+(?:\.\d*)?|\.\d+)\s*\*?\s+)?(?P<name>\w+(?::[\w.]+:\w+)?)(?:\((?P<answer>.*)\))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """One verifier of a task: weight, name, and what it compares with (None: the task's answer)."""

    weight: float
    name: str
    answer: str | None


@cache
def parts(verifier: str) -> tuple[Part, ...]:
    """The verifiers that a task's `verifier` names, with their weights.

    Raises:
        ConfigError: it cannot be read, or names one that is not in the register.
    """
    found = []
    for text in re.split(r"\s\+\s(?![^()]*\))", verifier.strip()):
        match = _PART.fullmatch(text.strip())
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
        found.append(Part(float(match["weight"] or 1.0), name, match["answer"]))
    return tuple(found)


def verify_all(
    tasks: Sequence[Task], completions: Sequence[str], sandbox: Sandbox | None = None
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
    jobs = [(at, part) for at, task in enumerate(tasks) for part in parts(task.verifier)]
    for at, part in jobs:
        if sandbox is None and isinstance(VERIFIERS.get(part.name), InSandbox):
            raise ConfigError(
                f"task {tasks[at].id!r}: {part.name} runs programs",
                expected="a sandbox",
                do="pass sandbox=Sandbox()",
            )
    verdicts: list[Verdict | None] = [None] * len(jobs)
    to_run: list[tuple[int, InSandbox, Task, str, Program]] = []
    to_call: list[tuple[int, tuple[str, Task, str]]] = []
    for job, (at, part) in enumerate(jobs):
        task = tasks[at] if part.answer is None else replace(tasks[at], answer=part.answer)
        verifier, text = VERIFIERS.get(part.name), completions[at]
        if verifier is None:
            to_call.append((job, (part.name.removeprefix("custom:"), task, text)))
        elif isinstance(verifier, InSandbox):
            program = _program(verifier, task, text)
            if isinstance(program, Verdict):
                verdicts[job] = program
            else:
                to_run.append((job, verifier, task, text, program))
        else:
            verdicts[job] = _guarded(verifier, task, text)
    if to_run and sandbox is not None:
        outcomes = sandbox.run_all([program for *_, program in to_run])
        for (job, runs, task, text, _), outcome in zip(to_run, outcomes, strict=True):
            verdicts[job] = _guarded(partial(runs.judge, outcome), task, text)
    for (job, _), verdict in zip(to_call, verify_custom([call for _, call in to_call]), strict=True):
        verdicts[job] = verdict
    by_task: list[list[tuple[Part, Verdict]]] = [[] for _ in tasks]
    for (at, part), judged in zip(jobs, verdicts, strict=True):
        assert judged is not None
        by_task[at].append((part, judged))
    return [_together(found) for found in by_task]


def tally(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Metrics of a batch: mean reward, share passed, and how often each kind of reason was given ("reason/timeout")."""
    n = max(len(verdicts), 1)
    kinds = Counter(v.reason.split(":")[0] or "passed" for v in verdicts)
    shares = {"reward": sum(v.reward for v in verdicts) / n, "passed": sum(v.passed for v in verdicts) / n}
    return shares | {f"reason/{kind}": float(count) for kind, count in sorted(kinds.items())}


def _program(verifier: InSandbox, task: Task, text: str) -> Program | Verdict:
    try:
        return verifier.build(task, text)
    except Exception as error:
        return _raised(error)


def _guarded(verifier: Callable[[Task, str], Verdict], task: Task, text: str) -> Verdict:
    try:
        return verifier(task, text)
    except Exception as error:  # one broken task does not end a training
        return _raised(error)


def _raised(error: Exception) -> Verdict:
    return Verdict(0.0, False, f"raised: {type(error).__name__}: {error}".splitlines()[0][:300], failed=True)


def _together(found: Sequence[tuple[Part, Verdict]]) -> Verdict:
    found = [(part, _finite(verdict)) for part, verdict in found]
    if len(found) == 1:
        part, verdict = found[0]
        return replace(verdict, reward=part.weight * verdict.reward)
    found.sort(key=lambda pair: not pair[1].failed)  # a failure is told before a wrong part
    wrong = [v.reason if ":" in v.reason else f"{v.reason}: {p.name}" for p, v in found if not v.passed]
    reward = sum(p.weight * v.reward for p, v in found)
    return Verdict(reward, not wrong, wrong[0] if wrong else "passed", found[0][1].failed)


def _finite(verdict: Verdict) -> Verdict:
    if math.isfinite(verdict.reward):
        return verdict
    return Verdict(0.0, False, f"raised: a reward of {verdict.reward}", failed=True)
