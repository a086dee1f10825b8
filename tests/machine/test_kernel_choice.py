"""Choices among ways to compute a product: by time, kept with the machine, forced, and without timing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from whorl.errors import ConfigError
from whorl.machine import kernel_choice
from whorl.machine.kernel_choice import (
    FORCE,
    TimedChoice,
    fastest,
    force_choices,
    forced_choices,
    recorded_choices,
    refuse_forced,
    timed_choice,
)


class Clock:
    """A clock that advances by the cost of each candidate's call."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[str]()

    def way(self, name: str, cost: float, error: Exception | None = None) -> Callable[[], object]:
        def work() -> object:
            self.calls.append(name)
            self.now += cost
            if error is not None:
                raise error
            return name

        return work


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(kernel_choice.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(kernel_choice, "available_core_fraction", lambda cores: 1.0)
    monkeypatch.setattr(kernel_choice, "choices_file", lambda: tmp_path / "cache" / "kernels-m-0.json")
    monkeypatch.delenv(FORCE, raising=False)
    for memo in ("_chosen", "_required", "_contention"):
        monkeypatch.setattr(kernel_choice, memo, type(getattr(kernel_choice, memo))())
    return made


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({"direct": 2e-3, "transposed": 1e-3}, "transposed"),
        ({"direct": 1e-3, "transposed": 2e-3}, "direct"),
        ({"direct": 1.02e-3, "transposed": 1e-3}, "direct"),  # below the margin for the default
        ({"direct": 0.9, "transposed": 0.5, "fp32": 9.0}, "transposed"),
    ],
)
def test_fastest_takes_the_smallest_time(costs: dict[str, float], chosen: str, clock: Clock) -> None:
    ways = {name: clock.way(name, cost) for name, cost in costs.items()}
    assert fastest("head 1x2x3 bf16", ways, flops=6e6) == chosen
    (kept,) = kernel_choice._read(kernel_choice.choices_file()).values()
    assert kept.chosen == chosen and kept.uncontended and kept.seconds == pytest.approx(costs)
    assert clock.calls.count("fp32") <= 2  # a hopeless way is timed once


def test_choice_is_kept_with_the_machine(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(path: str, *names: str) -> int:
        """Choose in a fresh process; returns the number of calls."""
        monkeypatch.setattr(kernel_choice, "_chosen", {})
        monkeypatch.setattr(kernel_choice, "choices_file", lambda: tmp_path / path)
        before = len(clock.calls)
        fastest("head", {name: clock.way(name, 1e-3 * (9 - len(name))) for name in names})
        return len(clock.calls) - before

    assert choose("kernels-a.json", "direct", "looped") > 0 == choose("kernels-a.json", "direct", "looped")
    assert choose("kernels-b.json", "direct", "looped") > 0  # another machine
    assert choose("kernels-a.json", "direct", "other") > 0  # other candidates
    (tmp_path / "kernels-a.json").write_text('{"head": {"chosen"')
    assert choose("kernels-a.json", "direct", "other") > 0  # damaged
    (tmp_path / "kernels-c.json").mkdir()
    assert choose("kernels-c.json", "direct", "other") > 0  # not writable: the choice of this process


@pytest.mark.parametrize(
    ("alone", "age", "again"), [(True, 1e6, False), (False, 60, False), (False, 1e6, True)]
)
def test_contended_choice_expires(alone: bool, age: float, again: bool, clock: Clock) -> None:
    ways = {name: clock.way(name, 1e-3) for name in ("a", "b")}
    timed_choice("p", ways)
    path = kernel_choice.choices_file()
    ((name, kept),) = kernel_choice._read(kernel_choice.choices_file()).items()
    old = replace(kept, uncontended=alone, measured_at=time.time() - age)
    path.write_text(json.dumps({name: vars(old)}))
    calls = len(clock.calls)
    timed_choice("p", ways)
    assert (len(clock.calls) > calls) == again


def test_first_writer_decides_for_all(clock: Clock) -> None:
    ways = {"a": clock.way("a", 1e-3), "b": clock.way("b", 5e-4)}
    first = TimedChoice("a", {"a": 1.0, "b": 2.0})

    def late() -> object:  # another process writes while this one times
        name = kernel_choice._with_threads("p")
        kernel_choice._keep(kernel_choice.choices_file(), name, first, ways, refresh=False)
        return ways["a"]()

    assert timed_choice("p", {**ways, "a": late}).chosen == "a"


def test_continued_step_keeps_its_ways(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for costs in ((2e-3, 1e-3), (1e-3, 2e-3)):
        monkeypatch.setattr(kernel_choice, "_chosen", {})
        kernel_choice.choices_file().unlink(missing_ok=True)
        with recorded_choices(tmp_path / "choices"):
            ways = {name: clock.way(name, cost) for name, cost in zip("ab", costs, strict=True)}
            assert fastest("p", ways) == "b"


def test_deterministic_algorithms_take_the_default_untimed(clock: Clock) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert fastest("p", {"a": clock.way("a", 2.0), "b": clock.way("b", 1.0)}) == "a"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not clock.calls and not kernel_choice.choices_file().exists()


def test_candidate_that_fails_is_dropped_with_a_warning(clock: Clock) -> None:
    refused = RuntimeError("the kernel refuses AMX (errno 95)")
    ways = {"direct": clock.way("direct", 2e-3), "tiles": clock.way("tiles", 1e-3, refused)}
    with pytest.warns(RuntimeWarning, match="'tiles' is not used, RuntimeError: the kernel refuses AMX"):
        assert fastest("p", ways) == "direct"
    (kept,) = kernel_choice._read(kernel_choice.choices_file()).values()
    assert list(kept.dropped) == ["tiles"] and list(kept.seconds) == ["direct"]
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="no candidate runs"):
        timed_choice("q", {"tiles": ways["tiles"]})


@pytest.mark.parametrize(
    ("setting", "name", "expected"),
    [
        ("head=512", "head 128x8192 bf16", "512"),
        ("mlp=native, tiles, head=512", "head", "512"),
        ("engine_step=native, tiles, 2 threads", "engine_step 3x192", "native, tiles, 2 threads"),
        ("*bf16=512", "head 128x8192 bf16", "512"),
        ("*fp32=512", "head 128x8192 bf16", "128"),
    ],
)
def test_forced_choice(
    setting: str, name: str, expected: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, setting)
    ways = {
        way: clock.way(way, 1e-3 * n) for n, way in enumerate(("128", "512", "native, tiles, 2 threads"), 1)
    }
    assert fastest(name, ways) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "mlp=tile",
            "mlp 1x1: the choice 'tile' is impossible(.|\n)*did you mean 'tiles'(.|\n)*from WHORL_CHOOSE",
        ),
        (
            "mlp=tiles",
            "'tiles' is impossible here: OSError: refused(.|\n)*one of: direct(.|\n)*from WHORL_CHOOSE",
        ),
        ("mlp", "WHORL_CHOOSE has 'mlp'(.|\n)*NAME=CANDIDATE"),
        ("gpu=fastest", "WHORL_CHOOSE has gpu = 'fastest'(.|\n)*one of: torch, triton"),
        ("atention=native", "WHORL_CHOOSE names 'atention'(.|\n)*did you mean 'attention'"),
    ],
)
def test_impossible_forced_choice_is_refused(
    setting: str, message: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, setting)
    ways = {"direct": clock.way("direct", 1e-3), "tiles": clock.way("tiles", 1e-3, OSError("refused"))}
    with pytest.raises(ConfigError, match=message):
        fastest("mlp 1x1", ways)
    monkeypatch.delenv(FORCE)
    assert forced_choices() == {}


