"""The processes of `whorl serve`: replicas behind a router, and manifests for other machines."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whorl.engine.config import EngineConfig
    from whorl.serve.config import ServeConfig, ServerProcessesConfig


def print_manifest(
    model: str, server: ServeConfig, engine: EngineConfig, processes: ServerProcessesConfig, store: str | None
) -> None:
    """Print the manifest for `processes.manifest`. That for Ray has the addresses, sizes and paths of this machine."""
    from whorl.router.manifests import DeploymentSpec, manifest_for_command
    from whorl.serve.server import check_auth_required

    own = ("--manifest", "--replicas", "--max-num-seqs", "--drain", "--host", "--port")
    kind, words, sizes = processes.manifest or "", sys.argv[1:], dict[str, Any]()
    if kind == "ray":
        check_auth_required(server, processes.no_auth)
        # A folder here may have the verb's name.
        words = [str(Path(w).absolute()) if w != "serve" and Path(w).exists() else w for w in words]
        if Path(model).exists():
            model = str(Path(model).absolute())
        elif store is None:
            home = os.environ.get("WHORL_HOME") or ".whorl"
            words += ["--store", home if "://" in home else str(Path(home).absolute())]
        sizes = {"host": server.host, "port": server.port or 8000, **_sizes_of_machine(processes.replicas)}
    what = DeploymentSpec(
        model=model, replicas=processes.replicas, max_num_seqs=engine.max_num_seqs,
        drain_seconds=max(1, int(server.drain_seconds)), **sizes,
    )  # fmt: skip
    print(manifest_for_command(kind, what, words, own), end="")


def _sizes_of_machine(replicas: int) -> dict[str, Any]:
    """Return cores and memory of a replica, such that `replicas` fit on this machine, for `DeploymentSpec`."""
    import psutil

    from whorl.machine.device_probe import usable_cores

    # Ray offers the memory that is available at its start, without its object store, which takes 0.3 of it.
    memory = 0.5 * psutil.virtual_memory().available / 2**30 / replicas
    return {
        "cpus": max(1, min(4, usable_cores() // replicas)),
        "memory_gib": max(0.1, min(8.0, round(memory, 1))),
    }


def serve_replicas_of(server: ServeConfig, processes: ServerProcessesConfig) -> None:
    """Run several servers, each with the same options, behind a router."""
    from whorl.router.metrics import SLO
    from whorl.router.replica_processes import drop_options, serve_replicas
    from whorl.serve.app_state import LIMITS_FOLDER
    from whorl.serve.server import api_key_check

    same = drop_options(sys.argv[1:], ("--replicas", "--host", "--port"))
    print(
        f"starting {processes.replicas} replicas behind http://{server.host}:{server.port}",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="whorl-limits-") as folder:
        serve_replicas(
            [sys.executable, "-m", "whorl.cli", *same], processes.replicas, server.host, server.port,
            grace=server.drain_seconds + 10, slo=SLO(server.slo_ttft, server.slo_tpot), no_auth=processes.no_auth,
            is_api_key=api_key_check(server), env={LIMITS_FOLDER: folder},
        )  # fmt: skip
