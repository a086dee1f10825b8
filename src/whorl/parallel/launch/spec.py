"""The ranks of a run: their command, their number, their nodes; and which of their exit codes start them again."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from whorl.errors import LOST, LOST_HELPER, ConfigError
from whorl.machine.process import describe_exit

ATTEMPT = "WHORL_ATTEMPT"  # environment variable: name of this start of the ranks, the same on all of them
LOSSES = {LOST: "lost another rank", LOST_HELPER: "lost a helper process"}  # exit codes of a rank
LAUNCHER = "WHORL_LAUNCHER"  # environment variable: process whose end ends the rank


@dataclass(frozen=True)
class LaunchSpec:
    """The ranks of a run.

    Args:
        name: of the run, for the scheduler.
        rank: command of every rank. node: command that starts the ranks of one node, for a scheduler.
        ranks: in total, the same number on each of `nodes`.
        rendezvous: HOST:PORT of the first node, where several nodes meet.
        restarts: how often all ranks start again after one was lost.

    Raises:
        ConfigError: the ranks cannot be shared by the nodes; several nodes without a rendezvous are refused later.
    """

    name: str
    rank: tuple[str, ...]
    node: tuple[str, ...] = ()
    ranks: int = 1
    nodes: int = 1
    rendezvous: str = ""
    restarts: int = 5

    def __post_init__(self) -> None:
        if self.ranks % self.nodes:
            below = self.ranks - self.ranks % self.nodes
            nearest = [n for n in (below, below + self.nodes) if n]
            raise ConfigError(
                f"--ranks {self.ranks} on --nodes {self.nodes}",
                expected=f"the same number of ranks on each node, such as {' or '.join(map(str, nearest))} ranks",
            )

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def label(self) -> str:
        """The name in the form that schedulers and clusters accept."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].rstrip("-") or "whorl"


def ends_the_run(code: int) -> bool:
    """Return whether an exit code is final: neither a signal from outside nor the loss of another process."""
    return code >= 0 and code not in LOSSES


def describe(codes: Mapping[int, int]) -> str:
    """Return the ranks that failed, from exit codes in the order of their ends: "rank 1 was killed by SIGKILL".

    The others lost it, or were stopped after it.
    """
    own = {
        rank: code
        for rank, code in codes.items()
        if code not in (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)
    }
    found = own or dict([*codes.items()][:1])
    return "; ".join(f"rank {rank} {LOSSES.get(code) or describe_exit(code)}" for rank, code in found.items())
