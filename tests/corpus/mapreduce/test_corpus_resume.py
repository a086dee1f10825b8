"""What runs again: after a kill with another number of workers, and after a change of one file of 300."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.corpus.resume import WORDS, trials

from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.corpus.deduplication.near import stages
from whorl.corpus.deduplication.near.minhash import band_keys, minhash_signatures
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.mapreduce import LocalPool
from whorl.corpus.mapreduce.units import Call
from whorl.tracking.progress import Progress


def test_kill_over_ingest_and_curate_gives_identical_bytes(tmp_path: Path) -> None:
    """One moment; bench/corpus/resume.py has twenty, over 1,000 files."""
    assert [kill.identical for kill in trials(tmp_path, kills=1, files=40, seed=1)] == [True]


class Counting:
    """Runs units in this process and counts them by their function."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    def execute(self, calls: Sequence[Call]) -> Iterator[int]:
        self.ran.update(call.stage.function.partition(":")[2] for call in calls)
        return LocalPool().execute(calls)


def run(data: Path, out: Path, units: Path) -> Counter[str]:
    executor = Counting()
    for name in ("ingest", "curate"):
        (out / name).mkdir(parents=True)
    progress: Any = Progress.silent()
    ingest(IngestConfig(sources=[str(data)]), out / "ingest", progress, units=units, executor=executor)
    curate(
        CurateConfig(validation_bytes=10_000, test_bytes=10_000), document_files(out / "ingest"), out / "curate",
        progress, units=units, executor=executor,
    )  # fmt: skip
    return executor.ran


def test_one_changed_file_runs_its_units_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[ingest.__module__], "BLOCK_BYTES", 5_000)
    monkeypatch.setattr(stages, "RECORDS_PER_PARTITION", 300)  # 32 partitions of the bands' keys
    partitions = 32
    data, units, rng = tmp_path / "data", tmp_path / "units", random.Random(2)
    data.mkdir()
    texts = [" ".join(rng.choices(WORDS, k=100)) for _ in range(300)]
    texts[250] = texts[200] + " and more"
    for number, text in enumerate(texts):
        (data / f"{number:04d}.txt").write_text(text)
    first = run(data, tmp_path / "first", units)
    blocks = first["read_block"]
    assert blocks > 30 and first["measure_file"] == first["sign"] == blocks and first["join"] == partitions
    assert not run(data, tmp_path / "again", units)

    words = texts[150].split(" ")
    changed = " ".join([*words[:50], words[50][::-1], *words[51:]])
    assert len(changed) == len(texts[150])
    (data / "0150.txt").write_text(changed)
    config = MinHashConfig()
    keys = band_keys(minhash_signatures([texts[150].encode(), changed.encode()], config), config)
    touched = len(np.unique(keys >> np.uint64(64 - 5)))  # by the bands of the old and of the new text
    assert 8 < touched < partitions
    # One block is read, measured and signed. No document lost or gained a candidate, so no edge changed.
    assert run(data, tmp_path / "changed", units) == {
        "read_block": 1, "measure_file": 1, "sign": 1, "join": touched, "gather": 1,
    }  # fmt: skip

    (data / "0150.txt").write_text(texts[200] + " and less")  # now a copy
    found = run(data, tmp_path / "copy", units)
    assert found["read_block"] == found["measure_file"] == found["sign"] == found["remove"] == 1
    assert found["join"] < partitions and found["gather"] <= 3  # its own file, and those of the other copies
