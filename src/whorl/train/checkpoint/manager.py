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
from whorl.train.checkpoint.format import Checkpoint, NewerFormatError, index_of, load
from whorl.train.checkpoint.remote import Durable, Found, Tiers
from whorl.train.checkpoint.rng_state import (
    generator_record,
    generator_tensors,
    restore_generators,
    without_generators,
)
from whorl.train.checkpoint.size_report import anatomy
from whorl.train.checkpoint.staging import Area, Layout, copiers, stage
from whorl.train.checkpoint.writer_process import Background

FOLDER = "stable"


def place(scratch: Path, step: int) -> Path:
    """Where the state after `step` steps is put aside during the stable run."""
    return scratch / FOLDER / f"{step:08d}"


PATIENCE = 60.0  # seconds that an upload may take after training has ended


@dataclass
class Account:
    """What checkpoints came to, over all of a run's starts."""

    written: int = 0
    late: int = 0  # came due while the one before was being written
    blocked_seconds: float = 0.0  # that steps waited for copies, in all
    longest_block: float = 0.0
    write_seconds: float = 0.0  # of the writer, in all
    bytes: int = 0  # of the last one
    durable_written: int = 0
    durable_failed: int = 0
    durable_at: float = 0.0  # when one was last asked for, in seconds since 1970
    durable_error: str = ""  # the last one; empty once an upload succeeded
    resumed: int = 0
    passed_over: list[str] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    def line(self) -> str:
        """For a report."""
        text = f"{self.written:,} of {self.bytes / 1e6:,.1f} MB; steps waited {self.blocked_seconds:.2f} s in all"
        if self.late:
            text += f"; {self.late:,} began late, the one before being written still"
        if self.resumed:
            text += f"; continued {self.resumed:,} times"
        if self.passed_over:
            text += f"; passed over: {self.passed_over[-1]}"
        if self.durable_written or self.durable_failed:
            text += f"; {self.durable_written:,} in the durable tier"
        if self.durable_failed:
            last = f", the last: {self.durable_error}" if self.durable_error else ", and succeeded later"
            text += f" ({self.durable_failed:,} failed{last})"
        return text


