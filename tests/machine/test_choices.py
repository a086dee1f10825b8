"""Choices made by timing: made once, and kept by an interrupted step and its processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whorl.machine import device_probe
from whorl.machine.device_probe import Machine, Measurement, choose
from whorl.machine.kernel_choice import VARIABLE, choose_once, recorded_choices
from whorl.recipes.registry import StepContext

SPEED = {"float32": {"1": [1e9], "2": [2e9]}, "bfloat16": {"1": [8e9], "2": [9e9]}}
MACHINE = choose(Measurement(SPEED, 1e9))


def test_choice_is_made_once_per_folder(tmp_path: Path) -> None:
    values = iter(range(9))
    for folder, expected in (("a", 0), ("a", 0), ("b", 1)):
        with recorded_choices(tmp_path / folder):
            assert os.environ[VARIABLE] == str(tmp_path / folder)
            assert choose_once("n", lambda: next(values)) == expected
    assert choose_once("n", lambda: next(values)) == 2 and VARIABLE not in os.environ
    (tmp_path / "a" / "n.json").write_text("{")
    with recorded_choices(tmp_path / "a"):
        assert choose_once("n", lambda: next(values)) == 3  # unreadable: the choice of this attempt


def test_first_process_decides_for_all(tmp_path: Path) -> None:
    def second() -> int:
        choose_once("n", lambda: 1)  # another process, which chose while this one measured
        return 2

    with recorded_choices(tmp_path):
        assert choose_once("n", second) == 1


def context(scratch: Path, lines: list[str], **options: Any) -> Any:
    progress: Any = SimpleNamespace(log=lines.append)
    return StepContext("sft", scratch, scratch, {}, progress, progress, progress, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_continued_step_keeps_dtype_and_threads(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WHORL_DTYPE", raising=False)
    begun, lines = replace(MACHINE, dtype="bfloat16", threads=2), list[str]()
    found: list[Machine] = []
    for now in (begun, replace(begun, dtype="float32", threads=1), replace(begun, threads=1)):
        monkeypatch.setattr(device_probe, "probe", lambda now=now: now)
        with recorded_choices(tmp_path):
            found.append(context(tmp_path, lines, deterministic=deterministic).machine)
    expected = ("cpu", "float32", 1) if deterministic else ("cpu", "bfloat16", 2)
    assert [machine.choice for machine in found] == [expected] * 3
    assert len(lines) == (0 if deterministic else 2)
    assert deterministic or "continues with bfloat16 and 2 threads, as it began" in lines[0]
