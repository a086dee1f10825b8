"""Episodes: rollouts of environments, sampled turn by turn by an engine or a back end (`samplers.py`).

    prompt | reply 1 | environment | reply 2 | environment | reply 3          ids of one row
      0        1           0           1           0           1              action_mask

The ids of a reply are kept as sampled. The messages of the environment are tokenized once, with the turn markers of the
chat template, and appended. So no text is tokenized twice, and the trainer scores the ids that the engine sampled.

The next turn of a row finds all earlier turns in the prefix cache. By default all rows reply, then all environments step,
then the next turns begin in row order: the batches of the engine, and so the last bits of a run, do not depend on time.
With `overlap`, the engine samples rows whose environment has answered while others still wait.

    done                                           terminated
    max_turns, context, length of a reply          truncated: `finished` is False, and rewards so far count
    a step or reset raises, hangs, returns no Turn `failed`: reward 0, counted in env_errors

The subtle point is seeds. Turn t of row n has a separate seed, so with `overlap` a reply does not depend on which
environment answered first, except for ties decided by rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, DataError
from whorl.evals.episodes.config import EpisodeConfig, make_environment
from whorl.evals.episodes.env_loop import GRACE_SECONDS, POLL_SECONDS, EnvLoop, StepError
from whorl.evals.episodes.environment import Prompt, Reply, TextEnv, Turn
from whorl.evals.grading import Grade, VerifiableTask
from whorl.tokens.token_encoder import Message
from whorl.tracking.seeds import derive


@dataclass
class Episode:
    """A rollout: one row of ids with aligned streams, and its result.

    ids, action_mask, log_probs, versions: of prompt, replies and messages; the last two are 0 outside of replies.
    reward: summed over turns. finished: terminated, not truncated. failed: the reward of 0 is no statement about the
    policy. env_errors: 1 if the environment failed. reply, reply_start: of the last turn.
    """

    env: TextEnv
    prompt: Prompt = ""
    ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reply_start: int = 0
    reply: Reply = field(default_factory=lambda: Reply(""))
    reward: float = 0.0
    passed: bool = False
    finished: bool = False
    failed: bool = False
    reason: str = ""
    turns: int = 0
    tool_calls: int = 0
    malformed_calls: int = 0
    env_errors: int = 0

    @property
    def grade(self) -> Grade:
        """The result as a verifier's."""
        if self.failed:
            return Grade(self.reward, False, self.reason, outcome="error")
        return Grade(self.reward, self.passed, self.reason)

    @property
    def text(self) -> str:
        """The last reply; with several turns the whole conversation after the prompt."""
        if self.turns <= 1:
            return self.reply.text
        first = 0 if isinstance(self.prompt, str) else len(self.prompt)
        lines = [f"{m['role']}: {m['content']}" for m in self.messages[first:]]
        return "\n".join([*lines, f"assistant: {self.reply.text}"])

    @property
    def versions_sampled(self) -> list[int]:
        """Versions of the weights that sampled the replies, one per id."""
        return [v for v, sampled in zip(self.versions, self.action_mask, strict=True) if sampled]

    def append(self, ids: Sequence[int]) -> None:
        """Append ids that the policy did not sample."""
        self.ids += ids
        self.action_mask += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [0] * len(ids)

    def end(self, info: Turn, *, terminated: bool) -> None:
        """Set the result of the last turn."""
        self.finished = terminated and self.reply.finished
        self.passed = bool(info.info.get("passed", terminated and self.reward > 0))
        self.failed = bool(info.info.get("failed", False))
        self.reason = str(info.info.get("reason", ""))

    def fail(self, reason: str) -> None:
        """Set the result after an error of the environment."""
        self.reward, self.failed, self.env_errors, self.reason = 0.0, True, 1, reason
        self.finished = self.reply.finished


class ReplySampler(Protocol):
    """Samples the replies of episodes.

    busy: whether replies are being sampled. empty_row: ids of an episode that could not start.
    """

    @property
    def empty_row(self) -> Sequence[int]: ...

    @property
    def busy(self) -> bool: ...

    def start(self, episode: Episode, task: VerifiableTask) -> None:
        """Prepare the prompt of an episode. Raises ConfigError: it is too long; other errors end the episode alone."""

    def submit(self, n: int, episode: Episode, sampling: SamplingParams) -> None:
        """Request the next reply of episode number n."""

    def step(self, episodes: Sequence[Episode]) -> list[int]:
        """Advance, and return the episodes whose reply ended; one without a reply has failed."""
        ...

    def extend(self, episode: Episode, messages: Sequence[Message]) -> bool:
        """Append the messages of a turn; return False if the policy cannot reply to them. Raises DataError."""
        ...