class Keeper:
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
        say: Callable[[str], None] = lambda _: None,
        tiers: Tiers | None = None,
        account: Account | None = None,
        thread: bool = False,
    ) -> None:
        self.folder, self.identity, self.seconds, self.say = folder, identity, seconds, say
        self.tiers, self.thread = tiers or Tiers(), thread
        self.account = account if account is not None else Account()
        self.job = "job-" + hashlib.sha256(canonical_json(identity)).hexdigest()[:16]
        self.area = Area()
        self.layout: Layout | None = None
        self.threads = copiers()
        self.background: Background | None = None
        self.writing: int | None = None  # the step whose checkpoint is being written
        self.aside = False  # and whether that is one that was put aside
        self.last = time.monotonic()
        self.account.durable_at = self.account.durable_at or time.time()
        self.uploaded: int | None = None  # the last step that was to be uploaded
        self.lead = seconds / 2  # how long a checkpoint takes to be whole; until one is, nobody knows
        self.counted_late = False

    def resume(self) -> Checkpoint | None:
        """The newest whole checkpoint of all tiers, or None; the generators are as they were then.

        Raises:
            CheckpointError: it is of another job, or of a newer format.
        """
        found = self._newest()
        if found is None:
            return None
        self._check(found, self.folder, "remove that folder to train from the start")
        for each in fields(Account):
            if each.name != "passed_over":
                setattr(
                    self.account,
                    each.name,
                    found.record["account"].get(each.name, getattr(self.account, each.name)),
                )
        self.account.passed_over = [*found.record["account"]["passed_over"], *self.account.passed_over]
        self.account.resumed += 1
        if self.account.written:
            self.lead = self.account.write_seconds / self.account.written
        restore_generators(found)
        return Checkpoint(found.step, without_generators(found.tensors), found.record)

    def begin(self, path: Path, but: Collection[str]) -> Checkpoint:
        """What another job put aside at `path`; the generators are as they were then.

        but: in what the job may differ from this one.

        Raises:
            CheckpointError: damaged, of a newer format, or of a job that differs in more.
        """
        found = load(path, self.area)
        self._check(found, path, "give it the parents that the stable run had", but)
        restore_generators(found)
        return Checkpoint(found.step, without_generators(found.tensors), found.record)

    def _check(self, found: Checkpoint, where: Path, do: str, but: Collection[str] = ()) -> None:
        theirs = found.record["job"]
        differing = sorted(k for k in self.identity if theirs.get(k) != self.identity[k] and k not in but)
        if differing:
            raise CheckpointError(
                f"the checkpoint in {where} is of another job: {', '.join(differing)} differs", do=do
            )

    def _newest(self) -> Checkpoint | None:
        """The newest step first, and of one step the local one."""
        local = sorted(self.folder.glob("step-*"))
        candidates: list[tuple[int, bool, Path | Found]] = [(int(p.name[5:]), True, p) for p in local]
        durable, far = None, list[Found]()
        if self.tiers.durable is not None:
            try:
                durable = Durable(self.tiers.durable, self.job)
                far, _ = durable.found()
            except Exception as error:  # any back end, any reason
                self._pass_over(self.tiers.durable, error)
        candidates += [(each.step, False, each) for each in far]
        for _, _, each in sorted(candidates, key=lambda item: item[:2], reverse=True):
            try:
                if isinstance(each, Path):
                    return load(each, self.area)
                assert durable is not None
                return load(durable.fetch(each, self.folder), self.area)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self._pass_over(each.name, error)
                if isinstance(each, Path):
                    self._set_aside(each)
            except Exception as error:
                self._pass_over(f"{each.name} of {self.tiers.durable}", error)
        return None

    def _pass_over(self, what: str, error: Exception) -> None:
        why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self.say(f"passed over {what}: {why}")
        self.account.passed_over.append(f"{what}: {why}")

    def _set_aside(self, damaged: Path) -> None:
        """Out of the way of retention, which goes by numbers and would take it for the newest; there to be looked at."""
        for older in self.folder.glob("damaged-*"):
            shutil.rmtree(older, ignore_errors=True)
        with suppress(OSError):  # a folder that cannot be written: the first checkpoint will say so
            damaged.rename(self.folder / f"damaged-{damaged.name}")

    def prepare(self, tensors: Mapping[str, Tensor], parameters: int = 0) -> None:
        """Allocates what saving such tensors takes, before the first step rather than in it, and starts the writer.

        parameters: how many the model has, for the account of bytes per parameter.
        """
        tensors = {**tensors, **generator_tensors()}
        self.layout = Layout.of(tensors)
        self.area.ensure(self.layout.n_bytes)
        self.account.parts = anatomy(tensors, parameters)
        self.background = self.background or Background(self.area, thread=self.thread)

    def owes_upload(self, step: int) -> bool:
        """Whether the durable tier, if there is one, was not told to take `step`."""
        return self.tiers.durable is not None and self.uploaded != step

    def due(self) -> bool:
        """Whether a checkpoint is to be taken now.

        Raises:
            DiskFullError, CheckpointError: the one before could not be written.
        """
        self._hear()
        if time.monotonic() - self.last < max(self.seconds / 2, self.seconds - self.lead):
            return False
        if self.writing is None or not self.seconds:
            return True
        if not self.counted_late:
            self.counted_late = True
            self.account.late += 1
            self.say(f"a checkpoint is late: that of step {self.writing:,} is being written still")
        return False

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any] | None = None,
        *,
        durable: bool = False,
    ) -> float:
        """Takes one; it is whole some time later (`finish` waits for that). Waits if one is being written.

        Args:
            durable: upload it too, whenever the last upload was.

        Returns:
            seconds that the caller waited.

        Raises:
            DiskFullError, CheckpointError: the one before could not be written.
        """
        account, began = self.account, time.monotonic()
        self._stage(tensors)
        copied = self.last = time.monotonic()
        account.blocked_seconds += copied - began
        account.longest_block = max(account.longest_block, copied - began)
        since = time.time() - account.durable_at
        far = self.tiers.durable is not None and (durable or since >= self.tiers.durable_seconds)
        if far:
            account.durable_at, self.uploaded = time.time(), step
        kept = {
            **(record or {}),
            "job": self.identity,
            "account": asdict(account),
            "generators": generator_record(),
        }
        self._submit(self.folder, step, kept, far, forced=durable)
        self.counted_late = False
        return copied - began

    def put_aside(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """A copy of its own in `folder`, which neither `resume` nor retention looks at; else like `save`. What is saved
        after it is whole after it."""
        began = time.monotonic()
        self._stage(tensors)
        self.account.blocked_seconds += time.monotonic() - began
        kept = {**(record or {}), "job": self.identity, "generators": generator_record()}
        self._submit(folder, step, kept, far=False)

    def found_aside(self, folder: Path) -> Mapping[str, Tensor]:
        """What `put_aside` left in `folder`.

        Raises:
            CheckpointError: there is nothing, or it is damaged.
        """
        self.finish()  # then nobody reads from the area
        found = sorted(folder.glob("step-*"))
        if not found:
            raise CheckpointError(f"{folder} holds no copy of the weights")
        return without_generators(load(found[-1], self.area).tensors)

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies `tensors` and the generators into the staging area, once nobody writes from it."""
        self.finish()
        if self.layout is None:
            self.prepare(tensors)
        assert self.layout is not None
        tensors = {**tensors, **generator_tensors()}
        if not self.layout.fits(tensors):
            self.layout = Layout.of(tensors)
        stage(self.area, self.layout, tensors, self.threads)

    def _submit(
        self, folder: Path, step: int, record: Mapping[str, Any], far: bool, forced: bool = False
    ) -> None:
        assert self.layout is not None and self.background is not None
        self.background.submit(
            {
                "folder": str(folder), "index": index_of(step, self.layout, record), "durable": far, "forced": forced,
                "tiers": self.tiers.model_dump(mode="json"), "job": self.job,
            }
        )  # fmt: skip
        self.writing, self.aside = step, folder != self.folder

    def _hear(self, patience: float | None = 0.0) -> None:
        """Takes in what the writer has told; waits for the first answer for `patience` seconds (None: however long)."""
        while self.background is not None and (answer := self.background.answer(patience)) is not None:
            patience = 0.0
            if answer["tier"] == "durable":
                self._hear_durable(answer)
                continue
            self.writing = None
            if "error" in answer:
                raise (DiskFullError if answer["full"] else CheckpointError)(answer["error"], do=answer["do"])
            if self.aside:
                continue
            self.lead = answer["seconds"]
            self.account.written += 1
            self.account.write_seconds += answer["seconds"]
            self.account.bytes = answer["bytes"]

    def _hear_durable(self, answer: dict[str, Any]) -> None:
        account = self.account
        if "late" in answer:
            account.durable_failed += 1
            account.durable_error = "an upload took longer than the time to the next"
        elif "error" in answer:
            account.durable_failed += 1
            if not account.durable_error:
                self.say(
                    f"the durable tier {self.tiers.durable} cannot be written ({answer['error']}); training goes on"
                )
            account.durable_error = answer["error"]
        else:
            if account.durable_error:
                self.say(f"the durable tier {self.tiers.durable} can be written again")
            account.durable_written, account.durable_error = account.durable_written + 1, ""

    def __enter__(self) -> Keeper:
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
        while self.writing is not None:
            self._hear(None)

    def close(self) -> None:
        """Lets the writer end what it has begun and gives the staging area back. Raises nothing; may be called twice."""
        if self.background is not None:
            if not self.background.close(PATIENCE):
                self.say(f"an upload to {self.tiers.durable} was left unfinished after {PATIENCE:.0f} s")
            with suppress(DiskFullError, CheckpointError):  # `finish` is for those who want to know
                self._hear()
            self.background = None
        self.threads.shutdown()
        self.area.close()
