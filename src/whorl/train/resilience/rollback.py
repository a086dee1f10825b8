"""Anchors: copies of the weights to go back to when training goes astray, at fixed step numbers.

Checkpoints are written when enough time has passed, so which steps have one depends on the machine's mood. What a run goes
back to must not: it decides the weights that come out. Hence these copies, every eighth of the run by default, beside the
checkpoints and in their format; and only where the steps just before went well.

The subtle part is which may be removed. A run that was killed continues from an older checkpoint, whose guard knows of an
older anchor; were that gone, the run could not do what the undisturbed one does. So anchors stay as long as one of the
last few checkpoints may ask for them.
"""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor

from whorl.errors import CheckpointError
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.learner.update import DivergedError


def ensure_local_snapshot(
    checkpointer: CheckpointManager,
    metadata: dict[str, Any],
    step: int,
    tensors: dict[str, Tensor],
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """`record` of the state of `step`, with an anchor that is here: what was restored from far away left its own behind.

    anew: whatever is here, the anchor is this state, unless it is itself in trouble.
    """
    guard = dict(metadata.get("spike_guard") or {})
    anchors = RollbackStore(checkpointer)
    if not guard or (not overwrite and (guard["snapshot_step"] is None or anchors.has(guard["snapshot_step"]))):
        return metadata
    guard["snapshot_step"] = None if guard["bad_steps"] or guard["diverged_steps"] else step
    if guard["snapshot_step"] is not None:
        anchors.save(step, tensors)
    return {**metadata, "spike_guard": guard}


class RollbackStore:
    """The anchors of one job. Rank 0's; a step number names each."""

    def __init__(self, checkpointer: CheckpointManager) -> None:
        self.checkpointer, self.folder = checkpointer, checkpointer.folder / "good"
        # The anchor that each checkpoint knows from which the run may still continue: those kept, and some being written.
        self.referenced = deque[int](maxlen=checkpointer.config.keep + 2)

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Writes the anchor of `step` (again, after a kill: the bits are the same)."""
        self.checkpointer.save_named(self._path(step), step, tensors)

    def restore(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Copies the anchor of `step` into `tensors`.

        Raises:
            DivergedError: it is gone or damaged.
        """
        try:
            restore(tensors, self.checkpointer.load_named(self._path(step)))
        except CheckpointError as error:
            raise DivergedError(
                f"training went astray, and the weights of step {step:,} cannot be read: {error}"
            ) from error

    def release_unreferenced(self, step: int | None) -> None:
        """A checkpoint was made that knows the anchor of `step`: what no checkpoint may ask for goes."""
        self.referenced.append(step or 0)
        if len(self.referenced) < (self.referenced.maxlen or 0):
            return
        for path in self.folder.glob("anchor-*"):
            if int(path.name.removeprefix("anchor-")) < min(self.referenced):
                shutil.rmtree(path, ignore_errors=True)

    def has(self, step: int) -> bool:
        """Whether the anchor of `step` is here."""
        return any(self._path(step).glob("step-*"))

    def _path(self, step: int) -> Path:
        return self.folder / f"anchor-{step:08d}"
