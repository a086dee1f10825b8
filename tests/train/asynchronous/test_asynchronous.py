"""Workers and servers: one worker equals the learner, staleness has its bound, NaN and kills leave the rest."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from bench.parallel._sparse import SparseLogistic
from tests.support.train.asynchronous import AllNaNWorker, FastFirst, KilledWorker, NaNBatches, NaNWorker
from tests.support.train.pretraining import assert_equal
from tests.support.train.pretraining import train as pretrain
from tests.support.train.tiny import job

from whorl.errors import ProducerError
from whorl.parallel.process_group import ProcessGroup
from whorl.train.asynchronous.methods import METHODS, AsynchronousMethod
from whorl.train.asynchronous.problems import LanguageModelProblem
from whorl.train.asynchronous.reader import ClockReader
from whorl.train.asynchronous.server import Nesterov, Server, train
from whorl.train.asynchronous.worker import Worker
from whorl.train.job import Job
from whorl.train.metrics.validation import Validator


def workers(wanted: Job, name: str, n: int = 2, kind: type[Worker] = Worker) -> list[Worker]:
    return [kind(LanguageModelProblem(wanted), METHODS[name], n) for _ in range(n)]


def test_one_worker_in_lockstep_equals_the_learner(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, micro_batch_size=3, steps=6)
    learner = pretrain(wanted, tmp_path)
    for method in ("synchronous", "asynchronous"):
        network, found = train(workers(wanted, method, 1), wanted.steps, serial=True)
        assert found["steps"] == wanted.steps and found["lags"] == {0: wanted.steps}
        assert_equal(network, learner)


@pytest.mark.parametrize("name", ["bounded", "hogwild", "diloco"])
def test_two_processes_learn(tokens: Path, name: str) -> None:
    method, group = METHODS[name], ProcessGroup()
    wanted = job(tokens, optim={"optimizer": "adamw"}, steps=max(16, 2 * method.local_steps))
    validator = Validator(wanted, group)

    def loss(network: torch.nn.Module) -> float:
        return validator(network, group)["held_out_nll"]  # type: ignore[arg-type]

    _, found = train(workers(wanted, name), wanted.steps, evaluate=loss, evaluations=2)
    first, last = (point["value"] for point in found["curve"])
    assert last < first < 5.0  # ln 300 = 5.7 before training
    assert (found["moved"] > 0) == method.unlocked and 0 <= found["lost"] <= found["moved"]
    assert sum(found["lags"].values()) == 2 * wanted.steps / max(1, method.local_steps)
    assert method.staleness is not None and max(found["lags"]) <= 2 * method.staleness + 1


@pytest.mark.parametrize(
    ("staleness", "order"),
    [(0, [0, 1] * 4), (2, [0, 0, 0, 1, 0, 1, 0, 1]), (None, [0] * 8)],
)
def test_staleness_bounds_how_far_a_fast_worker_runs(
    tokens: Path, staleness: int | None, order: list[int]
) -> None:
    method = AsynchronousMethod("", staleness)
    made = [Worker(LanguageModelProblem(job(tokens)), method, 2) for _ in range(2)]
    server = Server(made, 8, None)
    handles = [FastFirst(server.ring, each, number=n, board=server.board) for n, each in enumerate(made)]
    reader = ClockReader(server.ring, handles, staleness, server.board, print)
    read = [slot.producer for group in islice(reader, 4 if staleness == 0 else 8) for slot in group]
    assert read == order
    reader.close()


@pytest.mark.parametrize(
    ("kind", "serial", "words", "refused"),
    [(KilledWorker, False, "SIGKILL", {}), (NaNWorker, True, "3 gradients in a row", {1: 3})],
)
def test_failing_worker_is_named_and_left_out(
    tokens: Path, kind: type[Worker], serial: bool, words: str, refused: dict[int, int]
) -> None:
    messages: list[str] = []
    network, found = train(
        workers(job(tokens), "synchronous", kind=kind), 12, serial=serial, log=messages.append
    )
    assert "worker 1 is left out, 1 of 2 remain" in messages[0] and words in found["left_out"][1]
    assert found["refused"] == refused and sum(found["lags"].values()) == 24
    assert all(p.isfinite().all() for p in network.parameters())


def test_hogwild_keeps_nan_out_of_the_tables(tokens: Path) -> None:
    problem, method = NaNBatches(job(tokens)), METHODS["hogwild"]
    network, found = train([Worker(problem, method, 2) for _ in range(2)], 6, serial=True)
    assert found["refused"] == {1: 3} and found["moved"] > 0
    assert all(p.isfinite().all() for p in network.parameters())


def test_no_worker_left_raises_with_advice(tokens: Path) -> None:
    made = workers(job(tokens), "asynchronous", kind=AllNaNWorker)
    with pytest.raises(ProducerError, match="no worker is left of 2") as caught:
        train(made, 12, serial=True)
    assert "lower the learning rate" in caught.value.do


def test_hogwild_on_a_sparse_problem_learns() -> None:
    problem = SparseLogistic(samples=2000, features=1000, nonzeros=6)
    method = AsynchronousMethod("", staleness=None, local_steps=25, unlocked=True)
    network, found = train([Worker(problem, method, 2)] * 2, 200)
    assert problem.loss(network) < 0.45 < 0.69  # ln 2 before training
    assert found["moved"] > 0 and 0 <= found["lost"] < 0.05 * found["moved"]


def test_nesterov_equals_torch() -> None:
    found, expected = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    step, sgd = (
        Nesterov(0.7, 0.9, torch.zeros(3, dtype=torch.bool)),
        torch.optim.SGD([expected], 0.7, 0.9, nesterov=True),
    )
    for gradient in torch.randn(5, 3, generator=torch.Generator().manual_seed(0)):
        expected.grad = gradient
        sgd.step()
        step([found], gradient)
    torch.testing.assert_close(found, expected)
