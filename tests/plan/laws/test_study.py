"""Studies: runs that are chosen by the results, the same law after SIGKILL, diverged runs, and the verb."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.cli import refuse, succeed
from tests.support.recipes import study_runs

from whorl.errors import BudgetError
from whorl.plan import config
from whorl.plan.laws import grids, study_run
from whorl.plan.laws import study as design
from whorl.plan.laws.law import ScalingLaw, fitted_law
from whorl.recipes.steps.pretrain.law_page import grid_blocks
from whorl.report.blocks import Curve, Text
from whorl.store import Store
from whorl.train.config import OptimConfig
from whorl.train.learner.update import DivergedError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (design, "DATA"),
        (design, "MIN_STEPS"),
        (design, "MAX_EPOCHS"),
        (study_run, "train_run"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    study_runs.shrink()
    monkeypatch.setattr(study_runs.time, "sleep", lambda seconds: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


def test_study_ends_in_a_law_with_page_and_parents(folder: Path) -> None:
    law = study_runs.make_law(folder / "store")
    found = ScalingLaw.from_json(json.loads(law.file("law.json").read_text()))
    assert {*law.parents} == {"documents", "selection", "tokens"} and law.kind == "law"
    assert (found.loss_name, found.data_name, found.corpus) == ("bits per byte", "bytes", "tiny")
    assert 0.3 < found.size_exponent < 0.5 and 0.2 < found.data_exponent < 0.4
    assert len(law.summary["runs"]) > 3 and law.summary["headline"].startswith("For ")
    html = law.file("law.html").read_text()
    assert all(title in html for title in ("Loss against compute", "Residuals", "Constants"))


def test_killed_study_ends_in_the_same_law(folder: Path) -> None:
    undisturbed = study_runs.make_law(folder / "store").file("law.json").read_bytes()
    store = folder / "killed"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.recipes.study_runs", str(store)], start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while (
            len([a for a in Store(store).artifacts() if a.kind == "study_run"] if store.exists() else []) < 2
        ):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert not [a for a in Store(store).artifacts() if a.kind == "law"]
    assert study_runs.make_law(store).file("law.json").read_bytes() == undisturbed


def test_diverged_run_is_shown_and_not_fitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(job: Any, scratch: Path, *given: Any, **options: Any) -> list[float]:
        if job.seed == 1:
            raise DivergedError("loss nan")
        return study_runs.fake_training(job, scratch)

    monkeypatch.setattr(study_run, "train_run", diverging)
    law = study_runs.make_law(folder / "diverged")
    lost = [name for name, losses in law.summary["runs"].items() if None in losses]
    assert lost and all(name.endswith("seed1") for name in lost)
    html = law.file("law.html").read_text()
    assert "Runs that are not fitted" in html and f"{lost[0]} at" in html and "diverged" in html


def test_small_budget_is_refused_with_the_least_one(folder: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"1e\+09 FLOPs on .* runs of 0 sizes(.|\n)*give --budget \d\.\de\+1\dflops"
    ):
        study_runs.make_law(folder / "store", "1e9flops")


def test_study_verb_takes_tokens(folder: Path) -> None:
    study_runs.make_law(folder / "store")
    out = succeed(
        folder, "plan", "study", "tiny/tokens", "--budget", "9e10flops", "--store", folder / "store"
    ).stdout
    assert "Backtest" in out and "law.html" in out
    assert "of the kind model" not in refuse(
        folder, "plan", "study", "none/tokens", "--store", folder / "store", code=1
    )


def test_study_verb_refuses_its_budget_before_a_step_runs(folder: Path) -> None:
    for budget, words, more in (
        ("3usd@h100", "a study runs on this machine", []),
        ("30m", "deterministic excludes: give FLOPs", ["--deterministic"]),
    ):
        store = folder / "untouched"
        said = refuse(
            folder, "plan", "study", "quickstart", "--budget", budget, *more, "--store", store, code=2
        )
        assert words in said and not store.exists()


def test_run_trains_with_branches_that_equal_short_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    study_runs.shrink(fake=False)
    tokens = Store(folder / "store").open("tiny/tokens")
    from whorl.machine.device_probe import probe
    from whorl.plan.config import StudyConfig

    machine = probe().without_measured_choices()
    made = design.Study(StudyConfig(budget="9e10flops", deterministic=True), tokens.path, machine, 9e10)
    job = made.job(made.runs[0]).model_copy(update={"replicas": 1, "steps": 40})
    losses = study_run.train_run(job, folder / "run")
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] > 0


def test_every_run_is_trained_before_one_gets_a_further_seed(folder: Path) -> None:
    runs = [*study_runs.make_law(folder / "store").summary["runs"]]
    first = [name for name in runs if name.endswith("seed0")]
    assert runs[: len(first)] == first and len({name.partition("-")[0] for name in first}) >= 3


CRITICAL = 3 * study_runs.DATA.batch_size  # rows; at twice the usual ones a run needs 5/4 of the text


def with_grids(job: Any, scratch: Path, fractions: Any = design.FRACTIONS, **options: Any) -> list[float]:
    """Losses whose best rates are 1.3 times the defaults, and half of that beyond 70 wide without muP."""
    rows, usual = job.batch_size, study_runs.DATA.batch_size
    best = 1.3 * (0.5 if job.model.d_model > 70 and job.optim.mup_base_width is None else 1.0)
    factor = job.optim.lr_muon / OptimConfig().lr_muon / (rows / usual) ** 0.5
    seen = job.steps * rows / usual * (1 + usual / CRITICAL) / (1 + rows / CRITICAL)
    surplus = 0.2 * (math.log(factor / best) ** 2 - math.log(1 / best) ** 2)
    quiet = job.model_copy(update={"seed": 7})
    return [study_runs.surface_loss(quiet, share * seen, noise=0.0) + surplus for share in fractions]


def test_grids_find_rates_transfer_and_the_critical_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "MIN_STEPS", 16)
    monkeypatch.setattr(study_run, "train_run", with_grids)
    law = study_runs.make_law(folder / "grids", "2.6e11flops", ["law.grids=true"])
    html = law.file("law.html").read_text()
    found = re.search(
        r"Best learning rates: (\S+) x the defaults at width 64, (\S+) x at width 128\. With those of width 64 it loses "
        r"(\S+)%, by muP 0\.0%",
        html,
    )
    assert found is not None
    assert [float(x) for x in found.groups()[:2]] == pytest.approx([1.3, 0.65], rel=0.02)
    assert float(found[3]) > 0.3
    [tokens] = re.findall(r"Critical batch: ([\d,]+) tokens", html)
    assert float(tokens.replace(",", "")) == pytest.approx(CRITICAL * study_runs.DATA.seq_len, rel=0.3)
    assert "Loss against learning rate" in html and "log10 FLOPs per byte" in html
    names = [*law.summary["runs"]]
    assert sum("-rate" in name or "-rows" in name for name in names) == 11


def test_diverged_grid_runs_are_named(folder: Path) -> None:
    law, shapes = fitted_law(), {(64, 2): 98304, (128, 3): 589824}
    study: Any = SimpleNamespace(first=((64, 2),), sizes=shapes, vocab_size=1024, step_tokens=2048)
    losses = {
        grids.GridRun(shape, 2000, factor, mup=mup): math.nan if factor == 2 and shape[0] > 64 else 1.2
        for shape, mup in (((64, 2), False), ((128, 3), False), ((128, 3), True))
        for factor in config.FACTORS
    }
    losses |= {grids.GridRun((64, 2), round(2000 / rows), rows=rows): math.nan for rows in config.BATCHES}
    text, curve = grid_blocks(grids.read_grids(study, losses, law))
    assert isinstance(text, Text) and "not found: a run diverged" in text.lines[1]
    assert curve.note == "Diverged: width 128, 2 x; width 128, muP, 2 x."
    assert isinstance(curve, Curve) and [len(line.x) for line in curve.lines] == [3, 2, 2]


def test_grids_without_enough_flops_are_refused_before_a_run(folder: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"grids of 2\.2e\+10 FLOPs have (.|\n)*400 steps(.|\n)*omit --grids"
    ):
        study_runs.make_law(folder / "refused", sets=["law.grids=true"])
    assert not [a for a in Store(folder / "refused").artifacts() if a.kind == "study_run"]
