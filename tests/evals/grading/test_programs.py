"""Programs are found in answers of every form, and run in the sandbox."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whorl.errors import ConfigError
from whorl.evals.grading import grade_all
from whorl.evals.grading.programs import find_program
from whorl.evals.model.requests import Completion
from whorl.sandbox import ResourceLimits, Sandbox

DATA = Path(os.environ.get("WHORL_DATA", Path(__file__).parents[4] / "shared" / "data"))
PROMPT = 'import math\n\n\ndef double(x):\n    """Double."""\n'
GOLD = {"test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "double", "prompt": PROMPT}
RIGHT = [
    "    return 2 * x\n", "    return 2 * x\n\nprint(double(1))\n",
    "    return 2 * x\n\n\ndef half(x):\n    return x /",
    "```python\ndef double(x):\n    return math.floor(2 * x)\n```",
    "Sure:\n```py\n    return 2 * x\n```\nThis doubles.",
    "<think>no</think>\n```\ndef double(x):\n    return 2 * x\n```\nUse:\n```\ndouble(2)\n```",
    "```python\ndef double(x):\n    return 2 * x\n\nmain()\n```",
    "    y = x\n    return x + y\n# Test\nassert double(1) == 2\nif __name__ == '__main__':\n    print(",
    "    return 2 * x  # ok",
]  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    if not sys.platform.startswith("linux"):
        pytest.skip("confinement needs Linux")
    with Sandbox(ResourceLimits(wall_seconds=6, cpu_seconds=6), workers=2) as box:
        yield box


def test_program_outcomes(sandbox: Sandbox) -> None:
    others = {
        "    return x\n": "wrong", "    pass\n": "wrong", "": "not_found", "I think it is hard to say (": "not_found",
        "Sorry, but I can't assist with that.": "refused", "    while True: pass\n": "wrong",
    }  # fmt: skip
    texts = [Completion(t) for t in [*RIGHT, *others]] + [Completion("    return (2 *", finish="length")]
    graded = grade_all("program", [GOLD] * len(texts), texts, sandbox=sandbox)
    assert [g.outcome for g in graded] == ["right"] * len(RIGHT) + [*others.values(), "truncated"]
    assert all(g.scores["passed"] == float(g.outcome == "right") for g in graded)
    assert graded[-2].reason.split(":")[0] in ("time", "cpu")


def test_bad_items_are_errors(sandbox: Sandbox) -> None:
    golds = ["", "x = 1", {"test": ""}, "assert double(2) == 4", "assert double(2 == 4"]
    graded = grade_all("program", golds, [PROMPT + RIGHT[0]] * 5, sandbox=sandbox)
    assert [g.outcome for g in graded] == ["error", "error", "error", "right", "error"]
    assert graded[4].reason == "raised: DataError: the tests do not parse: '(' was never closed (line 1)"
    assert "no tests" in graded[0].reason and "check nothing" in graded[1].reason
    with pytest.raises(ConfigError, match="runs programs"):
        grade_all("program", [GOLD], [""])


def test_redefined_helper_of_the_prompt_changes_no_verdict(sandbox: Sandbox) -> None:
    """As in HumanEval 32, 38 and 50, whose tests call a function of the prompt."""
    prompt = 'KEY = 3\n\ndef encode(s):\n    return s[KEY:] + s[:KEY]\n\n\ndef decode(s):\n    """Undo encode."""\n'
    test = "def check(f):\n    assert f(encode('abcdefg')) == 'abcdefg'\n"
    gold = {"test": test, "entry_point": "decode", "prompt": prompt}
    forged = ["    return s\n\ndef encode(s):\n    return s\n", "    return s\n\nKEY = 0\n"]
    texts = ["    return s[-KEY:] + s[:-KEY]\n", *forged]
    texts += [f"```python\n{prompt}{text}```" for text in texts]
    graded = grade_all("program", [gold] * 6, texts, sandbox=sandbox)
    assert [g.outcome for g in graded] == ["right", "wrong", "wrong"] * 2, [g.reason for g in graded]


def test_source_keeps_the_prompt_and_complete_statements() -> None:
    assert find_program("    return 1\n\nprint(", "def f():\n", "f") == "def f():\n    return 1\n"
    assert find_program("def f(:", "", "f") is None and find_program("", "x = 1\n") is None
    whole = find_program("```\ndef f():\n    return 1\n```", "import a\ndef f():\n", "f")
    assert whole == "import a\ndef f():\n    return 1\n"


@pytest.mark.skipif(not (DATA / "human_eval.jsonl.gz").exists(), reason="no HumanEval next to the repository")
def test_human_eval_sample_in_each_form(sandbox: Sandbox) -> None:
    tasks = [
        json.loads(line) for line in gzip.decompress((DATA / "human_eval.jsonl.gz").read_bytes()).splitlines()
    ]
    golds, texts = [], []
    for task in tasks[::16]:
        whole = task["prompt"] + task["canonical_solution"]
        golds += [task] * 3
        texts += [task["canonical_solution"], f"Here:\n```python\n{whole}```\n", "    pass\n"]
    graded = grade_all("program", golds, texts, sandbox=sandbox)
    assert [g.outcome for g in graded] == ["right", "right", "wrong"] * len(tasks[::16])
