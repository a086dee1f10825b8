"""Determinism and SIGTERM through the command line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.cli import output_of, refuse, start_whorl, weights
from tests.support.e2e_recipe import MOE_RECIPE

from whorl.machine.device_probe import cache_folder

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]
RUN = ("run", "small.toml", "--until", "pretrain")


@pytest.fixture
def folder(code: Path, tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(MOE_RECIPE.replace("CODE", str(code)))
    return tmp_path


def test_deterministic_runs_are_bitwise_equal(folder: Path) -> None:
    found = []
    for name, threads in (("a", "1"), ("b", "2")):
        # Separate stores, device measurements and thread counts; compiled libraries are shared.
        (cache := folder / f"cache-{name}" / "whorl").mkdir(parents=True)
        (cache / "native").symlink_to(cache_folder() / "native")
        environment = {"OMP_NUM_THREADS": threads, "XDG_CACHE_HOME": str(folder / f"cache-{name}")}
        words = (*RUN, "--set", "plan.steps=24", "--deterministic", "--store", name)
        output_of(*words, cwd=folder, env=os.environ | environment)
        found.append(weights(folder / name, "small/pretrain"))
    assert found[0] == found[1]
    assert "1e14flops" in refuse(folder, "run", "quickstart", "--deterministic")


def test_sigterm_checkpoints_and_run_continues(folder: Path) -> None:
    words = (*RUN, "--set", "plan.steps=70", "--set", "pretrain.run.checkpoint_seconds=1000")
    process = start_whorl(*words, cwd=folder)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        beats = list(folder.glob(".whorl/runs/*/watch/pretrain/heartbeat.json"))
        if beats and '"step": 0' not in beats[0].read_text():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 143, output + error
    assert "stopped by SIGTERM after step" in error and "run the same command again" in error
    assert "Traceback" not in error and "stopped; finished steps are kept" in output
    assert "continues at step" in output_of(*words, cwd=folder)
