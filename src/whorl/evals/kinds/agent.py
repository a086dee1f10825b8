"""The kind `agent`: the model acts in a folder by calls of tools; tests of the task then inspect the folder.

    template         the task
    gold             source of tests (asserts, test functions) that run in the sandbox, in a folder with the agent's files
    options.files    the folder at the start: an expression with a mapping of paths to texts

The claims of the agent do not count. A run passes if its files are right, also if it ends because a budget is used up. A run
that claims success fails if they are not. If `options.program` names a file, the tests call the
functions of that program; they read other files as data.

    solved           mean over samples of: the tests pass
    first_answer     the first run passes: propensity, what one use of the model is worth
    best_of_N        at least one of N runs passes: capability, what N tries and a perfect check are worth
    pass@k           the same for k of N runs, unbiased      Chen et al. 2021, arXiv:2107.03374, eq. 1
    false_claims     runs that finish although their tests fail
    steps, tokens, tool_seconds, tool_errors      used by a run, mean over samples

The whole trajectory of every run is kept. The tests find the text of `finish` in the file `answer.txt`. For a system with
tools inside (`evals/episodes/system.py`), `tools` is empty here: the first message is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from pydantic import Field

from whorl.errors import ConfigError, DataError, WhorlError, shorten
from whorl.evals.episodes.folder import FolderEnv, FolderOptions, FolderTask, clip, run_agents
from whorl.evals.episodes.samplers import BackendSampler
from whorl.evals.kinds.kind import MODEL, Answered, Kind, Metric, Respond
from whorl.evals.model.requests import Message
from whorl.evals.results import ItemResult, Outcome
from whorl.evals.statistics.pass_at_k import pass_at_k
from whorl.evals.tasks.records import Item
from whorl.sandbox import Program, ProgramResult, Sandbox
from whorl.sandbox.unit_tests import tests_error
from whorl.sandbox.work_folder import check_paths

ANSWER_FILE = "answer.txt"  # of the tests' folder: the text of `finish`
SHOWN_FILE = 2000  # characters of a file on the page
SHOWN_BUDGET = {"steps", "tokens", "seconds", "observation", "file_bytes"}
BUDGETS = {"steps": "messages", "tokens": "tokens", "seconds": "seconds of programs"}


class AgentOptions(FolderOptions):
    """Settings of the kind `agent`."""

    files: str = Field(default="", description="expression of the folder at the start: path -> text")
    program: str = Field(default="", description="file of the agent whose functions the tests call")
    k: tuple[int, ...] = Field(default=(), description="of pass@k")


class Agent(Kind):
    """See the top of this file."""

    version = 2
    Options = AgentOptions

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        options, n = self.options, self.config.generation.samples
        if n > 1 and not self.config.generation.temperature:
            raise ConfigError(
                f"task {self.config.name}: {n} samples at temperature 0 are equal",
                expected="generation.temperature above 0", do="set it, or generation.samples = 1",
            )  # fmt: skip
        if any(not 1 <= k <= n for k in options.k):
            raise ConfigError(
                f"task {self.config.name}: pass@k with k = {options.k} of {n} samples", expected=f"1 to {n}"
            )
        self._files = self.add_template("options.files", options.files, expression=True, required=False)
        samples: dict[str, Metric] = {}
        if n > 1:
            samples = {
                "first_answer": Metric("propensity: the first run passes"),
                f"best_of_{n}": Metric(f"capability: at least one of {n} runs passes"),
                **{f"pass@{k}": Metric(f"at least one of {k} runs passes") for k in options.k},
            }
        self.metrics = {
            "solved": Metric("runs whose folder passes the tests"), **samples,
            "false_claims": Metric("runs that finish although the tests fail", higher_is_better=False),
            "steps": Metric("messages of a run", "", None, 0.0, None),
            "tokens": Metric("tokens of a run", "", None, 0.0, None),
            "tool_seconds": Metric("time of a run's programs", "s", None, 0.0, None),
            "tool_errors": Metric("calls of a run that failed", "", None, 0.0, None),
        }  # fmt: skip

    def check(self, item: Item) -> None:
        """Raises DataError: there are no tests, they check nothing, or the files have wrong paths."""
        where = f"task {self.config.name}, item {item.id!r}"
        if reason := tests_error(item.gold) if isinstance(item.gold, str) else "there are no tests":
            raise DataError(
                f"{where}: {reason}",
                expected="source with an assert as gold",
                do="correct the record, or `gold`",
            )
        try:
            check_paths([*self.first_files(item), self.options.program or ANSWER_FILE])
        except WhorlError as error:
            raise DataError(f"{where}: {error.what}", expected=error.expected) from error

    def first_files(self, item: Item) -> dict[str, bytes]:
        """Return the folder at the start. Raises DataError: it is no mapping of paths to texts."""
        found = {} if self._files is None else self._files(item.variables, item.id)
        if not isinstance(found, Mapping) or not all(isinstance(text, str) for text in found.values()):
            raise DataError(
                f"task {self.config.name}, item {item.id!r}: options.files is {shorten(repr(found), 60)}",
                expected="a mapping of paths to texts",
            )  # fmt: skip
        return {str(path): text.encode("utf-8", "replace") for path, text in found.items()}

    def answer(self, items: Sequence[Item], respond: Respond) -> list[Answered]:
        """See `Kind`: the episodes of all items and samples advance together."""
        n, number = self.config.generation.samples, count(1)
        tasks = [
            FolderTask(item.id, messages=_messages(self.prompt(item)), files=self.first_files(item))
            for item in items
            for _ in range(n)
        ]
        requests = [self.generate_request(item, (), k) for item in items for k in range(n)]
        sampler = BackendSampler(lambda sent: respond(sent, MODEL, self.round_label(next(number))), requests)
        episodes = run_agents(tasks, self.options, sampler)
        return [Answered(item, (), episodes[i * n : i * n + n]) for i, item in enumerate(items)]

    # -- scores --------------------------------------------------------------------------------------------------------

    def score(self, answered: Sequence[Answered]) -> list[ItemResult]:
        """See `Kind`: the tests of all runs run together, in new folders."""
        failed = [next((e.reason for e in each.extra if e.failed), "") for each in answered]
        runs = [[episode.env for episode in each.extra] for each in answered]
        complete = [
            (each.item, run)
            for each, own, no in zip(answered, runs, failed, strict=True)
            if not no
            for run in own
        ]
        programs = [self.test_program(*pair) for pair in complete]
        results: list[ProgramResult] = []
        if programs:
            with Sandbox(self.options.limits, workers=self.options.workers) as sandbox:
                results = sandbox.run_all(programs)
        verdicts = iter(results)
        return [
            self.missing(each, no) if no else self._item_result(each, own, [next(verdicts) for _ in own])
            for each, own, no in zip(answered, runs, failed, strict=True)
        ]

    def test_program(self, item: Item, run: FolderEnv) -> Program:
        """Return the tests of a run, with its files and its answer."""
        source = (
            run.files.get(self.options.program, b"").decode("utf-8", "replace")
            if self.options.program
            else ""
        )
        files = dict(run.files)
        if run.answer:
            files.setdefault(ANSWER_FILE, run.answer.encode("utf-8", "replace"))
        return Program(source, str(item.gold), files=files)

    def _item_result(
        self, answered: Answered, runs: Sequence[FolderEnv], verdicts: Sequence[ProgramResult]
    ) -> ItemResult:
        right = [verdict.ok for verdict in verdicts]
        n = len(runs)
        claims = [run.ended == "finished" and not ok for run, ok in zip(runs, right, strict=True)]
        scores = {"solved": sum(right) / n}
        if n > 1:
            table = np.array([right])
            scores |= {"first_answer": float(right[0]), f"best_of_{n}": float(any(right))}
            scores |= {f"pass@{k}": float(pass_at_k(table, k)[0]) for k in self.options.k}
        scores["false_claims"] = sum(claims) / n
        for name, attribute in (
            ("steps", "n_messages"), ("tokens", "tokens"), ("tool_seconds", "seconds"), ("tool_errors", "errors"),
        ):  # fmt: skip
            scores[name] = sum(float(getattr(run, attribute)) for run in runs) / n
        outcome, reason = describe_run(runs[0], verdicts[0])
        kept = [
            {
                "ended": run.ended, "tests": verdict.reason, "answer": run.answer, "trajectory": run.steps,
                "files": {path: clip(data.decode("utf-8", "replace"), SHOWN_FILE) for path, data in run.files.items()},
            }
            for run, verdict in zip(runs, verdicts, strict=True)
        ]  # fmt: skip
        details: dict[str, Any] = {
            "trajectory": kept[0].pop("trajectory"), "budget": self.options.model_dump(include=SHOWN_BUDGET), "run": kept[0],
        }  # fmt: skip
        if n > 1:
            details["other_runs"] = kept[1:]
        return self.result(
            answered, scores, outcome, reason, answers=[run.answer for run in runs], gold=str(answered.item.gold),
            details=details,
        )  # fmt: skip

    def prepare(self, item: Item) -> Item:
        """See `Kind`: one source of tests; a list of sources is joined."""
        if isinstance(item.gold, list | tuple):
            return replace(item, gold="\n".join(map(str, item.gold)))
        return item


def _messages(prompt: str | tuple[Message, ...]) -> tuple[Message, ...]:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def describe_run(run: FolderEnv, verdict: ProgramResult) -> tuple[Outcome, str]:
    """Return the outcome of a run, with the reason."""
    ended = "finished" if run.ended == "finished" else f"all {BUDGETS.get(run.ended, run.ended)} used up"
    if verdict.ok:
        return "right", f"{ended}; the tests pass"
    return (
        "wrong" if run.ended == "finished" else "truncated"
    ), f"{ended}; tests: {shorten(verdict.reason, 120)}"
