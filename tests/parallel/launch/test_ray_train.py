"""Ranks in workers of Ray Train, as short programs: their output, a kill, and the exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from whorl.parallel.launch.ray_train import run_ray
from whorl.parallel.launch.spec import LaunchSpec

pytestmark = pytest.mark.xdist_group("ray")

RANK = """
import os, pathlib, signal, sys
rank, mark = os.environ["RANK"], pathlib.Path(sys.argv[1])
if rank == "1" and not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("rank", rank, "of", os.environ["WORLD_SIZE"], "in", os.getcwd())
sys.exit(3 if rank == "0" else 0)
"""


def test_ray_starts_killed_ranks_again_and_returns_the_code(
    ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = (sys.executable, "-S", "-c", RANK, str(tmp_path / "killed"))
    assert run_ray(LaunchSpec("test", rank, ranks=2, restarts=1)) == 3
    output = capsys.readouterr().out
    assert "whorl: rank 1 was killed by SIGKILL; all ranks start again" in output
    assert f"rank 1 of 2 in {Path.cwd()}" in output and output.count("rank 1 of") == 1
