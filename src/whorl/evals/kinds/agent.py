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
tools inside (`evals/system`), `tools` is empty here: the first message is the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, DataError, WhorlError, shorten
from whorl.evals.agent.actions import GROUPS, instructions
from whorl.evals.agent.program_batch import ProgramBatch
from whorl.evals.agent.trajectory import AgentRun, RunBudget, clip, start_messages
from whorl.evals.kinds.generate import SEED_STEP
from whorl.evals.kinds.kind import Answered, Kind, Metric, Round, Steps
from whorl.evals.model.requests import Response
from whorl.evals.results import ItemResult, Outcome
from whorl.evals.statistics.pass_at_k import pass_at_k
from whorl.evals.tasks.task import Item
from whorl.sandbox import Program, ProgramResult, ResourceLimits, Sandbox
from whorl.sandbox.unit_tests import tests_error
from whorl.sandbox.work_folder import check_paths

ANSWER_FILE = "answer.txt"  # of the tests' folder: the text of `finish`
SHOWN_FILE = 2000  # characters of a file on the page
BUDGETS = {"steps": "messages", "tokens": "tokens", "seconds": "seconds of programs"}


class AgentOptions(BaseModel):
    """Settings of the kind `agent`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: tuple[Literal["python", "files", "finish"], ...] = ("python", "files", "finish")
    files: str = Field(default="", description="expression of the folder at the start: path -> text")
    program: str = Field(default="", description="file of the agent whose functions the tests call")
    steps: int = Field(default=12, ge=1, description="messages of a run, at most")
    tokens: int = Field(default=8192, ge=1, description="tokens of all messages of a run, at most")
    seconds: float = Field(default=30.0, gt=0, description="time of all programs of a run, at most")
    program_seconds: float = Field(default=5.0, gt=0, description="time of one program, and of the tests")
    memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    file_bytes: int = Field(default=1 << 20, ge=0, description="of all files of a run together")
    observation: int = Field(default=4000, ge=100, description="characters of a result that the model sees")
    workers: int = Field(default=2, ge=1, description="programs that run at once")
    k: tuple[int, ...] = Field(default=(), description="of pass@k")


class Agent(Kind):
    """See the top of this file."""

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
        self._files = (
            task.template("options.files", options.files, expression=True) if options.files else None
        )
        self.tools = [tool for group in options.tools for tool in GROUPS[group]]
        self.budget = RunBudget(
            options.steps, options.tokens, options.seconds, self.config.generation.max_tokens, options.observation,
            options.file_bytes,
        )  # fmt: skip
        self.limits = ResourceLimits(
            options.program_seconds, options.program_seconds, options.memory_bytes, options.file_bytes
        )
        self._batch = ProgramBatch(self.limits, options.workers)
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

    def check_fields(self, fields: Collection[str]) -> None:
        """See `Kind`."""
        super().check_fields(fields)
        if self._files is not None:
            self._files.check_fields(fields, required=False)

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

    def run_of(self, item: Item, sample: int) -> AgentRun:
        """Return a new run of an item."""
        each, files = self.config.generation, self.first_files(item)
        system = instructions(self.tools, self.budget.steps) if self.tools else ""
        sampling = {
            "stop": each.stop, "temperature": each.temperature, "top_p": each.top_p,
            "seed": each.seed + SEED_STEP * sample,
        }  # fmt: skip
        messages = start_messages(system, self.prompt(item), files)
        return AgentRun(messages, self.budget, files, self.tools, sampling)

    def steps(self, item: Item) -> Steps:
        """See `Kind`: the runs of all samples advance together; their programs run with those of all items."""
        runs = [self.run_of(item, sample) for sample in range(self.config.generation.samples)]
        responses: list[Response] = []
        while active := [run for run in runs if not run.ended]:
            replies = yield Round([run.request() for run in active])
            responses += replies
            tickets = []
            for run, reply in zip(active, replies, strict=True):
                if (program := run.receive(reply)) is not None:
                    tickets.append((run, self._batch.add(program)))
            if tickets:
                yield Round([])  # the other items add their programs
            for run, ticket in tickets:
                run.observe(self._batch.result(ticket))
        return Answered(item, tuple(responses), runs)

    # -- scores --------------------------------------------------------------------------------------------------------

    def score(self, answered: Sequence[Answered]) -> list[ItemResult]:
        """See `Kind`: the tests of all runs run together, in new folders."""
        complete = [each for each in answered if each.missing is None]
        programs = [self.test_program(each.item, run) for each in complete for run in each.extra]
        results: list[ProgramResult] = []
        if programs:
            with Sandbox(self.limits, workers=self.options.workers) as sandbox:
                results = sandbox.run_all(programs)
        verdicts = iter(results)
        return [
            self._item_result(each, [next(verdicts) for _ in each.extra]) if each.missing is None
            else self.missing(each, each.missing.reason)
            for each in answered
        ]  # fmt: skip

    def test_program(self, item: Item, run: AgentRun) -> Program:
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

    def _item_result(self, answered: Answered, verdicts: Sequence[ProgramResult]) -> ItemResult:
        runs: list[AgentRun] = answered.extra
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
            "trajectory": kept[0].pop("trajectory"), "budget": asdict(self.budget), "run": kept[0],
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


def describe_run(run: AgentRun, verdict: ProgramResult) -> tuple[Outcome, str]:
    """Return the outcome of a run, with the reason."""
    ended = "finished" if run.ended == "finished" else f"all {BUDGETS.get(run.ended, run.ended)} used up"
    if verdict.ok:
        return "right", f"{ended}; the tests pass"
    return (
        "wrong" if run.ended == "finished" else "truncated"
    ), f"{ended}; tests: {shorten(verdict.reason, 120)}"
