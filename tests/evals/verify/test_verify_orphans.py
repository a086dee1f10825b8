"""A killed worker leaves no custom verifier process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
def test_hanging_verifier_dies_with_killed_worker(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from whorl.evals.verify import VerifiableTask, verify_all
verifier = "custom:tests.support.evals.verify_functions:writes_pid_and_hangs"
verify_all([VerifiableTask("a", "?", verifier=verifier, answer={str(pid_file)!r})], ["x"])
"""
    with subprocess.Popen([sys.executable, "-c", code]) as worker:
        try:
            assert wait_until(lambda: pid_file.is_file() and pid_file.read_text().endswith("\n")), (
                worker.poll()
            )
        finally:
            worker.kill()
    hanging = int(pid_file.read_text())
    try:
        assert wait_until(lambda: not running(hanging))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hanging, signal.SIGKILL)


def wait_until(ready: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether `ready` became true in time."""
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return ready()


def running(process: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
