"""The probes: answers by independent solvers, balance against simple preferences, the suite and its training text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from bench.evals.suites._repeaters import REPEATERS, RepeatingModel
from tests.support.evals.backend import FakeBackend

from whorl.errors import ConfigError
from whorl.evals.model.requests import Request, Response, Score, ScoreRequest
from whorl.evals.runner import evaluate
from whorl.evals.suites.probe_lines import CHOICES, LEVELS, PROBES, ProbeLine
from whorl.evals.suites.probes import draw_lines, probe_records, probe_tasks, training_lines

PAIRS = dict(zip("ABCD", "abcd", strict=True))


def lines(probe: str, level: int, n: int) -> list[ProbeLine]:
    stream = draw_lines(probe, level, 0, "test")
    return [next(stream) for _ in range(n)]


def _after_last_pair(before: list[str]) -> str:
    """What followed the last two letters the last time."""
    places = [i for i in range(2, len(before)) if before[i - 2 : i] == before[-2:]]
    return before[places[0]]


def _unsorted(before: list[str]) -> str:
    to = before.index("to")
    words = [f"{a} {b}" for a, b in zip(before[1:to:2], before[2:to:2], strict=True)]
    return sorted(words)[(len(before) - to - 1) // 2]


def _innermost(before: list[str]) -> str:
    opened: list[str] = []
    for symbol in before[1:]:
        if symbol in PAIRS:
            opened.append(PAIRS[symbol])
        else:
            assert opened.pop() == symbol
    return opened[-1]


def _value(before: list[str]) -> str:
    text = "".join(before[1:-1]).replace("plus", "+").replace("minus", "-")
    signs = re.findall(r"[+-]?\d+", text)
    return " ".join(str(sum(map(int, signs))))


def _content(before: list[str]) -> str:
    cups = dict(zip(before[1:9:2], before[2:9:2], strict=True))
    operations = before[9 : before.index("then")]
    for a, b in zip(operations[1::3], operations[2::3], strict=True):
        cups[a], cups[b] = cups[b], cups[a]
    return cups[before[-1]]


def _looked_up(before: list[str]) -> str:
    then = before.index("then")
    table = {(before[i], before[i + 1]): before[i + 2] for i in range(1, then, 3)}
    return table[before[-2], before[-1]]


def _copied(before: list[str]) -> str:
    return before[len(before) - before.index("to")]


SOLVERS: Mapping[str, Callable[[list[str]], str]] = {
    "induction": _after_last_pair, "recall": _looked_up, "copying": _copied, "sorting": _unsorted,
    "brackets": _innermost, "arithmetic": _value, "state": _content,
}  # fmt: skip


@pytest.mark.parametrize("probe", PROBES)
def test_independent_solver_gets_every_item(probe: str) -> None:
    for level in range(1, LEVELS + 1):
        for line in lines(probe, level, 60):
            assert len(set(line.choices)) == CHOICES
            assert line.choices[line.gold] == SOLVERS[probe](list(line.symbols[: line.cut])), line.text
            assert line.text.startswith(f"{line.prompt} {line.choices[line.gold]}")


def _places(prompt: Sequence[str], choice: str) -> list[int]:
    words = choice.split()
    return [i for i in range(len(prompt)) if list(prompt[i : i + len(words)]) == words]


PREFERENCES: Mapping[str, Callable[[Sequence[str], str], float]] = {
    "most frequent": lambda prompt, choice: len(_places(prompt, choice)),
    "last": lambda prompt, choice: max(_places(prompt, choice), default=-1),
    "first": lambda prompt, choice: -min(_places(prompt, choice), default=99),
    "smallest": lambda prompt, choice: -float(int.from_bytes(choice.encode().ljust(8), "big")),
    "largest": lambda prompt, choice: float(int.from_bytes(choice.encode().ljust(8), "big")),
}


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("preference", PREFERENCES)
def test_constant_preference_is_not_above_chance(probe: str, preference: str) -> None:
    right, n = 0.0, 0
    for level in range(1, LEVELS + 1):
        for line in lines(probe, level, 200):
            values = [PREFERENCES[preference](line.symbols[: line.cut], choice) for choice in line.choices]
            best = [i for i, value in enumerate(values) if value == max(values)]
            right += (line.gold in best) / len(best)
            n += 1
    assert right / n < 1 / CHOICES + 0.045


def test_harder_levels_are_longer() -> None:
    for probe in PROBES:
        sizes = [np.mean([len(line.symbols) for line in lines(probe, level, 50)]) for level in (1, LEVELS)]
        assert sizes[1] > 1.3 * sizes[0], probe


def test_same_seed_gives_same_tasks_and_another_others() -> None:
    a, b, c = (probe_tasks(seed=seed, items=20) for seed in (3, 3, 4))
    assert [t.hash for t in a] == [t.hash for t in b]
    assert not {t.hash for t in a} & {t.hash for t in c}


def oracle(request: Request) -> Response:
    assert isinstance(request, ScoreRequest)
    before = request.context.rsplit("\n", 1)[-1].split()
    right = SOLVERS[before[0]](before) == request.continuation.strip()
    return Score((1,), (-0.1 if right else -3.0,), greedy=right)


@pytest.mark.parametrize("shots", [0, 4])
def test_model_with_the_skills_is_always_right(shots: int) -> None:
    results = evaluate(FakeBackend(oracle), probe_tasks(items=25, shots=shots))
    assert [r.measures[0].value for r in results] == [1.0] * len(PROBES)
    assert all(set(r.by_group) == {f"level {i}" for i in range(1, 6)} for r in results)
    assert all(r.measure("acc").chance == 0.25 for r in results)


def test_examples_are_whole_lines() -> None:
    task = probe_tasks(items=5, shots=2, probes=["sorting"])[0]
    prompt = str(task.kind.prompt(task.items[0]))
    first, second, third = prompt.split("\n")
    assert _unsorted(second.split()[:-2]) == " ".join(second.split()[-2:])
    assert first.startswith("sorting ") and third == task.items[0].fields["prompt"]


@pytest.mark.parametrize("name", REPEATERS)
def test_model_that_repeats_itself_wins_no_probe(name: str) -> None:
    for result in evaluate(RepeatingModel(name), probe_tasks(items=1000, shots=0)):
        assert result.measure("acc").value < 0.25 + 3.5 * (0.25 * 0.75 / 1000) ** 0.5, (name, result.task)


def test_training_lines_are_no_items_where_many_are_possible() -> None:
    tasks = probe_tasks(items=50, levels=(2, 3, 4, 5), probes=[p for p in PROBES if p != "arithmetic"])
    text = training_lines(3_000)
    prompts = tuple(item.fields["prompt"] for task in tasks for item in task.items)
    assert {t.split()[0] for t in text} == set(PROBES)
    assert sum(t.startswith(prompts) for t in text) == 0


def test_training_lines_give_probes_equal_symbols() -> None:
    symbols = dict.fromkeys(PROBES, 0)
    for text in training_lines(3_000):
        symbols[text.split()[0]] += len(text.split())
    assert max(symbols.values()) - min(symbols.values()) < 100


def test_few_possible_lines_give_fewer_items() -> None:
    records = probe_records("arithmetic", 900, 0)
    assert len(records) < 900 and len({r["prompt"] for r in records}) == len(records)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probes": ["inductoin"]}, "no probe 'inductoin'.*induction"),
        ({"levels": (6,)}, "level of a probe is 6.*from 1 to 5"),
        ({"levels": ()}, "items of 0 levels"),
        ({"items": 3}, "3 items of 5 levels"),
    ],
)
def test_wrong_settings_are_errors(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        probe_tasks(**settings)  # type: ignore[arg-type]
    assert re.search(message, str(caught.value), re.DOTALL)
