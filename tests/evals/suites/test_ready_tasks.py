"""Ready task files: hand-made records in each published format give the right prompts, and perfect and wrong answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend

from whorl.evals.kinds import KINDS
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.requests import Completion, GenerateRequest, Request, Response, Score, ScoreRequest
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.suites import TaskSources, catalog, load_tasks

DIFF = "--- a/{0}\n+++ b/{0}\n@@ -1,1 +1,1 @@\n-x = 1\n+x = 2\n"
GRIDS = {
    "train": [{"input": [[1, 0]], "output": [[0, 1]]}],
    "test": [{"input": [[2, 0]], "output": [[0, 2]]}],
}
RECORDS: dict[str, list[dict[str, Any]]] = {
    "mmlu": [
        {"question": "What is 2 + 2? ", "subject": "arithmetic", "choices": ["3", "4", "5", "6"], "answer": 1},
        {"question": "A noble gas:", "subject": "chemistry", "choices": ["O", "N", "He", "C"], "answer": 2},
    ],
    "mmlu-pro": [
        {"question_id": 70, "question": "Largest?", "options": ["1", "2", "9"], "answer": "C", "answer_index": 2,
         "category": "math"},
        {"question_id": 71, "question": "Least?", "options": ["1", "2"], "answer": "A", "answer_index": 0,
         "category": "law"},
    ],
    "gpqa": [
        {"Record ID": f"rec{i}", "Question": f"Which {i}?", "Correct Answer": "right\n", "Incorrect Answer 1": "w1",
         "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3", "High-level domain": "Physics"}
        for i in range(3)
    ],
    "hle": [
        {"id": "a", "question": "Name it.", "image": "", "answer": "helium", "answer_type": "exactMatch",
         "category": "Chem"},
        {"id": "b", "question": "See it.", "image": "data:image/png", "answer": "B", "answer_type": "multipleChoice",
         "category": "Art"},
    ],
    "hellaswag": [
        {"ind": 4, "activity_label": "Baking", "ctx_a": "A man mixes [step] dough.", "ctx_b": "he",
         "ctx": "", "endings": ["eats.", "bakes [title] bread.", "runs.", "flies."], "label": "1", "source_id": "a~1"},
        {"ind": 5, "activity_label": "Rowing", "ctx_a": "A boat.", "ctx_b": "it", "ctx": "",
         "endings": ["sinks.", "sings.", "sews.", "signs."], "label": "0", "source_id": "a~1"},
    ],
    "arc": [
        {"id": "Mercury_1", "question": "Hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"},
        {"id": "M_2", "question": "Cold?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "1"},
    ],
    "lambada": [{"text": "he looked at the sea"}, {"text": "she ate a pear"}],
    "gsm8k": [
        {"question": "Two and 1,000?", "answer": "2 + 1000 = <<2+1000=1002>>1002\n#### 1,002"},
        {"question": "Three?", "answer": "#### 3"},
    ],
    "humaneval": [
        {"task_id": f"HumanEval/{i}", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "",
         "test": "def check(candidate):\n    assert candidate(1) == 1\n"}
        for i in range(2)
    ],
    "ifeval": [
        {"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]},
        {"key": 2, "prompt": "Write low.", "instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]},
    ],
    "swe-bench": [
        {"instance_id": f"a__a-{i}", "repo": "a/a", "problem_statement": f"x is {i}", "patch": DIFF.format(f"f{i}.py"),
         "base_commit": "0", "test_patch": ""}
        for i in range(2)
    ],
    "arc-agi": [GRIDS, {**GRIDS, "test": [{"input": [[3]], "output": [[3]]}, {"input": [[4]], "output": [[4, 4]]}]}],
}  # fmt: skip
ANSWERS = {  # part of the prompt -> a right answer
    "Largest?": "9 is larger. The answer is (C).", "Least?": "The answer is (A).",
    "Name it.": "Explanation: gas\nAnswer: helium",
    "Two and": "2 + 1000 = 1002\n#### 1,002", "Three?": "#### 3", "def f": "    return x\n", "Write.": "Yes and no",
    "Write low.": "low, lower", "x is 0": f"```diff\n{DIFF.format('f0.py')}```",
    "x is 1": f"```diff\n{DIFF.format('f1.py')}```",
    "2 0": "0 2\n", "\n3\n": "3\n\n4 4\n",
}  # fmt: skip


def load(name: str, folder: Path) -> EvalTask:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[name]))
    return load_tasks([name], TaskSources({name: [str(path)]}))[0]


def run(task: EvalTask, right: bool) -> TaskResult:
    """Evaluate a model that answers every item right, or every item wrong."""
    likely = {text for item in task.items if isinstance(item.gold, int) for text in _likely(task, item)}

    def answer(request: Request) -> Response:
        if isinstance(request, GenerateRequest):
            prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[-1]["content"]
            found = next(text for part, text in ANSWERS.items() if part in prompt)
            return Completion(found if right else "", (), ())
        assert isinstance(request, ScoreRequest)
        good = (request.context, request.continuation) in likely or not likely
        return Score((1,), (-0.01 if good == right else -5.0,), greedy=good == right)

    return evaluate(FakeBackend(answer), [task])[0]


def _likely(task: EvalTask, item: Any) -> list[tuple[str, str]]:
    requests, n = task.kind.requests(item), len(item.choices)
    return [(r.context, r.continuation) for r in requests[item.gold :: n] if isinstance(r, ScoreRequest)]


def test_every_ready_task_is_tested_or_needs_a_judge() -> None:
    assert {name for name, config in catalog().items() if config.kind != "judge"} == set(RECORDS)
    for name, config in catalog().items():
        assert config.name == name and config.about and "arXiv:" in config.source and config.kind in KINDS


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_right_answers_score_1_and_wrong_ones_0(name: str, tmp_path: Path) -> None:
    task = load(name, tmp_path)
    good, bad = run(task, True), run(task, False)
    assert good.outcomes == {"right": len(task.items)}
    assert good.measure(good.metrics[0]).value == 1.0
    assert "right" not in bad.outcomes and bad.measure(bad.metrics[0]).value == 0.0


def test_prompts_of_the_published_formats(tmp_path: Path) -> None:
    def prompt(name: str, number: int = 0) -> str:
        task = load(name, tmp_path)
        found = task.kind.prompt(task.items[number])
        return found if isinstance(found, str) else found[-1]["content"]

    assert prompt("mmlu") == "What is 2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:"
    assert prompt("mmlu-pro").startswith("Largest?\n(A) 1\n(B) 2\n(C) 9\nThink step by step")
    assert prompt("hellaswag") == "Baking: A man mixes dough. He"
    assert load("hellaswag", tmp_path).items[0].choices[1] == "bakes. bread."
    assert prompt("arc") == "Question: Hot?\nAnswer:"
    assert prompt("lambada") == "he looked at the"
    assert prompt("arc-agi") == "Input:\n1 0\nOutput:\n0 1\n\nInput:\n2 0\nOutput:\n"
    assert [item.id for item in load("hle", tmp_path).items] == ["a"]
    assert {item.gold for item in load("gpqa", tmp_path).items} != {0}
