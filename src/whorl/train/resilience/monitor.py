"""The vigil: all that watches over a run, at the few places of the loop where it must.

`judge` before each update (the guard), `settle` after it (events told, anchors, going back), `record` for a checkpoint, and
around the whole loop SIGTERM and, in the first replica, the pulse. How each works stands in its own file: `guard.py`,
`anchors.py`, `stopping.py`, `pulse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import WhorlError
from whorl.parallel.process_group import World
from whorl.tokens.stream import StreamBatches
from whorl.train.checkpoint.manager import place
from whorl.train.learner.learner import Shared
from whorl.train.learner.loss_scaler import LossScaling
from whorl.train.metrics.meter import Observer, Window
from whorl.train.resilience.heartbeat import Pulse, answer_with_stacks
from whorl.train.resilience.preemption import Interrupted, StoppedError, Stopping
from whorl.train.resilience.provenance import documents_of
from whorl.train.resilience.rollback import Anchors
from whorl.train.resilience.spike_guard import Guard

if TYPE_CHECKING:
    from whorl.train.checkpoint.manager import Keeper
    from whorl.train.job import Job
    from whorl.train.metrics.moe_balance import Mixtures


class Vigil:
    """One replica's. Entered, it watches over the loop.

    Args:
        first: the step that comes first; record: what the checkpoint of the step before told besides tensors.
        folder: where the heartbeat and stacks go; None keeps neither.
        observer, keeper: of the first replica; stable: after which steps the state is put aside for a branch.

    Raises:
        StoppedError: (on leaving) SIGTERM came; what was learnt is in a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        shared: Shared,
        first: int,
        record: Mapping[str, Any],
        observer: Observer | None = None,
        keeper: Keeper | None = None,
        *,
        stable: Collection[int] = (),
        folder: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.stable = stable
        self.job, self.world, self.shared = job, world, shared
        self.observer, self.keeper, self.say = observer, keeper, say
        self.done = self.saved = first
        self.place: dict[str, Any] | None = record.get("stream")  # of the next batch, in raw text
        self.loads: list[list[float]] | None = record.get("routing")  # of the experts in the step before
        self.mixtures: Mixtures | None = None
        self.scaling = LossScaling(record.get("scaling")) if job.dtype == "float16" else None
        self.window = Window(record.get("window"))
        self.owes_a_look = bool(record.get("owes_a_look"))  # at held-out text: SIGTERM broke it off
        self.guard = Guard(
            job.watch, chance=math.log(job.model.vocab_size), steps=job.steps, first=first, state=record.get("guard")
        )  # fmt: skip
        self.every = job.watch.good_every or max(1, job.steps // 8)
        self.anchors = Anchors(keeper) if keeper is not None else None
        self.clock = Stopping(listen=keeper is not None)
        self.judge = self.guard.judge
        self.pulse: Pulse | None = None
        if folder is not None and world.rank:
            self._answers = answer_with_stacks(folder, world.rank)
        elif folder is not None:
            self.pulse = Pulse(
                folder,
                job.steps,
                replicas=world.children,
                phase=lambda: self.clock.phase,
                say=say,
            )
        self._entered = ExitStack()

    def __enter__(self) -> Vigil:
        self._entered.enter_context(self.clock)
        if self.pulse is not None:
            self._entered.enter_context(self.pulse)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, Interrupted) or (error is None and self.clock.wanted):
                self.owes_a_look = self.owes_a_look or (error is not None and self.clock.phase == "held_out")
                self.save(durable=True)  # what was broken off had changed nothing
                if self.keeper is not None:
                    self.keeper.finish()
                raise self._stopped(f"a checkpoint of step {self.done:,} is written") from None
            if (
                isinstance(error, WhorlError) and self.clock.wanted
            ):  # the signal took a helper too, in mid-step
                raise self._stopped(f"the last checkpoint is of step {self.saved:,}") from error
        finally:
            self._entered.__exit__(kind, error, trace)

    def _stopped(self, kept: str) -> StoppedError:
        return StoppedError(
            f"stopped by SIGTERM after step {self.done:,} of {self.job.steps:,}; {kept}",
            do="run the same command again: it continues from there",
        )

    def settle(self, done: int, records: object, *, skipped: bool) -> bool:
        """After step number `done`, on every replica: tells what happened, and goes back if it must; whether it did.

        Raises:
            DivergedError: training cannot be mended.
        """
        guard, before, went_back = self.guard, self.place, False
        if skipped:
            self._tell(done, before)
            guard.check()
        if guard.must_go_back:
            step = guard.go_back()
            if self.anchors is not None:
                self.anchors.restore(step, self.shared.tensors())
            self.world.exchange()
            self._tell(done, before)
            went_back = True
        self.place = records.state if isinstance(records, StreamBatches) else None
        self.done = done
        if done % self.every == 0 and done < self.job.steps and not guard.bad and not guard.astray:
            guard.anchor = done
            if self.anchors is not None:
                with self.clock.during("anchor"):
                    self.anchors.save(done, self.shared.tensors())
        if done in self.stable and self.keeper is not None:
            with self.clock.during("branch"):
                self.keeper.put_aside(
                    place(self.keeper.folder, done), done, self.shared.tensors(), self.record()
                )
        if self.pulse is not None:
            self.pulse.beat(done)
            for words in self.pulse.stalls:
                self._show({"step": done, "kind": "stall", "words": words, "action": "stacks were written"})
            self.pulse.stalls.clear()
        return went_back

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors."""
        kept: dict[str, Any] = {"guard": self.guard.state, "window": self.window.state()}
        if self.place is not None:
            kept["stream"] = self.place
        if self.mixtures:
            kept["routing"] = self.mixtures.state
        if self.scaling is not None:
            kept["scaling"] = self.scaling.state
        if self.owes_a_look:
            kept["owes_a_look"] = True
        return kept

    def save(self, *, durable: bool = False) -> float:
        """Takes a checkpoint of the last step that is done, unless there is one; returns the seconds that this waited."""
        if self.keeper is None:
            return 0.0
        if self.done == self.saved and not (durable and self.done and self.keeper.owes_upload(self.done)):
            return 0.0
        with self.clock.during("checkpoint"):
            seconds = self.keeper.save(self.done, self.shared.tensors(), self.record(), durable=durable)
        self.saved = self.done
        if self.anchors is not None:
            self.anchors.known(self.guard.anchor)
        return seconds

    def _tell(self, done: int, place: dict[str, Any] | None) -> None:
        """The guard's newest event, with the documents of its batch, to the log and the observer."""
        event = self.guard.event
        if self.observer is None or event is None:
            return
        if event["kind"] != "rewind":
            event |= documents_of(self.job, done - 1, place)
        self._show(event)

    def _show(self, event: dict[str, Any]) -> None:
        named = [f"{d['path']} ({d['id']})" if d.get("id") else d["path"] for d in event.get("documents", [])]
        more = event.get("n_documents", 0) - len(named)
        where = (
            f"; in the batch: {', '.join(named)}" + (f" and {more} more" if more > 0 else "") if named else ""
        )
        self.say(f"step {event['step']:,}: {event['words']}: {event['action']}{where}")
        if self.observer is not None:
            self.observer.on_event(int(event["step"]), event)
