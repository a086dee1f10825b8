"""Registry of graders, and grades of batches: rewards of training and metrics of evaluations.

    exact, numeric, choice      answers.py          the final answer, strict and lenient
    format, grid, patch         structures.py       the form of a text; grids of ARC-AGI, patches
    compiles                    programs.py         a program parses and has an effect
    program, unittest           programs.py         tests of a program, in the sandbox
    doctest                     doctests.py         examples of a program, in the sandbox
    parses                      parse_rate.py       a completed function is valid Python
    constraints                 constraints/        the instructions of IFEval (arXiv:2311.07911), strict and loose
    refusal                     refusal.py          compliance with harmless prompts, refusal of harmful ones
    safety                      evals.safety        the same under transformations, if the answer is about the request
    facts                       evals.suites        a known fact, or the statement that it is unknown
    cited                       evals.suites        a fact of the sources, and the number of the one that states it
    repetition                  repetition.py       distinct n-grams and repeated lines
    reasoning_gym               evals.suites        an item of reasoning-gym is solved, by the package's own scorer
    custom:MODULE:FUNCTION      custom.py           a user's function, in a separate process, outside the sandbox

A grader is a function `(gold, text, *, finish, prompt, **options) -> Grade`, total over texts; it has any of the named
arguments. A `ProgramGrader` builds a program of each text, and all programs of a batch run in parallel. A record comes from
anyone, so it may name a function only if a recipe or a command line does (`whorl.registry`).

    grade_all("numeric", golds, completions, form="mark")       a metric: one grader for all items
    grade_tasks(tasks, completions, sandbox)                    a reward: each task names its graders

A task's reward is a weighted sum: "0.1 format(<answer>) + 0.9 numeric[tags]" gives 0.1 for the form and 0.9 for the number.
The text in parentheses replaces the task's answer for that term, and the form in brackets is demanded (`strict` of
answers.py). A sum has passed if every term has.

An error does not stop a batch. A grader that raises, hangs or returns NaN gives value 0, outcome "error" and a reason.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.grading.custom import accepted, grade_in_process
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.programs import ProgramGrader
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.requests import Completion
from whorl.registry import Registry, check_permitted
from whorl.sandbox import Program, Sandbox

GRADERS = Registry(
    "grader",
    {
        "exact": "whorl.evals.grading.answers:exact",
        "numeric": "whorl.evals.grading.answers:numeric",
        "choice": "whorl.evals.grading.answers:choice",
        "format": "whorl.evals.grading.structures:format_match",
        "grid": "whorl.evals.grading.structures:grid",
        "patch": "whorl.evals.grading.structures:patch",
        "compiles": "whorl.evals.grading.programs:compiles",
        "program": "whorl.evals.grading.programs:program",
        "unittest": "whorl.evals.grading.programs:unittest",
        "doctest": "whorl.evals.grading.doctests:examples_pass",
        "parses": "whorl.evals.grading.parse_rate:parses",
        "constraints": "whorl.evals.grading.constraints:constraints",
        "refusal": "whorl.evals.grading.refusal:refusal",
        "safety": "whorl.evals.safety.metric:safety",
        "facts": "whorl.evals.suites.side_effects:facts",
        "cited": "whorl.evals.suites.cited_sources:cited",
        "repetition": "whorl.evals.grading.repetition:repetition",
        "reasoning_gym": "whorl.evals.suites.reasoning_gym:solved",
    },
)
PASS_CRITERIA = {
    "exact": "the answer equals the expected text",
    "numeric": "the number equals the expected one",
    "choice": "the chosen letter is the expected one",
    "format": "the text has the required form",
    "cited": "the answer has the fact, and cites the source that states it",
    "compiles": "the code parses and has an effect, right or wrong",
    "doctest": "the examples of the docstring give the expected output",
    "unittest": "all tests of the task succeed",
}
CUSTOM = "custom:"
MAY_HANG = frozenset({"reasoning_gym"})  # they run in the process of users' functions
_TERM = re.compile(
    r"(?:(?P<weight>\d+(?:\.\d*)?|\.\d+)\s*\*?\s+)?(?P<name>\w+(?::[\w.]+:\w+)?)(?:\[(?P<form>[^\]]*)\])?"
    r"(?:\((?P<answer>.*)\))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class WeightedGrader:
    """One term of a reward: weight, name, the answer to compare with (None: the task's answer), the demanded form."""

    weight: float
    name: str
    answer: str | None = None
    form: str = ""


@dataclass(frozen=True)
class _Call:
    name: str
    gold: Any
    text: str
    options: Mapping[str, Any]


def get_grader(name: str, options: Iterable[str] = (), *, named_by: str = "") -> Any:
    """Return a grader by its name or "custom:module:function", after a check of the names of its options.

    named_by: see `Registry.get`.

    Raises:
        ConfigError: it does not exist, has no such option, or is code that data may not name.
    """
    if name not in GRADERS and not name.startswith(CUSTOM):
        raise ConfigError(f"no grader {name!r}", expected=one_of(name, [*GRADERS, "custom:MODULE:FUNCTION"]))
    grader = GRADERS.get(name.removeprefix(CUSTOM), named_by=named_by)
    for option in options:
        if not takes(grader, option) or option == "finish":
            parameters = inspect.signature(_function(grader)).parameters.values()
            allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "finish"]
            raise ConfigError(
                f"the grader {name!r} has no option {option!r}", expected=one_of(option, allowed)
            )
    return grader


