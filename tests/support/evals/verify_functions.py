"""Custom verifiers as a user would write them; called in a separate process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from whorl.evals.verify import Verdict, VerifiableTask


def length(task: VerifiableTask, completion: str) -> float:
    print("goes to standard error, not into the replies")
    return len(completion) / 10


def same(task: VerifiableTask, completion: str) -> bool:
    return completion == task.answer and dict(task.messages[0])["role"] == "user"


def partial(task: VerifiableTask, completion: str) -> Verdict:
    return Verdict(0.25, False, "nearly: so")


def raises(task: VerifiableTask, completion: str) -> float:
    raise ValueError("no")


def hangs(task: VerifiableTask, completion: str) -> float:
    while True:
        pass


def writes_pid_and_hangs(task: VerifiableTask, completion: str) -> float:
    Path(task.answer).write_text(f"{os.getpid()}\n")
    while True:
        time.sleep(1)


def exits(task: VerifiableTask, completion: str) -> float:
    os._exit(0)


def not_a_number(task: VerifiableTask, completion: str) -> Any:
    return float("nan")
