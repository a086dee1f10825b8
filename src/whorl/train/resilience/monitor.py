"""The run monitor: connects the training loop to the resilience features.

`accept_step` runs before each update (spike guard). `on_step_end` logs events, takes snapshots and rolls back.
`state_dict` is part of a checkpoint. As a context manager it handles SIGTERM and, on rank 0, the heartbeat. See
`spike_guard.py`, `rollback.py`, `preemption.py`, `heartbeat.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import WhorlError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.stream import StreamBatches
from whorl.train.checkpoint.manager import branch_folder
from whorl.train.learner.learner import SharedState
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.metrics.meter import Meter, TrainCallback
from whorl.train.resilience.heartbeat import Heartbeat, register_stack_dump
from whorl.train.resilience.preemption import Preempted, PreemptedError, PreemptionHandler
from whorl.train.resilience.provenance import documents_in_batch
from whorl.train.resilience.rollback import RollbackStore
from whorl.train.resilience.spike_guard import SpikeGuard

if TYPE_CHECKING:
    from whorl.train.checkpoint.manager import CheckpointManager
    from whorl.train.job import Job
    from whorl.train.metrics.moe_balance import MoEBalancer


class RunMonitor:
    """The monitor of one replica; the loop runs within its context.

    Args:
        first: number of the first step.
        metadata: of the checkpoint, or empty.
        callback, checkpointer: of rank 0; None elsewhere.
        branch_points: steps after which the state is saved for a decay branch.
        folder: for the heartbeat and stack traces; None for neither.

    Raises:
        PreemptedError: (on exit) SIGTERM; a checkpoint of the last step is written.
    """

    def __init__(
        self,
        job: Job,
        process_group: ProcessGroup,
        shared: SharedState,
        first: int,
        metadata: Mapping[str, Any],
        callback: TrainCallback | None = None,
        checkpointer: CheckpointManager | None = None,
        *,
        branch_points: Collection[int] = (),
        folder: Path | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.branch_points = branch_points
        self.job, self.process_group, self.shared = job, process_group, shared
        self.callback, self.checkpointer, self.log = callback, checkpointer, log
        self.steps_done = self.last_saved_step = first
        self.stream_state: dict[str, Any] | None = metadata.get(
            "stream"
        )  # stream position of the next batch, for raw text
        self.expert_loads: list[list[float]] | None = metadata.get(
            "expert_loads"
        )  # expert loads of the previous step
        self.moe: MoEBalancer | None = None
        self.loss_scaler = LossScaler(metadata.get("loss_scaler")) if job.dtype == "float16" else None
        self.meter = Meter(metadata.get("meter"))
        # SIGTERM interrupted the validation
        self.validation_pending = bool(metadata.get("validation_pending"))
        self.guard = SpikeGuard(
            job.spike_guard,
            uniform_loss=math.log(job.model.vocab_size),
            steps=job.steps,
            first=first,
            state=metadata.get("spike_guard"),
        )
        self.snapshot_every = job.spike_guard.snapshot_every or max(1, job.steps // 8)
        self.rollback_store = RollbackStore(checkpointer) if checkpointer is not None else None
        self.preemption = PreemptionHandler(listen=checkpointer is not None)
        self.accept_step = self.guard.accept_step
        self.heartbeat: Heartbeat | None = None
        if folder is not None and process_group.rank:
            self._answers = register_stack_dump(folder, process_group.rank)
        elif folder is not None:
            self.heartbeat = Heartbeat(
                folder,
                job.steps,
                replicas=process_group.children,
                phase=lambda: self.preemption.phase,
                log=log,
            )
        self._entered = ExitStack()

    def __enter__(self) -> RunMonitor:
        self._entered.enter_context(self.preemption)
        if self.heartbeat is not None:
            self._entered.enter_context(self.heartbeat)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, Preempted) or (error is None and self.preemption.requested):
                self.validation_pending = self.validation_pending or (
                    error is not None and self.preemption.phase == "validation"
                )
                self.save(upload=True)  # the interrupted phase had changed no state
                if self.checkpointer is not None:
                    self.checkpointer.finish()
                raise self._preempted_error(f"a checkpoint of step {self.steps_done:,} is written") from None
            if (
                isinstance(error, WhorlError) and self.preemption.requested
            ):  # a helper process received the signal during a step
                raise self._preempted_error(
                    f"the last checkpoint is of step {self.last_saved_step:,}"
                ) from error
        finally:
            self._entered.__exit__(kind, error, trace)

    def _preempted_error(self, state: str) -> PreemptedError:
        return PreemptedError(
            f"stopped by SIGTERM after step {self.steps_done:,} of {self.job.steps:,}; {state}",
            do="run the same command again to resume",
        )

    def on_step_end(self, steps_done: int, batches: object, *, skipped: bool) -> bool:
        """Log events, roll back if necessary, save snapshots; return whether a rollback happened. Every replica calls this.

        Raises:
            DivergedError: training cannot recover.
        """
        guard, previous_state, rolled_back = self.guard, self.stream_state, False
        if skipped:
            self._report_event(steps_done, previous_state)
            guard.check_skip_limit()
        if guard.needs_rollback:
            step = guard.roll_back()
            if self.rollback_store is not None:
                self.rollback_store.restore(step, self.shared.tensors())
            self.process_group.all_gather_scalars()
            self._report_event(steps_done, previous_state)
            rolled_back = True
        self.stream_state = batches.state if isinstance(batches, StreamBatches) else None
        self.steps_done = steps_done
        if (
            steps_done % self.snapshot_every == 0
            and steps_done < self.job.steps
            and not guard.bad_steps
            and not guard.diverged_steps
        ):
            guard.snapshot_step = steps_done
            if self.rollback_store is not None:
                with self.preemption.during("snapshot"):
                    self.rollback_store.save(steps_done, self.shared.tensors())
        if steps_done in self.branch_points and self.checkpointer is not None:
            with self.preemption.during("branch"):
                self.checkpointer.save_named(
                    branch_folder(self.checkpointer.folder, steps_done),
                    steps_done,
                    self.shared.tensors(),
                    self.state_dict(),
                )
        if self.heartbeat is not None:
            self.heartbeat.beat(steps_done)
            for message in self.heartbeat.stall_messages:
                self._log_event(
                    {"step": steps_done, "kind": "stall", "message": message, "action": "stacks written"}
                )
            self.heartbeat.stall_messages.clear()
        return rolled_back

    def state_dict(self) -> dict[str, Any]:
        """The metadata of a checkpoint."""
        state: dict[str, Any] = {"spike_guard": self.guard.state, "meter": self.meter.state_dict()}
        if self.stream_state is not None:
            state["stream"] = self.stream_state
        if self.moe:
            state["expert_loads"] = self.moe.state
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state
        if self.validation_pending:
            state["validation_pending"] = True
        return state

    def save(self, *, upload: bool = False) -> float:
        """Save a checkpoint of the last finished step, unless one exists; return the stall in seconds."""
        if self.checkpointer is None:
            return 0.0
        if self.steps_done == self.last_saved_step and not (
            upload and self.steps_done and self.checkpointer.needs_upload(self.steps_done)
        ):
            return 0.0
        with self.preemption.during("checkpoint"):
            seconds = self.checkpointer.save(
                self.steps_done, self.shared.tensors(), self.state_dict(), upload=upload
            )
        self.last_saved_step = self.steps_done
        if self.rollback_store is not None:
            self.rollback_store.release_unreferenced(self.guard.snapshot_step)
        return seconds

    def _report_event(self, steps_done: int, stream_state: dict[str, Any] | None) -> None:
        """Send the guard's last event, with the documents of its batch, to the log and the callback."""
        event = self.guard.last_event
        if self.callback is None or event is None:
            return
        if event["kind"] != "rollback":
            event |= documents_in_batch(self.job, steps_done - 1, stream_state)
        self._log_event(event)

    def _log_event(self, event: dict[str, Any]) -> None:
        documents = [
            f"{d['path']} ({d['id']})" if d.get("id") else d["path"] for d in event.get("documents", [])
        ]
        more = event.get("n_documents", 0) - len(documents)
        listing = (
            f"; in the batch: {', '.join(documents)}" + (f" and {more} more" if more > 0 else "")
            if documents
            else ""
        )
        self.log(f"step {event['step']:,}: {event['message']}: {event['action']}{listing}")
        if self.callback is not None:
            self.callback.on_event(int(event["step"]), event)
