"""The spike guard: decides from loss and gradient norm whether a step is applied, before any weight changes.

    nonfinite     the loss or the gradient norm is NaN or infinite
    empty         the batch has no target
    spike         loss or norm is more than `threshold` robust standard deviations above the median of the last `window`
                  steps. Robust: 1.4826 x the median absolute deviation, so earlier spikes do not mask the next one. It
                  is at least a fraction of the median, so a smooth curve does not turn ripples into spikes
    diverged      the loss rose above the uniform loss and stayed there: at too high a learning rate, norms and caps
                  prevent NaN, but the weights become useless

A bad batch is *skipped*: weights and moments stay. After `patience` bad steps in a row the weights are at fault. They
are *rolled back* to the last snapshot (`rollback.py`), and training continues with the next batches, as PaLM did by
hand (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1). Skipping on rolling statistics: OLMo 2 (arXiv:2501.00656,
section 3). Both have limits, beyond which training stops.

The subtle point is exactness. Every replica decides from the same numbers, so all skip or none. The state is JSON in
each checkpoint. Step number equals batch number, skipped or not, so schedule and data order are unaffected. Snapshots
are taken at fixed steps. So a run with events that was killed and resumed ends with the same bits as an undisturbed
one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from whorl.errors import DataError
from whorl.train.config import SpikeGuardConfig
from whorl.train.learner.update import DivergedError, is_finite

MAD_TO_STD = 1.4826  # for a normal distribution
# Lower bounds on the deviation, as a fraction of the median. Odd but harmless batches had 1.2 times the usual loss and
# ten times the usual norm, which clipping handles.
MIN_LOSS_DEVIATION, MIN_NORM_DEVIATION = 0.05, 3.0
DIVERGED_ABOVE, RECOVERED_BELOW = (
    1.1,
    0.95,
)  # times the uniform loss: diverged above the first, recovered below the second
DIVERGED_STEPS = 64  # in a row
MIN_SKIPS_FACTOR = 4  # times `patience`: skips allowed in a run of any length


class SpikeGuard:
    """The `accept_step` of a language model.

    Args:
        uniform_loss: loss of the uniform distribution, ln(vocabulary), in nats; None: no loss counts as diverged.
        steps: of the whole run.
        first: number of the first step.
        state: `state` of the guard to continue.
    """

    def __init__(
        self,
        config: SpikeGuardConfig,
        *,
        uniform_loss: float | None,
        steps: int,
        first: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.uniform_loss, self.steps, self.step = config, uniform_loss, steps, first
        saved = state or {}
        self.losses = deque[float](saved.get("losses", ()), config.window)
        self.norms = deque[float](saved.get("norms", ()), config.window)
        self.bad_steps: list[str] = list(
            saved.get("bad_steps", ())
        )  # kinds of the bad steps since the last good one
        self.skipped, self.diverged_steps = int(saved.get("skipped", 0)), int(saved.get("diverged_steps", 0))
        self.baseline_loss = saved.get("baseline_loss", uniform_loss)
        self.rollbacks, self.snapshot_step = int(saved.get("rollbacks", 0)), saved.get("snapshot_step")
        self.events: list[dict[str, Any]] = list(saved.get("events", ()))
        self._new_events: list[dict[str, Any]] = []

    @property
    def state(self) -> dict[str, Any]:
        """The guard's state and all events, as JSON."""
        return {
            "losses": list(self.losses), "norms": list(self.norms),
            "bad_steps": list(self.bad_steps), "skipped": self.skipped,
            "diverged_steps": self.diverged_steps, "baseline_loss": self.baseline_loss,
            "rollbacks": self.rollbacks, "snapshot_step": self.snapshot_step,
            "events": list(self.events),
        }  # fmt: skip

    @property
    def needs_rollback(self) -> bool:
        """Whether skipping is no longer enough."""
        enough = min(DIVERGED_STEPS, max(1, self.steps // 2))
        return len(self.bad_steps) >= self.config.patience or self.diverged_steps >= enough

    def accept_step(self, metrics: Mapping[str, float]) -> bool:
        """Return whether to apply the step with these metrics (loss, nll, loss_tokens, grad_norm); called once per step."""
        self.step += 1
        nll = metrics.get("nll", metrics["loss"])
        if self.step == 1 and math.isfinite(nll) and self.baseline_loss is not None:
            self.baseline_loss = max(self.baseline_loss, nll)  # some networks start above it
        if "overflow" in metrics:  # the loss scale was too large (`loss_scaler.py`): not a bad step
            return False
        kind, message = self._diagnose(metrics)
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if kind in ("", "spike"):  # a level that stays is not a spike forever
            self.losses.append(loss)
            self.norms.append(norm)
        baseline = self.baseline_loss
        if baseline is not None and (
            nll > DIVERGED_ABOVE * baseline or (self.diverged_steps and not nll < RECOVERED_BELOW * baseline)
        ):
            self.diverged_steps += 1
        else:
            self.diverged_steps = 0
        if not kind:
            self.bad_steps = []
            return True
        self.bad_steps.append(kind)
        self.skipped += 1
        self._record_event(kind, message, f"skipped ({self.skipped} so far)", loss, norm)
        return False

    def roll_back(self) -> int:
        """Count a rollback; return the step of the snapshot to restore.

        Raises:
            DivergedError: no snapshot exists, or the limit is reached. DataError: all bad batches lack targets.
        """
        what = self._describe()
        if set(self.bad_steps) == {"empty"}:
            raise DataError(
                f"{what}: {len(self.bad_steps)} batches in a row have no target token",
                expected="rows with targets (loss_mask)",
                do="check the token set: whorl verify, then the length of its documents",
            )
        if self.snapshot_step is None or self.rollbacks >= self.config.max_rollbacks:
            why = (
                "no snapshot exists yet"
                if self.snapshot_step is None
                else f"{self.rollbacks} rollbacks are done, the maximum (spike_guard.max_rollbacks)"
            )
            raise DivergedError(f"{what}, and a rollback is not possible: {why}", do=self._remedy())
        self.rollbacks += 1
        self._record_event(
            "rollback",
            what,
            f"weights rolled back to step {self.snapshot_step:,}; the batches since then are skipped",
            None,
            None,
        )
        self.losses.clear()  # the restored weights have another loss level
        self.norms.clear()
        self.bad_steps, self.diverged_steps = [], 0
        return int(self.snapshot_step)

    def check_skip_limit(self) -> None:
        """Check the limit on skipped batches.

        Raises:
            DivergedError: it is exceeded.
        """
        limit = max(MIN_SKIPS_FACTOR * self.config.patience, self.config.max_skipped * self.step)
        if self.skipped > limit:
            raise DivergedError(
                f"{self.skipped} of {self.step:,} batches were skipped, the last because {self.events[-1]['message']}",
                expected=f"at most {self.config.max_skipped:.0%} of them (spike_guard.max_skipped)",
                do=self._remedy(),
            )

    def _diagnose(self, metrics: Mapping[str, float]) -> tuple[str, str]:
        """Return (kind, message) of a bad step, or two empty strings."""
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if not metrics["loss_tokens"]:
            return "empty", "the batch has no target token"
        if not is_finite(metrics):
            return "nonfinite", f"the loss is {loss:g} and its gradient norm {norm:g}"
        if self.config.threshold and len(self.losses) >= self.config.window // 4:
            for name, value, history, min_deviation in (
                ("loss", loss, self.losses, MIN_LOSS_DEVIATION),
                ("gradient norm", norm, self.norms, MIN_NORM_DEVIATION),
            ):
                middle = median(history)
                if value <= middle * (1 + self.config.threshold * min_deviation):
                    continue  # the usual case: one sort instead of two
                deviation = max(
                    MAD_TO_STD * median(abs(v - middle) for v in history), min_deviation * abs(middle), 1e-12
                )
                if value > middle + self.config.threshold * deviation:
                    times = (value - middle) / deviation
                    return (
                        "spike",
                        f"the {name} is {value:.3g}, {times:.0f} deviations above the median {middle:.3g}",
                    )
        return "", ""

    def _describe(self) -> str:
        if len(self.bad_steps) >= self.config.patience:
            last = self.events[-1]["message"]
            return f"step {self.step:,}: {len(self.bad_steps)} bad steps in a row, the last because {last}"
        return (
            f"step {self.step:,}: {self.diverged_steps} steps ago the loss rose above {self.baseline_loss:.2f} nats per "
            "token, the loss of uniform predictions, and it has not recovered"
        )

    def _remedy(self) -> str:
        return (
            "lower the learning rates (pretrain: --set plan.optim.lr_muon=..., lr_adamw, lr_embedding, lr_scalar, lr_ngram; "
            "later stages: lr or --set STEP.lr_scale=...); if they are the defaults, check the data listed in the run's log"
        )

    def _record_event(
        self, kind: str, message: str, action: str, loss: float | None, norm: float | None
    ) -> None:
        event = {
            "step": self.step, "kind": kind, "message": message, "action": action,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
        }  # fmt: skip
        self.events.append(event)
        self._new_events.append(event)

    def pop_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._new_events = self._new_events, []
        return events


def event_line(step: int, event: Mapping[str, Any]) -> str:
    """Return the log line of an event, with the documents of its batch."""
    listed = event.get("documents", [])
    names = [f"{d['path']} ({d['id']})" if d.get("id") else d["path"] for d in listed]
    more = event.get("n_documents", 0) - len(names)
    batch = f"; in the batch: {', '.join(names)}" + (f" and {more} more" if more > 0 else "") if names else ""
    return f"step {step:,}: {event['message']}: {event['action']}{batch}"
