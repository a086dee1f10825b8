"""Tasks of reasoning-gym: splits, levels, the package's scorers, and what they must not do."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.recipes.align_steps import run_text

from whorl.align.data.reasoning_gym import HELD_OUT, reasoning_gym_tasks
from whorl.errors import ConfigError, DataError
from whorl.evals.grading import grade_tasks
from whorl.evals.suites import gym_entries as gym
from whorl.evals.suites.reasoning_gym import solved
from whorl.recipes.steps.align.data_config import TasksConfig


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    gym._generator.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"whorl\[reasoning-gym\]"):
        reasoning_gym_tasks("chain_sum", {0: 1.0}, n_train=1, n_test=1)


@pytest.fixture
def package() -> Any:
    return pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


def seeds(rows: list[Any]) -> list[int]:
    """Return what each entry is drawn from."""
    return [json.loads(task.answer)["seed"] + json.loads(task.answer)["index"] for task, _ in rows]


@pytest.mark.usefixtures("package")
def test_splits_are_far_apart_and_share_no_question() -> None:
    made = reasoning_gym_tasks("chain_sum", {0: 1.0, 3: 3.0}, n_train=40, n_test=20, seed=7)
    train, test = made["train"], made["test"]
    assert (len(train), len(test)) == (40, 20)
    assert max(seeds(train)) < HELD_OUT <= min(seeds(test))
    assert len({task.prompt for task, _ in [*train, *test]}) == 60
    assert [task.difficulty for task, _ in train] == [0.0] * 10 + [3.0] * 30
    assert reasoning_gym_tasks("chain_sum", {0: 1.0, 3: 3.0}, n_train=40, n_test=20, seed=7) == made
    again = reasoning_gym_tasks("chain_sum", {0: 1.0, 3: 3.0}, n_train=8, n_test=20, seed=7)
    assert again["test"] == test and not set(seeds(again["train"])) - set(seeds(train))
    other = reasoning_gym_tasks("chain_sum", {0: 1.0, 3: 3.0}, n_train=40, n_test=20, seed=8)
    assert not set(seeds(other["train"])) & set(seeds(train))
    terms = [task.prompt.count(" + ") + task.prompt.count(" - ") for task, _ in train]
    assert set(terms[:10]) == {1} and max(terms[10:]) == 4  # the level sets the number of terms


@pytest.mark.usefixtures("package")
def test_scorer_of_package_grades_in_its_process() -> None:
    rows = reasoning_gym_tasks("chain_sum", {1: 1.0}, n_train=6, n_test=1)["train"]
    tasks, answers = [task for task, _ in rows], [str(answer) for _, answer in rows]
    right = grade_tasks(tasks, answers)
    tagged = grade_tasks(tasks, [f"Some thoughts <answer>{a}</answer>" for a in answers])
    wrong = grade_tasks(tasks, ["", "no number", *["999999"] * 4])
    assert all(v.passed and v.value == 1.0 for v in [*right, *tagged])
    assert not any(v.passed or v.failed for v in wrong) and max(v.value for v in wrong) < 1


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("score", "passed", "failed"),
    [
        *((score, True, False) for score in (True, 1)),
        (0.5, False, False),
        *((score, False, True) for score in (None, "1.0", float("nan"), 7.0, [1.0], KeyError("expression"))),
    ],
)
def test_wrong_types_of_scorer_are_errors(
    monkeypatch: pytest.MonkeyPatch, score: Any, passed: bool, failed: bool
) -> None:
    ((task, _),) = reasoning_gym_tasks("chain_sum", {0: 1.0}, n_train=1, n_test=1)["train"]

    def scorer(self: Any, answer: str, entry: dict[str, Any]) -> Any:
        entry["metadata"].clear()  # the next completion of this task is graded all the same
        if isinstance(score, Exception):
            raise score
        return score

    monkeypatch.setattr(
        sys.modules["reasoning_gym.arithmetic.chain_sum"].ChainSumDataset, "score_answer", scorer
    )
    for _ in range(2):
        if failed:
            with pytest.raises((DataError, KeyError)):
                solved(task.answer, "3")
        else:
            assert solved(task.answer, "3").passed is passed
    assert gym._entry(replace(gym.GymEntry(**json.loads(task.answer))))["metadata"]


@pytest.mark.usefixtures("package")
def test_other_question_is_error_of_grader() -> None:
    ((task, answer),) = reasoning_gym_tasks("chain_sum", {0: 1.0}, n_train=1, n_test=1)["train"]
    spec = json.loads(task.answer)
    changed = replace(task, answer=json.dumps({**spec, "question": "0" * 16}))
    verdict = grade_tasks([changed], [str(answer)])[0]
    assert verdict.failed and "another question" in verdict.reason


def test_default_levels_are_those_of_the_source() -> None:
    gym_config = {"source": "reasoning_gym", "dataset": "chain_sum"}
    assert TasksConfig.model_validate(gym_config).levels == {}
    assert TasksConfig.model_validate({**gym_config, "levels": {3: 1.0}}).levels == {3: 1.0}
    assert TasksConfig(source="arithmetic").levels == {1: 2.0, 2: 1.0, 5: 1.0}


def test_no_levels_are_the_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[gym.GymEntry] = []

    def generator_of(entry: gym.GymEntry) -> list[dict[str, str]]:
        entries.append(entry)
        return [{"question": f"{entry.seed + n}?", "answer": "1"} for n in range(entry.size)]

    monkeypatch.setattr("whorl.align.data.reasoning_gym.generator_of", generator_of)
    made = reasoning_gym_tasks("chain_sum", {}, n_train=3, n_test=1)
    assert [entry.level for entry in entries] == [None, None]
    assert len(made["train"]) == 3 and made["train"][0][0].difficulty == 0


@pytest.mark.usefixtures("package")
def test_unusable_settings_are_refused() -> None:
    for name, levels, options, message in (
        ("chain_sums", {0: 1.0}, {}, "chain_sum"),
        ("chain_sum", {99: 1.0}, {}, "no level 99"),
        ("chain_sum", {0: 1.0}, {"min_terms": 3}, "the level sets min_terms"),
        ("chain_sum", {0: 1.0}, {"depth": 3}, "rejects level 0"),
        ("chain_sum", {}, {"min_terms": 0}, "rejects its default settings .*min_terms"),
        ("chain_sum", {0: 0.0}, {}, "weights of 0 or more"),
        ("composite", {0: 1.0}, {}, "no levels"),
        ("list_functions", {0: 1.0}, {}, "does not determine the entries of list_functions"),
    ):
        with pytest.raises(ConfigError, match=message):
            reasoning_gym_tasks(name, levels, n_train=2, n_test=2, options=options)


@pytest.mark.usefixtures("package")
def test_entries_in_hash_order_need_a_fixed_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gym.HASH_SEED, raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        reasoning_gym_tasks("ransom_note", {0: 1.0}, n_train=2, n_test=2)


@pytest.mark.usefixtures("package")
def test_unevaluated_integral_is_no_solution() -> None:
    """The package gives some as reference answers, and its scorer accepts them."""
    made = reasoning_gym_tasks("intermediate_integration", {4: 1.0}, n_train=8, n_test=1)
    solutions = [answer for _, answer in made["train"]]
    assert None in solutions and not any("Integral" in answer for answer in solutions if answer)
    unsolved = next(task for task, answer in made["train"] if answer is None)
    integrand = unsolved.prompt.split("\n")[0].partition("\u222b ")[2].rpartition(" dx")[0]
    assert grade_tasks([unsolved], [f"<answer>Integral({integrand}, x) + C</answer>"])[0].value == 0


@pytest.mark.usefixtures("package")
def test_small_generator_gives_distinct_questions() -> None:
    """Fewer questions than requested: no repetition, and the held-out ones are kept out of training."""
    made = reasoning_gym_tasks("coin_flip", {0: 1.0}, n_train=30, n_test=4)
    texts = [task.prompt for split in made.values() for task, _ in split]
    assert len(set(texts)) == len(texts) < 34 and len(made["test"]) == 4 and made["train"]
    with pytest.raises(DataError, match=r"8 questions .* all of them held out"):
        reasoning_gym_tasks("coin_flip", {0: 1.0}, n_train=30, n_test=20)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("dataset", ["chain_sum", "knight_swap", "gsm_symbolic"])
def test_step_makes_tasks_with_default_levels(dataset: str, tmp_path: Path) -> None:
    """knight_swap refuses its own level 0, and gsm_symbolic has no levels."""
    recipe = f'[steps.tasks]\nuses = "tasks"\nsource = "reasoning_gym"\ndataset = "{dataset}"\n'
    made = run_text(recipe + "max_train = 6\nmax_test = 2\n", store=tmp_path)["tasks"]
    assert made.summary["counts"] == {"train": 6, "test": 2}


@pytest.mark.usefixtures("package")
def test_chat_tasks_are_conversations() -> None:
    ((task, answer),) = reasoning_gym_tasks("leg_counting", {0: 1.0}, n_train=1, n_test=1, chat=True)["train"]
    assert not task.prompt and task.messages[0]["role"] == "user" and answer
