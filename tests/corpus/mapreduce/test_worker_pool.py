"""Workers are shared by the stages of a process; small stages and the first units of a large one need none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from whorl.corpus.mapreduce import Input, LocalPool, Stage, Unit, UnitStore, executors, workers

HERE = "tests.corpus.mapreduce.test_worker_pool"


def write_process(
    inputs: list[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the process, and a variable of its environment, after some seconds."""
    time.sleep(config.get("seconds", 0))
    if config.get("raises"):
        raise ValueError("no")
    return {"process": os.getpid(), "variable": os.environ.get("WHORL_TEST_SETTING", "")}


@pytest.fixture(autouse=True)
def _no_idle_workers() -> Iterator[None]:
    workers.CREW.close()
    yield
    workers.CREW.close()


def run(folder: Path, name: str, n: int = 6, *, pool: LocalPool, **config: Any) -> list[Mapping[str, Any]]:
    units = [Unit((Input(str(folder), str(number)),)) for number in range(n)]
    stage = Stage(f"{HERE}:write_process", 1, {"name": name, **config})
    return [output.summary for output in UnitStore(folder / "units").run(stage, units, pool)]


def processes(found: list[Mapping[str, Any]]) -> set[int]:
    return {summary["process"] for summary in found}


def test_stages_share_their_workers(tmp_path: Path) -> None:
    pool = LocalPool(2, isolate=True)
    first = processes(run(tmp_path, "first", pool=pool, seconds=0.02))
    assert len(first) == 2 and os.getpid() not in first
    assert processes(run(tmp_path, "second", pool=LocalPool(2, isolate=True), seconds=0.02)) == first
    with pytest.raises(ValueError, match="no"):
        run(tmp_path, "raising", pool=pool, raises=True)
    assert processes(run(tmp_path, "third", pool=LocalPool(3, isolate=True), seconds=0.02)) & first


def test_pool_uses_no_more_workers_than_it_has(tmp_path: Path) -> None:
    many = processes(run(tmp_path, "many", pool=LocalPool(4, isolate=True), seconds=0.1))
    assert len(many) == 4
    for n in (2, 3, 6):  # with idle workers left over
        found = processes(run(tmp_path, f"few{n}", n, pool=LocalPool(2, isolate=True), seconds=0.02))
        assert len(found) <= 2 and found < many


def test_small_stage_runs_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "START_SECONDS", 1e9)  # on a busy machine its units may take long
    assert processes(run(tmp_path, "small", pool=LocalPool(2))) == {os.getpid()}
    assert not workers.CREW.is_starting and not workers.CREW.take(1)


class Ending:
    """A worker that ends after its first poll."""

    def __init__(self) -> None:
        self.polls = self.closed = 0

    def poll(self) -> int | None:
        self.polls += 1
        return None if self.polls == 1 else -9

    def close(self, *_: float) -> None:
        self.closed += 1


def test_worker_that_ends_while_it_is_taken_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, child = workers.Crew(), Ending()
    monkeypatch.setattr(crew, "_idle", [child])
    assert crew.take(1) == [child] and not child.closed  # its caller sees the end
    monkeypatch.setattr(crew, "_idle", [child])
    assert crew.take(1) == [] and child.closed == 1


@pytest.mark.parametrize("large", [False, True])
def test_units_run_here_until_workers_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(executors, "START_BYTES", 0)
    found = processes(run(tmp_path, "long", 60, pool=LocalPool(2), seconds=0.05))
    assert large or os.getpid() in found  # where a fork server runs already, workers may be ready at once
    assert 1 <= len(found - {os.getpid()}) <= 2


def test_changed_environment_gets_new_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = LocalPool(2, isolate=True)
    before = run(tmp_path, "before", pool=pool)
    monkeypatch.setenv("WHORL_TEST_SETTING", "new")
    after = run(tmp_path, "after", pool=pool)
    assert {s["variable"] for s in before} == {""} and {s["variable"] for s in after} == {"new"}


def test_worker_that_died_idle_is_replaced(tmp_path: Path) -> None:
    pool = LocalPool(2, isolate=True)
    first = run(tmp_path, "first", pool=pool, seconds=0.02)
    for number in processes(first):
        os.kill(number, 9)
    assert not processes(run(tmp_path, "second", pool=pool)) & processes(first)
