"""The checkpoint manager of one job: resume from the newest checkpoint, save when the interval has passed.

`save` copies the state into the staging buffer and returns; a writer process does the rest (`writer_process.py`). The
loop calls `due()` after each step, which also reports errors of the writer:

- *A checkpoint is due while the previous one is being written.* It is deferred and counted (`deferred`); training
  continues. Only the last checkpoint, one for a signal, or an interval of 0 waits.
- *The disk is full.* `DiskFullError` is raised between two steps; the previous checkpoint is intact.
- *Remote storage fails.* Logged once, counted, retried at the next interval, and reported.

A kill costs at most one interval: a copy is taken early by the duration of the last write, so that the new checkpoint
is *complete* within the interval after the previous one was *taken*.

A checkpoint also holds the global RNG states of torch, NumPy and Python, since third-party networks may use them, and
the statistics, so that counts continue after a kill.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from whorl.errors import CheckpointError, DiskFullError
from whorl.machine.kernel_choice import recorded_choices
from whorl.parallel.process_group import ProcessGroup
from whorl.store.address import canonical_json
from whorl.train.checkpoint.format import Checkpoint, NewerFormatError, build_index, load
from whorl.train.checkpoint.pieces import Part, own_tensors
from whorl.train.checkpoint.remote import RemoteCheckpoint, RemoteStore
from whorl.train.checkpoint.rng_state import (
    restore_rng_state,
    rng_metadata,
    rng_tensors,
    without_rng_state,
)
from whorl.train.checkpoint.size_report import bytes_per_parameter
from whorl.train.checkpoint.staging import FileLayout, StagingBuffer, copy_pool, copy_to_staging
from whorl.train.checkpoint.stats import CheckpointStats
from whorl.train.checkpoint.writer import Piece
from whorl.train.checkpoint.writer_process import AsyncWriter
from whorl.train.config import CheckpointConfig

BRANCH_FOLDER = "stable"


def branch_folder(scratch: Path, step: int) -> Path:
    """The folder for the state after `step` steps of a stable run."""
    return scratch / BRANCH_FOLDER / f"{step:08d}"


UPLOAD_TIMEOUT = 60.0  # seconds for an upload after the end of training
PIECES_TIMEOUT = 2.0  # seconds for other pieces after an error: a dead rank writes none


class CheckpointManager:
    """The checkpoints of one job, and in its context the choices by timing with which the job began: they decide bits.

    Args:
        identity: JSON that must be equal for a checkpoint to fit.
        seconds: between checkpoints; with 0, `due` is always true and `save` waits for the previous write.
        config: retention, and remote storage.
        stats: updated; continues from the stats of the resumed checkpoint.
        thread: write in a thread of this process (see `writer_process.py`).
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        *,
        seconds: float = 30.0,
        log: Callable[[str], None] = lambda _: None,
        config: CheckpointConfig | None = None,
        stats: CheckpointStats | None = None,
        thread: bool = False,
    ) -> None:
        self.folder, self.identity, self.seconds, self.log = folder, identity, seconds, log
        self.config, self.thread = config or CheckpointConfig(), thread
        self.stats = stats if stats is not None else CheckpointStats()
        self.job_id = "job-" + hashlib.sha256(canonical_json(identity)).hexdigest()[:16]
        self.staging, self.copy_pool = StagingBuffer(), copy_pool()
        self.layout: FileLayout | None = None
        self.writer: AsyncWriter | None = None
        self.step_in_progress: int | None = None  # the step whose checkpoint is being written
        self.writing_named = False  # whether that is a named copy
        self.last_save_time = time.monotonic()
        self.stats.last_remote_time = self.stats.last_remote_time or time.time()
        self.last_uploaded_step: int | None = None  # the last step requested for upload
        self.expected_write_seconds = seconds / 2  # until one is complete; at first an estimate
        self.deferral_counted, self.context = False, ExitStack()
        self.piece, self.owners, self.parts = Piece(), dict[str, int](), dict[str, Part]()

    def join(self, group: ProcessGroup, owners: Mapping[str, int]) -> None:
        """Write this rank's piece from now on; all ranks of a world call this. owners: of `own_tensors`."""
        number = int(group.all_gather_scalars(float(secrets.randbits(48)))[0][0])
        self.piece, self.owners = Piece(group.rank, group.size, f"{number:012x}"), dict(owners)

    def resume(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, local or remote, or None; restore the RNG states.

        Raises:
            CheckpointError: it is of another job, or of a newer format.
        """
        found = self._load_latest()
        if found is None:
            return None
        self._check_identity(found, self.folder, "remove that folder to train from the start")
        self.stats.resume(found.metadata["stats"])
        if self.stats.written:
            self.expected_write_seconds = self.stats.write_seconds / self.stats.written
        restore_rng_state(found)
        return Checkpoint(found.step, without_rng_state(found.tensors), found.metadata)

    def load_branch(self, path: Path, may_differ: Collection[str]) -> Checkpoint:
        """Return the branch state at `path`, saved by another job; restore the RNG states.

        may_differ: identity keys that may differ.

        Raises:
            CheckpointError: damaged, of a newer format, or of a job that differs in other keys.
        """
        found = load(path, self.staging)
        self._check_identity(found, path, "use the parents of the stable run", may_differ)
        restore_rng_state(found)
        return Checkpoint(found.step, without_rng_state(found.tensors), found.metadata)

    def _check_identity(
        self, found: Checkpoint, where: Path, do: str, may_differ: Collection[str] = ()
    ) -> None:
        saved = found.metadata["job"]
        differing = sorted(
            k for k in self.identity if saved.get(k) != self.identity[k] and k not in may_differ
        )
        if differing:
            raise CheckpointError(
                f"the checkpoint in {where} is of another job: {', '.join(differing)} differs", do=do
            )

    def _load_latest(self) -> Checkpoint | None:
        """The newest step first; for equal steps the local copy first."""
        local = sorted(self.folder.glob("step-*"))
        candidates: list[tuple[int, bool, Path | RemoteCheckpoint]] = [
            (int(p.name[5:]), True, p) for p in local
        ]
        remote, remote_checkpoints = None, list[RemoteCheckpoint]()
        if self.config.remote_url is not None:
            try:
                remote = RemoteStore(self.config.remote_url, self.job_id)
                remote_checkpoints, _ = remote.list_checkpoints()
            except Exception as error:  # any back end may raise any error
                self._reject(self.config.remote_url, error)
        candidates += [(each.step, False, each) for each in remote_checkpoints]
        for _, _, each in sorted(candidates, key=lambda item: item[:2], reverse=True):
            try:
                if isinstance(each, Path):
                    return load(each, self.staging)
                assert remote is not None
                return load(remote.download(each, self.folder), self.staging)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self._reject(each.name, error)
                if isinstance(each, Path):
                    self._move_damaged(each)
            except Exception as error:
                self._reject(f"{each.name} of {self.config.remote_url}", error)
        return None

    def _reject(self, what: str, error: Exception) -> None:
        why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self.log(f"rejected {what}: {why}")
        self.stats.rejected.append(f"{what}: {why}")

    def _move_damaged(self, damaged: Path) -> None:
        """Rename a damaged checkpoint. Retention counts by step and would keep it as the newest."""
        for older in self.folder.glob("damaged-*"):
            shutil.rmtree(older, ignore_errors=True)
        with suppress(OSError):  # a read-only folder: the first save reports it
            damaged.rename(self.folder / f"damaged-{damaged.name}")

    def prepare(self, tensors: Mapping[str, Tensor], parameters: int = 0) -> None:
        """Allocate the staging buffer for these tensors before the first step, and start the writer.

        parameters: the model's number of parameters, for bytes per parameter.
        """
        tensors = {**tensors, **rng_tensors()}
        self.layout = FileLayout.from_tensors(tensors)
        self.staging.ensure_capacity(self.layout.n_bytes)
        self.stats.size_report = bytes_per_parameter(tensors, parameters)
        self.writer = self.writer or AsyncWriter(self.staging, thread=self.thread)

    def needs_upload(self, step: int) -> bool:
        """Whether remote storage is configured and `step` was not requested for upload."""
        return self.config.remote_url is not None and self.last_uploaded_step != step

    def due(self) -> bool:
        """Return whether to take a checkpoint now.

        Raises:
            DiskFullError, CheckpointError: the previous one could not be written.
        """
        self._poll_writer()
        if time.monotonic() - self.last_save_time < max(
            self.seconds / 2, self.seconds - self.expected_write_seconds
        ):
            return False
        if self.step_in_progress is None or not self.seconds:
            return True
        if not self.deferral_counted:
            self.deferral_counted = True
            self.stats.deferred += 1
            self.log(f"checkpoint deferred: that of step {self.step_in_progress:,} is still being written")
        return False

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
        *,
        upload: bool = False,
    ) -> float:
        """Take a checkpoint; return the stall in seconds. Waits if a write is in progress; `finish` waits for this one.

        Args:
            upload: upload it too, regardless of the remote interval.

        Raises:
            DiskFullError, CheckpointError: the previous one could not be written.
        """
        stats, began = self.stats, time.monotonic()
        self._copy_to_staging(tensors)
        copied = self.last_save_time = time.monotonic()
        stats.stall_seconds += copied - began
        stats.max_stall_seconds = max(stats.max_stall_seconds, copied - began)
        since = time.time() - stats.last_remote_time
        due_remote = self.config.remote_url is not None and (upload or since >= self.config.remote_interval)
        due_remote &= not self.piece.rank  # its writer writes the index
        if due_remote:
            stats.last_remote_time, self.last_uploaded_step = time.time(), step
        record = {
            **(metadata or {}),
            "job": self.identity,
            "stats": asdict(stats),
            "generators": rng_metadata(),
        }
        self._submit(self.folder, step, record, due_remote, wait_for_upload=upload)
        self.deferral_counted = False
        return copied - began

    def save_named(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a separate copy in `folder`, which `resume` and retention ignore. Later saves complete after it."""
        began = time.monotonic()
        self._copy_to_staging(tensors)
        self.stats.stall_seconds += time.monotonic() - began
        record = {**(metadata or {}), "job": self.identity, "generators": rng_metadata()}
        self._submit(folder, step, record, upload=False)

    def load_named(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the tensors that `save_named` wrote to `folder`.

        Raises:
            CheckpointError: missing or damaged.
        """
        self.finish()  # the writer may still read the staging buffer
        found = sorted(folder.glob("step-*"))
        if not found:
            raise CheckpointError(f"{folder} has no copy of the weights")
        return without_rng_state(load(found[-1], self.staging).tensors)

    def _copy_to_staging(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` and the RNG states into the staging buffer, after the current write ends."""
        self.finish()
        if self.layout is None:
            self.prepare(tensors)
        assert self.layout is not None
        tensors = {**tensors, **rng_tensors()}
        if self.piece.size > 1:
            tensors, self.parts = own_tensors(tensors, self.owners, self.piece.rank)
        if not self.layout.matches(tensors):
            self.layout = FileLayout.from_tensors(tensors)
        copy_to_staging(self.staging, self.layout, tensors, self.copy_pool)

    def _submit(
        self,
        folder: Path,
        step: int,
        metadata: Mapping[str, Any],
        upload: bool,
        wait_for_upload: bool = False,
    ) -> None:
        assert self.layout is not None and self.writer is not None
        self.piece = replace(self.piece, number=self.piece.number + 1)
        self.writer.submit(
            {
                "folder": str(folder),
                "index": build_index(step, self.layout, metadata, self.piece.file, self.parts),
                "piece": astuple(self.piece),
                "upload": upload,
                "wait_for_upload": wait_for_upload,
                "config": self.config.model_dump(mode="json"),
                "job_id": self.job_id,
            }
        )
        self.step_in_progress, self.writing_named = step, folder != self.folder

    def _poll_writer(self, timeout: float | None = 0.0) -> None:
        """Process replies of the writer; wait up to `timeout` seconds for the first one (None: no limit)."""
        while self.writer is not None and (answer := self.writer.poll_reply(timeout)) is not None:
            timeout = 0.0
            if answer["tier"] == "remote":
                self._on_upload_reply(answer)
                continue
            self.step_in_progress = None
            if "error" in answer:
                raise (DiskFullError if answer["full"] else CheckpointError)(answer["error"], do=answer["do"])
            if self.writing_named:
                continue
            self.expected_write_seconds = answer["seconds"]
            self.stats.written += 1
            self.stats.write_seconds += answer["seconds"]
            self.stats.last_bytes = answer["bytes"]

    def _on_upload_reply(self, reply: dict[str, Any]) -> None:
        stats = self.stats
        if "deferred" in reply:
            stats.remote_failed += 1
            stats.remote_error = "an upload took longer than the interval"
        elif "error" in reply:
            stats.remote_failed += 1
            if not stats.remote_error:
                self.log(
                    f"remote storage {self.config.remote_url} is not writable ({reply['error']}); training continues"
                )
            stats.remote_error = reply["error"]
        else:
            if stats.remote_error:
                self.log(f"remote storage {self.config.remote_url} is writable again")
            stats.remote_written, stats.remote_error = stats.remote_written + 1, ""

    def __enter__(self) -> CheckpointManager:
        self.context.enter_context(recorded_choices(self.folder / "choices"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.context.close()
            self.close()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            DiskFullError, CheckpointError: it could not be written.
        """
        while self.step_in_progress is not None:
            self._poll_writer(None)

    def close(self) -> None:
        """Let the writer finish and free the staging buffer. Raises nothing; may be called twice."""
        if self.writer is not None:
            needs_pieces = self.step_in_progress is not None and self.piece.size > 1
            limit = PIECES_TIMEOUT if needs_pieces else UPLOAD_TIMEOUT
            if not self.writer.close(limit) and not needs_pieces:
                self.log(f"an upload to {self.config.remote_url} was unfinished after {UPLOAD_TIMEOUT:.0f} s")
            with suppress(
                DiskFullError, CheckpointError
            ):  # `finish` reports errors to callers that need them
                self._poll_writer()
            self.writer = None
        self.copy_pool.shutdown()
        self.staging.close()
