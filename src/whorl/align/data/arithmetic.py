"""Generated arithmetic problems with levels of difficulty, known answers and written solutions.

    level 1    47+85                   #### 132
    level 7    (23-48)*7               23-48=-25 NEWLINE -25*7=-175 NEWLINE #### -175
    digits     47+85                   47+85:7+5=12,4+8+1=13;132 NEWLINE #### 132

A level defines the operators, the digits of each number, and whether brackets may occur (`LEVELS`, 0 to 10). `weights`
sets the share of each level. Expression and solution come from one tree, so they always agree. The expression has
exactly the brackets that reproduce the tree; the solution evaluates it from the inside out, left first. The last line
is the answer after "#### ", as in GSM8K. With `digit_by_digit` each sum or difference is worked out by columns. Each
step then depends on at most three digits, which a small network learns much sooner than whole sums.

Problem i of a seed never changes: its numbers are a hash of (seed, i), not the next values of a stream (splitmix64:
Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

The subtle point is the held-out set. Two seeds or two indices may give the same problem, so an index cannot define
it. A hash of the expression does, without the seed. The operands of + and * are sorted first, because 12+34 and 34+12
are almost the same problem. An index on the wrong side is drawn again. A step of a longer problem may equal a
held-out short one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from whorl.align.data.formats import Conversation, PromptCompletion
from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.grading.task import VerifiableTask
from whorl.tracking.seeds import splitmix64

ANSWER_PREFIX = "#### "  # precedes the answer on the last line
SLOTS = 12  # draws per problem: level, and for up to 4 terms the numbers, operators and order
ATTEMPTS = 2000
_STEP = re.compile(r"(-?\d+)([+-])(\d+|\(-\d+\))=(-?\d+)")


@dataclass(frozen=True)
class ArithmeticLevel:
    """operators: any of "+-*". digits: of each of the 2 to 4 terms. brackets: whether they may occur anywhere."""

    operators: str
    digits: tuple[int, ...]
    brackets: bool = False


LEVELS = (
    ArithmeticLevel("+", (1, 1)),
    ArithmeticLevel("+", (2, 2)),
    ArithmeticLevel("-", (2, 2)),
    ArithmeticLevel("+-", (3, 3)),
    ArithmeticLevel("*", (2, 1)),
    ArithmeticLevel("+-", (2, 2, 2)),
    ArithmeticLevel("+-*", (2, 1, 1)),
    ArithmeticLevel("+-*", (2, 2, 1), brackets=True),
    ArithmeticLevel("*", (2, 2)),
    ArithmeticLevel("+-*", (2, 1, 2, 1), brackets=True),
    ArithmeticLevel("+-", (5, 5)),
)


@dataclass(frozen=True)
class ArithmeticProblem:
    """expression: Python syntax. answer: its value. steps: "a+b=c", from the inside out. level: index into LEVELS."""

    id: str
    expression: str
    answer: int
    steps: tuple[str, ...]
    level: int


@dataclass(frozen=True)
class Arithmetic:
    """A source of problems.

    Args:
        seed: selects the problems.
        weights: level -> relative frequency.
        show_steps: write solutions out; otherwise only the answer follows "expression=".
        digit_by_digit: write sums and differences out by columns.
        held_out_fraction: of all problems, in [0, 1). It must be equal for a training source and its test source;
            seed and weights may differ.

    Raises:
        ConfigError: an unknown level, a negative weight, or no positive weight.
    """

    seed: int = 0
    weights: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    show_steps: bool = True
    digit_by_digit: bool = False
    held_out_fraction: float = 0.1

    def __post_init__(self) -> None:
        for level, weight in self.weights.items():
            if level not in range(len(LEVELS)):
                raise ConfigError(
                    f"weights: unknown level {level}",
                    expected=one_of(str(level), [str(i) for i in range(len(LEVELS))]),
                )
            if not weight >= 0:
                raise ConfigError(f"weights: level {level} has {weight}", expected="0 or more")
        if not sum(self.weights.values()) > 0:
            raise ConfigError("weights: no level has a positive weight", expected="at least one")
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction is {self.held_out_fraction}", expected="0 up to below 1")

    def problems(self, start: int, n: int, *, held_out: bool = False) -> list[ArithmeticProblem]:
        """Return problems start, ..., start + n - 1 of the training set or of the held-out set.

        Raises:
            DataError: the levels have (almost) no problem in that set.
        """
        found: dict[int, ArithmeticProblem] = {}
        left = np.arange(start, start + n, dtype=np.uint64)
        for attempt in range(ATTEMPTS):
            if not len(left):
                return [found[i] for i in range(start, start + n)]
            rows = hash_draws(self.seed, left, attempt, SLOTS)
            levels = self._levels(rows[:, 0])
            again = []
            for index, level, row in zip(left.tolist(), levels.tolist(), rows.tolist(), strict=True):
                problem, key = _problem(f"arithmetic-{self.seed}-{index}", level, row)
                if self._is_held_out(key) == held_out:
                    found[index] = problem
                else:
                    again.append(index)
            left = np.array(again, dtype=np.uint64)
        raise DataError(
            f"no {'held-out' if held_out else 'training'} problem in {ATTEMPTS} draws at levels "
            f"{sorted(self.weights)}, with held_out_fraction {self.held_out_fraction:g}",
            expected="levels with more problems, or another held_out_fraction",
        )

    def distinct(self, n: int, *, held_out: bool = True) -> list[ArithmeticProblem]:
        """Return the first n distinct problems, so that a test counts none twice.

        Raises:
            DataError: there are fewer.
        """
        found: dict[str, ArithmeticProblem] = {}
        start = 0
        while len(found) < n:
            before, size = len(found), max(4 * n, 256)
            for problem in self.problems(start, size, held_out=held_out):
                found.setdefault(problem.expression, problem)
            start += size
            if len(found) == before:
                raise DataError(
                    f"the levels {sorted(self.weights)} have {before} distinct problems in this set, not {n}",
                    do="request fewer, or use levels with more digits",
                )
        return list(found.values())[:n]

    def prompt(self, problem: ArithmeticProblem) -> str:
        """Return the problem as a text to continue."""
        return f"{problem.expression}\n" if self.show_steps else f"{problem.expression}="

    def solution(self, problem: ArithmeticProblem) -> str:
        """Return the correct continuation."""
        return (
            written_solution(problem, digit_by_digit=self.digit_by_digit)
            if self.show_steps
            else str(problem.answer)
        )

    def task(self, problem: ArithmeticProblem, *, chat: bool = False) -> VerifiableTask:
        """Return a task: the verifier compares the number on the last line, or the exact text without steps."""
        return VerifiableTask(
            id=problem.id,
            prompt="" if chat else self.prompt(problem),
            messages=self._question(problem) if chat else (),
            verifier="numeric" if self.show_steps else "exact",
            answer=str(problem.answer),
            difficulty=float(problem.level),
        )

    def prompt_completion(self, problem: ArithmeticProblem) -> PromptCompletion:
        """Return training data for a model that continues text."""
        return PromptCompletion(self.prompt(problem), self.solution(problem), "arithmetic", problem.id)

    def conversation(self, problem: ArithmeticProblem) -> Conversation:
        """Return training data for a chat model."""
        answer = {"role": "assistant", "content": self.solution(problem)}
        return Conversation((*self._question(problem), answer), "arithmetic", problem.id)

    def _question(self, problem: ArithmeticProblem) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": f"What is {problem.expression}?"},)

    def _levels(self, drawn: NDArray[np.uint64]) -> NDArray[np.int64]:
        names = np.array(sorted(self.weights))
        upto = np.cumsum([self.weights[int(i)] for i in names])
        uniform = (drawn >> np.uint64(11)) * 2.0**-53
        chosen: NDArray[np.int64] = names[np.searchsorted(upto / upto[-1], uniform, side="right")]
        return chosen

    def _is_held_out(self, key: str) -> bool:
        digest = blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.held_out_fraction * 2**64


def written_solution(problem: ArithmeticProblem, *, digit_by_digit: bool = False) -> str:
    """Return the written solution; its last line is the answer."""
    steps = tuple(map(digit_steps, problem.steps)) if digit_by_digit else problem.steps
    return "\n".join((*steps, f"{ANSWER_PREFIX}{problem.answer}"))


def digit_steps(step: str) -> str:
    """Return a step "a+b=c" or "a-b=c" by columns: "a+b:", then the sum or difference of each column, then ";c".

    Signs are normalized first: -25+7 is 25-7 with a minus sign. Products stay unchanged.
    """
    match = _STEP.fullmatch(step)
    if match is None:
        return step
    a, operator, b, value = int(match[1]), match[2], int(match[3].strip("()")), match[4]
    b = b if operator == "+" else -b
    big, small = sorted((abs(a), abs(b)), reverse=True)
    adds = (a < 0) == (b < 0)
    columns, carried = [], 0
    upper, lower = str(big)[::-1], str(small)[::-1]
    for place, digit in enumerate(upper):
        other = lower[place : place + 1]
        if adds:
            terms = [digit, *([other] if other else []), *(["1"] if carried else [])]
            total = sum(map(int, terms))
            columns.append("+".join(terms) + f"={total}")
            carried = total // 10
        else:
            taken = [*([other] if other else []), *(["1"] if carried else [])]
            rest = int(digit) - sum(map(int, taken))
            carried = int(rest < 0)
            columns.append("-".join([str(int(digit) + 10 * carried), *taken]) + f"={rest + 10 * carried}")
    return f"{step.rsplit('=', 1)[0]}:{','.join(columns)};{value}"


def hash_draws(seed: int, indices: NDArray[np.uint64], attempt: int, n_draws: int) -> NDArray[np.uint64]:
    """Return [len(indices), n_draws] hashes of (seed, index, attempt, draw), each uniform over uint64."""
    with np.errstate(over="ignore"):
        state = splitmix64(np.array([seed % 2**64], dtype=np.uint64))
        state = splitmix64(state ^ splitmix64(indices + np.uint64(1)))
        state = splitmix64(state + np.uint64(attempt))
        steps = np.arange(1, n_draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return splitmix64(state[:, None] + steps)


# A subexpression: text, precedence (* 2, + and - 1, number 3), value, key that ignores operand order, and the steps of
# its evaluation.
_Term = tuple[str, int, int, str, tuple[str, ...]]


def _problem(name: str, number: int, row: Sequence[int]) -> tuple[ArithmeticProblem, str]:
    """Return a problem of a level from one row of draws, and its key."""
    level = LEVELS[number]
    terms = len(level.digits)
    parts: list[_Term] = []
    for drawn, digits in zip(row[1:5], level.digits, strict=False):
        low = 10 ** (digits - 1)
        value = low + drawn % (9 * low)  # the bias of the remainder is below 1e-13
        parts.append((str(value), 3, value, str(value), ()))
    operators = [level.operators[drawn % len(level.operators)] for drawn in row[5 : 4 + terms]]
    order = iter(row[8:])
    while operators:
        first = operators.index("*") if "*" in operators else 0
        at = next(order) % len(operators) if level.brackets else first
        parts[at : at + 2] = [_combine(parts[at], operators.pop(at), parts[at + 1])]
    text, _, answer, key, steps = parts[0]
    return ArithmeticProblem(name, text, answer, steps, number), key


def _combine(left: _Term, operator: str, right: _Term) -> _Term:
    binds = 2 if operator == "*" else 1
    a, b = left[2], right[2]
    value = a * b if operator == "*" else a + b if operator == "+" else a - b
    before = f"({left[0]})" if left[1] < binds else left[0]
    # Also where the value would not change: 8+(3+4) evaluates 3+4 first, and the text must show it.
    after = f"({right[0]})" if right[1] <= binds else right[0]
    keys = (left[3], right[3])
    if operator != "-":
        keys = min(keys), max(keys)
    step = f"{a}{operator}{b if b >= 0 else f'({b})'}={value}"
    return (
        f"{before}{operator}{after}",
        binds,
        value,
        f"({keys[0]}{operator}{keys[1]})",
        (*left[4], *right[4], step),
    )
