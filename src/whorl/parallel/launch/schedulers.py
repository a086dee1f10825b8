"""Slurm and Kubernetes: the text that starts an elastic agent (`elastic.py`) on each node, and the program that submits it.

Both send a signal before they take a node away. The agent passes it on, rank 0 writes a checkpoint and exits with 143, and
the scheduler starts the same command again, which continues. A rank that is killed is started again by its agent; a
killed agent ends its ranks, and the scheduler starts all agents again.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whorl.errors import LOST, ConfigError, WhorlError
from whorl.parallel.launch.spec import LaunchSpec

WARNING_SECONDS = 120  # between the signal and the end
PORT = 29400

SLURM = """\
#!/bin/bash
#SBATCH --job-name={label}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
#SBATCH --signal=B:USR1@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={label}-%j.out

# Several nodes meet at the first. The port follows from the job's number, so that two jobs on one node differ.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 {command} &
step=$!
# Before the time limit: a checkpoint, then another turn in the queue. After a kill: at most {restarts} more turns.
trap 'turn=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
while kill -0 $step 2>/dev/null; do wait $step; code=$?; done
[[ $code =~ ^({lost}|137)$ && ${{SLURM_RESTART_COUNT:-0}} -lt {restarts} ]] && turn=1
[ $code -eq 0 ] || [ -z "$turn" ] || scontrol requeue "$SLURM_JOB_ID"
exit $code
"""

KUBERNETES = """\
# Edit image, volume and resources as the cluster has them. All pods need the same store: a shared volume, or --store URL.
apiVersion: v1
kind: Service
metadata: {{name: {label}}}
spec:
  clusterIP: None
  selector: {{job-name: {label}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {label}}}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {restarts}
  podFailurePolicy:
    rules:
    - action: FailJob
      onExitCodes: {{containerName: whorl, operator: In, values: [1, 2]}}
    - action: Ignore
      onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  template:
    spec:
      subdomain: {label}
      restartPolicy: Never
      terminationGracePeriodSeconds: {seconds}
      containers:
      - name: whorl
        image: whorl:latest
        command: {command}
        env: [{{name: WHORL_HOME, value: /store}}]
        resources: {{requests: {{cpu: "{cpus}"}}}}
        volumeMounts: [{{name: store, mountPath: /store}}]
      volumes: [{{name: store, persistentVolumeClaim: {{claimName: whorl}}}}]
"""


@dataclass(frozen=True)
class BatchSystem:
    """How a scheduler gets a job. submit: reads `text` from standard input. package: what has its program."""

    text: Callable[[LaunchSpec], str]
    submit: tuple[str, ...]
    package: str


def _fields(spec: LaunchSpec) -> dict[str, object]:
    return {
        "label": spec.label, "nodes": spec.nodes, "cpus": spec.ranks_per_node, "restarts": spec.restarts,
        "seconds": WARNING_SECONDS, "lost": LOST,
    }  # fmt: skip


def slurm_script(spec: LaunchSpec) -> str:
    """Return a script for `sbatch`."""
    meeting = ' --rendezvous "$head:$((20000 + SLURM_JOB_ID % 20000))"' if spec.nodes > 1 else ""
    return SLURM.format(command=shlex.join(spec.node) + meeting, **_fields(spec))


def kubernetes_manifest(spec: LaunchSpec) -> str:
    """Return a headless service and an indexed job, whose pod 0 is the rendezvous."""
    command = [*spec.node, "--rendezvous", f"{spec.label}-0.{spec.label}:{PORT}"]
    return KUBERNETES.format(command=json.dumps(["whorl", *command[3:]]), **_fields(spec))


SCHEDULERS = {
    "slurm": BatchSystem(slurm_script, ("sbatch",), "slurm-client (Debian), on a login node of the cluster"),
    "kubernetes": BatchSystem(kubernetes_manifest, ("kubectl", "apply", "-f", "-"), "kubectl, with access to the cluster"),
}  # fmt: skip


def write_job(scheduler: str, spec: LaunchSpec, path: Path) -> None:
    """Write the text for a scheduler into a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(SCHEDULERS[scheduler].text(spec))
    except OSError as error:
        raise ConfigError(
            f"--write {path}: {error.strerror}", expected="a file that can be written"
        ) from error


def submit_job(scheduler: str, spec: LaunchSpec) -> str:
    """Give a job to a scheduler; return the answer of its program.

    Raises:
        ConfigError: the program is not installed. WhorlError: it failed, with its message.
    """
    found = SCHEDULERS[scheduler]
    if shutil.which(found.submit[0]) is None:
        raise ConfigError(
            f"{found.submit[0]} is not installed, so nothing can be given to {scheduler}",
            expected=found.package, do=f"--write FILE, and `{' '.join(found.submit).rstrip(' -')} FILE` where it is",
        )  # fmt: skip
    done = subprocess.run(found.submit, input=found.text(spec), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip()
        raise WhorlError(
            f"{' '.join(found.submit)} failed: {last}", do="--write FILE shows what was submitted"
        )
    return done.stdout.strip()
