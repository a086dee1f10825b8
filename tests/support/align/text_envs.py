"""Environments for the tests, registered by their address, and a worker whose policy ends its replies early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from whorl.align.environments import EnvironmentConfig
from whorl.align.rl.rollout import RolloutWorker
from whorl.evals.episodes.environment import Reply, TextEnv, Turn
from whorl.sandbox import Program
from whorl.tokens.token_encoder import Message

LIMITS = ("max_turns", "step_seconds", "reset_seconds", "overlap")


class ShortReplies(RolloutWorker):
    """A worker whose replies end at every second byte, so that random weights reach several turns."""

    def setup(self, rows: int = 64) -> None:
        super().setup(rows)
        self._encoder.stop_ids |= frozenset(range(0, 256, 2))


class Echo(TextEnv):
    """Answers a reply with its length in brackets; done after `turns` replies. Reward: digits in the replies."""

    def __init__(self, services: Any, turns: int = 3, chat: bool = False, seconds: float = 0.0) -> None:
        super().__init__(services)
        self.turns, self.chat, self.seconds, self.seen = turns, chat, seconds, 0

    def reset(self, task: Any) -> Any:
        prompt = super().reset(task)
        return [{"role": "user", "content": prompt}] if self.chat else prompt

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        await asyncio.sleep(self.seconds)
        self.seen += 1
        answer = {"role": "tool", "content": f"[{len(reply.text)}]"}
        reward = sum(c.isdigit() for c in reply.text) / 4
        return Turn([answer], reward, done=self.seen == self.turns, info={"tool_calls": 1})


class Faulty(TextEnv):
    """Fails in a way of choice: in `reset`, on the first reply, or in `close`."""

    def __init__(self, services: Any, way: str) -> None:
        super().__init__(services)
        self.way = way

    def reset(self, task: Any) -> Any:
        if self.way == "reset":
            raise RuntimeError("no such level")
        if self.way == "reset exits":
            raise SystemExit("bye")
        if self.way == "reset hangs":
            return asyncio.sleep(60)
        if self.way == "reset blocks":
            time.sleep(3)
        wrong = {"reset type": 3, "reset empty": "", "reset message": [{"content": "hi"}]}
        return wrong.get(self.way, super().reset(task))

    async def close(self) -> None:
        if self.way == "close":
            raise OSError("no server")

    async def step(self, messages: Sequence[Message], reply: Reply) -> Any:
        if self.way == "hangs":
            await asyncio.sleep(60)
        if self.way == "blocks":
            time.sleep(3)
        if self.way == "raises":
            raise KeyError("state")
        return {
            "wrong type": "good", "not finite": Turn(reward=float("nan")),
            "bad message": Turn([{"role": "tool"}]), "bad count": Turn(info={"tool_calls": "two"}),
            "ends": Turn(reward=1.0, truncated=True),
        }.get(self.way, Turn([{"role": "tool", "content": "x" * 40}], 0.5))  # fmt: skip


class Prepared(TextEnv):
    """Waits in `reset`, runs a program, and gives its output as the prompt."""

    needs_sandbox = True

    def __init__(self, services: Any, seconds: float) -> None:
        super().__init__(services)
        self.seconds = seconds

    async def reset(self, task: Any) -> str:
        await asyncio.sleep(self.seconds)
        return (await self.services.run(Program("print(7 * 7)"))).output

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        return Turn(done=True)


class Sync(TextEnv):
    """Has a step that is no coroutine."""

    def step(self, messages: Sequence[Message], reply: Reply) -> Any:  # type: ignore[override]
        return Turn(done=True)


def config_of(name: str, **changes: Any) -> EnvironmentConfig:
    limits = {name: changes.pop(name) for name in LIMITS if name in changes}
    return EnvironmentConfig(name=f"{__name__}:{name}", options=changes, **limits)
