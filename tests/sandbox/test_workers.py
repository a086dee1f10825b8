"""Batches over workers, and workers that are killed, stopped or cannot be had."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import ConfigError, WhorlError
from whorl.sandbox import Program, ResourceLimits, Sandbox
from whorl.sandbox import sandbox as room

PATIENT = ResourceLimits(wall_seconds=30, cpu_seconds=30)  # the machine may be busy
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")


def pids(sandbox: Sandbox) -> list[int]:
    return [w.process.pid for w in sandbox._workers if w is not None]


@linux
def test_a_batch_comes_back_in_order() -> None:
    with Sandbox(PATIENT, workers=2) as sandbox:
        outcomes = sandbox.run_all([f"print({i})" for i in range(40)])
        assert [o.output for o in outcomes] == [f"{i}\n" for i in range(40)]
        assert sandbox.run_all([]) == []


@linux
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=200), tests=st.text(max_size=50))
def test_any_text_has_an_outcome(text: str, tests: str) -> None:
    outcome = _shared().run(Program(text, tests))
    assert outcome.reason.split(":")[0] in room_kinds() and outcome.ok == (outcome.reason == "passed")
    try:
        compile(text, "program", "exec")
    except (SyntaxError, ValueError):
        assert outcome.kind == "syntax"


_KEPT: list[Sandbox] = []


def _shared() -> Sandbox:
    if not _KEPT:
        _KEPT.append(Sandbox(PATIENT, workers=1))
    return _KEPT[0]


def room_kinds() -> tuple[str, ...]:
    from whorl.sandbox.limits import REASON_KINDS

    return REASON_KINDS


@pytest.fixture(scope="module", autouse=True)
def end_of_shared() -> object:
    yield
    for sandbox in _KEPT:
        sandbox.close()


@linux
def test_large_programs_and_tests_fit_through_the_pipes() -> None:
    with Sandbox(ResourceLimits(wall_seconds=30, output_bytes=4 << 20), workers=1) as sandbox:
        source = "x = '" + "a" * (1 << 20) + "'"
        outcome = sandbox.run(
            Program(source, "y = '" + "b" * (1 << 20) + "'\nassert len(x) == len(y)", ("print(x)",))
        )
        assert outcome.ok and len(outcome.example_outputs[0].text) == (1 << 20) + 1


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_worker_killed_between_programs_is_started_again(number: int) -> None:
    with Sandbox(PATIENT, workers=2) as sandbox:
        before = pids(sandbox)
        os.kill(before[0], number)
        outcomes = sandbox.run_all(["print(1)"] * 6)
        assert sum(o.kind == "crashed" for o in outcomes) <= 1 and sum(o.ok for o in outcomes) >= 5
        assert all(o.ok for o in sandbox.run_all(["print(1)"] * 6))
        assert sandbox.restarts == 1 and before[0] not in pids(sandbox) and before[1] in pids(sandbox)


@linux
def test_a_worker_killed_at_its_work_costs_one_program() -> None:
    with Sandbox(ResourceLimits(wall_seconds=60, cpu_seconds=60), workers=2) as sandbox:
        victim = pids(sandbox)[0]
        children = f"/proc/{victim}/task/{victim}/children"
        struck: list[int] = []

        def strike() -> None:
            while not struck:
                struck.extend(map(int, Path(children).read_text().split()))
            os.kill(victim, signal.SIGKILL)

        thread = threading.Thread(target=strike)
        thread.start()
        outcomes = sandbox.run_all(["while True: pass", *["print(1)"] * 20])
        thread.join()
        assert [o.kind for o in outcomes] == ["crashed"] + ["passed"] * 20
        assert sandbox.restarts == 1
        with pytest.raises(ProcessLookupError):  # what it had forked died with it
            while True:
                os.kill(struck[0], 0)


@linux
def test_a_worker_that_is_stopped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "GRACE_SECONDS", 0.1)
    with Sandbox(ResourceLimits(wall_seconds=0.1), workers=1) as sandbox:
        os.kill(pids(sandbox)[0], signal.SIGSTOP)
        assert sandbox.run("print(1)").kind == "crashed"
    with Sandbox(PATIENT, workers=1) as sandbox:
        assert sandbox.run("print(1)").ok


@linux
@pytest.mark.parametrize("source", ["", "open('a', 'w').write('x')\nwhile True: pass"])
def test_nothing_is_left_when_the_parent_ends(source: str) -> None:
    with Sandbox(ResourceLimits(wall_seconds=600, cpu_seconds=600), workers=1) as sandbox:
        worker = sandbox._workers[0]
        assert worker is not None and worker.process.stdin is not None
        if source:
            worker.submit(Program(source), sandbox.limits, 0)
        worker.process.stdin.close()
        assert worker.process.wait(60) == 0 and not worker.root.exists()


@linux
def test_nothing_is_left_when_the_parent_ends_before_the_answer() -> None:
    with Sandbox(PATIENT, workers=1) as sandbox:
        worker = sandbox._workers[0]
        assert worker is not None and worker.process.stdout is not None
        worker.process.stdout.close()
        worker.submit(Program("print(1)"), sandbox.limits, 0)
        assert worker.process.wait(60) == 0 and not worker.root.exists()


@linux
def test_many_threads_may_share_a_sandbox() -> None:
    with Sandbox(PATIENT, workers=2) as sandbox:
        said: dict[int, list[str]] = {}

        def ask(n: int) -> None:
            said[n] = [o.output for o in sandbox.run_all([f"print({n})"] * 5)]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert said == {n: [f"{n}\n"] * 5 for n in range(4)}


@linux
def test_what_protects_is_told_and_what_is_missing_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(PATIENT, workers=1) as sandbox:
        assert set(sandbox.protections()) == {"process", "limits", "environment", "landlock", "seccomp"}
    with Sandbox(
        PATIENT, workers=1, allow_missing={"landlock"}
    ) as sandbox:  # not given up where it can be had
        assert "landlock" in sandbox.protections()
    monkeypatch.setattr(room, "_PROBE_PROGRAM", room._PROBE_PROGRAM + "print('landlock')\n")
    with pytest.raises(ConfigError, match="landlock is missing"):
        Sandbox(PATIENT, workers=1)
    with Sandbox(PATIENT, workers=1, allow_missing={"landlock"}) as sandbox:
        assert "landlock" not in sandbox.protections() and sandbox.run("print(1)").ok


@linux
def test_a_kernel_without_landlock_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    start = room._BOOTSTRAP.replace(
        "main; main()",
        "main; from whorl.sandbox import confinement; confinement.LANDLOCK_CREATE = 4000; main()",
    )
    monkeypatch.setattr(room, "_BOOTSTRAP", start)
    with pytest.raises(ConfigError, match=r"landlock is missing.*5\.13"):
        Sandbox(PATIENT, workers=1)
    with Sandbox(PATIENT, workers=1, allow_missing={"landlock"}) as sandbox:
        assert "landlock" not in sandbox.protections() and "seccomp" in sandbox.protections()


def test_elsewhere_and_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="workers is 0"):
        Sandbox(workers=0)
    with pytest.raises(ConfigError, match="landlok"):
        Sandbox(allow_missing={"landlok"})
    for name in ("wall_seconds", "memory_bytes", "processes", "file_bytes"):
        with pytest.raises(ConfigError, match=name):
            ResourceLimits(**{name: -1})
    with pytest.raises(ConfigError):
        ResourceLimits(wall_seconds=float("nan"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="darwin"):
        Sandbox()


@linux
def test_a_closed_sandbox_says_so_and_a_worker_that_does_not_start_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = Sandbox(PATIENT, workers=1)
    sandbox.close()
    sandbox.close()
    with pytest.raises(ConfigError, match="closed"):
        sandbox.run("1")
    monkeypatch.setattr(room, "_BOOTSTRAP", "import sys; sys.exit(1)")
    with pytest.raises(WhorlError, match="did not start"):
        Sandbox(PATIENT, workers=1)
