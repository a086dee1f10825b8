"""Longer rows at the end of a run: their shapes, resumed runs, replicas, and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.tiny import decoder_config
from tests.support.train.pretraining import (
    assert_close,
    assert_equal,
    assert_resume_is_exact,
    raw_text,
    train,
)
from tests.support.train.tiny import job

from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.loader import TokenProducer
from whorl.train.job import Job, first_long_step, identity, last_rows, row_shape
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.decay_branches import branch_job, branch_state_folder, branch_step, export_branches
from whorl.train.lm.objective import LMObjective
from whorl.train.profiling.step_timer import random_batch, time_steps
from whorl.train.resilience.provenance import documents_in_batch

STEPS, SWITCH = 12, 9
MODEL = decoder_config(vocab_size=300, ngram_buckets=256, trained_length=32)


def long_job(tokens: Path, **change: object) -> Job:
    return job(tokens, **{"model": MODEL, "steps": STEPS, "long_ratio": 0.25, **change})


def test_rows_at_the_end_are_longer_and_fewer(tokens: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shapes, call = list[tuple[int, ...]](), LMObjective.__call__

    def spy(self: LMObjective, micro_batch: dict[str, torch.Tensor]) -> Any:
        shapes.append(tuple(micro_batch["tokens"].shape))
        return call(self, micro_batch)

    monkeypatch.setattr(LMObjective, "__call__", spy)
    train(long_job(tokens), tmp_path / "whole")
    assert shapes == [(8, 32)] * SWITCH + [(2, 128)] * (STEPS - SWITCH)
    shapes.clear()
    train(long_job(tokens, micro_batch_size=4), tmp_path / "micro")  # as many tokens in each
    assert shapes == [(4, 32)] * 2 * SWITCH + [(1, 128)] * 2 * (STEPS - SWITCH)


@pytest.mark.parametrize("both", [False, True])
def test_long_rows_are_compiled_on_request(tokens: Path, both: bool, monkeypatch: Any) -> None:
    wanted = long_job(tokens, compile_long=both)
    model = build_model(wanted)
    (update,) = build_learner(model, wanted, allocate_shared(model, wanted), ProcessGroup()).updates
    objective, shapes = update.objective, list[int]()
    assert isinstance(objective, LMObjective)

    def compiled(x: torch.Tensor, *rest: Any) -> Any:  # in the compiled function's place
        shapes.append(x.shape[1])
        return objective._loss(x, *rest)

    monkeypatch.setattr(objective, "compiled_loss", compiled)
    losses = [objective(random_batch(wanted, rows, 0, n)).total.item() for rows, n in ((8, 32), (2, 128))]
    assert shapes == ([32, 128] if both else [32]) and all(loss > 0 for loss in losses)


@pytest.mark.parametrize("stop", [5, SWITCH, 10])
def test_resume_with_long_rows_is_bit_exact(tokens: Path, tmp_path: Path, stop: int) -> None:
    assert_resume_is_exact(long_job(tokens), tmp_path, stop)


def test_long_rows_are_shared_by_replicas_and_filled_by_processes(tokens: Path, tmp_path: Path) -> None:
    whole = train(long_job(tokens), tmp_path / "one")
    assert_close(whole, train(long_job(tokens, replicas=2), tmp_path / "two"))
    assert_equal(whole, train(long_job(tokens, serial_loader=False), tmp_path / "process"))


def test_branch_starts_before_its_own_long_rows(tokens: Path, tmp_path: Path) -> None:
    whole = long_job(tokens, steps=40, long_ratio=0.5, schedule={"decay_ratio": 0.2})
    branch, at = branch_job(whole, 0.7), branch_step(whole, 0.7)
    assert at == first_long_step(branch) == 14  # the learning rate would decay from step 23
    train(whole, tmp_path / "whole", branch_points=[at])
    assert export_branches(tmp_path / "whole", tmp_path / "model", {0.7: at}) == [0.7]
    start = branch_state_folder(tmp_path / "model", 0.7)
    end = train(branch, tmp_path / "branch", branch_start=start)
    assert_equal(end, train(branch, tmp_path / "planned"))


def test_row_shapes_and_identity(tokens: Path) -> None:
    wanted = long_job(tokens)
    assert first_long_step(wanted) == SWITCH and first_long_step(job(tokens)) == STEPS
    assert [row_shape(wanted, step).seq_len for step in (0, SWITCH - 1, SWITCH, STEPS)] == [32, 32, 128, 128]
    assert last_rows(wanted).seq_len == 128 and last_rows(job(tokens)).seq_len == 32
    assert identity(wanted) != identity(long_job(tokens, long_ratio=0.5))


def test_provenance_of_a_long_batch(tokens: Path) -> None:
    found = documents_in_batch(long_job(tokens), SWITCH, None)
    rows = TokenProducer(tokens, "train", 128, 2)
    assert [each["number"] for each in found["documents"]] == rows.documents_in_batch(SWITCH).tolist()


def test_long_steps_are_timed(tokens: Path) -> None:
    timed = time_steps(long_job(tokens), seconds=0.05)
    assert timed.long_step_seconds > 0
    assert timed.mean_step_seconds(0.5) == pytest.approx((timed.step_seconds + timed.long_step_seconds) / 2)
    assert time_steps(job(tokens), seconds=0.05).long_step_seconds == 0


def test_long_rows_that_are_impossible_are_refused(tokens: Path, tmp_path: Path) -> None:
    for change in (
        {"model": decoder_config(vocab_size=300, ngram_buckets=256)},
        {"seq_len": 64},
        {"stream": raw_text(tokens, tmp_path)},
    ):
        with pytest.raises(ValidationError, match="trained_length = seq_len"):
            long_job(tokens, **change)
    with pytest.raises(ValidationError, match="that 4 x replicas"):
        long_job(tokens, batch_size=6)
