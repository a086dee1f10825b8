"""What a run tells: to whom (`Observer`), and figures between two reports, means weighted by tokens and where time went."""

from __future__ import annotations

from typing import Any, Protocol

from whorl.models import LanguageModel


class TrainCallback(Protocol):
    """What rank 0 tells while it trains. All calls are made between updates."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None: ...
    def on_evaluation(self, step: int, metrics: dict[str, float], model: LanguageModel) -> None: ...
    def on_checkpoint(self, step: int, seconds: float) -> None: ...
    def on_event(self, step: int, event: dict[str, Any]) -> None: ...


class Meter:
    """Figures since the last report: means weighted by tokens, and where the time went. A checkpoint keeps it (`state`), so
    that the first report after a kill is of all its steps."""

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
        if "skipped" in metrics:  # what may be NaN is in its event
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
