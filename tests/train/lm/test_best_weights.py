"""A run that memorizes its text ends with the weights that were best on held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.train.pretraining import assert_equal, train
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.errors import WhorlError
from whorl.recipes.steps.pretrain.train_job import describe_held_out
from whorl.train.lm.pretrain import pretrain
from whorl.train.metrics.validation import MARGIN


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("few"), documents=12)


class Stop(WhorlError):
    """Raised in place of a kill."""


class StopAt(Notes):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        super().on_step(step, metrics)
        if step == self.step:
            raise Stop("here")


@pytest.mark.parametrize("replicas", [1, 2])
def test_run_that_overfits_ends_with_best_weights(replicas: int, few: Path, tmp_path: Path) -> None:
    wanted, notes = job(few, steps=60, evaluations=12, replicas=replicas), Notes()
    kept = pretrain(wanted, tmp_path / "a", notes)
    losses = [e["held_out_nll"] for e in notes.evaluations]
    step = int(notes.evaluations[-1]["kept_step"])
    assert losses[-1] == pytest.approx(min(losses[:-1])) and step < 60
    assert max(losses) > (1 + MARGIN) * min(losses)
    assert [e["kind"] for e in notes.events] == ["overfitting"] * len(notes.events)
    assert f"the weights of step {step} are saved" in notes.events[-1]["action"]
    text = describe_held_out({"held_out_bits_per_byte": 2.2, "held_out_perplexity": 9.0, "kept_step": step})
    assert text.endswith(f"(weights of step {step}; later ones overfit)")
    if replicas == 1:
        with pytest.raises(Stop):  # a killed run keeps the same weights
            pretrain(wanted, tmp_path / "b", StopAt(step + 11))
        assert_equal(train(wanted, tmp_path / "b"), kept)


def test_run_of_one_epoch_saves_no_copies(tokens: Path, tmp_path: Path) -> None:
    train(job(tokens), tmp_path / "a")
    assert not (tmp_path / "a" / "best").exists()


def test_headline_without_validation_split() -> None:
    assert "no held-out text" in describe_held_out({"nll": 1.0})
