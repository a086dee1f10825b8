"""Own objectives of pretraining: equal to the fused loss, for any split and after a resume; wrong ones are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_close, assert_resume_is_exact, train, train_notes
from tests.support.train.tiny import Notes, job

from whorl.errors import ConfigError
from whorl.plan.training_plan import TrainingPlan
from whorl.recipes.steps.tokens import read_plan
from whorl.registry import PERMITTED
from whorl.train.job import job_of_program, read_job

OWN = "tests.support.train.own_objectives"
USUAL = "whorl.objectives.next_token:next_token_of_logits"


@pytest.mark.parametrize("change", [{}, {"model": shape(HEADS, experts=EXPERTS)}])
def test_own_cross_entropy_equals_fused_loss(change: Any, tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, steps=4, z_loss=0.0, **change)
    fused, own, lines = Notes(), Notes(), list[str]()
    named = wanted.model_copy(update={"objective": USUAL, "compile": True})
    assert_close(train(wanted, tmp_path / "a", fused), train(named, tmp_path / "b", own, log=lines.append))
    assert sum(f"objective {USUAL} reads whole logits" in line for line in lines) == 1
    assert own.steps[-1]["nll"] == pytest.approx(fused.steps[-1]["nll"], rel=1e-4)
    assert own.steps[-1].keys() == fused.steps[-1].keys()


def test_own_objective_is_independent_of_split(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, steps=6, objective=f"{OWN}:smoothed")
    notes = Notes()
    whole = assert_resume_is_exact(wanted, tmp_path, 3, notes)
    assert all(step["smoothed"] == pytest.approx(step["loss"]) != step["nll"] for step in notes.steps)
    for change in ({"micro_batch_size": 1}, {"replicas": 2}):
        assert_close(whole, train(wanted.model_copy(update=change), tmp_path / str(change)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{OWN}:counts_rows", r"the count of .*counts_rows' is 8\n  expected: \d+, mask.sum\(\)"),
        (f"{OWN}:detached", "the total of .*detached' has no gradient"),
        (f"{OWN}:each_token", r"the total of .*each_token' has the shape \["),
        (f"{OWN}:bare", "bare' returned a Tensor"),
        (f"{OWN}:of_pairs", r"cannot be called: too many positional arguments\n  expected: a function \(logits, targets"),
        (f"{OWN}:absent", "the objective .*absent' cannot be imported"),
        (f"{OWN}:LEAVE_ONE_OUT", "cannot be called: .* is not a callable object"),
    ],
)  # fmt: skip
def test_wrong_own_objective_is_named(name: str, message: str, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train_notes(job(tokens, steps=1, objective=name), tmp_path)


def test_own_objective_of_python_and_of_a_folder(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python program may name code; the job of a model that someone else has trained may not."""
    monkeypatch.delenv(PERMITTED, raising=False)
    for change in ({"objective": f"{OWN}:smoothed"}, {"optim": {"optimizer": f"{OWN}:Optimizer"}}):
        wanted = job(tokens, **change)
        monkeypatch.delenv(PERMITTED, raising=False)
        (tmp_path / "job.json").write_text(wanted.model_dump_json())
        with pytest.raises(ConfigError, match=r"job.json names the code 'tests\."):
            read_job(tmp_path)
        plan = TrainingPlan(job=wanted, budget="1m", expected={}, arithmetic=[], candidates=[])
        (tmp_path / "plan.json").write_text(plan.model_dump_json())
        context: Any = SimpleNamespace(parents={"plan": SimpleNamespace(file=tmp_path.joinpath)})
        with pytest.raises(ConfigError, match=r"plan.json names the code 'tests\."):
            read_plan(context)
        job_of_program(wanted.model_dump())
        assert read_plan(context) == plan
        assert read_job(tmp_path)["tokens"] == str(tokens)
    with pytest.raises(ConfigError, match="objective is wrong: 'nextoken'"):
        job_of_program(wanted.model_dump() | {"objective": "nextoken"})