def takes(grader: Any, argument: str) -> bool:
    """Return whether a grader has a named argument."""
    return bool(accepted(_function(grader), {argument: None}))


def needs_sandbox(tasks: Iterable[VerifiableTask]) -> bool:
    """Return whether a grader of the tasks runs programs, alone or as a part of another."""
    names = {
        term.name for text in {task.verifier for task in tasks} for term in _parse(text)
    } & GRADERS.entries.keys()
    return any(isinstance(GRADERS.get(name), ProgramGrader) for name in names)


def parse_graders(text: str, named_by: str = "") -> tuple[WeightedGrader, ...]:
    """Return the graders named by a task's `verifier`, with their weights.

    named_by: the task, for the message.

    Raises:
        ConfigError: the text cannot be parsed, or names an unknown grader or code that is not permitted.
    """
    found = _parse(text)
    for term in found:
        if term.name.startswith(CUSTOM):
            check_permitted(term.name.removeprefix(CUSTOM), f"{named_by}verifier {text!r}")
    return found


@lru_cache(4096)  # a set of tasks may give each task its own answer
def _parse(text: str) -> tuple[WeightedGrader, ...]:
    terms = []
    for term in re.split(r"\s\+\s(?![^()]*\))", text.strip()):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ConfigError(
                f"verifier {term!r} cannot be parsed",
                expected="for example 0.1 format(<answer>) + 0.9 numeric",
            )
        name = match["name"]
        if name not in GRADERS and not name.startswith(CUSTOM):
            raise ConfigError(
                f"unknown verifier {name!r}", expected=one_of(name, [*GRADERS, "custom:MODULE:FUNCTION"])
            )
        form = match["form"] or ""
        if form:
            get_grader(name, ("form", "strict"))
        terms.append(WeightedGrader(float(match["weight"] or 1.0), name, match["answer"], form))
    return tuple(terms)


def pass_criterion(tasks: Sequence[VerifiableTask]) -> str:
    """Return what passing means for these tasks, in words, with the number of tasks if there are several kinds."""
    kinds = Counter(
        " and ".join(
            PASS_CRITERIA.get(term.name, f"{term.name} passes") for term in parse_graders(task.verifier)
        )
        for task in tasks
    )
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{text} ({n} tasks)" for text, n in kinds.most_common())


def grade_all(
    name: str,
    golds: Sequence[Any],
    completions: Sequence[Completion | str],
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    sandbox: Sandbox | None = None,
) -> list[Grade]:
    """Return the grade of each completion against the gold answer at the same index.

    Args:
        options: keyword arguments of the grader, for all items or one mapping for each.
        sandbox: required by graders that run programs.

    Raises:
        DataError: the numbers of golds, completions and options differ.
        ConfigError: the grader or an option is unknown, or it needs a sandbox. Raised before any grading.
    """
    each = [options or {}] * len(golds) if options is None or isinstance(options, Mapping) else list(options)
    if not len(golds) == len(completions) == len(each):
        raise DataError(
            f"{len(golds)} gold answers, {len(completions)} completions, {len(each)} options",
            expected="one of each for each item",
        )
    get_grader(name, {key: None for one in each for key in one})
    calls = [
        _Call(name, gold, done.text, {**more, "finish": done.finish})
        for gold, done, more in zip(golds, _completions(completions), each, strict=True)
    ]
    return _grade(calls, sandbox)


