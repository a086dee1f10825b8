"""Scripts for Slurm and manifests for Kubernetes, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from tests.support.cli import refuse, succeed

from whorl.errors import ConfigError
from whorl.parallel.launch.schedulers import kubernetes_manifest, slurm_script
from whorl.parallel.launch.spec import LaunchSpec

NODE = ("python", "-m", "whorl.cli", "launch", "my recipe.toml", "--on", "torchrun")
SPEC = LaunchSpec("My recipe", ("rank",), NODE, ranks=8, nodes=2)


def test_slurm_script_is_bash_with_a_rendezvous() -> None:
    script = slurm_script(SPEC)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for line in (
        "#SBATCH --job-name=my-recipe",
        "#SBATCH --nodes=2",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --requeue",
    ):
        assert f"{line}\n" in script
    assert "launch 'my recipe.toml' --on torchrun --rendezvous \"$head:" in script


def test_kubernetes_manifest_is_valid_and_meets_at_pod_zero() -> None:
    service, job = yaml.safe_load_all(kubernetes_manifest(SPEC))
    for document in (service, job):
        kubernetes_validate.validate(document, "1.30", strict=True)
    assert job["spec"]["completions"] == 2 and service["metadata"]["name"] == "my-recipe"
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (
        command[:3] == ["whorl", "launch", "my recipe.toml"] and command[-1] == "my-recipe-0.my-recipe:29400"
    )


def test_ranks_that_nodes_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="such as 4 or 6 ranks"):
        LaunchSpec("x", ("rank",), ranks=5, nodes=2)


def test_launch_refuses_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(*words: str) -> str:
        return refuse(tmp_path, "launch", "quickstart", *words)

    assert "slurm" in message("--on", "slurn")
    assert "--on slurm or kubernetes" in message("--write", "x")
    assert "--on torchrun or slurm or kubernetes" in message("--nodes", "2")
    assert "--rendezvous with --on slurm" in message("--on", "slurm", "--rendezvous", "a:1")
    assert "--layout with --on local" in message("--on", "local", "--layout", "tp=2")
    assert "multiply to 3" in message("--ranks", "8", "--layout", "tp=3")
    assert "none.toml: No such file or directory\n" in message("--ranks", "2", "--layout", "auto:none.toml")
    assert "nothing" in message("--on", "torchrun", "--set", "plan.nothing=1")
    assert "No such option: --nothing" in message("--on", "torchrun", "--nothing")
    assert "--rendezvous HOST:PORT" in message("--on", "torchrun", "--nodes", "2", "--ranks", "2")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not installed" in message("--on", "slurm") and "kubectl is not" in message(
        "--on", "kubernetes"
    )
    words = (
        "launch",
        "quickstart",
        "--on",
        "slurm",
        "--ranks",
        "4",
        "--nodes",
        "2",
        "--write",
        "job.sh",
        "--budget",
        "2m",
    )
    assert "written: job.sh" in succeed(tmp_path, *words).output
    command = "launch quickstart --budget 2m --on torchrun --ranks 4 --nodes 2 --restarts 5 --rendezvous"
    assert command in (tmp_path / "job.sh").read_text()


def test_a_scheduler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho 'sbatch: error: no partition' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    message = refuse(tmp_path, "launch", "quickstart", "--on", "slurm", code=1)
    assert "sbatch failed: sbatch: error: no partition" in message and "--write FILE" in message
