"""Loss scaling for fp16: keeping gradients inside the range of a type that has little of it.

fp16 has more digits than bf16 but ends at 65,504 and knows nothing below 6e-8. Gradients of deep layers fall below, weights
stop learning, and nothing tells. So the loss is multiplied by a scale before the backward, and the gradients, fp32 by then,
are divided by it before anything looks at them (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). The scale finds
itself: where a gradient overflows, the step is left out and the scale halved; after `GROW_EVERY` steps without, it doubles.

    backward of  scale * total;   gradients / (scale * count);   powers of two throughout

A power of two changes exponents only, so in fp32 a scaled step has the same bits as one that is not: a test.

Two subtle parts. The loss of this house is a *sum* over tokens, not their mean: 4,096 tokens are a factor of 2^12 by
themselves. So the scale begins where others would have 2^20, may go below 1, and never above 2^15, which fp16 can hold
itself (`next_token` multiplies fp16 gradients by it). And an overflow is no fault of the data: the loss of the step is
finite, only its gradients are not. The guard (`guard.py`) is told, so that it counts no event, keeps no memory of that step
and does not go back for it. A loss that is not finite is the guard's matter as ever, and leaves the scale alone; so are
gradients that are not finite at the smallest scale.

Every replica sees the same sums, so all halve or none. The scale and its count are in each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**8, 2.0**-24, 2.0**15
GROWTH_INTERVAL = 200  # steps; at the edge one in so many is left out


class LossScaler:
    """The scale of one update.

    Args:
        state: `state` of the one that is continued.
        start: the first scale, a power of two; grow_every: good steps until it doubles.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        init_scale: float = INITIAL_SCALE,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        at = state or {}
        self.scale, self.growth_interval = float(at.get("scale", init_scale)), growth_interval
        self.growth_tracker, self.overflows = int(at.get("growth_tracker", 0)), int(at.get("overflows", 0))

    @property
    def state(self) -> dict[str, Any]:
        """All that later scales depend on (JSON)."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker, "overflows": self.overflows}

    def check_overflow(self, loss: float, norm: float, rows_finite: bool = True) -> bool:
        """Whether the gradients, and nothing else, are not finite: then the scale is halved and the step is to be left out.

        loss, norm: of the whole step, over all replicas; rows_finite: that the gradients of look-up tables are.
        """
        if (math.isfinite(norm) and rows_finite) or not math.isfinite(loss) or self.scale <= MIN_SCALE:
            return False
        self.scale, self.growth_tracker, self.overflows = self.scale / 2, 0, self.overflows + 1
        return True

    def on_step_end(self) -> None:
        """A step was taken."""
        self.growth_tracker += 1
        if self.growth_tracker >= self.growth_interval:
            self.scale, self.growth_tracker = min(2 * self.scale, MAX_SCALE), 0
