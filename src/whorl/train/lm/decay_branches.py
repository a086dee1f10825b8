"""Decay branches: one stable run that serves several budgets.

With the warmup-stable-decay schedule (`lr_schedule.py`) the plateau does not depend on the run's length. So a run for a
quarter of the steps equals the long run until its decay starts (Hu et al. 2024, MiniCPM, arXiv:2404.06395, section 4;
Haegele et al. 2024, arXiv:2405.18392). For T steps, decay ratio d and branches at fractions s of T, the cost is T (1 +
d sum s) steps instead of T (1 + sum s). With d = 0.5:

    steps           0       0.125 T   0.25 T           0.5 T                      T
    stable run      warm-up ---+---------+---------------+ decay ................ model for T
    fraction 0.25              + decay . model for 0.25 T
    fraction 0.5                         + decay ....... model for 0.5 T

`pretrain.decay_branches = [0.25, 0.5]` saves the state at each branch point and stores it in the model artifact
(`stable/0.25/`, checkpoint format). A `decay_branch` step with `fraction = 0.25` and the model as parent resumes that
state and decays. A branch is a separate step, so it is an ordinary model artifact. A state takes about three times the
weights.

A branch equals, bit for bit, the run planned for its steps. The state holds everything that the next step depends on. The
branch warms up over the stable run's warm-up *steps*. It starts at the first step at which the two schedules differ.
Rollbacks are the exception: snapshots are taken every eighth of a run's own steps (`spike_guard.snapshot_every`), and a
branch starts with a snapshot of its branch point.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from whorl.errors import ConfigError, one_of
from whorl.train.checkpoint.manager import BRANCH_FOLDER, branch_folder
from whorl.train.config import ScheduleConfig
from whorl.train.job import Job, row_shape
from whorl.train.optim.lr_schedule import lr_scale, warmup_steps

if TYPE_CHECKING:
    from whorl.train.checkpoint.format import Checkpoint
    from whorl.train.checkpoint.manager import CheckpointManager

MAY_DIFFER = ("steps", "schedule")  # between a stable run and its branches


def min_fraction(schedule: ScheduleConfig) -> float:
    """The smallest fraction (exclusive) whose decay starts after the warm-up; 0 if the warm-up is given in steps."""
    return (
        schedule.warmup_ratio / (1 - schedule.decay_ratio)
        if schedule.warmup_steps is None and schedule.decay_ratio < 1
        else 0.0
    )


def check_fractions(fractions: Iterable[float], schedule: ScheduleConfig) -> None:
    """Check the fractions of a recipe before there is a plan.

    Raises:
        ValueError: (for pydantic) invalid fractions, or a schedule without a plateau.
    """
    fractions = list(fractions)
    for share in fractions:
        if not 0 < share < 1:
            raise ValueError(f"decay_branches: {share:g} is not a fraction of the run: between 0 and 1")
    if len(set(fractions)) < len(fractions):
        raise ValueError(f"decay_branches: {fractions} contains a duplicate")
    if fractions and (schedule.kind != "wsd" or schedule.decay_ratio == 1):
        what = f"kind = {schedule.kind!r}" if schedule.kind != "wsd" else "decay_ratio = 1"
        raise ValueError(f"decay_branches start on a plateau, which a schedule with {what} does not have")
    if fractions and min(fractions) <= min_fraction(schedule):
        raise ValueError(
            f"decay_branches: {min(fractions):g} would decay within the warm-up: above {min_fraction(schedule):.2g} "
            "(warmup_ratio / (1 - decay_ratio))"
        )


def branch_job(job: Job, fraction: float) -> Job:
    """Return the job that a branch is equal to: `fraction` of the steps of `job`, with the same warm-up in steps."""
    schedule = {
        "warmup_steps": warmup_steps(job.steps, job.schedule),
        "warmup_ratio": ScheduleConfig().warmup_ratio,
    }
    return job.model_copy(
        update={
            "steps": round(fraction * job.steps),
            "seconds": None,
            "schedule": job.schedule.model_copy(update=schedule),
        }
    )


def branch_step(job: Job, fraction: float) -> int:
    """Return the number of steps of `job` after which the branch starts.

    Raises:
        ConfigError: with so few steps there is no plateau or no decay.
    """
    branch = branch_job(job, fraction)

    def stable(step: int) -> float:
        return lr_scale(step, job.steps, job.schedule)

    steps = range(branch.steps)

    def differs(step: int) -> bool:
        is_decayed = lr_scale(step, branch.steps, branch.schedule) != stable(step)
        return is_decayed or row_shape(branch, step) != row_shape(job, step)

    at = next((step for step in steps if differs(step)), branch.steps)
    if not 0 < at < branch.steps or stable(at - 1) < 1:
        why = "no plateau between warm-up and decay" if at < branch.steps else "nothing to decay"
        raise ConfigError(
            f"decay_branches: {fraction:g} of {job.steps:,} steps are {branch.steps:,}, "
            + ("all of them" if branch.steps == job.steps else f"which leaves {why}"),
            do="choose another fraction in pretrain.decay_branches, or train longer",
        )
    return at


def export_branches(
    scratch: Path,
    out: Path,
    steps_by_fraction: Mapping[float, int],
    log: Callable[[str], None] = lambda _: None,
) -> list[float]:
    """Copy the saved branch states to `out`; return the fractions whose state was found.

    A run that resumed on another machine from remote storage lacks the states saved by the first machine.
    """
    kept = []
    for share, step in steps_by_fraction.items():
        found = branch_folder(scratch, step) / f"step-{step:08d}"
        if found.exists():
            shutil.copytree(found, out / BRANCH_FOLDER / str(share))
            kept.append(share)
        else:
            log(f"the stable state of step {step:,} is missing: this model has no branch at {share:g}")
    return kept


def branch_state_folder(model: Path, fraction: float) -> Path:
    """Return the folder of a branch state in a pretrained model's folder.

    Raises:
        ConfigError: there is no state for this fraction.
    """
    found = sorted(path.name for path in (model / BRANCH_FOLDER).glob("*"))
    if str(fraction) not in found:
        raise ConfigError(
            f"the model has no stable state for the fraction {fraction:g}",
            expected=one_of(str(fraction), found) if found else "",
            do=f"set it before training, pretrain.decay_branches = [{fraction:g}]; a run that resumed on another machine "
            "from remote storage lacks the earlier states",
        )
    return model / BRANCH_FOLDER / str(fraction)


def load_branch(checkpoints: CheckpointManager, folder: Path) -> Checkpoint:
    """Return the state in `folder`, from which a branch continues as if it were its checkpoint.

    Raises:
        CheckpointError: damaged, or of a job that differs in more than its budget.
    """
    found = checkpoints.load_branch(folder, MAY_DIFFER)
    state = {**found.metadata.get("task", {}), "meter": None}
    return replace(found, metadata={**found.metadata, "task": state, "is_branch": True})