def test_forced_choice_is_recorded_and_decides_in_a_continued_step(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {name: clock.way(name, 1e-3 * n) for n, name in enumerate("abc", 1)}
    found = []
    for forced in ("", "update=c", "", "update=b", ""):
        monkeypatch.setattr(kernel_choice, "_chosen", {})  # a new process
        monkeypatch.setenv(FORCE, forced)
        with recorded_choices(tmp_path / "choices"):
            found.append(fastest("update 1x1", ways))
    assert found == ["a", "c", "c", "b", "b"]
    assert [kept.chosen for kept in kernel_choice._read(kernel_choice.choices_file()).values()] == ["a"]


def test_force_choices_adds_to_the_variable_and_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("", "mlp=torch,head=512"):
        monkeypatch.setenv(FORCE, before)
        with force_choices({"engine_step": "native, vectors, 2 threads", "head": "256 native"}):
            found = forced_choices()
            assert found["engine_step"] == "native, vectors, 2 threads" and found["head"] == "256 native"
            assert found.get("mlp") == ("torch" if before else None)
        assert os.environ[FORCE] == before
    monkeypatch.delenv(FORCE)
    with force_choices({"mlp": "torch"}):
        assert os.environ[FORCE] == "mlp=torch"
    assert FORCE not in os.environ


def test_forced_choice_without_candidates_is_refused() -> None:
    with force_choices({"engine_step": "native, vectors, 2 threads", "mlp": "torch"}):
        refuse_forced(["mlp"], "no choice", allowed="torch")
        refuse_forced(["head"], "no choice")
        with pytest.raises(
            ConfigError, match=r"'native, vectors, 2 threads' is impossible here: no compiler(.|\n)*torch"
        ):
            refuse_forced(["mlp", "engine_step"], "no compiler", allowed="torch")


def test_choices_are_kept_for_one_version_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "measured_machine", lambda: (None, "m-0"))
    files = []
    for code in ("a", "b"):
        monkeypatch.setattr(kernel_choice, "sources_hash", lambda code=code: code)
        files.append(kernel_choice.choices_file().name)
    assert files == ["kernels-m-0-a.json", "kernels-m-0-b.json"]
