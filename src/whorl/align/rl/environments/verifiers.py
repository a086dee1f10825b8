"""Tasksets and harnesses of verifiers (the extra `verifiers`, `verifiers.v1`).

    [steps.rl.environment]
    name = "verifiers"
    options = { taskset = "my_taskset", taskset_options = { split = "train" }, max_turns = 4 }

A harness drives the rollout there: it sends requests to an OpenAI-compatible endpoint until it is done. Here the engine
samples and the environment answers. So each rollout runs as a task of the event loop, and its requests wait at a local
endpoint (`_verifiers_endpoint.py`):

    reset    starts the rollout; the prompt is the conversation of its first request, the tools are those of the request
    step     answers the waiting request with the reply; the next request's new messages are those of the turn
             the end of the rollout gives its reward, from the taskset's rewards

Each request repeats the conversation. Only its new messages are tokenized; a reply keeps its sampled ids. The answer to
a request has the ids of prompt and reply, and their log-probabilities, as vLLM writes them.

The subtle point is a harness that rewrites the conversation (compaction, subagents): its requests are no continuation
of the sampled ids, so the rollout fails with this reason and is counted in `env_errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from whorl.align.rl.environments._verifiers_endpoint import LocalEndpoint, PendingRequest, completion
from whorl.errors import ConfigError, DataError
from whorl.evals.episodes.environment import EnvServices, Prompt, Reply, TextEnv, Turn
from whorl.evals.grading.task import VerifiableTask
from whorl.tokens.chat.tool_calls import parse_reply
from whorl.tokens.token_encoder import Message


class VerifiersEnv(TextEnv):
    """See the top of this file. A task's `answer` holds its index in the taskset (`verifiers_tasks`).

    Args:
        taskset: id of an installed taskset, or its module.
        taskset_options, harness_options: fields of their configurations.
        harness: id; None takes the taskset's own.
        max_turns: limit that the harness respects, so that a rollout at its limit still gets its reward.
        passed_reward: a rollout has passed if its reward is at least this.

    Raises:
        ConfigError: the package is not installed, or taskset, harness or options do not exist.
    """

    def __init__(
        self,
        services: EnvServices,
        taskset: str,
        taskset_options: Mapping[str, Any] | None = None,
        harness: str | None = None,
        harness_options: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        passed_reward: float = 1.0,
    ) -> None:
        super().__init__(services)
        self._tasks = _load_tasks(taskset, json.dumps(dict(taskset_options or {}), sort_keys=True))
        self._harness = {"id": harness or _default_harness(taskset), **(harness_options or {})}
        _agent(self._harness, "http://127.0.0.1", max_turns)  # its errors stop the stage
        self.max_turns, self.passed_reward = max_turns, passed_reward
        self.messages: list[Message] = []  # of the last request, with the reply to it
        self._events: asyncio.Queue[Any] = asyncio.Queue()  # requests, then the trace or an error
        self._waiting: PendingRequest | None = None
        self._rollout: asyncio.Task[None] | None = None
        self._endpoint: LocalEndpoint | None = None

    async def reset(self, task: VerifiableTask) -> Prompt:
        index = int(task.answer) if task.answer.isdigit() else -1
        if not 0 <= index < len(self._tasks):
            raise DataError(
                f"task {task.id!r}: the answer is {task.answer!r}"[:200],
                expected=f"an index of the taskset, below {len(self._tasks)}",
            )
        self._endpoint = await LocalEndpoint.acquire()
        agent = _agent(self._harness, self._endpoint.url, self.max_turns)
        self._rollout = asyncio.create_task(self._run(agent, self._tasks[index]))
        event = await self._events.get()
        if not isinstance(event, PendingRequest):
            raise DataError(f"the rollout ended without a request: {_reason(event)}")
        self._waiting, self.tools = event, event.tools
        self.messages = list(event.messages)
        return tuple(event.messages)

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        assert self._waiting is not None
        parsed = parse_reply(reply.text)
        counts = {"tool_calls": len(parsed.calls), "malformed_calls": parsed.malformed}
        response = completion(reply, parsed)
        self._waiting.answer(response)
        self.messages.append(response["choices"][0]["message"])
        event = await self._events.get()
        if isinstance(event, PendingRequest):
            self._waiting, known = event, len(self.messages)
            if [*map(_comparable, event.messages[:known])] != [*map(_comparable, self.messages)]:
                raise DataError(
                    "the harness changed earlier messages", expected="requests that continue the conversation"
                )
            if event.tools != self.tools:
                raise DataError("the harness changed its tools", expected="the tools of the first request")
            new = event.messages[known:]
            self.messages = list(event.messages)
            return Turn(new, info=counts)
        self._waiting = None
        if isinstance(event, Exception) or event.has_error:
            return Turn(done=True, info={**counts, "failed": True, "passed": False, "reason": _reason(event)})
        reward = float(event.reward)
        info = {**counts, "passed": reward >= self.passed_reward, "reason": str(event.stop_condition)}
        return Turn(reward=reward, done=not event.is_truncated, truncated=event.is_truncated, info=info)

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._rollout
        left = [self._waiting, *(self._events.get_nowait() for _ in range(self._events.qsize()))]
        for request in left:
            if isinstance(request, PendingRequest):
                request.abandon()
        if self._endpoint is not None:
            await self._endpoint.release()

    async def _run(self, agent: Any, task: Any) -> None:
        assert self._endpoint is not None
        endpoint, known = self._endpoint, list[str]()

        def register(trace: Any) -> None:
            known.append(trace.id)
            endpoint.queues[trace.id] = self._events

        try:
            self._events.put_nowait(await agent.run(task, on_trace=register))
        except Exception as error:  # of foreign code
            self._events.put_nowait(error)
        finally:
            for name in known:
                endpoint.queues.pop(name, None)


def verifiers_tasks(
    taskset: str, options: Mapping[str, Any] | None = None, *, n_train: int, n_test: int
) -> dict[str, list[VerifiableTask]]:
    """Return tasks of a taskset: the first `n_test` are held out, the next `n_train` train; repeated ones are dropped.

    Raises:
        ConfigError: as `VerifiersEnv`. DataError: no task is left to train.
    """
    found: dict[str, VerifiableTask] = {}
    for index, task in enumerate(_load_tasks(taskset, json.dumps(dict(options or {}), sort_keys=True))):
        text = task.data.prompt_text or task.data.name or f"task {index}"
        key = task.data.model_copy(update={"idx": None}).model_dump_json()
        name = f"{taskset}-{task.data.id or index}"
        found.setdefault(
            key, VerifiableTask(name, messages=({"role": "user", "content": text},), answer=str(index))
        )
    tasks = list(found.values())
    if len(tasks) <= n_test:
        raise DataError(
            f"{taskset} has {len(tasks)} distinct tasks, and {n_test} are held out", expected="more tasks"
        )
    return {"train": tasks[n_test : n_test + n_train], "test": tasks[:n_test]}


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(
            f"verifiers cannot be imported: {error}", expected="the extra 'verifiers'",
            do="pip install 'whorl[verifiers]'",
        ) from error  # fmt: skip


@lru_cache(maxsize=8)
def _load_tasks(taskset: str, options: str) -> Sequence[Any]:
    package = _package()
    try:
        config = package.taskset_config_type(taskset)(id=taskset, **json.loads(options))
        loaded = package.load_taskset(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the taskset {taskset!r} cannot be loaded: {error}") from error
    if not loaded.bounded:
        raise ConfigError(f"the taskset {taskset!r} is infinite", expected="one with an end")
    return list(loaded)


def _default_harness(taskset: str) -> str:
    """Return the harness that the taskset's module exports, or `null`, a plain loop of requests."""
    name: str = _package().default_harness_id(taskset)
    return "null" if name == "bash" else name


def _agent(harness: Mapping[str, Any], url: str, max_turns: int | None) -> Any:
    package = _package()
    try:
        client = package.EvalClientConfig(base_url=f"{url}/v1", api_key_var="WHORL_ENDPOINT_KEY")
        config = package.AgentConfig(
            harness=dict(harness), runtime=package.SubprocessConfig(), model="policy", client=client, max_turns=max_turns,
            network_notice=False,
        )  # fmt: skip
        return package.Agent(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the harness {harness['id']!r} cannot be loaded: {error}") from error


def _comparable(message: Message) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return message.get("role"), message.get("content") or "", calls


def _reason(event: Any) -> str:
    """Return the error of a rollout, from its trace or an exception."""
    if isinstance(event, Exception):
        return f"{type(event).__name__}: {event}"
    return (
        f"{event.errors[-1].type}: {event.errors[-1].message}" if event.errors else str(event.stop_condition)
    )
