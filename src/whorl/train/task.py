"""A task: what a trainer trains. Pretraining, fine-tuning, preferences, RL, distillation, embedders and agents are tasks.

    networks, allocate, make_learner      what is trained, and with which loss and optimizers
    batches, minibatches, sync_weights    the choices of the loop (`learner/loop.py`)
    report, evaluate                      what is measured
    tensors, state_dict                   further state of a checkpoint

Everything else belongs to the trainer (`trainer.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.train.checkpoint.format import Checkpoint
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.stats import CheckpointStats
from whorl.train.config import CheckpointConfig, FiniteGuardConfig, RoutingConfig, SpikeGuardConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.resilience.oom_advice import OutOfMemoryError, describe, is_out_of_memory
from whorl.train.resilience.preemption import INTERRUPTIBLE

R = TypeVar("R")


@dataclass(frozen=True)
class RunOptions:
    """How a task runs. Apart from rounding, only `spike_guard`, `ema` and `routing` decide a weight.

    Args:
        scratch: folder of checkpoints; None keeps none, and SIGTERM is not handled.
        checkpoint_seconds: time between checkpoints.
        checkpoint_config: retention and remote storage.
        checkpoint_stats: updated with counts and stall times.
        replicas: processes, this one included.
        threads: of each replica; None leaves torch's setting.
        spike_guard: when a batch is skipped, and when the weights are rolled back; by default non-finite batches only.
        ema: decay per step of averaged weights, which the networks have at the end; 0 for none.
        routing: load balancing of mixtures of experts.
        deterministic: no timing decides a bit (`determinism.py`).
        branch_points: steps after which the state is saved for a decay branch (`lm/decay_branches.py`).
        heartbeat_dir: where the heartbeat and, after a stall, stack traces are written; None for neither.
    """

    scratch: Path | None = None
    checkpoint_seconds: float = 30.0
    checkpoint_config: CheckpointConfig | None = None
    checkpoint_stats: CheckpointStats | None = None
    replicas: int = 1
    threads: int | None = None
    spike_guard: SpikeGuardConfig = field(default_factory=FiniteGuardConfig)
    ema: float = 0.0
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    deterministic: bool = False
    branch_points: Collection[int] = ()
    heartbeat_dir: Path | None = None

    def check(self, unsupported: Mapping[str, str]) -> None:
        """Refuse options that a task does not support, with its reason.

        Raises:
            ConfigError: one of them differs from its default.
        """
        usual = RunOptions()
        for name, why in unsupported.items():
            if getattr(self, name) != getattr(usual, name):
                raise ConfigError(f"{name} is {getattr(self, name)}: {why}", do="remove it")


@dataclass(frozen=True)
class ResumePoint:
    """Steps done, the last step of this call, and the metadata of the checkpoint (empty without one)."""

    first: int
    last: int
    metadata: Mapping[str, Any]


class TrainCallback(Protocol):
    """Receives the results of rank 0. All calls happen between updates; `on_step` may raise `StopTraining`."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        return None

    def on_evaluation(self, step: int, metrics: dict[str, float], networks: Any) -> None:
        return None

    def on_checkpoint(self, step: int, seconds: float) -> None:
        return None

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        return None


class StepFunction(TrainCallback):
    """A callback made of a function of step and metrics.

    receiver: the start, evaluations, checkpoints and events go to its methods of these names, if it has them; default: the
        function.
    """

    def __init__(self, function: Callable[[int, dict[str, float]], None], receiver: object = None) -> None:
        self.function, self.receiver = function, function if receiver is None else receiver

    def on_start(self, steps: int) -> None:
        """Give the receiver the number of steps of the whole run, for its progress bar."""
        self._forward("on_start", steps)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.function(step, metrics)

    def on_evaluation(self, step: int, metrics: dict[str, float], networks: Any) -> None:
        self._forward("on_evaluation", step, metrics, networks)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self._forward("on_checkpoint", step, seconds)

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self._forward("on_event", step, event)

    def _forward(self, name: str, *values: Any) -> None:
        if (method := getattr(self.receiver, name, None)) is not None:
            method(*values)


