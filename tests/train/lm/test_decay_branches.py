"""A decay branch equals, bit for bit, the run planned for its budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_equal, raw_text, train, weights
from tests.support.train.spike_guards import poisoned
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.errors import CheckpointError, ConfigError
from whorl.models import load_model
from whorl.recipes.recipe import load_recipe, parse_recipe
from whorl.recipes.runner import run_recipe
from whorl.recipes.steps.pretrain import observer
from whorl.store import Store
from whorl.tracking.progress import Progress
from whorl.train.checkpoint.format import load
from whorl.train.config import ScheduleConfig
from whorl.train.job import Job
from whorl.train.lm import decay_branches as branches
from whorl.train.lm import pretrain as module
from whorl.train.optim.lr_schedule import lr_scale


def test_branch_equals_run_planned_for_its_budget(tokens: Path, tmp_path: Path) -> None:
    """Also if the stable run and the branch are interrupted."""
    whole = job(tokens, steps=37, schedule={"warmup_ratio": 0.07, "decay_ratio": 0.4}, ema=0.9)
    points = {share: branches.branch_step(whole, share) for share in (0.3, 0.7)}
    assert points == {0.3: 7, 0.7: 16}  # of 11 and 26 steps with decay ratio 0.4
    saved, folder = {"branch_points": points.values(), "checkpoint_seconds": 0.0}, tmp_path / "whole"
    for stop in (7, 12, 37):  # at the first point, between the points, at the end
        end = train(whole, folder, stop_after=stop, **saved)
    assert_equal(end, train(whole, tmp_path / "without"))  # saving branch states changes nothing
    assert branches.export_branches(folder, tmp_path / "model", points) == [0.3, 0.7]
    shutil.rmtree(folder)
    for share, at in points.items():
        budget = branches.branch_job(whole, share)
        start, scratch = branches.branch_state_folder(tmp_path / "model", share), tmp_path / str(share)
        for stop in (at + 2, budget.steps):
            notes = Notes()
            end = train(budget, scratch, notes, branch_start=start, stop_after=stop, checkpoint_seconds=0.0)
        assert len(notes.steps) == budget.steps - at - 2
        assert_equal(end, train(budget, tmp_path / f"planned {share}"))


@pytest.mark.parametrize("name", ["raw text", "experts", "two replicas"])
def test_branch_resumes_stream_experts_and_replicas(name: str, tokens: Path, tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {
        "raw text": {"stream": raw_text(tokens, tmp_path / "raw")},
        "experts": {"model": shape(HEADS, experts=EXPERTS, n_layers=1)},
        "two replicas": {"replicas": 2},
    }
    whole = job(tokens, steps=14, **changes[name])
    assert branches.branch_step(whole, 0.5) == 4
    start = stable_state(whole, tmp_path / "whole", 4, stop_after=6)
    budget = branches.branch_job(whole, 0.5)
    assert_equal(train(budget, tmp_path / "branch", branch_start=start), train(budget, tmp_path / "planned"))


def stable_state(whole: Job, scratch: Path, step: int, **more: object) -> Path:
    """The folder of the state at `step` after training the stable run."""
    train(whole, scratch, branch_points=[step], **more)
    return branches.branch_folder(scratch, step) / f"step-{step:08d}"


@given(st.integers(8, 4000), st.floats(0.01, 0.99), st.floats(0.05, 0.95), st.floats(0, 0.3))
def test_branch_step_is_end_of_plateau(steps: int, share: float, decay: float, warmup: float) -> None:
    assume(warmup + decay < 1)
    schedule = ScheduleConfig(warmup_ratio=warmup, decay_ratio=decay)
    whole = job(Path("none")).model_copy(update={"steps": steps, "schedule": schedule})
    budget = branches.branch_job(whole, share)
    try:
        at = branches.branch_step(whole, share)
    except ConfigError:
        if budget.steps == steps:  # rounded up to the whole run
            return
        length = decay * budget.steps
        assert share <= branches.min_fraction(schedule) + 2 / steps or length < 2 or budget.steps - length < 2
        return
    for step in range(at):
        assert lr_scale(step, budget.steps, budget.schedule) == lr_scale(step, steps, schedule)
    assert lr_scale(at - 1, steps, schedule) == 1 > lr_scale(at, budget.steps, budget.schedule)
    assert at == pytest.approx((1 - decay) * budget.steps, abs=1.01)
    assert at <= (1 - decay) * steps + 1


def test_branch_from_other_job_raises(tokens: Path, tmp_path: Path) -> None:
    whole = job(tokens, steps=12)
    start = stable_state(whole, tmp_path / "whole", 3)

    def refused(of: Job, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            train(branches.branch_job(of, 0.5), tmp_path / words, branch_start=start)

    refused(job(make_tokens(tmp_path / "other", seed=1), steps=12), "of another job: data differs")
    refused(job(tokens, steps=12, seed=1), "of another job: seed differs")
    damaged = start / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    refused(whole, "differs from the recorded hash")


def test_branch_rolls_back_to_its_start(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = {"patience": 2, "max_rollbacks": 1, "max_skipped": 1.0, "snapshot_every": 2}
    # NaN for the letter x, which is in no text
    whole = poisoned(tokens, tmp_path / "whole", steps=12, spike_guard=watch)
    start = stable_state(whole, tmp_path / "whole", 3, stop_after=4)
    plain = module.micro_batches

    def spoilt(record: Any, *where: Any) -> Any:
        parts = plain(record, *where)
        parts[0]["tokens"][:] = ord("x")
        return parts

    monkeypatch.setattr(module, "micro_batches", spoilt)
    notes, budget = Notes(), branches.branch_job(whole, 0.5)
    back = train(budget, tmp_path / "branch", notes, branch_start=start, stop_after=5)
    assert "rolled back to step 3" in notes.events[-1]["action"]
    kept = load(start).tensors
    for name, w in weights(back).items():
        torch.testing.assert_close(w, kept[f"weights/{name}"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("decay_branches=[0.5,1.0]", "decay_branches: 1 is not a fraction of the run: between 0 and 1"),
        ("decay_branches=[0.5,0.5]", r"decay_branches: \[0.5, 0.5\] contains a duplicate"),
        ("decay_branches=[0.03,0.5]", r"decay_branches: 0.03 would decay within the warm-up: above 0.04"),
        ("decay_branches=[0.5] train.schedule.kind=cosine", "plateau, which a schedule with kind = 'cosine' does"),
    ],
)  # fmt: skip
def test_check_fractions_invalid_raises(sets: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_recipe("quickstart", sets=[f"pretrain.{s}" for s in sets.split()])


def test_branch_without_plateau_or_state_raises(tmp_path: Path) -> None:
    for steps, share, words in ((4, 0.2, "nothing to decay"), (100, 0.3, "no plateau")):
        schedule = {"warmup_steps": 0 if steps == 4 else 20}
        with pytest.raises(ConfigError, match=words):
            branches.branch_step(job(Path("none"), steps=steps, schedule=schedule), share)
    (tmp_path / "stable" / "0.25").mkdir(parents=True)
    words = r"(?s)no stable state for the fraction 0.3.*0.25.*decay_branches = \[0.3\]"
    with pytest.raises(ConfigError, match=words):
        branches.branch_state_folder(tmp_path, 0.3)
    messages: list[str] = []
    assert branches.export_branches(tmp_path / "scratch", tmp_path / "out", {0.5: 7}, messages.append) == []
    assert "stable state of step 7 is missing" in messages[0]


RECIPE = """
name = "budgets"
[steps.ingest]
[steps.curate]
parents = ["ingest"]
[steps.plan]
parents = ["ingest", "curate"]
[steps.tokenizer]
parents = ["ingest", "curate", "plan"]
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.pretrain]
parents = ["plan", "tokens", "tokenizer"]
decay_branches = [0.5]
[steps.half]
uses = "decay_branch"
parents = ["pretrain", "tokens", "tokenizer"]
fraction = 0.5
"""


def test_decay_branch_step_makes_model_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "memory_in_use", lambda: 0)  # saves seconds
    monkeypatch.setattr(observer.PretrainObserver, "_sample", lambda *_: "")
    (tmp_path / "code").mkdir()
    for n in range(40):
        text = "".join(f"def f{n}_{i}(x):\n    return x + {i * n}\n\n" for i in range(60))
        (tmp_path / "code" / f"{n}.py").write_text(text)
    sets = [
        f'ingest.sources=["{tmp_path / "code"}"]', 'ingest.include=["*.py"]', "curate.validation_bytes=3000",
        "curate.test_bytes=3000", "plan.steps=24", "plan.d_model=32", "plan.n_layers=1", "plan.vocab_size=300",
        "plan.data.seq_len=32", "plan.ngram_buckets=64", "plan.replicas=1", "plan.deterministic=true",
        "pretrain.serial_loader=true",
    ]  # fmt: skip
    recipe = parse_recipe(RECIPE, "budgets.toml", sets=sets)
    made = run_recipe(recipe, Store(tmp_path / "store"), Progress.silent()).artifacts
    stable, half = made["pretrain"], made["half"]
    assert stable.summary["branches"] == [0.5] and half.kind == "model"
    assert (half.summary["steps"], half.summary["branched_at"], half.summary["steps_trained"]) == (12, 7, 5)
    curve, whole = (
        [(r["step"], r["nll"]) for r in json.loads(each.file("curve.json").read_text()) if "nll" in r]
        for each in (half, stable)
    )
    assert [step for step, _ in curve] == [*range(1, 13)] and curve[:7] == whole[:7]
    assert not torch.equal(load_model(half.path).embedding, load_model(stable.path).embedding)
    assert made["pretrain"].address in str(half.parents)
    other = parse_recipe(RECIPE, "budgets.toml", sets=[*sets, "half.fraction=0.25"])
    with pytest.raises(ConfigError, match=r"no stable state for the fraction 0.25"):
        run_recipe(other, Store(tmp_path / "store"), Progress.silent())
