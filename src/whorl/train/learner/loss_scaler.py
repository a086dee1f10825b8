"""Dynamic loss scaling for fp16.

fp16 has more digits than bf16, but its range ends at 65,504 and underflows below 6e-8. Gradients of deep layers
underflow, and weights stop changing without an error. So the loss is multiplied by a scale before the backward. The
fp32 gradients are divided by it before any use (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). On an
overflow the step is skipped and the scale halves; after `GROWTH_INTERVAL` steps without overflow it doubles.

    backward of  scale * total;   gradients / (scale * count);   scales are powers of two

A power of two changes only exponents, so in fp32 a scaled step has the same bits as an unscaled one (tested).

Two subtle points. (1) The loss is a *sum* over tokens: 4,096 tokens are a factor of 2^12. So the scale starts at 2^8
where others use 2^20, may fall below 1, and stays at or below 2^15, which fp16 represents (`next_token` multiplies fp16
gradients by it). (2) An overflow is not a bad batch: the loss is finite, only its gradients are not. The spike guard
records no event for it. A non-finite loss is left to the spike guard and does not change the scale; neither do
non-finite gradients at the smallest scale.

Every replica sees the same sums, so all of them halve the scale, or none. The state is in each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**8, 2.0**-24, 2.0**15
GROWTH_INTERVAL = 200  # steps; at the limit, one step in this many is skipped


class LossScaler:
    """The loss scale of one update.

    Args:
        state: `state` of the scaler to continue.
        init_scale: the first scale, a power of two.
        growth_interval: steps without overflow before the scale doubles.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        init_scale: float = INITIAL_SCALE,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        saved = state or {}
        self.scale, self.growth_interval = float(saved.get("scale", init_scale)), growth_interval
        self.growth_tracker, self.overflows = (
            int(saved.get("growth_tracker", 0)),
            int(saved.get("overflows", 0)),
        )

    @property
    def state(self) -> dict[str, Any]:
        """The scaler's state as JSON."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker, "overflows": self.overflows}

    def check_overflow(self, loss: float, norm: float, rows_finite: bool = True) -> bool:
        """Return whether only the gradients are non-finite; then halve the scale. The caller must skip the step.

        loss, norm: of the whole step, over all replicas; rows_finite: whether gradients of lookup tables are finite.
        """
        if (math.isfinite(norm) and rows_finite) or not math.isfinite(loss) or self.scale <= MIN_SCALE:
            return False
        self.scale, self.growth_tracker, self.overflows = self.scale / 2, 0, self.overflows + 1
        return True

    def on_step_end(self) -> None:
        """Count a step that was applied."""
        self.growth_tracker += 1
        if self.growth_tracker >= self.growth_interval:
            self.scale, self.growth_tracker = min(2 * self.scale, MAX_SCALE), 0
