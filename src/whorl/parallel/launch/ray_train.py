"""The ranks as workers of Ray Train, started again as a whole after one was lost; their output comes to the driver."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from whorl.errors import LOST, ConfigError
from whorl.parallel.launch.spec import LAUNCHER, LaunchSpec, describe, ends_the_run
from whorl.parallel.process_group import ReplicaError


def run_ray(spec: LaunchSpec) -> int:
    """Run the ranks on the cluster of RAY_ADDRESS, or on a local one; return their exit code.

    Raises:
        ConfigError: Ray Train is not installed. ReplicaError: ranks were lost too often.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.util.queue import Queue
    except ImportError as error:
        raise ConfigError("Ray Train is not installed", do="pip install 'whorl[ray]'") from error
    if started := not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    cpus = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
    if cpus < spec.ranks:
        print(f"whorl: Ray waits for {spec.ranks} CPUs, one for each rank; it has {cpus:.0f}", flush=True)
    output: Any = Queue(actor_options={"num_cpus": 0})
    codes = list[int]()
    printer = threading.Thread(target=_receive, args=(output, codes), daemon=True)
    printer.start()
    with tempfile.TemporaryDirectory(prefix="whorl-ray-") as folder:
        trainer = TorchTrainer(
            _run_rank,
            train_loop_config={"command": spec.rank, "directory": str(Path.cwd()), "output": output},
            scaling_config=ScalingConfig(num_workers=spec.ranks),
            run_config=RunConfig(
                name=spec.label, storage_path=folder,
                failure_config=FailureConfig(max_failures=spec.restarts),
            ),
            torch_config=TorchConfig(backend="gloo"),
        )  # fmt: skip
        try:
            trainer.fit()
        except Exception as error:
            raise ReplicaError(
                f"Ray Train ended after {spec.restarts} restarts: {error}", do="the same command continues"
            ) from error
        finally:
            output.put(None)
            printer.join(5)
            output.shutdown()
            if started:
                ray.shutdown()
    return codes[-1] if codes else LOST


def _receive(output: Any, codes: list[int]) -> None:
    """Print lines until None comes; numbers are exit codes of rank 0."""
    while (message := output.get()) is not None:
        if isinstance(message, int):
            codes.append(message)
        else:
            print(message, end="", flush=True)


def _run_rank(config: dict[str, Any]) -> None:
    """Run one rank in a child process; Ray has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    import ray.train

    rank, output = ray.train.get_context().get_world_rank(), config["output"]
    own = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store of Ray's group
    process = subprocess.Popen(
        config["command"], cwd=config["directory"], env={**os.environ, **own},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    for line in process.stdout or ():
        output.put(line)
    code = process.wait()
    if not ends_the_run(code):
        text = describe({rank: code})
        output.put(f"whorl: {text}; all ranks start again from the newest checkpoint\n")
        raise RuntimeError(text)
    if rank == 0:
        output.put(code)
