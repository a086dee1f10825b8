"""Training on a real Slurm: a killed rank and a signal with requeue change no bit of the weights."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.support.cli import run_whorl, succeed, weights
from tests.support.parallel.kills import MARK, reached_step, roles, wait_for, write_recipe
from tests.support.parallel.slurm import private_slurm, slurm

from whorl.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]


def test_slurm_requeues_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = ("small.toml", "--deterministic")
    write_recipe(tmp_path, steps=40)
    succeed(tmp_path, "launch", *words, "--ranks", 2, "--store", "one")
    store = tmp_path / "two"
    shutil.copytree(tmp_path / "one", store)
    shutil.rmtree(Store(store).open("small/pretrain").path)
    shutil.rmtree(store / "runs")
    log = tmp_path / "small-1.out"
    with private_slurm(tmp_path / "slurm") as env:
        env = {**env, MARK: str(tmp_path)}
        submitted = run_whorl(
            "launch", *words, "--store", store, "--on", "slurm", "--ranks", 2, cwd=tmp_path, env=env
        )
        assert submitted.stdout == "Submitted batch job 1\n", submitted.stderr
        wait_for(lambda: reached_step(store) >= 5, log)
        os.kill(roles(str(tmp_path))["rank 1"].pid, signal.SIGKILL)
        step = reached_step(store) + 5
        wait_for(lambda: reached_step(store) >= step, log)
        slurm(env, "scancel", "--batch", "--signal=USR1", "1")
        wait_for(lambda: "PENDING" in slurm(env, "squeue", "-h", "-o", "%T"), log)
        # Within a second of its end a node refuses the job, as its credential is revoked.
        slurm(env, "scontrol", "update", "JobId=1", "StartTime=now+3")
        wait_for(lambda: not slurm(env, "squeue", "-h"), log)
        assert not roles(str(tmp_path))
    text = log.read_text()
    assert "rank 1 was killed by SIGKILL; all ranks start again" in text
    # Once by the requeue; a rank whose peer was killed may stop in the same way.
    assert "stopped by SIGTERM after step" in text and text.count("continues at step") >= 2
    assert weights(store, "small/pretrain") == weights(tmp_path / "one", "small/pretrain"), text
