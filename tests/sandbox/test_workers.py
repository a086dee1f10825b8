"""Batches over workers, workers that die or hang, and missing protections."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import ConfigError, WhorlError
from whorl.sandbox import Program, ResourceLimits, Sandbox
from whorl.sandbox import sandbox as sandbox_module
from whorl.sandbox.limits import REASON_KINDS

PATIENT = ResourceLimits(wall_seconds=30, cpu_seconds=30)  # the machine may be busy
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")


def pids(sandbox: Sandbox) -> list[int]:
    return [w.process.pid for w in sandbox._workers if w is not None]


def test_run_all_keeps_order() -> None:
    with Sandbox(PATIENT, workers=2) as sandbox:
        results = sandbox.run_all([f"print({i})" for i in range(40)])
        assert [o.output for o in results] == [f"{i}\n" for i in range(40)]
        assert sandbox.run_all([]) == []


@settings(max_examples=25)
@given(text=st.text(max_size=200), tests=st.text(max_size=50))
def test_any_text_has_result(sandbox: Sandbox, text: str, tests: str) -> None:
    result = sandbox.run(Program(text, tests))
    assert result.kind in REASON_KINDS and result.ok == (result.reason == "passed")
    try:
        compile(text, "program", "exec")
    except (SyntaxError, ValueError):
        assert result.kind == "syntax"


def test_large_programs_and_tests_pass_pipes() -> None:
    with Sandbox(ResourceLimits(wall_seconds=30, output_bytes=4 << 20), workers=1) as sandbox:
        source, tests = (f"{name} = '{name * (1 << 20)}'" for name in "xy")
        result = sandbox.run(Program(source, f"{tests}\nassert len(x) == len(y)", ("print(x)",)))
        assert result.ok and len(result.example_outputs[0].text) == (1 << 20) + 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_idle_worker_killed_is_restarted(number: int) -> None:
    with Sandbox(PATIENT, workers=2) as sandbox:
        before = pids(sandbox)
        os.kill(before[0], number)
        results = sandbox.run_all(["print(1)"] * 6)
        assert sum(o.kind == "crashed" for o in results) <= 1 and sum(o.ok for o in results) >= 5
        assert all(o.ok for o in sandbox.run_all(["print(1)"] * 6))
        assert sandbox.restarts == 1 and before[0] not in pids(sandbox) and before[1] in pids(sandbox)


def test_busy_worker_killed_loses_one_program() -> None:
    with Sandbox(ResourceLimits(wall_seconds=60, cpu_seconds=60), workers=2) as sandbox:
        victim = pids(sandbox)[0]
        children = f"/proc/{victim}/task/{victim}/children"
        child: list[int] = []

        def kill_at_work() -> None:
            while not child:
                child.extend(map(int, Path(children).read_text().split()))
            os.kill(victim, signal.SIGKILL)

        thread = threading.Thread(target=kill_at_work)
        thread.start()
        results = sandbox.run_all(["while True: pass", *["print(1)"] * 20])
        thread.join()
        assert [o.kind for o in results] == ["crashed"] + ["passed"] * 20
        assert sandbox.restarts == 1
        with pytest.raises(ProcessLookupError):  # its child died with it
            while True:
                os.kill(child[0], 0)


def test_stopped_worker_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "GRACE_SECONDS", 0.1)
    with Sandbox(ResourceLimits(wall_seconds=0.1), workers=1) as sandbox:
        os.kill(pids(sandbox)[0], signal.SIGSTOP)
        assert sandbox.run("print(1)").kind == "crashed"
    with Sandbox(PATIENT, workers=1) as sandbox:
        assert sandbox.run("print(1)").ok


@pytest.mark.parametrize("source", ["", "open('a', 'w').write('x')\nwhile True: pass"])
def test_worker_exits_and_cleans_up_with_parent(source: str) -> None:
    with Sandbox(ResourceLimits(wall_seconds=600, cpu_seconds=600), workers=1) as sandbox:
        worker: Any = sandbox._workers[0]
        if source:
            worker.submit(Program(source), sandbox.limits, 0)
        worker.process.stdin.close()
        assert worker.process.wait(60) == 0 and not worker.root.exists()


def test_worker_exits_if_parent_stops_reading() -> None:
    with Sandbox(PATIENT, workers=1) as sandbox:
        worker: Any = sandbox._workers[0]
        worker.process.stdout.close()
        worker.submit(Program("print(1)"), sandbox.limits, 0)
        assert worker.process.wait(60) == 0 and not worker.root.exists()


def test_threads_share_sandbox() -> None:
    with Sandbox(PATIENT, workers=2) as sandbox:
        with ThreadPoolExecutor(4) as threads:
            results = threads.map(sandbox.run_all, [[f"print({n})"] * 5 for n in range(4)])
        assert [[o.output for o in found] for found in results] == [[f"{n}\n"] * 5 for n in range(4)]


def test_failed_probe_stops_sandbox_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(PATIENT, workers=1) as sandbox:
        assert set(sandbox.protections()) == {"process", "limits", "environment", "landlock", "seccomp"}
    with Sandbox(PATIENT, workers=1, allow_missing={"landlock"}) as sandbox:  # still applied if supported
        assert "landlock" in sandbox.protections()
    probe = sandbox_module._PROBE_PROGRAM + "print('landlock')\n"
    monkeypatch.setattr(sandbox_module, "_PROBE_PROGRAM", probe)
    with pytest.raises(ConfigError, match="landlock is missing"):
        Sandbox(PATIENT, workers=1)
    with Sandbox(PATIENT, workers=1, allow_missing={"landlock"}) as sandbox:
        assert "landlock" not in sandbox.protections() and sandbox.run("print(1)").ok


def test_kernel_without_landlock_stops_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "main; from whorl.sandbox import confinement; confinement.LANDLOCK_CREATE = 4000; main()"
    start = sandbox_module._BOOTSTRAP.replace("main; main()", other)
    monkeypatch.setattr(sandbox_module, "_BOOTSTRAP", start)
    with pytest.raises(ConfigError, match=r"landlock is missing.*5\.13"):
        Sandbox(PATIENT, workers=1)
    with Sandbox(PATIENT, workers=1, allow_missing={"landlock"}) as sandbox:
        assert "landlock" not in sandbox.protections() and "seccomp" in sandbox.protections()


def test_closed_sandbox_and_dead_worker_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(PATIENT, workers=1)
    sandbox.close()
    sandbox.close()
    with pytest.raises(ConfigError, match="closed"):
        sandbox.run("1")
    monkeypatch.setattr(sandbox_module, "_BOOTSTRAP", "import sys; sys.exit(1)")
    with pytest.raises(WhorlError, match="did not start"):
        Sandbox(PATIENT, workers=1)
