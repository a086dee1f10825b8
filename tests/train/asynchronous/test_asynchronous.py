"""Workers and servers: one worker equals the learner, staleness has its bound, NaN and kills leave the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.train.pretraining import assert_equal
from tests.support.train.pretraining import train as pretrain
from tests.support.train.tiny import job

from whorl.train.asynchronous.problems import LanguageModelProblem
from whorl.train.asynchronous.server import METHODS, train


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_one_worker_in_lockstep_equals_the_learner(tokens: Path, tmp_path: Path, optimizer: str) -> None:
    wanted = job(tokens, optim={"optimizer": optimizer}, micro_batch_size=3)
    learner = pretrain(wanted, tmp_path)
    for method in ("synchronous", "asynchronous"):
        found = train(LanguageModelProblem(wanted), METHODS[method], 1, wanted.steps, serial=True)
        assert found.steps == wanted.steps and found.lags == {0: wanted.steps}
        assert_equal(found.network, learner)


@pytest.mark.parametrize("name", METHODS)
def test_methods_learn(tokens: Path, name: str) -> None:
    wanted = job(tokens, optim={"optimizer": "adamw"}, steps=64)
    found = train(LanguageModelProblem(wanted), METHODS[name], 2, wanted.steps, serial=True, evaluate=lambda n: 0.0)
    print(name, found)
    assert len(found.curve) == 8