class Task(ABC, Generic[R]):
    """Networks, data and state of one kind of training. `R` is a record of `batches`.

    The task of rank 0 is pickled for the other replicas, before `make_learner`. So what cannot be pickled, such as
    readers, is made there, and callbacks belong to the trainer.

    steps: records of the whole run.
    dtype: in which the networks compute; float16 scales the loss.
    uniform_loss: of a uniform prediction in nats, above which the spike guard sees divergence; None: never.
    interruptible: phases of the loop that change no state, so that SIGTERM may interrupt them.
    unsupported: options that make no sense for this task, with the reason.
    """

    steps: int
    networks: nn.Module
    dtype: torch.dtype = torch.float32
    uniform_loss: float | None = None
    interruptible: Collection[str] = INTERRUPTIBLE
    unsupported: ClassVar[Mapping[str, str]] = {}

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON that must be equal for a checkpoint to fit: everything that decides the weights."""

    # Rank 0, before the replicas start.

    def find_checkpoint(self, checkpoints: CheckpointManager) -> Checkpoint | None:
        """Return the state to continue from, or None."""
        return checkpoints.resume()

    def prepare(self) -> None:
        """Compute what later steps need from the initial networks. Not called for a resumed run: see `tensors`."""

    @abstractmethod
    def allocate(self, replicas: int) -> SharedState:
        """Allocate weights, gradients and optimizer state of `networks`."""

    # Every rank.

    @abstractmethod
    def make_learner(self, trainer: Any) -> Learner:
        """Return the learner on `trainer.shared`; each update has `trainer.accept_step` and `trainer.loss_scaler`.

        trainer: the `Trainer` of this rank.
        """

    @abstractmethod
    def batches(self, first: int) -> AbstractContextManager[Iterator[R]]:
        """Return a context that yields the records from number `first` on."""

    @abstractmethod
    def minibatches(self, record: R) -> Iterable[Sequence[MicroBatch]]:
        """Yield the passes over a record, each a list of this rank's micro-batches."""

    def lr_scale(self, step: int) -> float:
        """Return the factor on every learning rate at a step."""
        return 1.0

    def sync_weights(self, steps_done: int) -> None:
        """Publish the weights to producers that act with them."""

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        """Return the metrics for `TrainCallback.on_step`, or None at steps without a report. Called after every step."""
        times = {f"time/{name}": seconds for name, seconds in clock.pop_seconds().items()}
        return {**{name: value for name, value in metrics.items() if math.isfinite(value)}, **times}

    def evaluate_at(self, steps_done: int) -> bool:
        """Whether `evaluate` runs after this step."""
        return False

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the current weights (the averages, with EMA), which are in evaluation mode."""
        return {}

    def keep_best(self, steps_done: int, metrics: dict[str, float]) -> dict[str, float]:
        """Save or restore the best weights after an evaluation; return its metrics, of the restored weights if any."""
        return metrics

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats | None:
        """Return the layer statistics, or None."""
        return None

    def may_save(self, steps_done: int) -> bool:
        """Whether a run may continue from this step with the bits of an undisturbed one."""
        return True

    def close(self) -> None:
        """Release what `make_learner` made."""

    # Further state of a checkpoint. Tensors are read when one is taken, `state_dict` after every step.

    def tensors(self) -> dict[str, Tensor]:
        """Return further tensors of rank 0, in addition to those of the learner."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return JSON that the next step depends on."""
        return {}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore both. Rank 0, before the replicas start."""

    # Error reports.

    def documents(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return the documents in the batch of a step, for an event: {"documents": [...], "n_documents": n}, or {}.

        state: `state_dict` before that step.
        """
        return {}

    def explain(self, error: Exception) -> OutOfMemoryError | None:
        """Return an error with advice in place of `error`, or None."""
        return self.out_of_memory(error) if is_out_of_memory(error) else None

    def out_of_memory(self, error: Exception) -> OutOfMemoryError:
        """Return the error with the settings to reduce."""
        what, remedies = describe(error, next(self.networks.parameters()).device.type)
        return OutOfMemoryError(what, do="; ".join([*remedies, "lower the batch size"]))
