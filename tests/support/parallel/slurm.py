"""A private Slurm on loopback: one controller, and nodes that are all this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=1
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def private_slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start Slurm in a folder; yield the environment of its commands. Skips where it cannot be started."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))) or os.getuid():
        pytest.skip("needs Debian's slurm-wlm, and root to start it")
    (folder / "state").mkdir(parents=True)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, ports=free_ports(2), host=socket.gethostname()))
    env = {**os.environ, "SLURM_CONF": str(config)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    daemons = [
        subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        for command in (["slurmctld", "-D", "-i"], ["slurmd", "-D"])
    ]
    try:
        deadline = time.monotonic() + 20
        while "idle" not in slurm(env, "sinfo", "-h", "-o", "%T") and time.monotonic() < deadline:
            time.sleep(0.1)
        yield env
    finally:
        slurm(env, "scancel", "--user=root", "--full", "--signal=KILL")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


def slurm(env: Mapping[str, str], *command: str) -> str:
    """Run a command of Slurm; return its output."""
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout.strip()
