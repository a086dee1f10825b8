"""Checkpoints: everything a run needs to continue as if it had never stopped.

One folder a checkpoint, `step-00001200/`: `state.safetensors` (weights and optimiser moments, keyed by parameter name,
fp32) and `state.json` (step, position in the data, figures to go on from, and the hash of the tensors). It is written
beside its final name, flushed to the disk, then renamed: a folder that carries a final name is whole, whatever was
killed when. Loading takes the newest that is whole and says why it passed over others.

Nothing here knows how many replicas there were: tensors are whole, so a run continues on any number of them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from whorl.errors import CheckpointError, DiskFullError

FORMAT = 1
KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and what else the run needs (JSON)."""

    step: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]


def save(folder: Path, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step` and removes all but the newest two.

    Raises:
        DiskFullError: no space; older checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    aside, final = folder / f"writing-{os.getpid()}", folder / f"step-{step:08d}"
    aside.mkdir()
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, aside / "state.safetensors")
        digest = _digest(aside / "state.safetensors")
        body = {"format": FORMAT, "step": step, "sha256": digest, "record": record}
        (aside / "state.json").write_text(json.dumps(body))
        for path in (*aside.iterdir(), aside):
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise DiskFullError(
                f"no space left while writing the checkpoint of step {step} to {folder}",
                do="free space, then run the same command: it continues from the checkpoint before",
            ) from error
        raise
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(folder: Path, say: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """The newest whole checkpoint of `folder`, or None. `say` is told of each that was passed over and why."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return load(path)
        except CheckpointError as error:
            say(f"passed over {path.name}: {error}")
    return None


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path`.

    Raises:
        CheckpointError: missing or unreadable files, a hash that differs, or a newer format.
    """
    try:
        body = json.loads((path / "state.json").read_text())
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: checkpoint format {body['format']}",
                expected=f"{FORMAT}, the one this version writes",
            )
        if _digest(path / "state.safetensors") != body["sha256"]:
            raise CheckpointError(f"{path / 'state.safetensors'}: its content differs from its recorded hash")
        tensors = load_file(path / "state.safetensors")
        return Checkpoint(int(body["step"]), tensors, body["record"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error


def restore(target: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copies `tensors` into `target` in place, by name.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape differs.
    """
    for name in sorted(target.keys() | tensors.keys()):
        want, have = target.get(name), tensors.get(name)
        if want is None or have is None or want.shape != have.shape:
            raise CheckpointError(
                f"checkpoint tensor {name!r} is {'missing' if have is None else tuple(have.shape)}",
                expected=f"{'no such tensor' if want is None else tuple(want.shape)}",
                do="the checkpoint is of another model: remove it to start again",
            )
        want.copy_(have)


class Keeper:
    """The checkpoints of one job: what it goes on from, and a new one whenever enough time has passed.

    Args:
        identity: what must be the same for a checkpoint to fit (JSON).
        seconds: between checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        *,
        seconds: float = 30.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder, self.identity, self.seconds, self.say = folder, identity, seconds, say
        self.last = time.monotonic()

    def resume(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None.

        Raises:
            CheckpointError: it is of another job.
        """
        found = newest(self.folder, self.say)
        if found is None:
            return None
        theirs = found.record["job"]
        differing = sorted(k for k in self.identity if theirs.get(k) != self.identity[k])
        if differing:
            raise CheckpointError(
                f"the checkpoint in {self.folder} is of another job: {', '.join(differing)} differs",
                do="remove that folder to train from the start",
            )
        return found

    def due(self) -> bool:
        """Whether enough time has passed since the last one."""
        return time.monotonic() - self.last >= self.seconds

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any] | None = None) -> float:
        """Writes one; returns how many seconds that took."""
        began = time.monotonic()
        save(self.folder, step, tensors, {**(record or {}), "job": self.identity})
        self.last = time.monotonic()
        return self.last - began


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
