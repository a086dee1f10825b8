"""The keeper: the checkpoints of one job. What it goes on from, and a new one whenever enough time has passed.

`save` copies the state into the staging area and returns; a writer beside training does the rest (`background.py`).
What can go wrong there is heard at the next look, `due()`, which the loop calls after each step:

- *A second checkpoint while the first is being written* is not begun: training goes on, `due` says no until the
  writer is done, and the delay is counted (`late`). Only what must be (the last one, a signal's, an interval of 0)
  waits.
- *A full disk* raises `DiskFullError` between two steps; the checkpoint before is whole.
- *A durable tier that fails* is said once, counted, tried again next time, and ends up in the report.

A kill costs at most an interval: the next copy is taken early by the time that the last writing took, so that a new
checkpoint is *whole* within the interval after the one before was *taken*.

A checkpoint also carries the state of the generators that belong to nobody (torch's, NumPy's and Python's own), which
no code of this house draws from, but a network of somebody else's may; and this account, so that counts go on after a
kill.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from whorl.errors import CheckpointError, DiskFullError
from whorl.store.address import canonical_json
from whorl.train.checkpoint.format import Checkpoint, NewerFormatError, build_index, load
from whorl.train.checkpoint.remote import CheckpointConfig, RemoteCheckpoint, RemoteStore
from whorl.train.checkpoint.rng_state import (
    restore_rng_state,
    rng_metadata,
    rng_tensors,
    without_rng_state,
)
from whorl.train.checkpoint.size_report import bytes_per_parameter
from whorl.train.checkpoint.staging import Layout, StagingBuffer, copy_pool, copy_to_staging
from whorl.train.checkpoint.writer_process import AsyncWriter

BRANCH_FOLDER = "stable"


def branch_folder(scratch: Path, step: int) -> Path:
    """Where the state after `step` steps is put aside during the stable run."""
    return scratch / BRANCH_FOLDER / f"{step:08d}"


UPLOAD_TIMEOUT = 60.0  # seconds that an upload may take after training has ended


@dataclass
class CheckpointStats:
    """What checkpoints came to, over all of a run's starts."""

    written: int = 0
    deferred: int = 0  # came due while the one before was being written
    stall_seconds: float = 0.0  # that steps waited for copies, in all
    max_stall_seconds: float = 0.0
    write_seconds: float = 0.0  # of the writer, in all
    last_bytes: int = 0  # of the last one
    remote_written: int = 0
    remote_failed: int = 0
    last_remote_time: float = 0.0  # when one was last asked for, in seconds since 1970
    remote_error: str = ""  # the last one; empty once an upload succeeded
    resumes: int = 0
    rejected: list[str] = field(default_factory=list)
    size_report: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> str:
        """For a report."""
        text = f"{self.written:,} of {self.last_bytes / 1e6:,.1f} MB; steps waited {self.stall_seconds:.2f} s in all"
        if self.deferred:
            text += f"; {self.deferred:,} began late, the one before being written still"
        if self.resumes:
            text += f"; continued {self.resumes:,} times"
        if self.rejected:
            text += f"; passed over: {self.rejected[-1]}"
        if self.remote_written or self.remote_failed:
            text += f"; {self.remote_written:,} in the durable tier"
        if self.remote_failed:
            last = f", the last: {self.remote_error}" if self.remote_error else ", and succeeded later"
            text += f" ({self.remote_failed:,} failed{last})"
        return text


