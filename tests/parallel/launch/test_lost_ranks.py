"""Ranks that do not answer, or call other collectives than their peers: an error with the ranks, and no hang."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whorl.errors import LOST, LOST_HELPER, CheckpointError
from whorl.parallel import distributed, process_group
from whorl.parallel.distributed import DistributedGroup
from whorl.parallel.process_group import ProcessGroup, ReplicaError, spawn_replicas
from whorl.parallel.ranks import run_ranks
from whorl.train.resilience.oom_advice import is_out_of_memory


def freeze_or_raise(group: Any, how: str, file: Path) -> None:
    if how == "raise":
        raise ValueError("planted")
    if how == "lose":
        died = CheckpointError("the checkpoint writer died")
        died.exit_code = LOST_HELPER
        raise died
    file.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def train_with(how: str, file: Path) -> None:
    with closing(spawn_replicas(2, freeze_or_raise, how, file)) as group:
        try:
            group.all_gather_scalars(1.0)
        except ReplicaError as error:
            if how == "freeze":
                os.kill(int(file.read_text()), signal.SIGCONT)
            file.write_text(f"{error.exit_code} {error}")


def on_world(how: str, file: Path) -> None:
    process_group.REPLICA_TIMEOUT = distributed.REPLICA_TIMEOUT = 1.0  # type: ignore[attr-defined]
    distributed.drive(train_with, how, file)


def mismatch() -> str:
    dist.set_debug_level(
        dist.DebugLevel.DETAIL
    )  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does at the start of a rank
    group, tensor = dist.new_group(), torch.ones(3)
    try:
        dist.all_reduce(tensor, group=group) if dist.get_rank() else dist.broadcast(tensor, 0, group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_exception_of_a_rank_is_final(tmp_path: Path) -> None:
    run_ranks(2, on_world, "raise", tmp_path / "error")
    text = (tmp_path / "error").read_text()
    assert text.startswith("1 training replica 1 failed:") and "planted" in text


def test_a_rank_that_lost_its_writer_ends_the_driver_with_its_exit_code(tmp_path: Path) -> None:
    run_ranks(2, on_world, "lose", tmp_path / "error")
    assert (tmp_path / "error").read_text().startswith(f"{LOST_HELPER} training replica 1 failed:")


def test_a_collective_that_fails_for_a_dead_rank_is_lost() -> None:
    here, there = Pipe()
    group = DistributedGroup(0, 2, [None, here], None)
    closed = RuntimeError("Connection closed by peer")
    assert group.lost_peer(ValueError("planted")) is None
    there.close()
    lost = group.lost_peer(closed)
    assert lost is not None and lost.exit_code == LOST and "replica 1 died" in str(lost)


def test_a_dead_rank_is_lost_and_no_lack_of_memory() -> None:
    error = ProcessGroup(0, 2)._dead_replica_error(1)
    assert error.exit_code == LOST and not is_out_of_memory(error)


def test_a_frozen_rank_is_named_and_lost(tmp_path: Path) -> None:
    run_ranks(2, on_world, "freeze", tmp_path / "error")
    text = (tmp_path / "error").read_text()
    assert text.startswith(f"{LOST} training replica 1 did not respond for 1 s")


def test_a_collective_out_of_order_names_calls_and_ranks() -> None:
    for text in run_ranks(2, mismatch):
        assert (
            "mismatch" in text
            and "ALLREDUCE" in text
            and "BROADCAST" in text
            and "Rank 0" in text
            and "Rank 1" in text
        )
