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
from whorl.train.checkpoint.manager import Keeper
from whorl.train.learner.update import DivergedError


def on_this_machine(
    keeper: Keeper, record: dict[str, Any], step: int, tensors: dict[str, Tensor], *, anew: bool = False
) -> dict[str, Any]:
    """`record` of the state of `step`, with an anchor that is here: what was restored from far away left its own behind.

    anew: whatever is here, the anchor is this state, unless it is itself in trouble.
    """
    guard = dict(record.get("guard") or {})
    anchors = Anchors(keeper)
    if not guard or (not anew and (guard["anchor"] is None or anchors.has(guard["anchor"]))):
        return record
    guard["anchor"] = None if guard["bad"] or guard["astray"] else step
    if guard["anchor"] is not None:
        anchors.save(step, tensors)
    return {**record, "guard": guard}


class Anchors:
    """The anchors of one job. Rank 0's; a step number names each."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.folder = keeper, keeper.folder / "good"
        # The anchor that each checkpoint knows from which the run may still continue: those kept, and some being written.
        self.asked = deque[int](maxlen=keeper.tiers.keep + 2)

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Writes the anchor of `step` (again, after a kill: the bits are the same)."""
        self.keeper.put_aside(self._place(step), step, tensors)

    def restore(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Copies the anchor of `step` into `tensors`.

        Raises:
            DivergedError: it is gone or damaged.
        """
        try:
            restore(tensors, self.keeper.found_aside(self._place(step)))
        except CheckpointError as error:
            raise DivergedError(
                f"training went astray, and the weights of step {step:,} cannot be read: {error}"
            ) from error

    def known(self, step: int | None) -> None:
        """A checkpoint was made that knows the anchor of `step`: what no checkpoint may ask for goes."""
        self.asked.append(step or 0)
        if len(self.asked) < (self.asked.maxlen or 0):
            return
        for path in self.folder.glob("anchor-*"):
            if int(path.name.removeprefix("anchor-")) < min(self.asked):
                shutil.rmtree(path, ignore_errors=True)

    def has(self, step: int) -> bool:
        """Whether the anchor of `step` is here."""
        return any(self._place(step).glob("step-*"))

    def _place(self, step: int) -> Path:
        return self.folder / f"anchor-{step:08d}"