class EpisodeRunner:
    """Runs episodes of one environment; see the top of this file.

    environment: None selects the task's verifier, with one turn.
    """

    def __init__(self, sampler: ReplySampler, loop: EnvLoop, environment: EpisodeConfig | None) -> None:
        self.sampler, self.loop, self.config = sampler, loop, environment
        self._make = partial(make_environment, environment)
        self._keys = count()

    def run(
        self, tasks: Sequence[VerifiableTask], sampling: SamplingParams,
        *, seed: int = 0, first_index: int = 0, on_end: Callable[[int, Episode], None] = lambda n, episode: None,
    ) -> list[Episode]:  # fmt: skip
        """Return an episode of each task, in order.

        Args:
            seed: each turn has its own, derived from the episode's index. first_index: index of the first episode.
            on_end: called with the index of each episode that ends.

        Raises:
            ConfigError: a prompt is too long; a verifier is unknown.
        """
        self.sampling, self.seed, self.first_index, self.on_end = sampling, seed, first_index, on_end
        envs = [self._make(self.loop) for _ in tasks]
        try:
            prompts = self.loop.reset_all(envs, tasks, self.config.reset_seconds if self.config else None)
            self.episodes = [self._start(*row) for row in zip(tasks, envs, prompts, strict=True)]
            self._run_episodes()
        finally:
            closed = self._close(envs)
        for episode, error in zip(self.episodes, closed, strict=True):
            if error is not None and not episode.env_errors:
                episode.env_errors, episode.reason = 1, error.reason
        return self.episodes

    def _close(self, envs: Sequence[TextEnv]) -> list[StepError | None]:
        own = [n for n, env in enumerate(envs) if type(env).close is not TextEnv.close]
        closed = self.loop.close_all(
            [envs[n] for n in own], self.config.step_seconds if self.config else None
        )
        errors = dict(zip(own, closed, strict=True))
        return [errors.get(n) for n in range(len(envs))]

    def _run_episodes(self) -> None:
        self.active = set(range(len(self.episodes)))
        for n in [n for n, episode in enumerate(self.episodes) if episode.failed]:
            self._end(n)
        self.stepping: dict[int, int] = {}  # key of a step -> episode
        self.ready: set[int] = set()  # episodes whose next turn begins when no step is running
        first_of: dict[tuple[int, ...] | int, int] = {}
        for n in sorted(self.active):
            first_of.setdefault(tuple(self.episodes[n].ids) or n, n)
        firsts = set(first_of.values())
        rest = self.active - firsts
        for n in sorted(firsts):
            self._submit(n)
        if rest:  # equal prompts submitted later find the prefix cached
            while any(
                e.turns == 0 and len(e.ids) == e.reply_start for e in map(self.episodes.__getitem__, firsts)
            ):
                self._sample()
            for n in sorted(rest):
                self._submit(n)
        self._progress = time.monotonic()
        while self.active:
            if self.sampler.busy:
                self._sample()
            self._answer()
            if self.ready and not self.sampler.busy and not self.stepping:
                for n in sorted(self.ready):
                    self._submit(n)
                self.ready.clear()

    def _start(self, task: VerifiableTask, env: TextEnv, prompt: Prompt | StepError) -> Episode:
        episode = Episode(env)
        if not isinstance(prompt, StepError):
            episode.prompt = prompt
            episode.messages = [] if isinstance(prompt, str) else [*prompt]
            try:
                self.sampler.start(episode, task)
            except ConfigError:
                raise
            except Exception as error:  # of a chat template, or foreign messages
                prompt = StepError(f"reset: {type(error).__name__}: {error}".splitlines()[0])
        if isinstance(prompt, StepError):
            episode = Episode(env)
            episode.append(self.sampler.empty_row)
            episode.fail(prompt.reason)
        return episode

    def _submit(self, n: int) -> None:
        """Request the next reply."""
        episode, sampling = self.episodes[n], self.sampling
        episode.reply_start = len(episode.ids)
        if sampling.temperature:
            turn = [episode.turns] if episode.turns else []
            seed = derive(self.seed, self.first_index + n, *turn)
            sampling = sampling.model_copy(update={"seed": seed})
        self.sampler.submit(n, episode, sampling)

    def _sample(self) -> None:
        """Advance the sampler, and start the environments of the replies that ended."""
        for n in self.sampler.step(self.episodes):
            if self.episodes[n].failed:
                self._end(n)
            else:
                self._step_environment(n)
        self._progress = time.monotonic()

    def _step_environment(self, n: int) -> None:
        episode, key = self.episodes[n], next(self._keys)
        episode.turns += 1
        self.stepping[key] = n
        seconds = self.config.step_seconds if self.config else None
        self.loop.submit(key, episode.env, tuple(episode.messages), episode.reply, seconds)

    def _answer(self) -> None:
        """Process the turns that environments returned; wait for one if no reply is being sampled."""
        while found := self.loop.take():
            self._process(*found)
        if self.config is not None:
            self.loop.start_flush()
        if self.sampler.busy or not self.stepping:
            return
        if self.config is None and self.loop.awaits_flush:  # one batch for all completions
            self.loop.flush()
        elif found := self.loop.take(POLL_SECONDS):
            self._process(*found)
        elif self.loop.is_flushing:
            self._progress = time.monotonic()
        elif self.config and time.monotonic() - self._progress > self.config.step_seconds + GRACE_SECONDS:
            self.loop.abandon()

    def _process(self, key: int, turn: Turn | StepError) -> None:
        n = self.stepping.pop(key)
        episode = self.episodes[n]
        self._progress = time.monotonic()
        if isinstance(turn, StepError):
            episode.fail(turn.reason)
        else:
            episode.reward += turn.reward
            episode.tool_calls += int(turn.info.get("tool_calls", 0))
            episode.malformed_calls += int(turn.info.get("malformed_calls", 0))
            if self._continues(episode, turn):
                if self.config is not None and self.config.overlap:
                    self._submit(n)
                else:
                    self.ready.add(n)
                return
        self._end(n)

    def _end(self, n: int) -> None:
        self.active.discard(n)
        self.on_end(n, self.episodes[n])

    def _continues(self, episode: Episode, turn: Turn) -> bool:
        """Append the messages of a turn and return whether the policy replies again; otherwise set the result."""
        limited = self.config is None or episode.turns >= self.config.max_turns
        if turn.done or turn.truncated or limited:
            episode.end(turn, terminated=turn.done and not turn.truncated)
            return False
        try:
            extended = self.sampler.extend(episode, turn.messages)
        except DataError as error:
            episode.fail(str(error).splitlines()[0])
            return False
        if not extended:
            episode.end(turn, terminated=False)
            return False
        reply = {"role": "assistant", "content": episode.reply.text}
        episode.messages += [reply, *turn.messages]
        return True