class CheckpointManager:
    """The checkpoints of one job.

    Args:
        identity: what must be the same for a checkpoint to fit (JSON).
        seconds: between checkpoints; with 0, `due` is always true and `save` waits for the one before.
        tiers: retention, and the durable tier if there is one.
        account: counted into; goes on from that of the checkpoint.
        thread: write in a thread of this process (see `background.py`).
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
        self.staging = StagingBuffer()
        self.layout: Layout | None = None
        self.copy_pool = copy_pool()
        self.writer: AsyncWriter | None = None
        self.step_in_progress: int | None = None  # the step whose checkpoint is being written
        self.writing_named = False  # and whether that is one that was put aside
        self.last_save_time = time.monotonic()
        self.stats.last_remote_time = self.stats.last_remote_time or time.time()
        self.last_uploaded_step: int | None = None  # the last step that was to be uploaded
        self.expected_write_seconds = (
            seconds / 2
        )  # how long a checkpoint takes to be whole; until one is, nobody knows
        self.deferral_counted = False

    def resume(self) -> Checkpoint | None:
        """The newest whole checkpoint of all tiers, or None; the generators are as they were then.

        Raises:
            CheckpointError: it is of another job, or of a newer format.
        """
        found = self._load_latest()
        if found is None:
            return None
        self._check_identity(found, self.folder, "remove that folder to train from the start")
        for each in fields(CheckpointStats):
            if each.name != "rejected":
                setattr(
                    self.stats,
                    each.name,
                    found.metadata["stats"].get(each.name, getattr(self.stats, each.name)),
                )
        self.stats.rejected = [*found.metadata["stats"]["rejected"], *self.stats.rejected]
        self.stats.resumes += 1
        if self.stats.written:
            self.expected_write_seconds = self.stats.write_seconds / self.stats.written
        restore_rng_state(found)
        return Checkpoint(found.step, without_rng_state(found.tensors), found.metadata)

    def load_branch(self, path: Path, may_differ: Collection[str]) -> Checkpoint:
        """What another job put aside at `path`; the generators are as they were then.

        but: in what the job may differ from this one.

        Raises:
            CheckpointError: damaged, of a newer format, or of a job that differs in more.
        """
        found = load(path, self.staging)
        self._check_identity(found, path, "give it the parents that the stable run had", may_differ)
        restore_rng_state(found)
        return Checkpoint(found.step, without_rng_state(found.tensors), found.metadata)

    def _check_identity(
        self, found: Checkpoint, where: Path, do: str, may_differ: Collection[str] = ()
    ) -> None:
        theirs = found.metadata["job"]
        differing = sorted(
            k for k in self.identity if theirs.get(k) != self.identity[k] and k not in may_differ
        )
        if differing:
            raise CheckpointError(
                f"the checkpoint in {where} is of another job: {', '.join(differing)} differs", do=do
            )

    def _load_latest(self) -> Checkpoint | None:
        """The newest step first, and of one step the local one."""
        local = sorted(self.folder.glob("step-*"))
        candidates: list[tuple[int, bool, Path | RemoteCheckpoint]] = [
            (int(p.name[5:]), True, p) for p in local
        ]
        durable, far = None, list[RemoteCheckpoint]()
        if self.config.remote_url is not None:
            try:
                durable = RemoteStore(self.config.remote_url, self.job_id)
                far, _ = durable.list_checkpoints()
            except Exception as error:  # any back end, any reason
                self._reject(self.config.remote_url, error)
        candidates += [(each.step, False, each) for each in far]
        for _, _, each in sorted(candidates, key=lambda item: item[:2], reverse=True):
            try:
                if isinstance(each, Path):
                    return load(each, self.staging)
                assert durable is not None
                return load(durable.download(each, self.folder), self.staging)
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
        self.log(f"passed over {what}: {why}")
        self.stats.rejected.append(f"{what}: {why}")

    def _move_damaged(self, damaged: Path) -> None:
        """Out of the way of retention, which goes by numbers and would take it for the newest; there to be looked at."""
        for older in self.folder.glob("damaged-*"):
            shutil.rmtree(older, ignore_errors=True)
        with suppress(OSError):  # a folder that cannot be written: the first checkpoint will say so
            damaged.rename(self.folder / f"damaged-{damaged.name}")

    def prepare(self, tensors: Mapping[str, Tensor], parameters: int = 0) -> None:
        """Allocates what saving such tensors takes, before the first step rather than in it, and starts the writer.

        parameters: how many the model has, for the account of bytes per parameter.
        """
        tensors = {**tensors, **rng_tensors()}
        self.layout = Layout.from_tensors(tensors)
        self.staging.ensure_capacity(self.layout.n_bytes)
        self.stats.size_report = bytes_per_parameter(tensors, parameters)
        self.writer = self.writer or AsyncWriter(self.staging, thread=self.thread)

    def needs_upload(self, step: int) -> bool:
        """Whether the durable tier, if there is one, was not told to take `step`."""
        return self.config.remote_url is not None and self.last_uploaded_step != step

    def due(self) -> bool:
        """Whether a checkpoint is to be taken now.

        Raises:
            DiskFullError, CheckpointError: the one before could not be written.
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
            self.log(f"a checkpoint is late: that of step {self.step_in_progress:,} is being written still")
        return False

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
        *,
        upload: bool = False,
    ) -> float:
        """Takes one; it is whole some time later (`finish` waits for that). Waits if one is being written.

        Args:
            durable: upload it too, whenever the last upload was.

        Returns:
            seconds that the caller waited.

        Raises:
            DiskFullError, CheckpointError: the one before could not be written.
        """
        account, began = self.stats, time.monotonic()
        self._copy_to_staging(tensors)
        copied = self.last_save_time = time.monotonic()
        account.stall_seconds += copied - began
        account.max_stall_seconds = max(account.max_stall_seconds, copied - began)
        since = time.time() - account.last_remote_time
        far = self.config.remote_url is not None and (upload or since >= self.config.remote_interval)
        if far:
            account.last_remote_time, self.last_uploaded_step = time.time(), step
        kept = {
            **(metadata or {}),
            "job": self.identity,
            "stats": asdict(account),
            "generators": rng_metadata(),
        }
        self._submit(self.folder, step, kept, far, wait_for_upload=upload)
        self.deferral_counted = False
        return copied - began

    def save_named(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """A copy of its own in `folder`, which neither `resume` nor retention looks at; else like `save`. What is saved
        after it is whole after it."""
        began = time.monotonic()
        self._copy_to_staging(tensors)
        self.stats.stall_seconds += time.monotonic() - began
        kept = {**(metadata or {}), "job": self.identity, "generators": rng_metadata()}
        self._submit(folder, step, kept, upload=False)

    def load_named(self, folder: Path) -> Mapping[str, Tensor]:
        """What `put_aside` left in `folder`.

        Raises:
            CheckpointError: there is nothing, or it is damaged.
        """
        self.finish()  # then nobody reads from the area
        found = sorted(folder.glob("step-*"))
        if not found:
            raise CheckpointError(f"{folder} holds no copy of the weights")
        return without_rng_state(load(found[-1], self.staging).tensors)

    def _copy_to_staging(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies `tensors` and the generators into the staging area, once nobody writes from it."""
        self.finish()
        if self.layout is None:
            self.prepare(tensors)
        assert self.layout is not None
        tensors = {**tensors, **rng_tensors()}
        if not self.layout.matches(tensors):
            self.layout = Layout.from_tensors(tensors)
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
        self.writer.submit(
            {
                "folder": str(folder), "index": build_index(step, self.layout, metadata), "upload": upload, "wait_for_upload": wait_for_upload,
                "config": self.config.model_dump(mode="json"), "job_id": self.job_id,
            }
        )  # fmt: skip
        self.step_in_progress, self.writing_named = step, folder != self.folder

    def _poll_writer(self, timeout: float | None = 0.0) -> None:
        """Takes in what the writer has told; waits for the first answer for `patience` seconds (None: however long)."""
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
        account = self.stats
        if "deferred" in reply:
            account.remote_failed += 1
            account.remote_error = "an upload took longer than the time to the next"
        elif "error" in reply:
            account.remote_failed += 1
            if not account.remote_error:
                self.log(
                    f"the durable tier {self.config.remote_url} cannot be written ({reply['error']}); training goes on"
                )
            account.remote_error = reply["error"]
        else:
            if account.remote_error:
                self.log(f"the durable tier {self.config.remote_url} can be written again")
            account.remote_written, account.remote_error = account.remote_written + 1, ""

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def finish(self) -> None:
        """Waits until the last checkpoint is whole.

        Raises:
            DiskFullError, CheckpointError: it could not be written.
        """
        while self.step_in_progress is not None:
            self._poll_writer(None)

    def close(self) -> None:
        """Lets the writer end what it has begun and gives the staging area back. Raises nothing; may be called twice."""
        if self.writer is not None:
            if not self.writer.close(UPLOAD_TIMEOUT):
                self.log(
                    f"an upload to {self.config.remote_url} was left unfinished after {UPLOAD_TIMEOUT:.0f} s"
                )
            with suppress(DiskFullError, CheckpointError):  # `finish` is for those who want to know
                self._poll_writer()
            self.writer = None
        self.copy_pool.shutdown()
        self.staging.close()
