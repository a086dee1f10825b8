"""Snapshots of the weights for rollbacks, at fixed step numbers.

Checkpoints are written by time, so their steps differ between machines. A rollback decides the final weights, so its
target must not. Snapshots are therefore taken at fixed steps, every eighth of the run by default, in the checkpoint
format, and only if the previous steps were good.

The subtle point is retention. A killed run resumes from an older checkpoint, whose guard refers to an older snapshot.
So a snapshot stays as long as one of the last few checkpoints refers to it.
"""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor

from whorl.errors import CheckpointError
from whorl.parallel.process_group import ProcessGroup
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.pieces import restore_named
from whorl.train.learner.update import DivergedError


def ensure_local_snapshot(
    checkpointer: CheckpointManager,
    metadata: dict[str, Any],
    step: int,
    tensors: dict[str, Tensor],
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a restored state, with a snapshot that exists on this machine.

    A state downloaded from remote storage refers to a snapshot of the other machine; this state then becomes the
    snapshot.
    overwrite: make this state the snapshot in any case, unless the guard has bad steps.
    """
    guard = dict(metadata.get("spike_guard") or {})
    anchors = RollbackStore(checkpointer)
    if not guard or (
        not overwrite and (guard["snapshot_step"] is None or anchors.has(guard["snapshot_step"]))
    ):
        return metadata
    guard["snapshot_step"] = None if guard["bad_steps"] or guard["diverged_steps"] else step
    if guard["snapshot_step"] is not None:
        anchors.save(step, tensors)
    return {**metadata, "spike_guard": guard}


class RollbackStore:
    """The snapshots of one job, by step number; of rank 0, or of each rank of a world."""

    def __init__(self, checkpointer: CheckpointManager) -> None:
        self.checkpointer, self.folder = checkpointer, checkpointer.folder / "good"
        # The snapshot of each checkpoint from which the run may resume: those on disk, and some being written.
        self.referenced = deque[int](maxlen=checkpointer.config.keep + 2)

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Write the snapshot of `step`; after a kill it is written again with the same bits."""
        self.checkpointer.save_named(self.path(step), step, tensors)

    def release_unreferenced(self, step: int | None) -> None:
        """Remove snapshots that no checkpoint refers to; a checkpoint that refers to `step` was just saved."""
        self.referenced.append(step or 0)
        if len(self.referenced) < (self.referenced.maxlen or 0):
            return
        for path in self.folder.glob("anchor-*"):
            if not self.checkpointer.piece.rank and int(path.name.removeprefix("anchor-")) < min(
                self.referenced
            ):
                shutil.rmtree(path, ignore_errors=True)

    def has(self, step: int) -> bool:
        """Whether the snapshot of `step` exists."""
        return any(self.path(step).glob("step-*"))

    def path(self, step: int) -> Path:
        """The folder of the snapshot of `step`."""
        return self.folder / f"anchor-{step:08d}"


def restore_snapshot(
    store: RollbackStore | None, step: int, tensors: dict[str, Tensor], group: ProcessGroup
) -> None:
    """Copy the snapshot of `step` into `tensors`. Every rank calls this; store: of those that write.

    Raises:
        DivergedError: it is missing or damaged.
    """
    try:
        if store is None:
            restore_named(None, Path(), tensors, group)
        else:
            restore_named(store.checkpointer, store.path(step), tensors, group)
    except CheckpointError as error:
        raise DivergedError(
            f"training diverged, and the snapshot of step {step:,} cannot be read: {error}"
        ) from error
