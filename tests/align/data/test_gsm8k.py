"""GSM8K: published lines, invalid lines, and the whole files where they are available."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from whorl.align.data import Quarantine
from whorl.align.data.gsm8k import gsm8k
from whorl.errors import DataError

ANSWER = "He had 40*30 = <<40*30=1200>>1200 apples.\nHe kept 1200-200=<<1200-200=1000>>1000.\n#### 1,000"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_problem_as_task_conversation_and_pair(tmp_path: Path) -> None:
    path = write(tmp_path / "some.jsonl", {"question": " How many? ", "answer": ANSWER})
    (problem,) = gsm8k(path, Quarantine())
    assert (problem.question, problem.answer, problem.steps) == ("How many?", "1000", 2)
    assert problem.solution == "He had 40*30 = 1200 apples.\nHe kept 1200-200=1000.\n#### 1,000"
    task = problem.task()
    assert (task.verifier, task.answer, task.difficulty) == ("numeric", "1000", 2.0)
    assert task.id == "gsm8k:some.jsonl:1"
    assert task.messages == problem.conversation().messages[:1]
    pair = problem.prompt_completion()
    assert problem.task(chat=False).prompt == pair.prompt
    assert pair.completion == problem.conversation().messages[1]["content"] == problem.solution
    (kept,) = gsm8k(path, Quarantine(), calculator=True)
    assert kept.solution == ANSWER


@pytest.mark.parametrize(
    ("final", "answer"),
    [("#### 72", "72"), ("#### -3", "-3"), ("#### $1,234.50", "1234.50"), ("####5 ", "5"), ("#### .5", ".5")],
)
def test_final_number_formats(tmp_path: Path, final: str, answer: str) -> None:
    path = write(tmp_path / "x.jsonl", {"question": "q", "answer": f"So.\r\n{final}\n"})
    assert next(gsm8k(path, Quarantine())).answer == answer


def test_invalid_lines_are_quarantined(tmp_path: Path) -> None:
    good = {"question": "q", "answer": "a\n#### 1"}
    no_answers = [{**good, "answer": "72"}, {**good, "answer": "#### many"}]
    bad_fields = [{**good, "question": 3}, {**good, "question": " "}, {"question": "q"}]
    path = write(tmp_path / "x.jsonl", good, *no_answers, *bad_fields, [], {**good, "answer": "#### 2"})
    quarantine = Quarantine()
    assert [p.answer for p in gsm8k(path, quarantine)] == ["1", "2"]
    assert quarantine.summary() == {"accepted": 2, "no_answer": 2, "bad_field": 2, "empty": 1, "bad_json": 1}
    assert [(r.line, r.field) for r in quarantine][:2] == [(2, "answer"), (3, "answer")]
    with pytest.raises(DataError, match="no usable record"):
        list(gsm8k(write(tmp_path / "y.jsonl", {"text": "x"}), Quarantine()))


@pytest.mark.parametrize(("name", "n"), [("train", 7473), ("test", 1319)])
def test_published_files_parse_completely(name: str, n: int) -> None:
    folder = Path(os.environ.get("WHORL_DATA", Path(__file__).parents[4] / "shared" / "data"))
    path = folder / f"gsm8k_{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; WHORL_DATA names the folder that holds it")
    quarantine = Quarantine()
    problems = list(gsm8k(path, quarantine))
    assert len(problems) == n and not len(quarantine)
    assert len({p.id for p in problems}) == n
    for problem in problems:
        assert re.fullmatch(r"-?\d+(\.\d+)?", problem.answer)
        assert "<<" not in problem.solution and problem.steps >= 1
        assert problem.solution.splitlines()[-1].replace(",", "") == f"#### {problem.answer}"
