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
from whorl.train.config import WatchConfig
from whorl.train.learner.update import DivergedError, is_finite

MAD_TO_DEVIATION = 1.4826  # of a normal distribution
# A deviation is taken to be at least this share of the median. Batches of odd but harmless documents were seen to have 1.2
# times the usual loss and ten times the usual norm, which clipping deals with.
LEAST_LOSS, LEAST_NORM = 0.05, 3.0
ASTRAY, BACK = (
    1.1,
    0.95,
)  # times the loss of guessing: above the first weights go astray, below the second they are back
ASTRAY_STEPS = 64  # in a row
FEWEST_SKIPS = 4  # times `patience`: so many may be skipped in a run of any length


class Guard:
    """The judge of a language model's steps.

    Args:
        chance: loss of guessing each token evenly, ln(vocabulary), in nats.
        steps: of the whole run.
        first: the number of the step that is judged first.
        state: `state` of the guard that judged the steps before.
    """

    def __init__(
        self,
        config: WatchConfig,
        *,
        chance: float,
        steps: int,
        first: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.chance, self.steps, self.step = config, chance, steps, first
        at = state or {}
        self.losses = deque[float](at.get("losses", ()), config.window)
        self.norms = deque[float](at.get("norms", ()), config.window)
        self.bad: list[str] = list(at.get("bad", ()))  # what was wrong with the steps just before, in a row
        self.skipped, self.astray = int(at.get("skipped", 0)), int(at.get("astray", 0))
        self.level = at.get("level", chance)
        self.rewinds, self.anchor = int(at.get("rewinds", 0)), at.get("anchor")
        self.events: list[dict[str, Any]] = list(at.get("events", ()))
        self.event: dict[str, Any] | None = None  # of the step judged last

    @property
    def state(self) -> dict[str, Any]:
        """All that later judgements depend on, and every event (JSON)."""
        return {
            "losses": list(self.losses), "norms": list(self.norms), "bad": list(self.bad), "skipped": self.skipped,
            "astray": self.astray, "level": self.level, "rewinds": self.rewinds, "anchor": self.anchor,
            "events": list(self.events),
        }  # fmt: skip

    @property
    def must_go_back(self) -> bool:
        """Whether skipping no longer helps."""
        enough = min(ASTRAY_STEPS, max(1, self.steps // 2))
        return len(self.bad) >= self.config.patience or self.astray >= enough

    def judge(self, figures: Mapping[str, float]) -> bool:
        """Whether to take the step of these figures (loss, nll, count, gradient_norm); called once a step."""
        self.step += 1
        nll = figures.get("nll", figures["loss"])
        if self.step == 1 and math.isfinite(nll):
            self.level = max(self.level, nll)  # some networks begin above it
        if (
            "overflow" in figures
        ):  # the scale of the loss was too large (scaling.py): nothing is wrong with the step
            self.event = None
            return False
        kind, words = self._wrong(figures)
        loss, norm = figures["loss"], figures["gradient_norm"]
        if kind in ("", "spike"):  # a level that stays is not a spike for ever
            self.losses.append(loss)
            self.norms.append(norm)
        if nll > ASTRAY * self.level or (self.astray and not nll < BACK * self.level):
            self.astray += 1
        else:
            self.astray = 0
        self.event = None
        if not kind:
            self.bad = []
            return True
        self.bad.append(kind)
        self.skipped += 1
        self._note(kind, words, f"skipped ({self.skipped} so far)", loss, norm)
        return False

    def go_back(self) -> int:
        """Counts a return to the last good copy: the number of the step it is of.

        Raises:
            DivergedError: there is none, or it was done too often. DataError: nothing but batches without a target.
        """
        what = self._in_words()
        if set(self.bad) == {"empty"}:
            raise DataError(
                f"{what}: {len(self.bad)} batches in a row have no token to predict",
                expected="rows with targets (loss_mask)",
                do="look at the token set: whorl verify, then the length of its documents",
            )
        if self.anchor is None or self.rewinds >= self.config.rewinds:
            why = (
                "there is no good copy of them yet"
                if self.anchor is None
                else f"they did {self.rewinds} times"
            )
            raise DivergedError(f"{what}, and weights cannot go back: {why}", do=self._cure())
        self.rewinds += 1
        self._note(
            "rewind",
            what,
            f"weights went back to those of step {self.anchor:,}; the batches since then are left out",
            None,
            None,
        )
        self.losses.clear()  # those weights are of another level
        self.norms.clear()
        self.bad, self.astray = [], 0
        return int(self.anchor)

    def check(self) -> None:
        """That the limit of skipped batches is not passed.

        Raises:
            DivergedError: it is.
        """
        limit = max(FEWEST_SKIPS * self.config.patience, self.config.most_skipped * self.step)
        if self.skipped > limit:
            raise DivergedError(
                f"{self.skipped} of {self.step:,} batches had to be skipped, the last because {self.events[-1]['words']}",
                expected=f"at most {self.config.most_skipped:.0%} of them (watch.most_skipped)",
                do=self._cure(),
            )

    def _wrong(self, figures: Mapping[str, float]) -> tuple[str, str]:
        """(kind, words) of what is wrong with a step, or two empty texts."""
        loss, norm = figures["loss"], figures["gradient_norm"]
        if not figures["count"]:
            return "empty", "no token of the batch has a target"
        if not is_finite(figures):
            return "not finite", f"the loss is {loss:g} and the norm of its gradient {norm:g}"
        if self.config.spike and len(self.losses) >= self.config.window // 4:
            for name, value, seen, least in (
                ("loss", loss, self.losses, LEAST_LOSS),
                ("norm of the gradient", norm, self.norms, LEAST_NORM),
            ):
                middle = median(seen)
                if value <= middle * (1 + self.config.spike * least):
                    continue  # nearly always: one sort, not two
                deviation = max(
                    MAD_TO_DEVIATION * median(abs(v - middle) for v in seen), least * abs(middle), 1e-12
                )
                if value > middle + self.config.spike * deviation:
                    times = (value - middle) / deviation
                    return (
                        "spike",
                        f"the {name} is {value:.3g}, {times:.0f} deviations above the median {middle:.3g}",
                    )
        return "", ""

    def _in_words(self) -> str:
        if len(self.bad) >= self.config.patience:
            last = self.events[-1]["words"]
            return f"step {self.step:,}: {len(self.bad)} steps in a row went wrong, the last because {last}"
        return (
            f"step {self.step:,}: {self.astray} steps ago the loss rose far above the {self.level:.2f} nats a token that "
            "guessing costs, and it did not come back"
        )

    def _cure(self) -> str:
        return (
            "lower the learning rates (--set plan.optim.matrix_rate=..., adamw_rate, embedding_rate, scalar_rate, "
            "memory_rate); if they are the usual ones, look at the documents named in the run's log"
        )

    def _note(self, kind: str, words: str, action: str, loss: float | None, norm: float | None) -> None:
        self.event = {
            "step": self.step, "kind": kind, "words": words, "action": action,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "gradient_norm": norm if norm is not None and math.isfinite(norm) else None,
        }  # fmt: skip
        self.events.append(self.event)
