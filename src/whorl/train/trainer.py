"""The trainer: one lifecycle for every task (`task.py`).

    resume        from the newest checkpoint, local or remote; else `task.prepare()`
    replicas      other processes on the same shared weights; every rank runs the same loop (`learner/loop.py`)
    each step     batch, update (the spike guard may skip it), expert balance, EMA, rollback or snapshot, report,
                  evaluation, checkpoint
    end           the last step, `StopTraining`, SIGTERM or an error; then processes, threads and files are released

The weights depend on the task and the step number only: data order, learning rates, seed. So a run that was killed and
resumed ends with the same bits as an undisturbed one. Time decides when a checkpoint is taken, and it shortens a run that
was planned by time and falls behind its plan (`resilience/deadline.py`). Rank 0 copies a checkpoint from shared memory while
the other replicas compute the next gradients: weights change only after a barrier.

See `resilience/` for the spike guard, rollbacks, preemption and the heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, NoReturn

import torch

from whorl.errors import WhorlError
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.train.checkpoint.manager import CheckpointManager, branch_folder
from whorl.train.determinism import deterministic
from whorl.train.learner.average import EMA_INTERVAL, Average, Averages
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import StopTraining, Stopwatch, train_loop
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.resilience.heartbeat import open_heartbeat
from whorl.train.resilience.preemption import Preempted, PreemptedError, PreemptionHandler, preempted_error
from whorl.train.resilience.rollback import RollbackStore, restore_snapshot
from whorl.train.resilience.spike_guard import SpikeGuard, event_line
from whorl.train.resume import join_world, open_checkpoints, resume
from whorl.train.task import R, ResumePoint, RunOptions, StepFunction, Task, TrainCallback

__all__ = ["R", "RunOptions", "StepFunction", "Task", "TrainCallback", "Trainer"]


class Trainer(Generic[R]):
    """One rank of a run. `fit` on rank 0 starts the others.

    Args:
        callback: receives metrics, evaluations, checkpoints and events.
        log: receives one line per event.
    """

    shared: SharedState
    learner: Learner
    moe: MoEBalancer
    loss_scaler: LossScaler | None
    callback_error: Exception | None  # raised by `on_event` in this step
    rounds_done: int  # of the learner, before this call

    def __init__(
        self,
        task: Task[R],
        options: RunOptions | None = None,
        callback: TrainCallback | None = None,
        *,
        log: Callable[[str], None] = lambda text: None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.task, self.options, self.callback, self.log = task, options or RunOptions(), callback, log
        self.group = group or ProcessGroup()
        self.checkpoints: CheckpointManager | None = None

    def fit(self, *, stop_after: int | None = None) -> None:
        """Train to the last step, or until `stop_after` steps are done in total; continues from the newest checkpoint.

        Raises:
            ConfigError: an option that the task does not support.
            CheckpointError: the checkpoint is of another job. DiskFullError: one could not be written.
            ReplicaError, ProducerError: a helper process failed.
            DivergedError: training diverged and could not recover.
            OutOfMemoryError: with the settings to reduce.
            PreemptedError: SIGTERM; a checkpoint is written.
        """
        self.options.check(self.task.unsupported)
        threads = torch.get_num_threads()
        try:
            self._fit(stop_after)
        except Exception as error:
            explained = self.task.explain(error)
            if explained is None:
                raise
            explained.exit_code = getattr(error, "exit_code", explained.exit_code)  # a lost rank stays one
            raise explained from error
        finally:
            torch.set_num_threads(threads)

    def _fit(self, stop_after: int | None) -> None:
        task, options = self.task, self.options
        with ExitStack() as stack:
            stack.enter_context(deterministic(options.deterministic))  # before anything is chosen
            if options.scratch is not None:
                self.checkpoints = stack.enter_context(open_checkpoints(task, options, self.log))
            last = task.steps if stop_after is None else min(stop_after, task.steps)
            shared, start = resume(task, options, self.checkpoints, last, self.log)
            self.group = spawn_replicas(options.replicas, _replica_main, task, options, shared, start)
            try:
                self._train(shared, start)
            except RuntimeError as error:
                if (lost := self.group.lost_peer(error)) is not None:
                    raise lost from error
                raise
            finally:
                self.group.close()
        self.averages.bind(task.networks, use_average=self.steps_done == task.steps or self.stopped)
        task.networks.eval()

    def _train(self, shared: SharedState, start: ResumePoint) -> None:
        """The part that every rank runs."""
        task, options, metadata = self.task, self.options, start.metadata
        if options.threads is not None and not options.deterministic:
            torch.set_num_threads(options.threads)
        self.shared, self.start = shared, start
        self.steps_done = self.last_saved_step = start.first
        self.stopped, self.callback_error = False, None
        self.task_state: dict[str, Any] = metadata.get("task", {})
        self.validation_pending = bool(metadata.get("validation_pending"))  # SIGTERM interrupted it
        self.moe = MoEBalancer(task.networks, options.routing, self.group, metadata.get("expert_loads"))
        self.loss_scaler = LossScaler(metadata.get("loss_scaler")) if task.dtype == torch.float16 else None
        self.rounds_done = int(metadata.get("rounds", start.first))
        guard = options.spike_guard
        self.guard = SpikeGuard(
            guard,
            uniform_loss=task.uniform_loss,
            steps=task.steps,
            first=self.rounds_done,
            state=metadata.get("spike_guard"),
        )
        self.accept_step = self.guard.accept_step
        self.snapshot_every = guard.snapshot_every or max(guard.patience, task.steps // 8)
        self.rollback_store = RollbackStore(self.checkpoints) if self.checkpoints is not None else None
        ema = Average("", options.ema, every=EMA_INTERVAL)
        self.averages = Averages([ema], shared.weights, shared.averages, self.group)
        self.stopwatch = PreemptionHandler(listen=self.checkpoints is not None and not self.group.rank)
        self._hold_preemption()
        try:
            self.learner = task.make_learner(self)
            save = partial(self._save_and_wait, upload=True)
            join_world(task, self.group, self.checkpoints, self.learner.writers, save)
            self.layer_stats = task.make_layer_stats(self.learner, start.first)
            if self.layer_stats is not None:
                self.layer_stats.noise_scale.state = tuple(metadata.get("noise_scale", (0.0, 0.0)))
            with self._watched(), task.batches(start.first) as records:
                if self.validation_pending:
                    self._evaluate(start.first)
                with suppress(StopTraining):
                    train_loop(
                        self.learner,
                        records,
                        task.minibatches,
                        first=start.first,
                        last=start.last,
                        lr_scale=task.lr_scale,
                        sync_weights=task.sync_weights,
                        on_step_end=self._on_step_end,
                        stopwatch=self.stopwatch,
                    )
                self.learner.export()
        finally:
            task.close()

    @property
    def last(self) -> int:
        """The last step of this call."""
        return min(self.start.last, self.task.steps)

    def _on_step_end(self, done: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        task, skipped = self.task, "skipped" in metrics
        self.moe.discard_step() if skipped else self.moe.on_step_end(done)
        self.averages.on_round_end(done)
        self._follow_guard(done)
        self.steps_done = done
        self._save_copies(done)
        if self.heartbeat is not None:
            for message in self.heartbeat.beat(done):
                self.report_event(done, {"kind": "stall", "message": message, "action": "stacks written"})
        if self.layer_stats is not None:
            self.layer_stats.on_step_end(done)
        report = task.report(done, metrics, clock)
        self.task_state = task.state_dict()
        if self.callback_error is not None:  # of `on_event`, before the state of this step was complete
            self._save_and_raise(self.callback_error)
        if report is not None and not skipped:
            layers = self.layer_stats.pop_metrics() if self.layer_stats is not None else {}
            self._notify("on_step", done, {**report, **self.moe.pop_metrics(), **layers})
        if task.evaluate_at(done):
            self._evaluate(done)
        self._hold_preemption()
        if self.checkpoints is not None and task.may_save(done):
            is_due = done == task.steps or self.checkpoints.due()
            stop = self.stopwatch.requested or self.stopped
            if not self.group.shares_memory:  # each rank writes a piece when rank 0 does
                own = float(is_due), float(stop)
                is_due, stop = (bool(flag) for flag in self.group.all_gather_scalars(*own)[0])
            stops_together = stop and self.learner.laid is not None
            if is_due or stops_together:
                self._notify("on_checkpoint", done, self.save(upload=stops_together))
            if self.stopwatch.requested and (stop or self.learner.laid is None):  # under a layout together
                self.stopwatch.phase = "between steps"
                raise Preempted
            if stops_together:
                raise StopTraining
        if done == self.last < self.start.last:
            raise StopTraining

    def _follow_guard(self, done: int) -> None:
        """Report what the spike guard decided in this step, and roll back if necessary.

        Raises:
            DivergedError: training cannot recover.
        """
        guard, events = self.guard, self.guard.pop_events()
        for event in events:
            self.report_event(done, event)
        if events:
            guard.check_skip_limit()
        if guard.needs_rollback:
            step = guard.roll_back()
            restore_snapshot(self.rollback_store, step, self.shared.tensors(), self.group)
            self.learner.load()
            for event in guard.pop_events():
                self.report_event(done, event)
            if self.layer_stats is not None:
                self.layer_stats.reset()
            self.task.sync_weights(done)

    def _save_copies(self, done: int) -> None:
        """Save the snapshot for rollbacks, and the state for a decay branch, at their steps."""
        guard, checkpoints = self.guard, self.checkpoints
        is_good = not guard.bad_steps and not guard.diverged_steps
        if done % self.snapshot_every == 0 and done < self.task.steps and is_good:
            guard.snapshot_step = done
            if self.rollback_store is not None:
                with self.stopwatch.during("snapshot"):
                    self.learner.export()
                    self.rollback_store.save(done, self.shared.tensors())
        if done in self.options.branch_points and checkpoints is not None:
            self.task_state = self.task.state_dict()
            with self.stopwatch.during("branch"):
                self.learner.export()
                folder = branch_folder(checkpoints.folder, done)
                checkpoints.save_named(folder, done, self.shared.tensors(), self.state_dict())

    def _evaluate(self, done: int) -> None:
        self.learner.export()
        self.task.networks.eval()
        with self.averages.average_parameters(self.task.networks):
            with self.stopwatch.during("validation"):
                metrics = self.task.evaluate()
            self.validation_pending = False
            metrics = self.task.keep_best(done, metrics)
            self._notify("on_evaluation", done, metrics, self.task.networks)
        self.task.networks.train()
        self.task_state = self.task.state_dict()

    def save(self, *, upload: bool = False, is_request: bool = False) -> float:
        """Save a checkpoint of the last finished step, unless one exists; return the stall in seconds.

        is_request: rank 0 alone calls this, so the other ranks of a world get a request for their pieces.
        """
        checkpoints, done = self.checkpoints, self.steps_done
        if checkpoints is None or not self.task.may_save(done):
            return 0.0
        if done == self.last_saved_step and not (upload and done and checkpoints.needs_upload(done)):
            return 0.0
        if is_request and self.learner.laid is not None:  # the others may wait for tensors of this rank
            return 0.0
        if is_request:
            self.group.request()
        with self.stopwatch.during("checkpoint"):
            self.learner.export()
            tensors = {**self.shared.tensors(), **self.task.tensors()}
            seconds = checkpoints.save(done, tensors, self.state_dict(), upload=upload)
        self.last_saved_step = done
        if self.rollback_store is not None:
            self.rollback_store.release_unreferenced(self.guard.snapshot_step)
        return seconds

    def state_dict(self) -> dict[str, Any]:
        """The metadata of a checkpoint."""
        state: dict[str, Any] = {
            "task": self.task_state,
            "rounds": self.learner.rounds,
            "replicas": self.group.size,
        }
        state["spike_guard"] = self.guard.state
        if self.layer_stats is not None:
            state["noise_scale"] = self.layer_stats.noise_scale.state
        if self.moe:
            state["expert_loads"] = self.moe.state
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state
        if self.validation_pending:
            state["validation_pending"] = True
        return state

    def _notify(self, name: str, *arguments: Any) -> None:
        """Call the callback. If it raises, the step is saved first, then the error is raised again."""
        if self.callback is None:
            return
        try:
            getattr(self.callback, name)(*arguments)
        except StopTraining:
            self.stopped = True
            if self.learner.laid is None:  # else at the end of the step, on all ranks
                raise
        except Exception as error:
            self._save_and_raise(error)

    def _save_and_raise(self, error: Exception) -> NoReturn:
        try:
            self._save_and_wait()
        except WhorlError as failure:  # the first error is the one to raise
            self.log(f"no checkpoint of step {self.steps_done:,} could be written: {failure}")
        raise error

    def _save_and_wait(self, *, upload: bool = False) -> None:
        self.save(upload=upload, is_request=True)
        if self.checkpoints is not None:
            self.checkpoints.finish()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Within the context SIGTERM is handled, and a heartbeat is written.

        Raises:
            PreemptedError: SIGTERM.
        """
        self.heartbeat = open_heartbeat(
            self.options.heartbeat_dir, self.task.steps, self.group, lambda: self.stopwatch.phase, self.log
        )
        interrupted = False
        with self.stopwatch, self.heartbeat or nullcontext():
            try:
                yield
            except Preempted:
                interrupted = True
            except WhorlError as error:
                if self.stopwatch.requested:  # a helper process received the signal during a step
                    raise self._preempted() from error
                raise
            if interrupted or self.stopwatch.requested:
                if interrupted and self.stopwatch.phase == "validation":
                    self.validation_pending = True
                self._save_and_wait(upload=True)  # the interrupted phase had changed no state
                raise self._preempted()

    def _hold_preemption(self) -> None:
        """Let SIGTERM interrupt only what can be repeated from a checkpoint of the last step, and no message to a rank."""
        may_save = self.task.may_save(self.steps_done) and self.group.shares_memory
        self.stopwatch.interruptible = frozenset(self.task.interruptible if may_save else ())

    def _preempted(self) -> PreemptedError:
        return preempted_error(self.steps_done, self.task.steps, self.last_saved_step)

    def log_objective(self, name: str) -> None:
        """Log that a user's objective is computed without the fused loss and the compiled step."""
        if name not in ("next_token", "masked") and self.group.rank == 0:
            self.log(f"objective {name} reads whole logits: without the fused loss and compilation")

    def report_event(self, done: int, event: dict[str, Any]) -> None:
        """Send an event to the log and the callback, those of the guard with the documents of the step's batch.

        `task_state` is still that of the previous step, where the batch begins.
        """
        event["step"] = done
        if self.group.rank:
            return
        if event["kind"] not in ("rollback", "stall", "overfitting", "behind"):
            event = {**event, **self.task.documents(done - 1, self.task_state)}
        self.log(event_line(done, event))
        if self.callback is not None:
            try:
                self.callback.on_event(done, event)
            except Exception as error:
                self.callback_error = error


def _replica_main(
    group: ProcessGroup, task: Task[R], options: RunOptions, shared: SharedState, start: ResumePoint
) -> None:
    """Run the ranks other than 0."""
    with ExitStack() as stack:
        stack.enter_context(deterministic(options.deterministic))
        trainer = Trainer(task, options, group=group)
        if options.scratch is not None and not group.shares_memory:
            trainer.checkpoints = stack.enter_context(open_checkpoints(task, options))
        trainer._train(shared, start)
