"""The agent of one node, of torch's elastic launcher (torchrun): starts the ranks, and all again after one was lost.

It differs from `torchrun` in three points. A rank that ends with an error ends the run, since the same error would come
again. A rank that was killed is named. All nodes agree on a name of the attempt, through the store of their rendezvous.
The ranks use it as the prefix of their store: keys of the attempt before would mix with the new ones.

Ranks that neither died nor answered may wait in different collectives. So after a timeout the next attempt runs with
TORCH_DISTRIBUTED_DEBUG=DETAIL, under which torch names both calls and their ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, registry

from whorl.errors import LOST, ConfigError
from whorl.parallel.launch.spec import ATTEMPT, LAUNCHER, LaunchSpec, describe, ends_the_run
from whorl.parallel.process_group import ReplicaError

STOP_SECONDS = 90  # after SIGTERM, for a checkpoint; then SIGKILL
SAME_SECONDS = 10  # between the ends of ranks of one cause; a frozen one is killed 30 s after the first
RENDEZVOUS_SECONDS = 900  # for all nodes to start


def run_elastic(spec: LaunchSpec) -> int:
    """Run this node's ranks; return their exit code, 128 + the signal if one stopped this process.

    Raises:
        ConfigError: several nodes without a rendezvous. ReplicaError: ranks were lost too often, or another node was.
    """
    if spec.nodes > 1 and not spec.rendezvous:
        raise ConfigError(
            f"--nodes {spec.nodes} without a rendezvous", expected="--rendezvous HOST:PORT, the same on each node",
            do="give host and a free port of the first node; with `--on slurm` the script does so",
        )  # fmt: skip
    logging.disable(logging.CRITICAL)  # the messages below replace those of the elastic launcher
    os.environ[LAUNCHER] = str(os.getpid())
    endpoint, local = spec.rendezvous or "localhost:0", None if spec.rendezvous else "localhost"
    run_id = spec.name if spec.rendezvous else uuid.uuid4().hex
    meeting = RendezvousParameters(
        "c10d", endpoint, run_id, spec.nodes, spec.nodes, local, timeout=RENDEZVOUS_SECONDS, join_timeout=RENDEZVOUS_SECONDS
    )  # fmt: skip
    try:
        workers = WorkerSpec(
            role=spec.name, local_world_size=spec.ranks_per_node, entrypoint=spec.rank[0], args=spec.rank[1:],
            rdzv_handler=registry.get_rendezvous_handler(meeting), max_restarts=spec.restarts,
            monitor_interval=0.1, local_addr=local,
        )  # fmt: skip
        agent = _Agent(workers, DefaultLogsSpecs(os.devnull), shutdown_timeout=STOP_SECONDS)
        result: RunResult = agent.run()
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except RendezvousError as error:
        raise ReplicaError(
            f"the nodes did not meet at {endpoint}: {error}",
            do="start the same command on each node; a host and port that all nodes reach",
        ) from error
    if not result.is_failed():
        return 0
    codes = _codes(result)
    first = next(iter(codes.values()))
    if ends_the_run(first):
        return first
    raise ReplicaError(
        f"{describe(codes)}, and {spec.restarts} restart{'s' * (spec.restarts != 1)} did not help",
        do="SIGKILL without a cause is the kernel's when memory is full: fewer ranks per node, or smaller batches; "
        "the same command continues",
    )


def _codes(result: RunResult) -> dict[int, int]:
    """Return the exit codes of the ranks that failed, without those that had to be killed after them.

    Ranks that died come first: an error of another one follows from it, whichever was noticed first. Then the first ones.
    """
    failures = result.failures
    first = next(iter(failures.values())).timestamp
    codes = [(rank, f.exitcode) for rank, f in failures.items() if f.timestamp - first < SAME_SECONDS]
    return dict(sorted(codes, key=lambda each: each[1] >= 0 or each[1] == -signal.SIGTERM))


class _Agent(LocalElasticAgent):
    """See the top of this file."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        store: Any = worker_group.store  # of this round of the rendezvous
        if worker_group.group_rank == 0:
            store.set(ATTEMPT, uuid.uuid4().hex)
        os.environ[ATTEMPT] = store.get(ATTEMPT).decode()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.FAILED:
            return result
        codes = _codes(result)
        if ends_the_run(next(iter(codes.values()))):
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            if all(code in (LOST, -signal.SIGTERM) for code in codes.values()):
                os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            done = self._worker_group.spec.max_restarts - self._remaining_restarts
            print(
                f"whorl: {describe(codes)}; all ranks start again from the newest checkpoint ({done + 1} of "
                f"{self._worker_group.spec.max_restarts})",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return result
