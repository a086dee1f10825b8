"""Decay branches: one stable run that serves several budgets.

Under warm-up, stable, decay (`schedule.py`) the plateau does not know how long the run will be. So the run planned for a
quarter of the steps is, up to where its decay would begin, the *same* run; only the decay is its own (Hu et al. 2024,
MiniCPM, arXiv:2404.06395, section 4; Haegele et al. 2024, arXiv:2405.18392). For T steps, of which the share d decays, and
branches at the shares s of T, that is T (1 + d sum s) steps of training in place of T (1 + sum s). With d = 0.5:

    steps         0       0.125 T   0.25 T           0.5 T                      T
    stable run    warm-up ---+---------+---------------+ decay ................ model for T
    share 0.25               + decay . model for 0.25 T
    share 0.5                          + decay ....... model for 0.5 T

How the house is told: `pretrain.branches = [0.25, 0.5]` makes the step `pretrain` put the state aside where each decay
would begin, and keep it in its artifact (`stable/0.25/`, in the checkpoints' format); a step of the kind `branch`, with the
pretrained model as its parent and `share = 0.25`, resumes it and decays. A branch is a step of its own, and not a second
product of `pretrain`, because then it is a model like any other: with an address, a lineage, an evaluation, a report, a
resume of its own. It costs disk: a state is some three times the weights.

The subtle part: equal means bit for bit, to the run that was planned as (this plateau, that decay). So a state carries all
that the next step depends on: weights, moments, averages, the stream's position, the experts' loads, the guard's memory, the
generators. The data order knows no number of steps. And a branch warms up over the stable run's *steps*, not over a share of
its own. Where it begins is not computed but found: at the first step at which the two schedules differ.

Not equal is what a run goes back to when it goes astray: copies to go back to are made every eighth of a run's own steps
(`watch.good_every`). A branch begins with one, of where it branched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, one_of
from whorl.train.checkpoint.manager import BRANCH_FOLDER, branch_folder
from whorl.train.config import ScheduleConfig
from whorl.train.optim.lr_schedule import lr_scale, warmup_steps

if TYPE_CHECKING:
    from torch import Tensor

    from whorl.train.checkpoint.manager import CheckpointManager
    from whorl.train.job import Job

MAY_DIFFER = ("steps", "schedule")  # between a stable run and its branches


def min_fraction(schedule: ScheduleConfig) -> float:
    """The share above which the decay of a branch begins after the warm-up; 0 where that is given in steps."""
    return (
        schedule.warmup_ratio / (1 - schedule.decay_ratio)
        if schedule.warmup_steps is None and schedule.decay_ratio < 1
        else 0.0
    )


def check_fractions(fractions: Iterable[float], schedule: ScheduleConfig) -> None:
    """What a recipe can be told before there is a plan.

    Raises:
        ValueError: (for pydantic) shares that are none, or a schedule that cannot have them.
    """
    fractions = list(fractions)
    for share in fractions:
        if not 0 < share < 1:
            raise ValueError(f"branches: {share:g} is no share of the run: between 0 and 1")
    if len(set(fractions)) < len(fractions):
        raise ValueError(f"branches: {fractions} names one twice")
    if fractions and (schedule.kind != "wsd" or schedule.decay_ratio == 1):
        what = f"kind = {schedule.kind!r}" if schedule.kind != "wsd" else "decay = 1"
        raise ValueError(f"branches leave a plateau, which a schedule of {what} does not have")
    if fractions and min(fractions) <= min_fraction(schedule):
        raise ValueError(
            f"branches: {min(fractions):g} would decay within the warm-up: above {min_fraction(schedule):.2g} "
            f"(warmup / (1 - decay))"
        )


def branch_job(job: Job, fraction: float) -> Job:
    """The run for `share` of the steps of `job` that a branch is equal to: it warms up as long as `job` does."""
    schedule = {
        "warmup_steps": warmup_steps(job.steps, job.schedule),
        "warmup_ratio": ScheduleConfig().warmup_ratio,
    }
    return job.model_copy(
        update={"steps": round(fraction * job.steps), "schedule": job.schedule.model_copy(update=schedule)}
    )


def branch_step(job: Job, fraction: float) -> int:
    """After how many steps of `job` the branch begins.

    Raises:
        ConfigError: so few steps leave it no plateau, or nothing to decay.
    """
    branch = branch_job(job, fraction)

    def stable(step: int) -> float:
        return lr_scale(step, job.steps, job.schedule)

    steps = range(branch.steps)
    at = next((s for s in steps if lr_scale(s, branch.steps, branch.schedule) != stable(s)), branch.steps)
    if not 0 < at < branch.steps or stable(at - 1) < 1:
        why = "no plateau between warm-up and decay" if at < branch.steps else "nothing to decay"
        raise ConfigError(
            f"branches: {fraction:g} of {job.steps:,} steps are {branch.steps:,}, "
            + ("all of them" if branch.steps == job.steps else f"which leaves {why}"),
            do="name another share in pretrain.branches, or train longer",
        )
    return at


def export_branches(
    scratch: Path,
    out: Path,
    steps_by_fraction: Mapping[float, int],
    log: Callable[[str], None] = lambda _: None,
) -> list[float]:
    """Copies what was put aside into `out`; returns the shares whose state was there.

    A run that was continued on another machine, from the durable tier, lacks what the first one had put aside.
    """
    kept = []
    for share, step in steps_by_fraction.items():
        found = branch_folder(scratch, step) / f"step-{step:08d}"
        if found.exists():
            shutil.copytree(found, out / BRANCH_FOLDER / str(share))
            kept.append(share)
        else:
            log(
                f"the stable state of step {step:,} is not here any more: no branch at {share:g} from this model"
            )
    return kept


def branch_state_folder(model: Path, fraction: float) -> Path:
    """The state of a branch in the folder of a pretrained model.

    Raises:
        ConfigError: it has none of this share.
    """
    found = sorted(path.name for path in (model / BRANCH_FOLDER).glob("*"))
    if str(fraction) not in found:
        raise ConfigError(
            f"the model keeps no stable state at the share {fraction:g}",
            expected=one_of(str(fraction), found) if found else "",
            do=f"name it before training, pretrain.branches = [{fraction:g}]; a run that was continued on another machine "
            "from the durable tier has lost those of before",
        )
    return model / BRANCH_FOLDER / str(fraction)


def resume_from_branch(
    checkpointer: CheckpointManager, folder: Path, tensors: Mapping[str, Tensor]
) -> tuple[int, dict[str, Any]]:
    """Restores the state at `start` into `tensors`: how many steps are done, and the record.

    Raises:
        CheckpointError: damaged, or of a job that differs in more than its budget.
    """
    from whorl.train.checkpoint.format import restore
    from whorl.train.resilience.rollback import ensure_local_snapshot

    found = checkpointer.load_branch(folder, MAY_DIFFER)
    restore(tensors, found.tensors)
    record = ensure_local_snapshot(checkpointer, found.metadata, found.step, dict(tensors), overwrite=True)
    return found.step, {**record, "meter": None}
