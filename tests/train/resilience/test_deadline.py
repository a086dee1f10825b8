"""The deadline of a run that was planned by time, under a clock that the test turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.parallel.process_group import ProcessGroup
from whorl.train.lm.pretrain import PretrainTask, pretrain
from whorl.train.resilience import deadline
from whorl.train.resilience.deadline import Deadline

STEPS, STEP_SECONDS = 400, 0.5
PLANNED = STEPS * STEP_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])
    return now


def finish(
    clock: list[float], slowness: Callable[[float], float], made: Deadline | None = None, until: int = 10**9
) -> tuple[int, float, list[float]]:
    """Return the steps, the seconds since the start and the planned steps of a run."""
    run, began, path, group = made or Deadline(STEPS, PLANNED), clock[0], list[float](), ProcessGroup()
    done = run.step
    while done < min(run.steps, until):
        path.append(run.planned(done))
        clock[0] += STEP_SECONDS * slowness((clock[0] - began) / PLANNED)
        done += 1
        run.follow(done, group)
    return done, clock[0] - began, path


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.04])
def test_run_on_time_keeps_its_steps(clock: list[float], slowness: float) -> None:
    steps, _, path = finish(clock, lambda share: slowness)
    assert steps == STEPS and path == list(range(STEPS))


@pytest.mark.parametrize(
    "slowness",
    [
        lambda share: 1.2,
        lambda share: 2.0,
        lambda share: 4.0,
        lambda share: 1.0 if share < 0.5 else 3.0,
        lambda share: 1.0 if share < 0.85 else 2.0,
        lambda share: 1.0 if int(share * 20) % 2 else 5.0,  # in turns
    ],
    ids=["1.2", "2", "4", "from half", "in the decay", "in turns"],
)
def test_slow_run_ends_on_time(clock: list[float], slowness: Callable[[float], float]) -> None:
    steps, seconds, path = finish(clock, slowness)
    assert steps < STEPS and 0.9 * PLANNED < seconds < 1.1 * PLANNED
    assert all(b - a >= 1 for a, b in itertools.pairwise(path))
    assert STEPS - path[-1] <= 2 * (path[-1] - path[-2])  # the last step is near the planned end


def test_rate_is_planned_again_on_free_machine(clock: list[float]) -> None:
    steps, seconds, path = finish(clock, lambda share: 3.0 if share < 0.3 else 1.0)
    assert path[-1] - path[-2] < 2.2 and seconds < 1.05 * PLANNED
    # 30 % of the time at a third of the speed, the rest at full speed: no time is left over
    assert steps > 0.95 * STEPS * (0.3 / 3 + 0.7)


def test_resume_continues_rate_and_seconds(clock: list[float]) -> None:
    run = Deadline(STEPS, PLANNED)
    done, before, _ = finish(clock, lambda share: 2.0, run, until=100)
    state = run.state_dict()
    clock[0] += 1e6  # the process is dead
    later = Deadline(STEPS, PLANNED, state)
    assert (later.steps, later.planned(done)) == (run.steps, run.planned(done)) and later.rate > 1.5
    later.step = done if (at := later.planned(done)) else 0
    later.planned_at = at
    _, after, _ = finish(clock, lambda share: 2.0, later)
    assert before + after < 1.1 * PLANNED


def test_stopped_process_still_decays(clock: list[float]) -> None:
    run = Deadline(STEPS, PLANNED)
    done, _, _ = finish(clock, lambda share: 1.0, run, until=200)
    clock[0] += 10 * PLANNED  # SIGSTOP
    rest = 0
    while done < run.steps:
        clock[0] += STEP_SECONDS
        done, rest = done + 1, rest + 1
        run.follow(done, ProcessGroup())
    assert 10 <= rest <= 30


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


class Slow(Notes):
    """Turns the clock by a step's seconds after each step."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        super().on_step(step, metrics)
        self.clock[0] += self.seconds


def test_training_decays_earlier_and_says_so(tokens: Path, tmp_path: Path, clock: list[float]) -> None:
    planned = job(
        tokens, steps=60, seconds=60.0, schedule={"warmup_steps": 2}, long_ratio=0.25,
        model=job(tokens).model.model_copy(update={"trained_length": 32}),
    )  # fmt: skip
    quiet, slow = Slow(clock, 1.0), Slow(clock, 2.0)
    pretrain(planned, tmp_path / "quiet", quiet)
    assert len(quiet.steps) == 60 and not quiet.events
    pretrain(planned, tmp_path / "slow", slow)
    assert 27 <= len(slow.steps) <= 33 and [event["kind"] for event in slow.events] == ["behind"]
    assert "behind its plan of 60 s, 60 steps" in slow.events[0]["message"]
    assert slow.steps[-1]["planned_steps"] == len(slow.steps) and "planned_steps" not in quiet.steps[-1]
    last, rates = len(slow.steps), [found["learning_rate"] for found in slow.steps]
    assert rates[-1] < 0.1 * max(rates) and len(slow.evaluations) >= 1
    assert slow.checkpoints[-1] == last

    # Interrupted and resumed, the steps and the decision of the checkpoint are kept.
    first, second = Slow(clock, 2.0), Slow(clock, 2.0)
    pretrain(planned, tmp_path / "cut", first, stop_after=20, checkpoint_seconds=0.0)
    clock[0] += 1e5
    pretrain(planned, tmp_path / "cut", second)
    assert len(first.steps) == first.checkpoints[-1] == 20 and 27 <= 20 + len(second.steps) <= 33
    assert 27 <= second.steps[0]["planned_steps"] <= 33, "the bar of a resumed run"


def test_jobs_without_seconds_follow_no_clock(tokens: Path, clock: list[float]) -> None:
    task = PretrainTask(job(tokens))
    clock[0] += 1e9
    assert not task.deadline.follow(1, ProcessGroup()) and task.deadline.steps == task.steps == 12
