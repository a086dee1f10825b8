"""Determinism and SIGTERM through the command line."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.e2e_recipe import MOE_RECIPE as RECIPE

SETS = ["--set", "plan.steps=40", "--until", "pretrain"]


def command(*more: object) -> list[str]:
    return [sys.executable, "-m", "whorl.cli", "run", "small.toml", *SETS, *map(str, more)]


def weights(store: Path) -> str:
    from whorl.store import Store

    found = Store(store).open("small/pretrain").file("model.safetensors")
    return hashlib.sha256(found.read_bytes()).hexdigest()


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_deterministic_runs_are_bitwise_equal(code: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE.replace("CODE", str(code)))
    found = []
    for name, threads in (("a", "1"), ("b", "2")):
        # Separate stores, device measurements and thread counts.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "XDG_CACHE_HOME": str(tmp_path / f"cache-{name}"),
        }
        done = subprocess.run(
            command("--deterministic", "--store", tmp_path / name),
            capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(weights(tmp_path / name))
    assert found[0] == found[1]
    refused = subprocess.run(
        [sys.executable, "-m", "whorl.cli", "run", "quickstart", "--deterministic"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2 and "1e14flops" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_sigterm_checkpoints_and_run_continues(code: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE.replace("CODE", str(code)))
    more = ("--set", "plan.steps=150", "--set", "pretrain.checkpoint_seconds=1000")
    process = subprocess.Popen(
        command(*more), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        beats = list(tmp_path.glob(".whorl/runs/*/watch/pretrain/heartbeat.json"))
        if beats and '"step": 0' not in beats[0].read_text():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 143, output + error
    assert "stopped by SIGTERM after step" in error and "run the same command again" in error
    assert "Traceback" not in error and "stopped; finished steps are kept" in output
    again = subprocess.run(command(*more), capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert again.returncode == 0 and "continues at step" in again.stdout, again.stdout + again.stderr
