"""A worker that is killed leaves no verifier of one's own behind, whatever that is doing."""

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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked to")
def test_a_function_that_hangs_dies_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from whorl.evals.verify import VerifiableTask, verify_all
verify_all([VerifiableTask("a", "?", verifier="custom:tests.support.evals.verify_functions:tells_and_hangs", answer={str(told)!r})], ["x"])
"""
    with subprocess.Popen([sys.executable, "-c", code]) as worker:
        try:
            assert waited(lambda: told.is_file() and told.read_text().endswith("\n")), worker.poll()
        finally:
            worker.kill()
    hanging = int(told.read_text())
    try:
        assert waited(lambda: not running(hanging))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hanging, signal.SIGKILL)


def waited(ready: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return ready()


def running(process: int) -> bool:
    """Whether it is there, and no zombie that waits for somebody to read its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
