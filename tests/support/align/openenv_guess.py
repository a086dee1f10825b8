"""An OpenEnv environment for the tests: a search for a secret number; the answer to a wrong reply is its direction."""

from __future__ import annotations

import asyncio
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    guess: str


class GuessObservation(Observation):
    text: str = ""


class GuessNumber(Environment[GuessAction, GuessObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self._state = 0, State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> GuessObservation:
        self.secret, self._state = (seed or 0) % 10, State(step_count=0)
        return GuessObservation(text="Guess a digit: ")

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> GuessObservation:
        if kwargs.get("hang"):
            await asyncio.sleep(5)
        return self.reset(seed, episode_id)

    def step(self, action: GuessAction, timeout_s: float | None = None, **kwargs: Any) -> GuessObservation:
        self._state.step_count += 1
        if action.guess == "crash":
            raise RuntimeError("the game crashed")
        if not action.guess.isdigit():
            return GuessObservation(text="a digit: ", reward=-0.5)
        guess = int(action.guess)
        done = guess == self.secret
        text = "" if done else "too high: " if guess > self.secret else "too low: "
        return GuessObservation(text=text, reward=float(done), done=done)

    @property
    def state(self) -> State:
        return self._state
