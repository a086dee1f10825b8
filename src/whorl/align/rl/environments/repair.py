"""Repair of a program in the sandbox, with the output of its failing tests after each attempt.

    user         a program that fails, as the messages of the task
    assistant    the repaired program, in a fenced block or alone
    user         The tests fail. AssertionError: f(7, 3) is 4, not 10
    assistant    ...

The task's answer is the source of its tests. The reward is `discount` to the power of the failed attempts, and 0 if no
attempt passes. The tests run in another process than the program, which sees only the arguments of its calls. But the
output of failing tests is part of the dialogue and may name expected values: a policy can return these alone, so each
function needs many inputs (`docs/sandbox.md`).
"""

from __future__ import annotations

from collections.abc import Sequence

from whorl.errors import ConfigError
from whorl.evals.episodes.environment import EnvServices, Reply, TextEnv, Turn
from whorl.evals.grading.programs import tests_program
from whorl.tokens.token_encoder import Message

MAX_CHARACTERS = 600  # of the output that the policy sees; the end is kept


class RepairEnv(TextEnv):
    """See the top of this file.

    Args:
        attempts: programs that the policy may write.
        discount: factor of the reward for each failed attempt.

    Raises:
        ConfigError: an argument is out of range.
    """

    needs_sandbox = True

    def __init__(self, services: EnvServices, attempts: int = 3, discount: float = 1.0) -> None:
        super().__init__(services)
        if attempts < 1 or not 0 < discount <= 1:
            raise ConfigError(
                f"repair: attempts is {attempts} and discount is {discount}",
                expected="at least 1 attempt, and a discount above 0 up to 1",
            )
        self.attempts, self.discount, self.tried = attempts, discount, 0

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        result = await self.services.run(tests_program(self.task.answer, reply.text, prompt=self.task.prompt))
        self.tried += 1
        if result.ok:
            reward = self.discount ** (self.tried - 1)
            return Turn(reward=reward, done=True, info={"passed": True, "tool_calls": 1})
        info = {"passed": False, "tool_calls": 1, "reason": result.reason}
        if self.tried >= self.attempts:
            return Turn(done=True, info=info)
        output = "\n".join(text for text in (result.output.strip(), result.reason) if text)
        text = f"The tests fail. {output[-MAX_CHARACTERS:]}"
        return Turn([{"role": "user", "content": text}], info=info)
