"""Pinning and huge pages in training: asked for by the job, off by default, of no effect on the weights."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
from tiny import Notes, job, make_tokens

from whorl.models import LanguageModel
from whorl.models.recompute import Alive
from whorl.runs import pinning
from whorl.runs.pinning import can_pin
from whorl.train.pretrain import Job, _identity, build_model, learner_of, pretrain, shared_of
from whorl.train.timing import random_part
from whorl.train.world import World


class Where(Notes):
    """Remembers on which cores rank 0 and its loader were when it told of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[set[int]] = []
        self.loaders: list[set[int]] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        super().on_step(step, metrics)
        if can_pin():
            self.cores.append(os.sched_getaffinity(0))
            self.loaders += [os.sched_getaffinity(c.pid) for c in psutil.Process().children()]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def run(wanted: Job, scratch: Path) -> tuple[LanguageModel, Where]:
    notes = Where()
    return pretrain(wanted, scratch, notes), notes


def test_pinned_training_ends_with_the_same_weights_and_gives_its_cores_back(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tokens, steps=4, serial_loader=False)
    assert not wanted.pin and not wanted.huge_pages
    before = os.sched_getaffinity(0) if can_pin() else set()
    free, _ = run(wanted, tmp_path / "free")
    pin = wanted.model_copy(update={"pin": True, "huge_pages": True})
    assert _identity(pin) == _identity(wanted)
    monkeypatch.setattr(pinning, "shares", lambda cores, *_: [{cores[-1]}])  # as of several replicas
    held, notes = run(pin, tmp_path / "pin")
    for a, b in zip(free.parameters(), held.parameters(), strict=True):
        assert torch.equal(a, b)
    if can_pin():
        assert notes.cores and all(c == {max(before)} for c in notes.cores)
        assert notes.loaders and all(c == before for c in notes.loaders), "the loader may run anywhere"
        assert os.sched_getaffinity(0) == before


def test_steps_use_the_same_memory_and_nothing_grows(tokens: Path) -> None:
    wanted = job(tokens)
    model = build_model(wanted)
    (update,) = learner_of(model, wanted, shared_of(model, wanted), World()).updates
    part = random_part(wanted, wanted.batch_rows)
    places, left, peaks = set(), [], []
    for number in range(8):
        update.accumulate(update.objective(part))
        if number < 2:  # both of Muon's turns, once
            update.step(1e-3)
            continue
        with Alive() as alive:
            update.step(1e-3)
        places.add(tuple(t.data_ptr() for t in update.summed.values()))
        left.append(alive.bytes)
        peaks.append(alive.peak)
    assert len(places) == 1 and left == [0] * 6, "what a step makes does not outlive it"
    assert peaks[0] == peaks[2] == peaks[4] and peaks[1] == peaks[3] == peaks[5], (
        "and every second step is alike"
    )
