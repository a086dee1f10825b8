"""The guard: whether a step may be taken, judged from its loss and gradient norm before any weight moves.

A long run dies of one bad batch, or of a rate that was a little too high, hours after the cause. So each step is judged:

    not finite    the loss or the gradient norm is NaN or infinite (or the batch has no target at all)
    a spike       loss or norm lies more than `spike` robust standard deviations above the median of the last `window` steps.
                  Robust: 1.4826 x the median absolute deviation, so that the spikes seen before do not hide the next one;
                  never less than a share of the median, so that a smooth curve does not make its ripples into spikes
    astray        the loss rose above that of guessing each token evenly and did not come back for long: a rate that is far
                  too high gives no NaN (norms and caps hold it back) but weights that know less than nothing, or nothing

A bad batch is *skipped*: weights and moments stay. `patience` of them in a row are no longer the batches' fault but the
weights': these *go back* to the last good copy (`anchors.py`) and training goes on with the next batches, as PaLM did by
hand (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1: the same batches did no harm to other weights). Skipping on a
rolling statistic of loss and norm: OLMo 2 (arXiv:2501.00656, section 3). Both have limits; beyond them training stops.

The subtle part is that this must be exact. Every replica judges the same numbers by the same rule, so all skip or none.
The guard's memory is JSON and lies in each checkpoint; a step's number is its batch's number, skipped or not, so the
schedule and the order of the data know nothing of all this; and copies to go back to are made at fixed step numbers. So
a run with events that was killed and continued ends with the same bits as one that was not.
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

MAD_TO_STD = 1.4826  # of a normal distribution
# A deviation is taken to be at least this share of the median. Batches of odd but harmless documents were seen to have 1.2
# times the usual loss and ten times the usual norm, which clipping deals with.
MIN_LOSS_DEVIATION, MIN_NORM_DEVIATION = 0.05, 3.0
DIVERGED_ABOVE, RECOVERED_BELOW = (
    1.1,
    0.95,
)  # times the loss of guessing: above the first weights go astray, below the second they are back
DIVERGED_STEPS = 64  # in a row
MIN_SKIPS_FACTOR = 4  # times `patience`: so many may be skipped in a run of any length


class SpikeGuard:
    """The judge of a language model's steps.

    Args:
        chance: loss of guessing each token evenly, ln(vocabulary), in nats.
        steps: of the whole run.
        first: the number of the step that is judged first.
        state: `state` of the guard that judged the steps before.
    """

    def __init__(
        self,
        config: SpikeGuardConfig,
        *,
        uniform_loss: float,
        steps: int,
        first: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.uniform_loss, self.steps, self.step = config, uniform_loss, steps, first
        at = state or {}
        self.losses = deque[float](at.get("losses", ()), config.window)
        self.norms = deque[float](at.get("norms", ()), config.window)
        self.bad_steps: list[str] = list(
            at.get("bad_steps", ())
        )  # what was wrong with the steps just before, in a row
        self.skipped, self.diverged_steps = int(at.get("skipped", 0)), int(at.get("diverged_steps", 0))
        self.baseline_loss = at.get("baseline_loss", uniform_loss)
        self.rollbacks, self.snapshot_step = int(at.get("rollbacks", 0)), at.get("snapshot_step")
        self.events: list[dict[str, Any]] = list(at.get("events", ()))
        self.last_event: dict[str, Any] | None = None  # of the step judged last

    @property
    def state(self) -> dict[str, Any]:
        """All that later judgements depend on, and every event (JSON)."""
        return {
            "losses": list(self.losses), "norms": list(self.norms), "bad_steps": list(self.bad_steps), "skipped": self.skipped,
            "diverged_steps": self.diverged_steps, "baseline_loss": self.baseline_loss, "rollbacks": self.rollbacks, "snapshot_step": self.snapshot_step,
            "events": list(self.events),
        }  # fmt: skip

    @property
    def needs_rollback(self) -> bool:
        """Whether skipping no longer helps."""
        enough = min(DIVERGED_STEPS, max(1, self.steps // 2))
        return len(self.bad_steps) >= self.config.patience or self.diverged_steps >= enough

    def accept_step(self, metrics: Mapping[str, float]) -> bool:
        """Whether to take the step of these figures (loss, nll, count, gradient_norm); called once a step."""
        self.step += 1
        nll = metrics.get("nll", metrics["loss"])
        if self.step == 1 and math.isfinite(nll):
            self.baseline_loss = max(self.baseline_loss, nll)  # some networks begin above it
        if (
            "overflow" in metrics
        ):  # the scale of the loss was too large (scaling.py): nothing is wrong with the step
            self.last_event = None
            return False
        kind, words = self._diagnose(metrics)
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if kind in ("", "spike"):  # a level that stays is not a spike for ever
            self.losses.append(loss)
            self.norms.append(norm)
        if nll > DIVERGED_ABOVE * self.baseline_loss or (
            self.diverged_steps and not nll < RECOVERED_BELOW * self.baseline_loss
        ):
            self.diverged_steps += 1
        else:
            self.diverged_steps = 0
        self.last_event = None
        if not kind:
            self.bad_steps = []
            return True
        self.bad_steps.append(kind)
        self.skipped += 1
        self._record_event(kind, words, f"skipped ({self.skipped} so far)", loss, norm)
        return False

    def roll_back(self) -> int:
        """Counts a return to the last good copy: the number of the step it is of.

        Raises:
            DivergedError: there is none, or it was done too often. DataError: nothing but batches without a target.
        """
        what = self._describe()
        if set(self.bad_steps) == {"empty"}:
            raise DataError(
                f"{what}: {len(self.bad_steps)} batches in a row have no token to predict",
                expected="rows with targets (loss_mask)",
                do="look at the token set: whorl verify, then the length of its documents",
            )
        if self.snapshot_step is None or self.rollbacks >= self.config.max_rollbacks:
            why = (
                "there is no good copy of them yet"
                if self.snapshot_step is None
                else f"they did {self.rollbacks} times"
            )
            raise DivergedError(f"{what}, and weights cannot go back: {why}", do=self._remedy())
        self.rollbacks += 1
        self._record_event(
            "rollback",
            what,
            f"weights went back to those of step {self.snapshot_step:,}; the batches since then are left out",
            None,
            None,
        )
        self.losses.clear()  # those weights are of another level
        self.norms.clear()
        self.bad_steps, self.diverged_steps = [], 0
        return int(self.snapshot_step)

    def check_skip_limit(self) -> None:
        """That the limit of skipped batches is not passed.

        Raises:
            DivergedError: it is.
        """
        limit = max(MIN_SKIPS_FACTOR * self.config.patience, self.config.max_skipped * self.step)
        if self.skipped > limit:
            raise DivergedError(
                f"{self.skipped} of {self.step:,} batches had to be skipped, the last because {self.events[-1]['message']}",
                expected=f"at most {self.config.max_skipped:.0%} of them (watch.most_skipped)",
                do=self._remedy(),
            )

    def _diagnose(self, metrics: Mapping[str, float]) -> tuple[str, str]:
        """(kind, words) of what is wrong with a step, or two empty texts."""
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if not metrics["loss_tokens"]:
            return "empty", "no token of the batch has a target"
        if not is_finite(metrics):
            return "nonfinite", f"the loss is {loss:g} and the norm of its gradient {norm:g}"
        if self.config.threshold and len(self.losses) >= self.config.window // 4:
            for name, value, seen, least in (
                ("loss", loss, self.losses, MIN_LOSS_DEVIATION),
                ("norm of the gradient", norm, self.norms, MIN_NORM_DEVIATION),
            ):
                middle = median(seen)
                if value <= middle * (1 + self.config.threshold * least):
                    continue  # nearly always: one sort, not two
                deviation = max(
                    MAD_TO_STD * median(abs(v - middle) for v in seen), least * abs(middle), 1e-12
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
            return f"step {self.step:,}: {len(self.bad_steps)} steps in a row went wrong, the last because {last}"
        return (
            f"step {self.step:,}: {self.diverged_steps} steps ago the loss rose far above the {self.baseline_loss:.2f} nats a token that "
            "guessing costs, and it did not come back"
        )

    def _remedy(self) -> str:
        return (
            "lower the learning rates (--set plan.optim.matrix_rate=..., adamw_rate, embedding_rate, scalar_rate, "
            "memory_rate); if they are the usual ones, look at the documents named in the run's log"
        )

    def _record_event(
        self, kind: str, message: str, action: str, loss: float | None, norm: float | None
    ) -> None:
        self.last_event = {
            "step": self.step, "kind": kind, "message": message, "action": action,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
        }  # fmt: skip
        self.events.append(self.last_event)
