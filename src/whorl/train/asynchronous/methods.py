"""The table of methods. It imports no torch, so that a recipe can be checked fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AsynchronousMethod:
    """One method of the family.

    staleness: of the reader (`reader.py`). local_steps: of a record; 0: it is a gradient. unlocked: workers move the tables.
    outer_lr, momentum: of the server's Nesterov steps on the mean change; 1 and 0 give the mean of the workers' weights.
    """

    about: str
    staleness: int | None = 0
    local_steps: int = 0
    unlocked: bool = False
    outer_lr: float = 1.0
    momentum: float = 0.0

    @property
    def sends_changes(self) -> bool:
        """Whether a record is the change of all weights in local steps."""
        return self.local_steps > 0 and not self.unlocked


_EACH, _LOCAL = "a step on each gradient when it is ready", "16 local steps, then"
METHODS = {
    "synchronous": AsynchronousMethod("a barrier, then a step on the mean gradient"),
    "bounded": AsynchronousMethod(f"{_EACH}; workers at most 2 clocks apart", staleness=2),
    "asynchronous": AsynchronousMethod(_EACH, staleness=None),
    "hogwild": AsynchronousMethod(
        "workers move the tables without a lock, the rest is synchronous", unlocked=True
    ),
    "local_sgd": AsynchronousMethod(f"{_LOCAL} the mean of the weights", local_steps=16),
    "diloco": AsynchronousMethod(f"{_LOCAL} a Nesterov step on the mean change", 0, 16, False, 1.0, 0.5),
}
