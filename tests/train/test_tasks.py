"""What every task of the trainer promises: exact resumes, SIGTERM, the spike guard, heartbeats, replicas."""

from __future__ import annotations

import functools
import json
import math
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.align.kill_at_step import same_weights
from tests.support.train import tiny
from tests.support.train.checkpoint_states import load_latest
from tests.support.train.task_runs import STEPS, TASKS, Run, write_inputs

from whorl.errors import ConfigError
from whorl.machine.process import Child
from whorl.objectives.next_token import Loss
from whorl.train.learner.learner import UpdateState
from whorl.train.lm.pretrain import pretrain
from whorl.train.resilience.preemption import PreemptedError
from whorl.train.task import RunOptions, Task
from whorl.train.trainer import Trainer

REPLICATED = ("pretrain", "sft", "preference", "reward_model", "rl", "image_classifier", "captioner")


@pytest.fixture(autouse=True)
def one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runner samples is measured, and runners differ in last bits (`engine/cpu/runner.py`)."""
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[str], torch.nn.Module]:
    """The networks of a task that ran without interruption, trained once."""
    return functools.cache(lambda name: TASKS[name](Run(folder)))


def raise_at(step: int, error: Callable[[], None]) -> Callable[[int], None]:
    def at(done: int) -> None:
        if done == step:
            error()

    return at


def fail() -> None:
    raise ValueError("the callback is broken")


@pytest.mark.parametrize("name", ["pretrain", "rl", "agent"])  # SIGTERM below tests the state of every task
def test_kill_9_and_resume_equals_undisturbed(
    name: str, folder: Path, tmp_path: Path, undisturbed: Callable[[str], torch.nn.Module]
) -> None:
    step = random.randint(4, STEPS - 2)
    entry = "tests.support.train.task_runs:train_and_die"
    child = Child(entry, name, folder, tmp_path, step, preload=("whorl.train.trainer",))
    assert child.wait(300) == -signal.SIGKILL, child.exit_description()
    messages: list[str] = []
    again = TASKS[name](Run(folder, tmp_path, log=messages.append))
    assert any("continues at step" in text for text in messages), messages
    assert same_weights(undisturbed(name), again), f"killed at step {step}"


@pytest.mark.parametrize("name", TASKS)
def test_sigterm_saves_a_checkpoint_and_resumes(
    name: str, folder: Path, tmp_path: Path, undisturbed: Callable[[str], torch.nn.Module]
) -> None:
    at = raise_at(3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(PreemptedError, match=f"after step 3 of {STEPS}; a checkpoint of step 3 is written"):
        TASKS[name](Run(folder, tmp_path, at, heartbeat_dir=tmp_path / "watch"))
    found = load_latest(tmp_path)
    assert found is not None and found.step == 3
    heartbeat = json.loads((tmp_path / "watch" / "heartbeat.json").read_text())
    assert heartbeat["state"] == "ended: PreemptedError" and heartbeat["step"] == 3
    assert same_weights(undisturbed(name), TASKS[name](Run(folder, tmp_path)))


@pytest.mark.parametrize("name", ["pretrain", "agent"])
def test_callback_that_raises_leaves_a_checkpoint(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the callback is broken"):
        TASKS[name](Run(folder, tmp_path, raise_at(2, fail)))
    found = load_latest(tmp_path)
    assert found is not None and found.step == 2


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of the third update NaN."""
    accumulate = UpdateState.accumulate

    def poisoned(self: Any, loss: Loss) -> None:
        bad = self.steps == 2
        accumulate(self, Loss(loss.total * math.nan, loss.count, loss.metrics) if bad else loss)

    monkeypatch.setattr(UpdateState, "accumulate", poisoned)


@pytest.mark.parametrize("name", TASKS)
def test_nonfinite_batch_is_skipped_and_reported(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    poison(monkeypatch)
    trained = TASKS[name](Run(folder, tmp_path, log=messages.append))
    assert all(p.isfinite().all() for p in trained.parameters())
    assert [text for text in messages if "nan" in text and "skipped (1 so far)" in text], messages


def test_event_callback_that_raises_leaves_a_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event comes in the middle of a step. The error is raised when the step is complete, and can be resumed."""
    poison(monkeypatch)
    notes, job = tiny.Notes(), tiny.job(folder / "tokens", steps=STEPS, batch_size=12)
    expected = pretrain(job, tmp_path / "whole", notes)
    (event,) = notes.events
    notes.on_event = lambda step, event: fail()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the callback is broken"):
        pretrain(job, tmp_path / "cut", notes)
    found = load_latest(tmp_path / "cut")
    assert found is not None and found.step == event["step"]
    assert same_weights(expected, pretrain(job, tmp_path / "cut", tiny.Notes()))


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_agree(name: str, folder: Path, undisturbed: Callable[[str], torch.nn.Module]) -> None:
    """Three replicas; two are tested with each stage."""
    one, three = undisturbed(name), TASKS[name](Run(folder, replicas=3))
    expected = dict(one.named_parameters())
    torch.testing.assert_close(dict(three.named_parameters()), expected, atol=2e-4, rtol=1e-3)


class Refusing(Task[Any]):
    steps = 1
    identity = allocate = make_learner = batches = minibatches = None  # refused before they are called
    unsupported = {"replicas": "the loss compares all pairs of a batch", "ema": "there is no average"}  # noqa: RUF012


@pytest.mark.parametrize(("options", "why"), [({"replicas": 2}, "all pairs"), ({"ema": 0.9}, "no average")])
def test_option_without_sense_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is .*{why}"):
        Trainer(Refusing(), RunOptions(**options)).fit()
