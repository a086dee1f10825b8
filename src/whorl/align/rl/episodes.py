"""Episodes: rollouts of environments, sampled by the engine turn by turn.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from whorl.align.environments import EnvironmentConfig
from whorl.align.rl.env_loop import GRACE_SECONDS, POLL_SECONDS, EnvLoop, StepError
from whorl.align.rl.environment import Prompt, Reply, TextEnv, Turn, load_environment
from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, DataError
from whorl.evals.model.example import ExampleTokenizer, Message
from whorl.evals.verify.task import Verdict, VerifiableTask
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
    reply: Reply = field(default_factory=lambda: Reply("", True))
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
    def verdict(self) -> Verdict:
        """The result as a verifier's."""
        return Verdict(self.reward, self.passed, self.reason, self.failed)

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


class EpisodeRunner:
    """Runs episodes of one environment on one engine; see the top of this file.

    Args:
        environment: None selects the task's verifier, with one turn.
        max_tokens: ids of one reply.
    """

    def __init__(
        self,
        engine: Engine,
        example_tokenizer: ExampleTokenizer,
        loop: EnvLoop,
        environment: EnvironmentConfig | None,
        max_tokens: int,
    ) -> None:
        self.engine, self.example_tokenizer, self.loop = engine, example_tokenizer, loop
        self.config, self.max_tokens = environment, max_tokens
        self._make = load_environment(environment)
        self._prompt_ids: dict[int, tuple[VerifiableTask, list[int]]] = {}
        self._keys = count()

    def run(
        self, tasks: Sequence[VerifiableTask], sampling: SamplingParams, *, seed: int, first_index: int = 0
    ) -> list[Episode]:
        """Return an episode of each task, in order.

        seed: each turn has its own, derived from the episode's index; first_index: index of the first episode.

        Raises:
            ConfigError: a prompt is too long; a verifier is unknown.
        """
        self.sampling, self.seed, self.first_index = sampling, seed, first_index
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
        self.active = {n for n, episode in enumerate(self.episodes) if not episode.failed}
        self.stepping: dict[int, int] = {}  # key of a step -> episode
        self.ready: set[int] = set()  # episodes whose next turn begins when no step is running
        first_of: dict[tuple[int, ...], int] = {}
        for n in sorted(self.active):
            first_of.setdefault(tuple(self.episodes[n].ids), n)
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
            if self.engine.busy:
                self._sample()
            self._answer()
            if self.ready and not self.engine.busy and not self.stepping:
                for n in sorted(self.ready):
                    self._submit(n)
                self.ready.clear()

    def _start(self, task: VerifiableTask, env: TextEnv, prompt: Prompt | StepError) -> Episode:
        episode, known = Episode(env), self._prompt_ids.get(id(task))
        if not isinstance(prompt, StepError):
            try:
                encode = self.example_tokenizer.prompt
                ids = known[1] if known else encode(prompt, env.tools, env.chat_template_kwargs)
            except Exception as error:  # of a chat template, or foreign messages
                prompt = StepError(f"reset: {type(error).__name__}: {error}".splitlines()[0])
        if isinstance(prompt, StepError):
            episode.append([self.example_tokenizer.tokenizer.end_ids[0]])
            episode.fail(prompt.reason)
            return episode
        episode.prompt = prompt
        if len(ids) >= self.engine.max_positions:
            raise ConfigError(
                f"the prompt of task {task.id!r} has {len(ids):,} ids, and the engine holds "
                f"{self.engine.max_positions:,}",
                expected="shorter prompts", do="leave it out, or increase max_seq_len",
            )  # fmt: skip
        self._prompt_ids[id(task)] = task, ids
        episode.append(ids)
        episode.messages = [] if isinstance(episode.prompt, str) else [*episode.prompt]
        return episode

    def _submit(self, n: int) -> None:
        """Request the next reply."""
        episode, sampling = self.episodes[n], self.sampling
        episode.reply_start = len(episode.ids)
        if sampling.temperature:
            turn = [episode.turns] if episode.turns else []
            seed = derive(self.seed, self.first_index + n, *turn)
            sampling = sampling.model_copy(update={"seed": seed})
        request = Request(
            id=str(n), ids=tuple(episode.ids), sampling=sampling, stop_ids=self.example_tokenizer.stop_ids,
            max_tokens=min(self.max_tokens, self.engine.max_positions - len(episode.ids)),
        )  # fmt: skip
        self.engine.add(request)

    def _sample(self) -> None:
        """Run one step of the engine, and start the environments of the replies that ended."""
        for delta in self.engine.step():
            episode = self.episodes[int(delta.request_id)]
            for token in delta.tokens:
                episode.ids.append(token.id)
                episode.action_mask.append(True)
                episode.log_probs.append(token.log_prob)
                episode.versions.append(token.version)
            if delta.finish_reason is not None:
                self._step_environment(int(delta.request_id), delta)
        self._progress = time.monotonic()

    def _step_environment(self, n: int, delta: Delta) -> None:
        episode, key = self.episodes[n], next(self._keys)
        start = episode.reply_start
        text = self.example_tokenizer.decode(episode.ids[start:])
        episode.reply = Reply(
            text, delta.finish_reason == "stop", episode.ids[:start], episode.ids[start:], episode.log_probs[start:]
        )  # fmt: skip
        episode.turns += 1
        self.stepping[key] = n
        seconds = self.config.step_seconds if self.config else None
        self.loop.submit(key, episode.env, tuple(episode.messages), episode.reply, seconds)

    def _answer(self) -> None:
        """Process the turns that environments returned; wait for one if the engine is idle."""
        while found := self.loop.take():
            self._process(*found)
        if self.config is not None:
            self.loop.start_flush()
        if self.engine.busy or not self.stepping:
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
        self.active.discard(n)

    def _continues(self, episode: Episode, turn: Turn) -> bool:
        """Append the messages of a turn and return whether the policy replies again; otherwise set the result."""
        limited = self.config is None or episode.turns >= self.config.max_turns
        if turn.done or turn.truncated or limited or not episode.reply.finished:
            episode.end(turn, terminated=turn.done and not turn.truncated)
            return False
        try:
            env = episode.env
            ids = self.example_tokenizer.after_reply(
                episode.prompt, turn.messages, env.tools, env.chat_template_kwargs, stop_id=episode.ids[-1]
            )
        except DataError as error:
            episode.fail(str(error).splitlines()[0])
            return False
        if len(episode.ids) + len(ids) >= self.engine.max_positions:
            episode.end(turn, terminated=False)
            return False
        episode.append(ids)
        reply = {"role": "assistant", "content": episode.reply.text}
        episode.messages += [reply, *turn.messages]
        return True
