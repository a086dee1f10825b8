"""Runs that a test starts as a child process, in a session of its own, and kills or stops."""

from __future__ import annotations

import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.train.tiny import Notes, job
from whorl.errors import DiskFullError
from whorl.machine.process import Channel, Child
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.lm.objective import LMObjective
from whorl.train.lm.pretrain import pretrain
from whorl.train.resilience.preemption import PreemptedError


def start(function: str, *args: Any) -> Child:
    """Start a function of this file."""
    return Child(f"{__name__}:{function}", *args, preload=("whorl.train.lm.pretrain",), new_session=True)


def save_each_step(channel: Channel, folder: Path, megabytes: int, graceful: bool) -> None:
    """Send "ready", then save one checkpoint after the other. graceful: end at SIGTERM, after the write."""
    if graceful:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    state = {"weights/a": torch.zeros(megabytes << 18), "state/a/mean": torch.zeros(1000).double()}
    with CheckpointManager(folder, {"job": "keeping"}, seconds=0.0) as keeper:
        found = keeper.resume()
        step = 0 if found is None else found.step
        keeper.prepare(state)
        channel.send("ready")
        while True:
            step += 1
            for tensor in state.values():
                tensor.fill_(step)
            keeper.save(step, state)


def fill_disk(channel: Channel, tokens: Path, scratch: Path) -> None:
    """Train on a disk that takes no more after the checkpoint of step 5; send the error's text."""

    class Filling(Notes):
        def on_checkpoint(self, step: int, seconds: float) -> None:
            super().on_checkpoint(step, seconds)
            if step == 5:
                for child in psutil.Process().children(recursive=True):
                    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    try:
        pretrain(job(tokens, steps=12, replicas=2), scratch, Filling(), checkpoint_seconds=0.0)
    except DiskFullError as error:
        channel.send(str(error))


def train_for_long(channel: Channel, tokens: Path, scratch: Path) -> None:
    """Train with two replicas and two loaders; send the step of each report."""
    notes: Any = Notes()
    notes.on_step = lambda step, metrics: channel.send(step)
    pretrain(job(tokens, replicas=2, serial_loader=False, steps=2000), scratch, notes)


def train_with_slow_phase(channel: Channel, tokens: Path, scratch: Path) -> None:
    """Train; the step that comes after 25 others sends "slow" and takes a minute.

    SIGTERM ends it with the error's text and its exit code.
    """
    plain, calls = LMObjective.__call__, [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 25:
            channel.send("slow")
            time.sleep(60)
        return plain(*args)

    LMObjective.__call__ = call  # type: ignore[method-assign]
    wanted = job(tokens, replicas=2, serial_loader=False, steps=60, evaluations=6)
    try:
        pretrain(wanted, scratch, Notes(), checkpoint_seconds=1e9, heartbeat_dir=scratch / "watch")
    except PreemptedError as error:
        channel.send(str(error))
        sys.exit(error.exit_code)
