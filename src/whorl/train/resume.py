"""The start of a run: its checkpoints, and the state from which it continues."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from whorl.errors import DataError
from whorl.parallel.distributed import DistributedGroup
from whorl.parallel.process_group import ProcessGroup
from whorl.store.address import canonical_json
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.learner.learner import SharedState
from whorl.train.resilience.rollback import ensure_local_snapshot
from whorl.train.task import ResumePoint, RunOptions, Task

Log = Callable[[str], None]


def open_checkpoints(task: Task[Any], options: RunOptions, log: Log = lambda text: None) -> CheckpointManager:
    """Return the checkpoints in `options.scratch`, a context."""
    assert options.scratch is not None
    return CheckpointManager(
        options.scratch, task.identity, seconds=options.checkpoint_seconds, log=log,
        config=options.checkpoint_config, stats=options.checkpoint_stats,
    )  # fmt: skip


def resume(
    task: Task[Any], options: RunOptions, checkpoints: CheckpointManager | None, last: int, log: Log
) -> tuple[SharedState, ResumePoint]:
    """Allocate the state, restored from the newest checkpoint if there is one. last: step of this call."""
    found = task.find_checkpoint(checkpoints) if checkpoints is not None else None
    if found is None:
        task.prepare()
    else:  # the tensors are views of a buffer that the next checkpoint uses
        own = {n: t.clone() for n, t in found.tensors.items() if not n.startswith(SharedState.PREFIXES)}
        task.load_state_dict(found.metadata.get("task", found.metadata), own)
    shared = task.allocate(options.replicas)
    if options.ema:
        shared.allocate_averages(options.replicas)
    first, metadata = 0, dict[str, Any]()
    if found is not None and checkpoints is not None:
        first, metadata = found.step, found.metadata
        restore(
            shared.tensors(), {n: t for n, t in found.tensors.items() if n.startswith(SharedState.PREFIXES)}
        )
        is_branch = bool(metadata.get("is_branch"))
        metadata = ensure_local_snapshot(checkpoints, metadata, first, shared.tensors(), overwrite=is_branch)
        if not is_branch:
            log(f"continues at step {first:,} of {task.steps:,}")
    if checkpoints is not None:
        parameters = sum(p.numel() for p in task.networks.parameters())
        checkpoints.prepare({**shared.tensors(), **task.tensors()}, parameters)
    return shared, ResumePoint(first, last, metadata)


def join_world(
    task: Task[Any],
    group: ProcessGroup,
    checkpoints: CheckpointManager | None,
    owners: Mapping[str, int],
    save: Callable[[], object],
) -> None:
    """Prepare the ranks of a world to save pieces, after a comparison of their jobs and data.

    owners: of parameters by name. save: called on the other ranks when rank 0 saves between two steps.

    Raises:
        DataError: a rank has another job or other data.
    """
    if not isinstance(group, DistributedGroup):
        return
    group.on_request = save
    own = int(hashlib.sha256(canonical_json(task.identity)).hexdigest()[:12], 16)
    found = [int(each) for (each,) in group.all_gather_scalars(float(own))]
    if differing := [rank for rank, each in enumerate(found) if each != found[0]]:
        raise DataError(
            f"the ranks {differing} have another job or other data than rank 0",
            expected="the same settings, and the same files under the same paths, on all machines",
        )
    if checkpoints is not None:
        checkpoints.join(group, owners)
