"""Environments of OpenEnv (the extra `openenv`), over the package's own client.

    [steps.rl.environment]
    name = "openenv"
    options = { url = "http://127.0.0.1:8000", observation = "text", action = "guess" }

A rollout is one session of the server, so the server needs `max_concurrent_envs` of at least a batch's rollouts. The
task's `answer` holds the arguments of `reset` as JSON, for example {"seed": 7}: with them the first observation depends
on the task alone. It follows the task's prompt. Later observations are messages of the role `user`.

    action = "guess"     the reply is the value of the action's field `guess`
    without              the reply is the whole action, a JSON object; a malformed one is answered with an error

The subtle point is the client's loop. A client belongs to the event loop in which it connected, and all sessions run in
one loop, so `reset`, `step` and `close` are coroutines.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from whorl.errors import ConfigError, DataError
from whorl.evals.episodes.environment import EnvServices, Prompt, Reply, TextEnv, Turn
from whorl.evals.grading.task import VerifiableTask
from whorl.registry import import_attribute
from whorl.tokens.token_encoder import Message

GENERIC_CLIENT = "openenv.core.generic_client:GenericEnvClient"


class OpenEnvEnv(TextEnv):
    """See the top of this file.

    Args:
        url: of the server.
        action: field of the action that holds the reply; None parses the reply.
        observation: field of the observation that the policy sees; None shows the whole observation as JSON.
        passed_reward: a rollout has passed if its reward is at least this.
        client: "module:Class" of an `EnvClient`; the default needs no package of the environment.

    Raises:
        ConfigError: the package is not installed, or the client cannot be imported.
    """

    def __init__(
        self,
        services: EnvServices,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        passed_reward: float = 1.0,
        client: str = GENERIC_CLIENT,
    ) -> None:
        super().__init__(services)
        self.action, self.observation, self.passed_reward = action, observation, passed_reward
        self.reward = 0.0
        self._client = _client_class(client)(base_url=url)

    async def reset(self, task: VerifiableTask) -> Prompt:
        try:
            arguments = json.loads(task.answer or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise DataError(
                f"task {task.id!r}: the answer is {task.answer!r}"[:200],
                expected="arguments of reset as JSON",
            )
        await self._client.connect()
        text = self._text(await self._client.reset(**arguments))
        if task.prompt:
            return task.prompt + text
        *before, last = task.messages
        if not text:
            return task.messages
        if last.get("role") != "user":
            return [*task.messages, {"role": "user", "content": text}]
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        if self.action is not None:
            action: Any = {self.action: reply.text}
        else:
            try:
                action = json.loads(reply.text)
            except (ValueError, RecursionError):
                action = None
            if not isinstance(action, dict):
                error = {"role": "user", "content": "error: expected an action, a JSON object"}
                return Turn([error], info={"passed": False, "malformed_calls": 1})
        result = await self._client.step(action)
        reward = result.reward
        if reward is None:
            reward = 0.0
        if isinstance(reward, str) or not isinstance(result.done, bool):
            raise DataError(
                f"the server returned the reward {reward!r} and done {result.done!r}"[:200],
                expected="a number or nothing, and a bool",
            )
        self.reward += float(reward)
        info = {"passed": self.reward >= self.passed_reward, "tool_calls": 1}
        if result.done:
            return Turn(reward=float(reward), done=True, info=info)
        return Turn([{"role": "user", "content": self._text(result)}], float(reward), info=info)

    async def close(self) -> None:
        await self._client.close()

    def _text(self, result: Any) -> str:
        """Return what the policy sees of a result."""
        seen = result.observation
        if hasattr(seen, "model_dump"):
            seen = seen.model_dump(mode="json")
        if self.observation is None:
            return json.dumps(seen, sort_keys=True)
        text = seen.get(self.observation) if isinstance(seen, Mapping) else None
        if not isinstance(text, str):
            raise DataError(
                f"the observation is {seen!r}"[:200], expected=f"a text in its field {self.observation!r}"
            )
        return text


def _client_class(path: str) -> Any:
    try:
        importlib.import_module("openenv.core")
    except ImportError as error:
        raise ConfigError(
            f"openenv cannot be imported: {error}",
            expected="the extra 'openenv'",
            do="pip install 'whorl[openenv]'",
        ) from error
    try:
        return import_attribute(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the client {path!r} cannot be imported: {error}", expected="module:Class of an EnvClient"
        ) from error
