"""Honest programs and tests as people write them: right programs pass, and subtly wrong ones fail.

A case of `honest/*.txt` is a right program, its tests, and replacements `(old, new)` that each make the program wrong.
The verdicts equal those of one process, in which the tests import everything from the program.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whorl.sandbox import Program, ResourceLimits, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")
CASES = sorted((Path(__file__).parent / "honest").glob("*.txt"))
HUMAN_EVAL = (
    Path(os.environ.get("WHORL_DATA", Path(__file__).parents[3] / "shared" / "data")) / "human_eval.jsonl.gz"
)


def read_cases(path: Path) -> Iterator[tuple[str, str, str, list[tuple[str, str]]]]:
    """Yield (name, program, tests, replacements)."""
    for text in path.read_text("utf-8").split("==== ")[1:]:
        head, tests, wrong = re.split(r"---- \w+\n", text)
        name, program = head.split("\n", 1)
        yield name, program, tests, [ast.literal_eval(line) for line in wrong.splitlines()]


@pytest.fixture(scope="module")
def patient() -> Iterator[Sandbox]:
    with Sandbox(ResourceLimits(wall_seconds=20, cpu_seconds=20), workers=2) as sandbox:
        yield sandbox


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_right_programs_pass_and_wrong_ones_fail(patient: Sandbox, path: Path) -> None:
    labels, programs = [], []
    for name, program, tests, wrong in read_cases(path):
        assert wrong and all(old in program for old, _ in wrong), name
        for old, new in [("", ""), *wrong]:
            labels.append((name, old, new))
            programs.append(Program(program.replace(old, new) if old else program, tests))
    results = patient.run_all(programs)
    bad = [
        (label, result)
        for label, result in zip(labels, results, strict=True)
        if result.kind != ("failed" if label[1] else "passed")
    ]
    assert len(programs) > 30 and not bad


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="no HumanEval beside the repository")
def test_human_eval_solutions_pass_and_empty_bodies_fail(patient: Sandbox) -> None:
    tasks = [json.loads(line) for line in gzip.decompress(HUMAN_EVAL.read_bytes()).splitlines()]
    programs = [
        Program(task["prompt"] + body, f"{task['test']}\ncheck({task['entry_point']})")
        for task in tasks
        for body in (task["canonical_solution"], "    pass\n")
    ]
    results = patient.run_all(programs)
    assert len(tasks) == 164
    assert [r.kind for r in results] == ["passed", "failed"] * len(tasks)
