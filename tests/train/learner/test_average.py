"""Exponential moving average of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.train.checkpoint_states import load_latest
from tests.support.train.pretraining import assert_close, assert_resume_is_exact, train, weights
from tests.support.train.tiny import Notes, job
from torch import Tensor

from whorl.models import Transformer
from whorl.train.learner.average import EMA_INTERVAL
from whorl.train.lm.build import build_model


class Watching(Notes):
    """Stores the weights at each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_evaluation(self, step: int, metrics: dict[str, float], model: Transformer) -> None:
        self.seen[step] = weights(model)


def test_ema_matches_formula_and_survives_resume(tokens: Path, tmp_path: Path) -> None:
    plain, raw, watching = job(tokens, steps=30, evaluations=3), Watching(), Watching()
    wanted = plain.model_copy(update={"ema": 0.9})
    train(plain, tmp_path / "plain", raw)  # validates every 10 steps with the trained weights
    averaged = assert_resume_is_exact(wanted, tmp_path, 17, watching)
    expected = weights(build_model(plain))
    for done in (10, 20, 30):
        b = min(0.9**EMA_INTERVAL, (1 + done) / (10 + done))
        expected = {n: b * average + (1 - b) * raw.seen[done][n] for n, average in expected.items()}
        torch.testing.assert_close(watching.seen[done], expected)
    torch.testing.assert_close(weights(averaged), expected)
    kept = load_latest(tmp_path / "whole")
    assert kept is not None
    # the trained weights are unaffected
    assert all(torch.equal(kept.tensors[f"weights/{n}"], t) for n, t in raw.seen[30].items())
    assert_close(averaged, train(wanted.model_copy(update={"replicas": 2}), tmp_path / "two"))
