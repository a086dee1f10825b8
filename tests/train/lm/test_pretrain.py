"""Pretraining: equal weights for any batch split and after a resume; it learns the data's entropy."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.support.train.child_runs import start
from tests.support.train.pretraining import assert_close, assert_equal, raw_text, train, train_notes
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.errors import BudgetError, CheckpointError
from whorl.parallel.process_group import ProcessGroup, ReplicaError, spawn_replicas


def test_pretrain_equal_for_micro_batches_and_replicas(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, steps=4)
    whole = train(wanted, tmp_path / "1x8")
    for change in ({"micro_batch_size": 4}, {"micro_batch_size": 1}, {"replicas": 2}):
        assert_close(whole, train(wanted.model_copy(update=change), tmp_path / str(change)))


def test_pretrain_serial_loader_equals_process(tokens: Path, tmp_path: Path) -> None:
    process = train(job(tokens, serial_loader=False), tmp_path / "b")
    assert_equal(train(job(tokens), tmp_path / "a"), process)


def test_pretrain_raw_text_learns_and_resumes_exactly(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, stream=raw_text(tokens, tmp_path), steps=30)
    notes = Notes()
    undisturbed = train(wanted, tmp_path / "a", notes)
    assert notes.evaluations[-1]["held_out_nll"] < notes.evaluations[0]["held_out_nll"]
    other = wanted.model_copy(update={"serial_loader": False})  # tokenized by a process
    assert wanted.stream is not None
    for stop in (11, 17):
        change = {"stream": wanted.stream.model_copy(update={"workers": stop % 3})}
        train(other.model_copy(update=change), tmp_path / "b", stop_after=stop, checkpoint_seconds=0.0)
    assert_equal(undisturbed, train(wanted, tmp_path / "b"))
    assert_close(undisturbed, train(wanted.model_copy(update={"replicas": 2}), tmp_path / "two"))


def test_pretrain_changed_raw_text_raises(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, stream=raw_text(tokens, tmp_path), steps=8)
    train(wanted, tmp_path / "a", stop_after=3, checkpoint_seconds=0.0)
    raw_text(tokens, tmp_path, seed=2)
    with pytest.raises(CheckpointError, match="the data or the settings of the stream changed"):
        train(wanted, tmp_path / "a")


def test_pretrain_checkpoint_accepts_copied_token_set_only(tokens: Path, tmp_path: Path) -> None:
    train(job(tokens), tmp_path / "scratch", stop_after=2, checkpoint_seconds=0.0)
    copied = shutil.copytree(tokens, tmp_path / "copied")
    train(job(copied), tmp_path / "scratch", stop_after=3, checkpoint_seconds=0.0)
    other = make_tokens(tmp_path / "other", seed=1)
    refused = {"another job": job(tokens, seed=1), "data differs": job(other)}
    refused["deterministic differs"] = job(tokens, deterministic=True)
    for words, wanted in refused.items():
        with pytest.raises(CheckpointError, match=words):
            train(wanted, tmp_path / "scratch")


def test_pretrain_killed_leaves_no_processes(tokens: Path, tmp_path: Path) -> None:
    child = start("train_for_long", tokens, tmp_path / "scratch")
    for _ in range(3):  # the replica and the two loaders work
        child.channel.recv()
    family = psutil.Process(child.pid).children(recursive=True)
    assert len(family) >= 3
    os.kill(child.pid, signal.SIGKILL)  # not its group
    child.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _fail(world: ProcessGroup) -> None:
    raise RuntimeError("the replica's own words")


def _die(world: ProcessGroup) -> None:
    os._exit(9)


@pytest.mark.parametrize(
    ("work", "words"), [(_fail, "the replica's own words"), (_die, "died without an error message")]
)
def test_replica_failure_raises(work: Callable[[ProcessGroup], None], words: str) -> None:
    with closing(spawn_replicas(2, work)) as world, pytest.raises(ReplicaError, match=words):
        world.all_gather_scalars(1.0)


def test_pretrain_invalid_batch_size_raises(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"for 3 replicas\n.* nearest are 2 and 4"):
        train(job(tokens, replicas=3), tmp_path)
    with pytest.raises(BudgetError, match="2 at the end of the run, for 8 replicas"):
        train(job(tokens).model_copy(update={"replicas": 8, "long_ratio": 0.1}), tmp_path)
    for how in ({}, {"serial_loader": False}, {"replicas": 2}):
        with pytest.raises(BudgetError, match="rows of 32 tokens") as error:
            train(job(tokens, batch_size=100_000, **how), tmp_path)
        assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pretrain_reaches_entropy_of_the_data(tmp_path: Path, seed: int) -> None:
    """Letters come in pairs: the first is one of 8, the second is certain. Entropy: ln(8) / 2 per letter."""
    tokens = make_tokens(tmp_path / "tokens", documents=300, seed=seed)
    notes = train_notes(job(tokens, steps=150, seed=seed, seq_len=64), tmp_path / "s")
    entropy = math.log(8) / 2
    reached = notes.evaluations[-1]["held_out_nll"]
    assert entropy - 0.06 < reached < entropy + 0.12, reached
    assert notes.evaluations[0]["held_out_nll"] > reached
    assert 0 <= notes.steps[-1]["time/data_fraction"] < 1
