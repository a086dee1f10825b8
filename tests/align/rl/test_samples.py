"""The rollouts that are shown during training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from whorl.align.rl.samples import COMPLETION_CHARACTERS, rollout_table
from whorl.evals.grading.task import VerifiableTask


def test_table_shows_lines_lengths_and_reasons() -> None:
    texts = ["    return 1\n", "x" * (COMPLETION_CHARACTERS + 7), "\x1b[2J?\n", "no"]
    tokenizer: Any = SimpleNamespace(decode=lambda ids: texts[ids[0]])
    experience: Any = SimpleNamespace(
        reward=torch.tensor([1.0, 0.0, 0.5, 0.5]), passed=torch.tensor([True, False, False, False]),
        task=torch.tensor([0, 0, 1, 1]), reason=["passed", "syntax: bad", "", "raised: E"],
        batch={"loss_mask": torch.ones(4, 1, dtype=torch.bool), "targets": torch.arange(4)[:, None]},
    )  # fmt: skip
    tasks = [
        VerifiableTask("a", 'def f():\n    """One."""\n', verifier="compiles"),
        VerifiableTask("b", messages=({"role": "user", "content": "Ask."},)),
    ]
    assert rollout_table(tokenizer, tasks, experience, 2).split("\n") == [
        "    task", "        def f():", '            """One."""',
        "    + reward 1.00, passed: the code parses and has an effect, right or wrong", "            return 1",
        "    - reward 0.00, syntax: bad", f"        {'x' * 500} ... (the first 500 of 507 characters)",
        "    task", "        Ask.",
        "    - reward 0.50, not passed", "        \\x1b[2J?",
        "    - reward 0.50, raised: E", "        no",
    ]  # fmt: skip
