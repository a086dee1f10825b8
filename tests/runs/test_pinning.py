"""Cores of one's own: dealt fairly, held, given back, not inherited; huge pages asked for where they can be had."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from whorl.runs import pages, pinning
from whorl.runs.pages import advise_huge, huge_bytes, setting
from whorl.runs.pinning import can_pin, in_order, pinned, shares, unpinned

needs = pytest.mark.skipif(not can_pin(), reason="no sched_setaffinity here")
ASK = "import os; print(*sorted(os.sched_getaffinity(0)))"


def child() -> set[int]:
    out = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout
    return {int(core) for core in out.split()}


def in_a_thread() -> set[int]:
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_every_replica_has_cores_of_its_own_or_none_has() -> None:
    for cores in range(1, 17):
        for replicas in range(1, 9):
            for threads in (1, 2, 3):
                parts = shares(range(cores), replicas, threads)
                if parts is None:
                    assert cores // replicas < threads
                    continue
                assert len(parts) == replicas and all(len(p) == cores // replicas >= threads for p in parts)
                assert sum(map(len, parts)) == len(set().union(*parts)), "no core is dealt twice"


def test_hyperthreads_and_sockets_stay_together(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert in_order(set(range(8)), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert shares(in_order(set(range(8)), tmp_path), 4) == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]
    assert in_order({3, 1, 2}, tmp_path / "nothing") == [1, 2, 3]


@needs
def test_it_holds_is_not_inherited_by_helpers_and_ends() -> None:
    before = os.sched_getaffinity(0)
    with unpinned():
        assert os.sched_getaffinity(0) == before, "nothing to lift"
    with pinned(0, len(before)) as cores:
        assert cores is not None and len(cores) == 1 and os.sched_getaffinity(0) == cores
        assert child() == cores, "what a pinned thread starts is pinned: hence `unpinned`"
        with unpinned():
            assert child() == before and in_a_thread() == before
        assert os.sched_getaffinity(0) == cores
    assert os.sched_getaffinity(0) == before
    with pytest.raises(RuntimeError), pinned(len(before) - 1, len(before)):
        raise RuntimeError
    assert os.sched_getaffinity(0) == before


@needs
def test_threads_of_the_pool_are_pinned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    go, there, seen = threading.Event(), threading.Event(), list[set[int]]()

    def work() -> None:
        there.set()
        go.wait(10)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)  # as one of torch's would be: older than the pinning
    thread.start()
    there.wait(10)
    monkeypatch.setattr(pinning, "shares", lambda *_: [{min(before)}])
    with pinned(0, 1, threads=2):
        go.set()
        thread.join()
    assert seen == [{min(before)}] and os.sched_getaffinity(0) == before


def test_it_is_nothing_where_it_cannot_be_or_would_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    with pinned(0, 1, on=False) as cores:
        assert cores is None
    with pinned(0, 10_000) as cores:
        assert cores is None, "more replicas than cores"
    monkeypatch.setattr(pinning, "usable_cores", lambda: 0)
    with pinned(0, 1) as cores:
        assert cores is None, "a quota below the cores that can be seen"
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert not can_pin()
    with pinned(0, 1) as cores, unpinned():
        assert cores is None


def test_the_kernels_setting_is_read(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "odd").write_text("1\n")
    assert setting("enabled", tmp_path) == "madvise"
    assert setting("odd", tmp_path) == setting("none", tmp_path) == ""
    assert huge_bytes() >= 0 and huge_bytes(2**30) == 0


def test_advice_is_for_whole_huge_pages_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.arange(3 * pages.HUGE // 4 + 7)[: 3 * pages.HUGE // 4].float()
    copy = big.clone()
    monkeypatch.setattr(pages, "setting", lambda *_: "never")
    assert advise_huge(big) == 0
    monkeypatch.undo()
    taken = advise_huge(big, big[5:], torch.zeros(8))
    assert taken in (0, 2 * pages.HUGE, 3 * pages.HUGE) and torch.equal(big, copy)
    if setting() in ("madvise", "always"):
        assert taken > 0
