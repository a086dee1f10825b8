"""Tasks on the ranks of a world equal those on replicas that share memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.train.task_runs import write_inputs
from tests.support.train.tiny import make_tokens
from tests.support.train.worlds import on_world, restored_runs, train_tasks

from whorl.parallel.ranks import run_ranks

PRELOAD = ("whorl.train.trainer",)
REPLICATED = ("pretrain", "sft", "preference", "reward_model", "rl", "image_classifier", "captioner")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("tasks"))


def assert_equal(found: Any, expected: Any, name: str = "") -> None:
    assert type(found) is type(expected), name
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_equal(found[key], value, f"{name}/{key}")
    else:
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), name  # bits, and NaN equals NaN


def test_gloo_equals_shared_memory_bit_for_bit_in_every_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")  # which runner samples is measured
    found, others = run_ranks(2, on_world, train_tasks, REPLICATED, folder, 2, preload=PRELOAD)
    assert others is None
    assert_equal(found, train_tasks(REPLICATED, folder, 2))


def test_runs_that_go_back_equal_those_in_shared_memory(tmp_path: Path) -> None:
    few = make_tokens(tmp_path / "few", documents=12)
    tokens = make_tokens(tmp_path / "tokens", replaced=dict.fromkeys(range(10, 60, 9), "x" * 100))
    found, _ = run_ranks(2, on_world, restored_runs, tokens, few, tmp_path / "world", 2, preload=PRELOAD)
    for name in ("error", "signal"):
        assert found.pop(f"{name} saved") == ["step-00000004"]
        assert_equal(found.pop(name), found["whole"], name)
    assert "rollback" in found["rollback events"] and found["kept"] < 60
    assert_equal(found, restored_runs(tokens, few, tmp_path / "memory", 2))
