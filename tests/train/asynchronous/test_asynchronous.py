"""Workers and servers: one worker equals the learner, staleness has its bound, NaN and kills leave the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.train.pretraining import assert_equal
from tests.support.train.pretraining import train as pretrain
from tests.support.train.tiny import job

from whorl.parallel.process_group import ProcessGroup
from whorl.train.asynchronous.methods import METHODS
from whorl.train.asynchronous.problems import LanguageModelProblem
from whorl.train.asynchronous.server import train
from whorl.train.asynchronous.worker import Worker
from whorl.train.job import Job
from whorl.train.metrics.validation import Validator


def workers(wanted: Job, name: str, n: int, kind: type[Worker] = Worker) -> list[Worker]:
    return [kind(LanguageModelProblem(wanted), METHODS[name], n) for _ in range(n)]


def test_one_worker_in_lockstep_equals_the_learner(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, micro_batch_size=3, steps=6)
    learner = pretrain(wanted, tmp_path)
    for method in ("synchronous", "asynchronous"):
        network, found = train(workers(wanted, method, 1), wanted.steps, serial=True)
        assert found["steps"] == wanted.steps and found["lags"] == {0: wanted.steps}
        assert_equal(network, learner)


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train(tokens: Path, name: str) -> None:
    wanted = job(tokens, optim={"optimizer": "adamw"}, steps=32)
    validator, group, method = Validator(wanted, ProcessGroup()), ProcessGroup(), METHODS[name]
    _, found = train(
        workers(wanted, name, 2),
        wanted.steps,
        evaluate=lambda network: validator(network, group)["held_out_nll"],
        evaluations=2,
    )
    first, last = (point["value"] for point in found["curve"])
    assert last < first < 5.0 < 5.7  # ln 300, before training
    assert (found["moved"] > 0) == method.unlocked and 0 <= found["lost"] <= found["moved"]
    assert sum(found["lags"].values()) == 64 / max(1, method.local_steps)
    assert method.staleness is None or max(found["lags"]) <= 2 * method.staleness + 1
