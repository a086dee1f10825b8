"""Metrics averaged between two reports."""

from __future__ import annotations

from typing import Any


class Meter:
    """Averages metrics since the last report, weighted by tokens, and sums times.

    A checkpoint stores the state, so the first report after a resume covers all its steps.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self._reset()
        self.__dict__.update(state or {})

    def state_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "sums": dict(self.sums)}

    def _reset(self) -> None:
        self.sums: dict[str, float] = {}
        self.grad_norm_sum = self.tokens = self.seconds = self.wait_seconds = 0.0
        self.steps = 0

    def add(self, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        self.seconds += sum(seconds.values())
        self.wait_seconds += seconds["data"]
        if "skipped" in metrics:  # its metrics may be NaN; the event has them
            return
        for name, value in metrics.items():
            if name not in ("loss_tokens", "grad_norm"):
                self.sums[name] = self.sums.get(name, 0.0) + value * metrics["loss_tokens"]
        self.grad_norm_sum += metrics["grad_norm"]
        self.tokens += metrics["loss_tokens"]
        self.steps += 1

    def pop_metrics(self) -> dict[str, float]:
        out = {
            **{name: total / self.tokens for name, total in self.sums.items()},
            "grad_norm": self.grad_norm_sum / self.steps,
            "tokens_per_second": self.tokens / self.seconds,
            "time/data_fraction": self.wait_seconds / self.seconds,
        }
        self._reset()
        return out
