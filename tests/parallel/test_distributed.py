"""Tasks on the ranks of a world equal those on replicas that share memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.train.task_runs import write_inputs
from tests.support.train.worlds import on_world, train_tasks

from whorl.parallel.ranks import run_ranks

REPLICATED = ("pretrain", "rl", "image_classifier", "captioner")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("tasks"))


def test_gloo_equals_shared_memory_bit_for_bit_in_every_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")  # which runner samples is measured
    found, others = run_ranks(2, on_world, train_tasks, REPLICATED, folder, 2)
    assert others is None
    for name, expected in train_tasks(REPLICATED, folder, 2).items():
        assert found[name].keys() == expected.keys()
        assert all(np.array_equal(found[name][n], t) for n, t in expected.items()), name
