"""GSM8K: word problems with written solutions (Cobbe et al. 2021, arXiv:2110.14168).

A line holds a question and an answer whose last line is "#### " and the number:

    Natalia sold 48/2 = <<48/2=24>>24 clips in May. NEWLINE Natalia sold ... NEWLINE #### 72

The text in << >> is for a calculator that fills in results during decoding. Without one it is noise and is removed by
default. The number may have commas for thousands; the task's answer has none.

Each problem gives a task ("numeric": the number after the last "####", or the last number), and with its solution a
conversation or a prompt-completion pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whorl.align.data.formats import Conversation, PromptCompletion
from whorl.data.quarantine import BadRecordError, Quarantine
from whorl.data.record_files import records
from whorl.evals.grading.task import VerifiableTask

CALCULATOR = re.compile(r"<<[^<>]*>>")
FINAL = re.compile(r"\n#### *(-?)\$?(\d[\d,]*(?:\.\d+)?|\.\d+) *\Z")
SOURCE = "gsm8k"


@dataclass(frozen=True)
class WordProblem:
    """A problem.

    solution: with its last line. answer: the number in Python syntax. steps: number of steps in the solution.
    """

    id: str
    question: str
    solution: str
    answer: str
    steps: int

    def task(self, *, chat: bool = True) -> VerifiableTask:
        """Return the task; its difficulty is the number of steps."""
        return VerifiableTask(
            id=self.id,
            prompt="" if chat else self._text(),
            messages=({"role": "user", "content": self.question},) if chat else (),
            verifier="numeric",
            answer=self.answer,
            difficulty=float(self.steps),
        )

    def conversation(self) -> Conversation:
        """Return training data for a chat model."""
        question = {"role": "user", "content": self.question}
        return Conversation((question, {"role": "assistant", "content": self.solution}), SOURCE, self.id)

    def prompt_completion(self) -> PromptCompletion:
        """Return training data for a model that continues text."""
        return PromptCompletion(self._text(), self.solution, SOURCE, self.id)

    def _text(self) -> str:
        return f"Question: {self.question}\nAnswer:\n"


def gsm8k(path: Path, quarantine: Quarantine, *, calculator: bool = False) -> Iterator[WordProblem]:
    """Yield problems in file order, with ids from file and line.

    Args:
        calculator: keep the text in << >>.

    Raises:
        DataError: the file is missing, or no line is a problem.
    """
    good = 0
    for file, line, record in records(path):
        try:
            if isinstance(record, BadRecordError):
                raise record
            problem = _problem(
                f"{SOURCE}:{file.name}:{line}", record.get("question"), record.get("answer"), calculator
            )
        except BadRecordError as error:
            quarantine.add(file, line, error)
        else:
            good += 1
            quarantine.accepted += 1
            yield problem
    if not good:
        raise quarantine.no_records_error(
            path, "lines with a question, and an answer that ends in '#### number'"
        )


def _problem(name: str, question: object, answer: object, calculator: bool) -> WordProblem:
    for field, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str):
            raise BadRecordError("bad_field", field, f"is {type(value).__name__}, not a text")
        if not value.strip():
            raise BadRecordError("empty", field, "only white space")
    text = "\n" + str(answer).replace("\r\n", "\n").strip()
    found = FINAL.search(text)
    if found is None:
        raise BadRecordError("no_answer", "answer", f"does not end in '#### number', but in {text[-30:]!r}")
    number = found[1] + found[2].replace(",", "")
    solution = text.strip()
    return WordProblem(
        id=name,
        question=str(question).strip(),
        solution=solution if calculator else CALCULATOR.sub("", solution),
        answer=number,
        steps=len(CALCULATOR.findall(solution)) or solution.count("\n"),
    )