def grade_tasks(
    tasks: Sequence[VerifiableTask], completions: Sequence[Completion | str], sandbox: Sandbox | None = None
) -> list[Grade]:
    """Return one grade per completion, in order: the weighted sum of the task's graders.

    Args:
        sandbox: required by graders that run programs.

    Raises:
        DataError: the numbers of tasks and completions differ.
        ConfigError: a verifier is unknown, or needs a sandbox. Raised before any grading.
    """
    if len(tasks) != len(completions):
        raise DataError(
            f"{len(tasks)} tasks with {len(completions)} completions", expected="one completion per task"
        )
    terms = [parse_graders(task.verifier, f"task {task.id!r}: ") for task in tasks]
    calls = [
        _Call(
            term.name, task.answer if term.answer is None else term.answer, done.text,
            {"finish": done.finish, "prompt": task.prompt, "messages": task.messages, "refusals": False}
            | ({"form": term.form, "strict": True} if term.form else {}),
        )
        for task, done, each in zip(tasks, _completions(completions), terms, strict=True) for term in each
    ]  # fmt: skip
    grades = iter(_grade(calls, sandbox))
    return [_weighted_sum(each, [next(grades) for _ in each]) for each in terms]


def _completions(given: Sequence[Completion | str]) -> list[Completion]:
    return [Completion(each) if isinstance(each, str) else each for each in given]


def _grade(calls: Sequence[_Call], sandbox: Sandbox | None) -> list[Grade]:
    """Return the grades of all calls; the programs among them run together, and so do the functions of users."""
    graders = {
        name: GRADERS.get(name)
        for name in {call.name for call in calls}
        if not name.startswith(CUSTOM) and name not in MAY_HANG
    }
    runs = next((name for name, grader in graders.items() if isinstance(grader, ProgramGrader)), None)
    if runs is not None and sandbox is None:
        raise ConfigError(f"{runs} runs programs", expected="a sandbox", do="pass sandbox=Sandbox()")
    grades, programs, foreign = dict[int, Grade](), dict[int, Program](), dict[int, tuple[Any, ...]]()
    for n, call in enumerate(calls):
        if call.name not in graders:
            path = GRADERS.entries.get(call.name) or call.name.removeprefix(CUSTOM)
            foreign[n] = path, call.gold, call.text, call.options
            continue
        found = _safely(_function(graders[call.name]), call)
        if isinstance(found, Program):
            programs[n] = found
        else:
            grades[n] = found
    if sandbox is not None and programs:
        for n, result in zip(programs, sandbox.run_all(list(programs.values())), strict=True):
            grades[n] = _safely(graders[calls[n].name].grade, calls[n], result)
    for n, grade in zip(foreign, grade_in_process(list(foreign.values())), strict=True):
        grades[n] = grade
    return [grades[n] for n in range(len(calls))]


def _function(grader: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = grader.build if isinstance(grader, ProgramGrader) else grader
    return function


def _safely(function: Callable[..., Any], call: _Call, *result: Any) -> Any:
    try:
        found = function(*result, call.gold, call.text, **accepted(function, call.options))
        return found if isinstance(found, Program) else Grade.read(found)
    except Exception as error:  # one broken item must not stop a batch
        return Grade.error(error)


def _weighted_sum(terms: Sequence[WeightedGrader], grades: Sequence[Grade]) -> Grade:
    if len(grades) == 1:
        return replace(grades[0], value=terms[0].weight * grades[0].value)
    pairs = sorted(zip(terms, grades, strict=True), key=lambda pair: not pair[1].failed)  # errors come first
    wrong = [g for _, g in pairs if not g.passed]
    reasons = [g.reason if ":" in g.reason else f"{g.reason}: {t.name}" for t, g in pairs if not g.passed]
    outcome = wrong[0].outcome if wrong else "right"
    value = sum(term.weight * grade.value for term, grade in pairs)
    answer = next((g.answer for g in grades if g.answer), "")
    return Grade(value, not wrong, reasons[0] if reasons else "passed", {}, outcome, answer)
