"""Environments of language models: conversations in which a program answers the policy.

    env = MyEnv(services, **options)                    one instance per rollout
    prompt = env.reset(task)                            a conversation, or a text to continue; may be a coroutine
    turn = await env.step(messages, reply)              after each reply, until `turn.done`
    await env.close()                                   once, after the last turn

A verifier is the environment of one turn (`VerifierEnv`). `runner.py` drives the turns; the messages of a turn are
tokenized once and never enter the loss.

The subtle point is waiting. All rollouts share one event loop, so a step that blocks it stops the others. A step awaits
`services.verify` and `services.run`, which batch the verifiers and programs of all rollouts, or `asyncio.to_thread` for
any other blocking call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from whorl.errors import DataError
from whorl.evals.grading import Grade, VerifiableTask
from whorl.evals.model.requests import Completion
from whorl.sandbox import Program, ProgramResult
from whorl.tokens.token_encoder import Message

Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class Reply(Completion):
    """A reply of the policy, with the stop id in its ids. prompt_ids: all ids before it, as the engine read them."""

    prompt_ids: Sequence[int] = ()

    @property
    def finished(self) -> bool:
        """Whether it ended with a stop id, not at a length limit."""
        return self.finish == "stop"


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to a reply.

    Attributes:
        messages: appended to the conversation, as {"role": "tool", "content": "42"}.
        reward: of this turn; the reward of a rollout is the sum over its turns.
        done: the rollout has terminated.
        truncated: the rollout ends at a limit of the environment.
        info: `passed` (bool; default: the rollout's reward is above 0), `tool_calls` and `malformed_calls` (counts of
            this turn), `failed` (bool: the reward of 0 is no statement about the reply).
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class EnvServices(Protocol):
    """Services that an environment may await; calls of all rollouts are batched."""

    async def verify(self, task: VerifiableTask, completion: Completion) -> Grade:
        """Return the grade of a completion, from the task's verifier or the reward model."""
        ...

    async def run(self, program: Program) -> ProgramResult:
        """Return the result of a program in the sandbox."""
        ...


class TextEnv(ABC):
    """One rollout of a multi-turn task; see the top of this file."""

    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, for the chat template
    chat_template_kwargs: Mapping[str, Any] | None = None  # its further variables
    needs_sandbox = False  # whether it calls `services.run`
    max_tokens: int | None = None  # of the next reply, where that is less than the sampler's limit

    def __init__(self, services: EnvServices) -> None:
        self.services = services

    def reset(self, task: VerifiableTask) -> Prompt | Awaitable[Prompt]:
        """Start the rollout of a task and return its prompt, which depends on the task alone.

        It has a time limit (`EpisodeConfig.reset_seconds`). One that waits is a coroutine, as a step.
        """
        self.task, self.tools = task, (*self.tools, *task.tools)
        self.chat_template_kwargs = task.chat_template_kwargs
        return task.prompt or task.messages

    @abstractmethod
    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        """Answer a reply.

        messages: the conversation before the reply; without entries for a text to continue.
        """

    async def close(self) -> None:
        """Release what the rollout holds. Called once, also after an error of `reset` or a step."""
        return


class VerifierEnv(TextEnv):
    """The environment of one turn: the task's verifier gives the reward."""

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        grade = await self.services.verify(self.task, reply)
        return Turn(reward=grade.value, done=True, info=grade_info(grade))


def grade_info(grade: Grade) -> dict[str, Any]:
    """Return the `info` of a turn that ends with a grade."""
    return {"passed": grade.passed, "failed": grade.failed, "reason": grade.reason}


def check_prompt(prompt: object) -> Prompt:
    """Return the result of a reset if it is valid.

    Raises:
        DataError: it is neither a text nor messages with a role, or it is empty.
    """
    if isinstance(prompt, str | list | tuple) and prompt:
        if not isinstance(prompt, str):
            _check_messages(
                prompt, "the prompt", needs_text=False
            )  # the chat template may take more than text
        return prompt
    what = "an empty prompt" if isinstance(prompt, str | list | tuple) else type(prompt).__name__
    raise DataError(f"reset returned {what}", expected="a text to continue, or messages")


def check_turn(turn: object) -> Turn:
    """Return the result of a step if it is valid.

    Raises:
        DataError: it is no Turn, its reward is not finite, or a message lacks a role or a text.
    """
    if not isinstance(turn, Turn):
        raise DataError(f"step returned {type(turn).__name__}", expected="a Turn")
    if not isinstance(turn.reward, int | float) or not math.isfinite(turn.reward):
        raise DataError(f"the reward of a turn is {turn.reward!r}", expected="a finite number")
    _check_messages(turn.messages, "a turn")
    if not isinstance(turn.info, Mapping):
        raise DataError(f"the info of a turn is {type(turn.info).__name__}", expected="a mapping")
    for name in ("tool_calls", "malformed_calls"):
        if not isinstance(turn.info.get(name, 0), int):
            raise DataError(f"{name} of a turn is {turn.info[name]!r}"[:200], expected="a count")
    return turn


def _check_messages(messages: Sequence[Any], where: str, *, needs_text: bool = True) -> None:
    for message in messages:
        valid = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not valid or (needs_text and not isinstance(message.get("content"), str)):
            raise DataError(
                f"a message of {where} is {message!r}"[:200], expected="a role and a text `content`"
            )
