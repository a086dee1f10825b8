"""The ranks as workers of Ray Train: one process per worker, started again as a whole after one was lost."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError
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
    except ImportError as error:
        raise ConfigError("Ray Train is not installed", do="pip install 'whorl[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False)
    with tempfile.TemporaryDirectory(prefix="whorl-ray-") as folder:
        trainer = TorchTrainer(
            _run_rank,
            train_loop_config={"command": spec.rank, "directory": str(Path.cwd())},
            scaling_config=ScalingConfig(num_workers=spec.ranks),
            run_config=RunConfig(
                name=spec.label, storage_path=folder, failure_config=FailureConfig(max_failures=spec.restarts)
            ),
            torch_config=TorchConfig(backend="gloo"),
        )
        try:
            result = trainer.fit()
        except Exception as error:
            raise ReplicaError(f"Ray Train gave up after {spec.restarts} restarts: {error}") from error
        finally:
            if started:
                ray.shutdown()
    return int((result.metrics or {}).get("code", 1))


def _run_rank(config: dict[str, Any]) -> None:
    """Run one rank in a child process; Ray has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    own = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store of Ray's group
    code = subprocess.run(
        config["command"], cwd=config["directory"], env={**os.environ, **own}, check=False
    ).returncode
    if not ends_the_run(code):
        raise RuntimeError(describe({rank: code}))
    ray.train.report({"code": code})
