"""Units of work: the same bytes for any number of workers and any executor, after kills, and only what has changed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from whorl.corpus.mapreduce import (
    Input,
    LocalPool,
    RayTasks,
    Stage,
    Unit,
    UnitStore,
    partition_name,
    shuffled,
)
from whorl.errors import DataError

HERE = "tests.corpus.test_mapreduce"
PARTITIONS = 4


def count_words(
    inputs: list[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: the words of some files, by partition."""
    parts: dict[int, Counter[str]] = {}
    text = " ".join(Path(path).read_text() for path in inputs)
    for word in text.split():
        parts.setdefault(sum(word.encode()) % PARTITIONS, Counter())[word] += 1
    for number, counts in parts.items():
        (out / partition_name(number)).write_text(json.dumps(sorted(counts.items())))
    return {"words": len(text.split())}


def add_counts(inputs: list[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Reduce."""
    total: Counter[str] = Counter()
    for path in inputs:
        total.update(dict(json.loads(Path(path).read_text())))
    (out / "counts").write_text(json.dumps(sorted(total.items())))


def fail(inputs: list[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Kills its process as often as the file `config["deaths"]` has bytes, then raises if it is told to."""
    deaths = Path(config["deaths"])
    if left := deaths.read_bytes():
        deaths.write_bytes(left[1:])
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("raises"):
        raise DataError(f"cannot read {Path(inputs[0]).name}", do="mend it")


def texts(folder: Path, n: int = 12) -> list[Path]:
    folder.mkdir()
    generator = random.Random(1)
    for i in range(n):
        (folder / f"{i:02d}.txt").write_text(
            " ".join(generator.choices(["aa", "ab", "ac", "ad", "ba", "ca"], k=50))
        )
    return sorted(folder.iterdir())


def word_count(store: UnitStore, files: list[Path], executor: Any) -> tuple[dict[str, int], list[int]]:
    """Return the counts, and how many units of each stage ran."""
    ran = [0, 0]

    class Counting:
        def execute(self, calls: Any) -> Any:
            ran[Counting.stage] += len(calls)
            return executor.execute(calls)

        stage = 0

    mapped = store.run(Stage(f"{HERE}:count_words", 1), [Unit((Input.of(f),)) for f in files], Counting())
    Counting.stage = 1
    reduced = store.run(Stage(f"{HERE}:add_counts", 1), shuffled(mapped), Counting())
    assert sum(o.summary["words"] for o in mapped) == 50 * len(files)
    return {w: n for o in reduced for w, n in json.loads((o.folder / "counts").read_text())}, ran


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("[!.]*/*"))}


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    files = texts(tmp_path / "in")
    expected = Counter(" ".join(f.read_text() for f in files).split())
    for workers in (1, 2, 3):
        pool = LocalPool(workers, isolate=True)
        counts, ran = word_count(UnitStore(tmp_path / f"units{workers}"), files, pool)
        assert counts == expected and ran == [12, PARTITIONS]
        assert contents(tmp_path / f"units{workers}") == contents(tmp_path / "units1")


def test_only_changed_units_and_the_partitions_they_touch_run_again(tmp_path: Path) -> None:
    files, store = texts(tmp_path / "in"), UnitStore(tmp_path / "units")
    word_count(store, files, LocalPool())
    assert word_count(store, files, LocalPool())[1] == [0, 0]
    files[3].write_text(files[3].read_text().replace("ab", "ag"))
    assert sum(b"ab") % PARTITIONS != sum(b"ag") % PARTITIONS
    fresh = UnitStore(tmp_path / "units")
    counts, ran = word_count(fresh, files, LocalPool())
    assert ran == [1, 2] and counts["ag"]
    assert word_count(fresh, files, LocalPool())[1] == [0, 0]
    (tmp_path / "in" / "copy.txt").write_text(files[0].read_text())
    files.append(tmp_path / "in" / "copy.txt")
    assert word_count(fresh, files, LocalPool())[1][0] == 0  # an equal file was read before


def test_key_has_everything_that_the_result_depends_on() -> None:
    unit = Unit((Input("a", "00"), Input("b", "11")), {"start": 0})
    stage = Stage("m:f", 1, {"x": 1})
    others = [
        (Stage("m:g", 1, {"x": 1}), unit), (Stage("m:f", 2, {"x": 1}), unit), (Stage("m:f", 1, {"x": 2}), unit),
        (stage, Unit(unit.inputs[::-1], unit.arguments)), (stage, Unit(unit.inputs, {"start": 1})),
        (stage, Unit((Input("a", "01"), unit.inputs[1]), unit.arguments)),
    ]  # fmt: skip
    assert len({s.key(u) for s, u in [(stage, unit), *others]}) == 1 + len(others)
    assert stage.key(Unit((Input("elsewhere", "00"), Input("b", "11")), {"start": 0})) == stage.key(unit)


