"""Deterministic mode: equal bits for any number of threads and any library speed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_equal, train
from tests.support.train.tiny import job

from whorl.nn.experts import experts
from whorl.objectives.next_token import Loss
from whorl.train.determinism import deterministic
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.objective import LMObjective


def state() -> tuple[object, ...]:
    import torch._inductor.config as inductor

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        experts.forced_library,
        inductor.deterministic,
    )


def test_deterministic_sets_and_restores_settings() -> None:
    before = state()
    with deterministic(False):
        assert state() == before
    with pytest.raises(KeyError), deterministic():
        assert state() == (True, 1, False, "mkl", True)
        raise KeyError
    assert state() == before


def test_deterministic_does_not_time_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_onednn_is_faster", partial(pytest.fail, "timed"))
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    with deterministic():
        assert torch.equal(experts.matmul(left, right), left @ right)
    monkeypatch.setattr(experts, "forced_library", "onednn")
    torch.testing.assert_close(experts.matmul(left, right), left @ right)
    monkeypatch.setattr(experts, "forced_library", None)
    with pytest.raises(pytest.fail.Exception, match="timed"):
        experts.matmul(left, right)


def test_deterministic_threads_do_not_change_bits(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is wide enough to split products and sums over threads."""
    plain, seen = LMObjective.__call__, set[int]()

    def watched(self: LMObjective, part: MicroBatch) -> Loss:
        seen.add(torch.get_num_threads())
        return plain(self, part)

    monkeypatch.setattr(LMObjective, "__call__", watched)
    model = shape({"n_heads": 4, "n_kv_heads": 4, "head_dim": 64}, d_model=256, mlp_hidden=1024)
    wanted = job(tokens, model=model, seq_len=64, steps=2, deterministic=True)
    assert_equal(*(train(wanted.model_copy(update={"threads": n}), tmp_path / f"{n}") for n in (1, 2)))
    assert seen == {1}
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_experts_ignore_faster_library(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tokens, model=shape(HEADS, experts=EXPERTS), steps=4, deterministic=True)
    ends = []
    for faster in (False, True):
        monkeypatch.setattr(experts, "_onednn_is_faster", lambda faster=faster: faster)
        ends.append(train(wanted, tmp_path / f"{faster}"))
    assert_equal(*ends)
