"""Exponential moving average of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.train.tiny import Notes, job
from torch import Tensor

from whorl.train.checkpoint.format import load_latest
from whorl.train.learner.ema import UPDATE_INTERVAL
from whorl.train.lm.pretrain import pretrain


class Watching(Notes):
    """Stores the weights at each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_evaluation(self, step, metrics, model) -> None:  # type: ignore[no-untyped-def]
        super().on_evaluation(step, metrics, model)
        self.seen[step] = {n: p.detach().clone() for n, p in model.named_parameters()}


def test_ema_matches_formula_and_survives_resume(tokens: Path, tmp_path: Path) -> None:
    plain = job(tokens, steps=30, evaluations=3)
    wanted = plain.model_copy(update={"ema": 0.9})
    raw = Watching()
    pretrain(plain, tmp_path / "plain", raw)  # validates every 10 steps with the trained weights
    watching = Watching()
    averaged = pretrain(wanted, tmp_path / "a", watching)
    expected = {n: t.clone() for n, t in start(plain).items()}
    for done in (10, 20, 30):
        b = min(0.9**UPDATE_INTERVAL, (1 + done) / (10 + done))
        for name, average in expected.items():
            average.mul_(b).add_(raw.seen[done][name], alpha=1 - b)
            torch.testing.assert_close(watching.seen[done][name], average)
    final = dict(averaged.named_parameters())
    for name, average in expected.items():
        torch.testing.assert_close(final[name].detach(), average)
    kept = load_latest(tmp_path / "a")
    assert kept is not None
    trained = {n.removeprefix("weights/"): t for n, t in kept.tensors.items() if n.startswith("weights/")}
    assert all(
        torch.equal(t, raw.seen[30][n]) for n, t in trained.items()
    )  # the trained weights are unaffected
    pretrain(wanted, tmp_path / "b", Notes(), stop_after=17, checkpoint_seconds=0.0)
    again = dict(pretrain(wanted, tmp_path / "b", Notes()).named_parameters())
    assert all(torch.equal(p, again[n]) for n, p in final.items())
    two = dict(
        pretrain(wanted.model_copy(update={"replicas": 2}), tmp_path / "two", Notes()).named_parameters()
    )
    for name, p in final.items():
        torch.testing.assert_close(two[name], p, atol=2e-4, rtol=1e-3)


def start(plain) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    from whorl.train.lm.pretrain import build_model

    return {n: p.detach() for n, p in build_model(plain).named_parameters()}
