"""Generated arithmetic: Python checks every problem and step; held-out problems never occur in training."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.align.data.arithmetic import LEVELS, Arithmetic, ArithmeticProblem, written_solution
from whorl.errors import ConfigError, DataError

EVERY = dict.fromkeys(range(len(LEVELS)), 1.0)


def numbers(problem: ArithmeticProblem) -> list[int]:
    return [n.value for n in ast.walk(ast.parse(problem.expression)) if isinstance(n, ast.Constant)]


def walk(node: ast.expr, steps: list[str]) -> int:
    """Append the steps of Python's tree of an expression, evaluated left first; return its value."""
    if isinstance(node, ast.Constant):
        return int(node.value)
    assert isinstance(node, ast.BinOp)
    a, b = walk(node.left, steps), walk(node.right, steps)
    sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    steps.append(f"{a}{sign}{b}={value}" if b >= 0 else f"{a}{sign}({b})={value}")
    return value


def test_problems_follow_tree_with_minimal_brackets() -> None:
    seen = Counter[int]()
    for problem in Arithmetic(3, EVERY).problems(0, 4000):
        level = LEVELS[problem.level]
        seen[problem.level] += 1
        tree, steps = ast.parse(problem.expression, mode="eval").body, list[str]()
        assert walk(tree, steps) == eval(problem.expression) == problem.answer
        assert tuple(steps) == problem.steps and len(steps) == len(level.digits) - 1
        assert ast.unparse(tree).replace(" ", "") == problem.expression  # writes only needed brackets
        assert written_solution(problem).splitlines()[-1] == f"#### {problem.answer}"
        assert sorted(len(str(n)) for n in numbers(problem)) == sorted(level.digits)
        assert level.brackets or "(" not in problem.expression
        assert not set(problem.expression) - set("0123456789()" + level.operators)
    assert set(seen) == set(EVERY) and min(seen.values()) > 4000 / len(LEVELS) * 0.75


@settings(max_examples=30)
@given(st.integers(0, 2**70), st.integers(0, 10**12), st.integers(1, 40), st.booleans())
def test_problem_depends_on_seed_and_index_only(seed: int, start: int, n: int, held_out: bool) -> None:
    source = Arithmetic(seed, EVERY)
    alone = [source.problems(start + i, 1, held_out=held_out)[0] for i in range(n)]
    assert source.problems(start, n, held_out=held_out) == alone


def test_problems_differ_by_seed_and_stay_fixed() -> None:
    one, two = (Arithmetic(seed, {10: 1}).problems(0, 200) for seed in (0, 1))
    assert not {p.expression for p in one} & {p.expression for p in two}
    first = [p.expression for p in Arithmetic(0, {1: 1, 7: 1}).problems(0, 4)]
    assert first == ["75+49", "22*(21*3)", "99+59", "42-74+2"]


def test_weights_set_share_of_levels() -> None:
    seen = Counter(p.level for p in Arithmetic(5, {1: 3, 4: 1, 8: 0}).problems(0, 8000))
    assert set(seen) == {1, 4}
    assert abs(seen[1] / 8000 - 0.75) < 0.02  # four standard deviations


def test_held_out_problems_never_occur_in_training() -> None:
    held = Arithmetic(7, {0: 1, 1: 1, 7: 1}).problems(0, 3000, held_out=True)
    trained = Arithmetic(8, {0: 1, 1: 1, 7: 1}).problems(0, 30000)
    sides = [{p.expression for p in side} for side in (held, trained)]
    assert not sides[0] & sides[1]
    ways = [{tuple(sorted(numbers(p))) for p in side if p.level < 2} for side in (held, trained)]
    assert not ways[0] & ways[1]
    # About a tenth of the 4,095 unordered sums of two digits is held out.
    two = {tuple(sorted(numbers(p))) for p in held if p.level == 1}
    assert 0.05 * 4095 < len(two) < 0.15 * 4095


def test_distinct_problems_and_too_few_problems() -> None:
    source = Arithmetic(0, {0: 1})
    assert len({p.expression for p in source.distinct(5)}) == 5
    with pytest.raises(DataError, match="distinct problems"):
        source.distinct(82)
    with pytest.raises(DataError, match="no held-out problem"):
        Arithmetic(0, {0: 1}, held_out_fraction=0.0).problems(0, 1, held_out=True)


def test_task_pair_and_conversation_agree() -> None:
    source, plain = Arithmetic(2, {7: 1}), Arithmetic(2, {7: 1}, show_steps=False)
    problem = source.problems(11, 1)[0]
    task, pair, chat = source.task(problem), source.prompt_completion(problem), source.conversation(problem)
    assert (task.prompt, task.verifier, task.answer) == (pair.prompt, "numeric", str(problem.answer))
    assert (task.id, task.difficulty) == ("arithmetic-2-11", 7.0)
    assert chat.messages[-1]["content"] == pair.completion == written_solution(problem)
    assert source.task(problem, chat=True).messages == chat.messages[:-1]
    assert plain.task(problem).verifier == "exact"
    short = plain.prompt_completion(problem)
    assert short.prompt + short.completion == f"{problem.expression}={problem.answer}"


def test_arithmetic_rejects_invalid_arguments() -> None:
    for weights in ({99: 1.0}, {1: -1.0}, {1: 0.0}, {}, {1: float("nan")}):
        with pytest.raises(ConfigError, match="weights"):
            Arithmetic(0, weights)
    with pytest.raises(ConfigError, match="held_out_fraction"):
        Arithmetic(0, held_out_fraction=1.0)


def test_digit_by_digit_solution_is_correct() -> None:
    """Every column is correct, and their last digits form the value."""
    source = Arithmetic(weights={1: 1, 2: 1, 3: 1, 5: 2, 7: 1}, digit_by_digit=True)
    carried = 0
    for problem in source.problems(0, 2000):
        *steps, last = source.solution(problem).split("\n")
        assert last == f"#### {problem.answer}"
        assert all("*" in step for step in steps if ":" not in step)
        for step in (step for step in steps if ":" in step):
            asked, rest = step.split(":")
            columns, value = rest.split(";")
            assert eval(asked) == int(value)
            sides = [column.split("=") for column in columns.split(",")]
            assert all(eval(left) == int(right) for left, right in sides)
            carried += sum("+1" in left or "-1" in left for left, _ in sides)
            last, *lower = [int(right) for _, right in sides][::-1]
            assert abs(int(value)) == int(f"{last}" + "".join(str(n % 10) for n in lower)), step
    assert carried > 500
