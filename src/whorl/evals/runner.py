"""Run tasks on a model: requests of all items, responses, scores, figures.

The items of a task advance together, one round of requests at a time. Equal requests are sent once. A cache around the
back end (`model/response_cache.py`) answers what an earlier run received, so another metric sends no request, and
`kill -9` loses one batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whorl.errors import ConfigError, one_of
from whorl.evals.kinds.kind import MODEL, EvalTask
from whorl.evals.measures import group_measures, outcome_counts, task_measures
from whorl.evals.model.requests import (
    GenerateRequest,
    Missing,
    ModelBackend,
    Request,
    Response,
    Score,
    ScoreRequest,
)
from whorl.evals.results import TaskResult
from whorl.tracking.progress import Progress


@dataclass
class Client:
    """Sends the requests of a round to the back end of a role, each distinct one once.

    Attributes:
        backends: role -> back end; "model" is the one under evaluation.
        n_requests: distinct requests so far. roles_used: roles of these requests.
    """

    backends: Mapping[str, ModelBackend]
    progress: Progress = field(default_factory=Progress.silent)
    n_requests: int = 0
    roles_used: set[str] = field(default_factory=set)

    def respond(self, requests: Sequence[Request], role: str, label: str) -> list[Response]:
        """Return the responses, in order.

        Raises:
            ConfigError: no back end has the role.
        """
        if role not in self.backends:
            raise ConfigError(
                f"{label} needs a model with the role {role!r}", expected=one_of(role, list(self.backends)),
                do=f"give it, for example with --{role} URL",
            )  # fmt: skip
        self.roles_used.add(role)
        if not requests:  # a round in which an item waits for the others
            return []
        numbers: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            numbers.setdefault(_key(request), []).append(number)
        places = list(numbers.values())
        responses: list[Response] = [Missing("the back end gave no response")] * len(requests)
        self.n_requests += len(places)
        with self.progress.task(label, total=len(places), unit="requests") as bar:

            def receive(index: int, response: Response) -> None:
                if isinstance(response, Score) and not all(map(math.isfinite, response.log_probs)):
                    response = Missing("a log-probability is not finite")
                for place in places[index]:
                    responses[place] = response
                bar.advance()

            self.backends[role].respond([requests[place[0]] for place in places], receive)
        return responses


def evaluate(
    backend: ModelBackend,
    tasks: Iterable[EvalTask],
    *,
    roles: Mapping[str, ModelBackend] | None = None,
    progress: Progress | None = None,
    on_result: Callable[[TaskResult], None] = lambda _: None,
) -> list[TaskResult]:
    """Return the results of each task, in order.

    Args:
        backend: the model; in a `CachedBackend`, earlier responses are used again.
        roles: back ends of further roles, such as "judge".
        on_result: called after each task.

    Raises:
        ConfigError: a task needs a role that has no back end.
    """
    progress = progress or Progress.silent()
    backends = {MODEL: backend, **(roles or {})}
    tasks = list(tasks)
    for task in tasks:
        for role in task.kind.roles:
            if role not in backends:
                raise ConfigError(
                    f"task {task.config.name} needs a model with the role {role!r}", expected=f"--{role} MODEL",
                    do=f"give an artifact, a folder or a URL with --{role}; in Python in `roles`",
                )  # fmt: skip
    found = []
    for task in tasks:
        client = Client(backends, progress)
        found.append(evaluate_task(client, task))
        on_result(found[-1])
    return found


def evaluate_task(client: Client, task: EvalTask) -> TaskResult:
    """Return the result of one task."""
    began = time.perf_counter()
    backend = client.backends[MODEL]
    cached = getattr(backend, "n_cached", 0)
    kind = task.kind
    for name in ("token_texts", "tokenizer", "sampler"):
        setattr(kind, name, getattr(backend, name, None))
    results = kind.score(kind.answer(task.items, client.respond))
    cut = sum(1 for result in results if result.details.get("n_cut"))
    notes = []
    if cut:
        limit = f" of {backend.max_length:,} positions" if backend.max_length else ""
        first = next(result for result in results if result.details.get("n_cut"))
        notes.append(
            f"{cut:,} of {len(results):,} contexts exceed the window{limit}: their beginning was cut; "
            f"{first.item!r} lost {first.details['n_cut']:,} tokens"
            + (", with them few-shot examples: lower --num-fewshot" if task.examples else "")
        )
    others = {role: client.backends[role] for role in sorted(client.roles_used - {MODEL})}
    notes += [f"The {role} is {each.name}, {each.address}" for role, each in others.items()]
    config = task.config
    return TaskResult(
        config.name, config.kind, config.version, task.hash, config.about, backend.name, backend.address,
        metrics=tuple(kind.chosen_metrics()), measures=tuple(task_measures(kind, results)),
        outcomes=outcome_counts(results), items=tuple(results), by_group=group_measures(kind, results),
        requests=client.n_requests, cached=getattr(backend, "n_cached", 0) - cached,
        seconds=time.perf_counter() - began, notes=(*notes, *kind.notes(results)),
        settings={role: each.address for role, each in others.items()},
    )  # fmt: skip


def _key(request: Request) -> Hashable:
    """Return a key that equal requests share; messages are mappings, which have no hash."""
    name = {GenerateRequest: "prompt", ScoreRequest: "context"}.get(type(request), "")
    if not name or isinstance(given := getattr(request, name), str):
        return request
    messages = tuple(tuple(sorted(message.items())) for message in given)
    return (messages, replace(request, **{name: ""}))  # type: ignore[arg-type]
