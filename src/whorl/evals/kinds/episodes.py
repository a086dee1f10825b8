"""The kind `episodes`: verifiable tasks, answered in their environment by the engine of a model (`evals/episodes`).

    passed    the verifier accepts the answer, or the environment's last turn has passed
    reward    summed over turns

Stages after pretraining measure held-out tasks with it, before and after training. A reply keeps the ids that the engine
sampled, as in training. An item whose verifier or environment failed has the outcome "error" and counts as not passed, so
figures before and after are over the same items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from pydantic import BaseModel, ConfigDict

from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.evals.episodes.config import EpisodeConfig
from whorl.evals.episodes.env_loop import make_env_loop
from whorl.evals.episodes.runner import EpisodeRunner
from whorl.evals.grading import VerifiableTask
from whorl.evals.kinds.kind import Answered, EvalTask, Kind, Respond
from whorl.evals.kinds.scores import SCORES
from whorl.evals.results import ItemResult
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.records import Item

TASK = "task"  # field of an item: its `VerifiableTask`


class EpisodeOptions(BaseModel):
    """Settings of the kind `episodes`. environment: None verifies one reply."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: EpisodeConfig | None = None


class Episodes(Kind):
    """See the top of this file."""

    Options = EpisodeOptions
    metrics = SCORES["verified"]

    def prompt(self, item: Item) -> str:
        """See `Kind`: the text, or the last message."""
        task: VerifiableTask = item.fields[TASK]
        return task.prompt or str(task.messages[-1].get("content", ""))

    def answer(self, items: Sequence[Item], respond: Respond) -> list[Answered]:
        """See `Kind`: all episodes advance together. Raises ConfigError: the back end has no engine, or a long prompt."""
        if self.sampler is None:
            raise ConfigError(
                f"task {self.config.name} runs episodes", expected="a back end with an engine (PolicyBackend)"
            )
        each, environment = self.config.generation, self.options.environment
        tasks: list[VerifiableTask] = [item.fields[TASK] for item in items]
        sampling = SamplingParams(temperature=each.temperature, top_p=each.top_p, top_k=0)
        with closing(make_env_loop(environment, tasks)) as loop:
            runner = EpisodeRunner(self.sampler(each.max_tokens), loop, environment)
            episodes = runner.run(tasks, sampling, seed=each.seed)
        return [Answered(item, (), episode) for item, episode in zip(items, episodes, strict=True)]

    def score_item(self, answered: Answered) -> ItemResult:
        """See `Kind`."""
        grade = answered.extra.grade
        scores = {"passed": float(grade.passed), "reward": grade.value}
        return self.result(answered, scores, grade.outcome, grade.reason, answers=(answered.extra.text,))


def episode_task(
    name: str, tasks: Sequence[VerifiableTask], generation: Mapping[str, Any], environment: EpisodeConfig | None
) -> EvalTask:  # fmt: skip
    """Return the task of the kind `episodes` with an item for each of `tasks`. generation: fields of `GenerationConfig`."""
    config = {
        "name": name, "kind": "episodes", "template": "{{ task.prompt }}", "generation": generation,
        "options": {"environment": environment},
    }  # fmt: skip
    return EvalTask(parse_task(config, name), [Item(task.id, {TASK: task}) for task in tasks], [])
