"""Pretraining: equal weights for any batch split and after a resume; it learns the data's entropy."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from tests.support.train.pretraining import assert_close, raw_text, train, weights
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.errors import BudgetError, CheckpointError
from whorl.parallel.process_group import ProcessGroup, ReplicaError, spawn_replicas

ROOT = Path(__file__).parents[3]


def test_pretrain_equal_for_micro_batches_and_replicas(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, steps=4)
    whole = weights(train(wanted, tmp_path / "1x8"))
    assert_close(whole, weights(train(wanted.model_copy(update={"micro_batch_size": 4}), tmp_path / "2x4")))
    assert_close(whole, weights(train(wanted.model_copy(update={"micro_batch_size": 1}), tmp_path / "8x1")))
    assert_close(whole, weights(train(wanted.model_copy(update={"replicas": 2}), tmp_path / "two")))


def test_pretrain_serial_loader_equals_process(tokens: Path, tmp_path: Path) -> None:
    serial = weights(train(job(tokens), tmp_path / "a"))
    process = weights(train(job(tokens, serial_loader=False), tmp_path / "b"))
    assert all(torch.equal(serial[n], process[n]) for n in serial)


def test_pretrain_resume_is_bit_exact(tokens: Path, tmp_path: Path) -> None:
    undisturbed = weights(train(job(tokens), tmp_path / "a"))
    notes = Notes()
    train(job(tokens), tmp_path / "b", notes, stop_after=5, checkpoint_seconds=0.0)
    assert notes.checkpoints[-1] == 5
    messages: list[str] = []
    continued = weights(train(job(tokens), tmp_path / "b", log=messages.append))
    assert any("continues at step 5 of 12" in line for line in messages)
    assert all(torch.equal(undisturbed[n], continued[n]) for n in undisturbed)


def test_pretrain_raw_text_learns_and_resumes_exactly(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, stream=raw_text(tokens, tmp_path), steps=30)
    notes = Notes()
    undisturbed = weights(train(wanted, tmp_path / "a", notes))
    assert notes.evaluations[-1]["held_out_nll"] < notes.evaluations[0]["held_out_nll"]
    other = wanted.model_copy(update={"serial_loader": False})  # tokenized by a process
    assert wanted.stream is not None
    for stop, replicas in ((11, 1), (17, 1)):
        change = {"stream": wanted.stream.model_copy(update={"workers": stop % 3}), "replicas": replicas}
        train(other.model_copy(update=change), tmp_path / "b", stop_after=stop, checkpoint_seconds=0.0)
    again = weights(train(wanted, tmp_path / "b"))
    assert all(torch.equal(undisturbed[n], again[n]) for n in again)
    assert_close(undisturbed, weights(train(wanted.model_copy(update={"replicas": 2}), tmp_path / "two")))


def test_pretrain_changed_raw_text_raises(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, stream=raw_text(tokens, tmp_path), steps=8)
    train(wanted, tmp_path / "a", stop_after=3, checkpoint_seconds=0.0)
    raw_text(tokens, tmp_path, seed=2)
    with pytest.raises(CheckpointError, match="the data or the settings of the stream changed"):
        train(wanted, tmp_path / "a")


def test_pretrain_checkpoint_of_other_job_raises(tokens: Path, tmp_path: Path) -> None:
    train(job(tokens), tmp_path, stop_after=2, checkpoint_seconds=0.0)
    with pytest.raises(CheckpointError, match="another job"):
        train(job(tokens, seed=1), tmp_path)


def test_pretrain_checkpoint_accepts_copied_token_set_only(tokens: Path, tmp_path: Path) -> None:
    train(job(tokens), tmp_path / "scratch", stop_after=2, checkpoint_seconds=0.0)
    copied = shutil.copytree(tokens, tmp_path / "copied")
    train(job(copied), tmp_path / "scratch", stop_after=3, checkpoint_seconds=0.0)
    with pytest.raises(CheckpointError, match="data differs"):
        train(job(make_tokens(tmp_path / "other", seed=1)), tmp_path / "scratch")


SCRIPT = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from tests.support.train.tiny import Notes, job
    from whorl.train.lm.pretrain import pretrain

    if __name__ == "__main__":
        pretrain(job(Path(sys.argv[2]), replicas=2, serial_loader=False, steps=200000), Path(sys.argv[3]), Notes())
"""


def test_pretrain_killed_leaves_no_processes(tokens: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = subprocess.Popen([sys.executable, str(script), str(ROOT), str(tokens), str(tmp_path / "scratch")])
    parent = psutil.Process(run.pid)
    deadline = time.monotonic() + 60
    while (
        len(parent.children(recursive=True)) < 3 and time.monotonic() < deadline
    ):  # a replica and two loaders
        time.sleep(0.1)
    time.sleep(1.0)
    family = parent.children(recursive=True)
    assert len(family) >= 3
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _fail(world: ProcessGroup) -> None:
    raise RuntimeError("the replica's own words")


def _die(world: ProcessGroup) -> None:
    import os

    os._exit(9)


@pytest.mark.parametrize(
    ("work", "words"), [(_fail, "the replica's own words"), (_die, "died without an error message")]
)
def test_replica_failure_raises(work: object, words: str) -> None:
    world = spawn_replicas(2, work)  # type: ignore[arg-type]
    try:
        with pytest.raises(ReplicaError, match=words):
            world.all_gather_scalars(1.0)
    finally:
        world.close()


def test_pretrain_invalid_batch_size_raises(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="for 3 replicas"):
        train(job(tokens, replicas=3), tmp_path)
    with pytest.raises(BudgetError, match="rows of 32 tokens"):
        train(job(tokens, batch_size=100_000), tmp_path)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pretrain_reaches_entropy_of_the_data(tmp_path: Path, seed: int) -> None:
    """Letters come in pairs: the first is one of 8, the second is certain. Entropy: ln(8) / 2 per letter."""
    tokens = make_tokens(tmp_path / "tokens", documents=300, seed=seed)
    notes = Notes()
    train(job(tokens, steps=150, seed=seed, seq_len=64), tmp_path / "s", notes)
    entropy = math.log(8) / 2
    reached = notes.evaluations[-1]["held_out_nll"]
    assert entropy - 0.06 < reached < entropy + 0.12, reached
    assert notes.evaluations[0]["held_out_nll"] > reached
    assert 0 <= notes.steps[-1]["time/data_fraction"] < 1