def test_killed_worker_costs_its_unit_only_and_a_raised_error_arrives(tmp_path: Path) -> None:
    files, deaths = texts(tmp_path / "in", 4), tmp_path / "deaths"
    units = [Unit((Input.of(f),)) for f in files]
    stage = Stage(f"{HERE}:fail", 1, {"deaths": str(deaths)}, isolate=True)
    deaths.write_bytes(b"xx")
    assert len(UnitStore(tmp_path / "units").run(stage, units, LocalPool(2))) == 4
    deaths.write_bytes(b"x" * 100)
    with pytest.raises(DataError, match=r"in.0\d.txt was ended 3 times: .*SIGKILL"):
        UnitStore(tmp_path / "other").run(stage, units, LocalPool(2))
    deaths.write_bytes(b"")
    raising = Stage(f"{HERE}:fail", 1, {"deaths": str(deaths), "raises": True}, isolate=True)
    for workers in (1, 2):
        with pytest.raises(DataError, match="cannot read 0"):
            UnitStore(tmp_path / "raised").run(raising, units, LocalPool(workers))
    assert not contents(tmp_path / "raised")


def test_kill_of_the_whole_job_keeps_finished_units(tmp_path: Path) -> None:
    files = texts(tmp_path / "in", 40)
    expected, _ = word_count(UnitStore(tmp_path / "whole"), files, LocalPool())
    script = (
        f"import sys; from pathlib import Path; from {HERE} import *\n"
        "from whorl.corpus.mapreduce import *\n"
        "pool = LocalPool(int(sys.argv[3]), isolate=True)\n"
        "word_count(UnitStore(Path(sys.argv[1])), sorted(Path(sys.argv[2]).iterdir()), pool)"
    )
    generator, killed = random.Random(3), 0
    for workers in (1, 3):
        job = subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / "units", tmp_path / "in", str(workers)],
            start_new_session=True,
        )
        end = time.monotonic() + 20
        goal = len(list((tmp_path / "units").glob("[!.]*"))) + generator.randrange(1, 12)
        while (
            len(list((tmp_path / "units").glob("[!.]*"))) < goal
            and job.poll() is None
            and time.monotonic() < end
        ):
            time.sleep(0.002)
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        killed += job.wait() == -signal.SIGKILL
    assert killed
    assert word_count(UnitStore(tmp_path / "units"), files, LocalPool(2, isolate=True))[0] == expected
    assert contents(tmp_path / "units") == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["counts", "manifest.json"])
def test_damaged_unit_runs_again(tmp_path: Path, damage: str) -> None:
    files, store = texts(tmp_path / "in"), UnitStore(tmp_path / "units")
    expected, _ = word_count(store, files, LocalPool())
    before = contents(store.folder)
    next(store.folder.rglob(damage)).write_text("{")
    found, ran = word_count(store, files, LocalPool())
    assert found == expected and contents(store.folder) == before and sum(ran) == 1


@pytest.mark.xdist_group("ray")
def test_ray_gives_the_same_bytes_and_survives_a_dead_worker(tmp_path: Path, ray_cluster: Any) -> None:
    files, deaths = texts(tmp_path / "in"), tmp_path / "deaths"
    expected, _ = word_count(UnitStore(tmp_path / "local"), files, LocalPool())
    for workers in (1, 3):
        assert word_count(UnitStore(tmp_path / f"ray{workers}"), files, RayTasks(workers))[0] == expected
        assert contents(tmp_path / f"ray{workers}") == contents(tmp_path / "local")
    units = [Unit((Input.of(f),)) for f in files[:3]]
    deaths.write_bytes(b"x")
    stage = Stage(f"{HERE}:fail", 1, {"deaths": str(deaths)}, isolate=True)
    assert len(UnitStore(tmp_path / "dead").run(stage, units, RayTasks(2))) == 3
    raising = Stage(f"{HERE}:fail", 1, {"deaths": str(deaths), "raises": True}, isolate=True)
    with pytest.raises(DataError, match="cannot read 0"):
        UnitStore(tmp_path / "dead").run(raising, units, RayTasks(2))
