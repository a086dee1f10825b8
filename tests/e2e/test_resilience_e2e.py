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
from tests.support.e2e_recipe import MOE_RECIPE

from whorl.machine.device_probe import cache_folder
from whorl.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]


@pytest.fixture
def folder(code: Path, tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(MOE_RECIPE.replace("CODE", str(code)))
    return tmp_path


def test_deterministic_run_ends_with_same_weights_after_sigterm(folder: Path) -> None:
    """With another number of threads, own measurements, and an interruption; what comes before training is shared."""

    def start(name: str, threads: int) -> Popen[str]:
        cache = folder / f"cache-{name}" / "whorl"
        if not cache.exists():
            cache.mkdir(parents=True)
            (cache / "native").symlink_to(cache_folder() / "native")
        environment = {"OMP_NUM_THREADS": str(threads), "XDG_CACHE_HOME": str(cache.parent)}
        words = ("run", "small.toml", "--until", "pretrain", "--deterministic", "--store", name)
        sets = ("--set", "plan.steps=40", "--set", "pretrain.run.checkpoint_seconds=1000")
        return start_whorl(*words, *sets, cwd=folder, env=os.environ | environment)

    def finish(process: Popen[str]) -> str:
        output, error = process.communicate(timeout=300)
        assert process.returncode == 0, output + error
        return output

    finish(start("a", 1))
    shutil.copytree(folder / "a", folder / "b")
    shutil.rmtree(Store(folder / "b").open("small/pretrain").path)
    shutil.rmtree(folder / "b" / "runs")
    process = start("b", 2)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        beats = list(folder.glob("b/runs/*/watch/pretrain/heartbeat.json"))
        if beats and '"step": 0' not in beats[0].read_text():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 143, output + error
    assert "stopped by SIGTERM after step" in error and "run the same command again" in error
    assert "Traceback" not in error and "stopped; finished steps are kept" in output
    assert "continues at step" in finish(start("b", 2))
    assert weights(folder / "a", "small/pretrain") == weights(folder / "b", "small/pretrain")
