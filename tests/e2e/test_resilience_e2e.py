"""Determinism and SIGTERM through the command line."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest
from tests.support.cli import start_whorl, weights

from whorl.machine.device_probe import cache_folder
from whorl.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]


def test_deterministic_run_ends_with_same_weights_after_sigterm(mixture: Path, tmp_path: Path) -> None:
    """With another number of threads, own measurements, and an interruption; what comes before training is shared."""
    shutil.copytree(mixture / ".whorl", tmp_path / "b")
    shutil.rmtree(Store(tmp_path / "b").open("small/pretrain").path)
    shutil.rmtree(tmp_path / "b" / "runs")
    cache = tmp_path / "cache" / "whorl"
    cache.mkdir(parents=True)
    (cache / "native").symlink_to(cache_folder() / "native")

    def start() -> Popen[str]:
        environment = {"OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(cache.parent)}
        words = ("run", "small.toml", "--until", "pretrain", "--deterministic", "--store", tmp_path / "b")
        sets = ("--set", "pretrain.run.checkpoint_seconds=1000")
        return start_whorl(*words, *sets, cwd=mixture, env=os.environ | environment)

    process = start()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        beats = list(tmp_path.glob("b/runs/*/watch/pretrain/heartbeat.json"))
        if beats and '"step": 0' not in beats[0].read_text():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 143, output + error
    assert "stopped by SIGTERM after step" in error and "run the same command again" in error
    assert "Traceback" not in error and "stopped; finished steps are kept" in output
    process = start()
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, output + error
    assert "continues at step" in output
    assert weights(mixture / ".whorl", "small/pretrain") == weights(tmp_path / "b", "small/pretrain")
