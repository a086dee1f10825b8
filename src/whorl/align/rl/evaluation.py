"""Tasks before and after training: a filter by the length of prompts, and episodes with the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from whorl.align.environments import EnvironmentConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.config import RLConfig
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, DataError
from whorl.evals.episodes.env_loop import StepError, make_env_loop
from whorl.evals.episodes.environment import Prompt, TextEnv, make_environment
from whorl.evals.episodes.runner import EpisodeRunner
from whorl.evals.episodes.samplers import EngineSampler
from whorl.evals.grading import Grade, VerifiableTask
from whorl.evals.model.sampling import open_engine
from whorl.tokens.token_encoder import TokenEncoder

RESETS = 64  # environments that start at a time


def filter_by_length(
    encoder: TokenEncoder,
    tasks: Sequence[VerifiableTask],
    length: int,
    max_tokens: int,
    environment: EnvironmentConfig | None = None,
) -> tuple[list[VerifiableTask], dict[str, int]]:
    """Return (tasks whose prompt leaves room for a completion, counts of the others by reason).

    Raises:
        ConfigError: `reset` of the environment fails for all of the first tasks.
    """
    found, rejected = list[VerifiableTask](), dict[str, int]()
    with closing(make_env_loop(environment, [])) as loop:
        for start in range(0, len(tasks), RESETS):
            part = tasks[start : start + RESETS]
            envs = [make_environment(environment, loop) for _ in part]
            prompts = loop.reset_all(envs, part, environment.reset_seconds if environment else None)
            for task, env, prompt in zip(part, envs, prompts, strict=True):
                reason = _reject_reason(encoder, prompt, env, length - max_tokens)
                if reason:
                    rejected[reason] = rejected.get(reason, 0) + 1
                else:
                    found.append(task)
            if environment is not None:
                loop.close_all(envs, environment.step_seconds)
                first = prompts[0]
                if (
                    start == 0
                    and isinstance(first, StepError)
                    and all(isinstance(p, StepError) for p in prompts)
                ):
                    raise ConfigError(
                        f"the environment {environment.name!r} starts none of {len(part)} tasks: {first.reason}",
                        do="correct the environment, or raise environment.reset_seconds",
                    )
    return found, rejected


def _reject_reason(encoder: TokenEncoder, prompt: Prompt | StepError, env: TextEnv, room: int) -> str:
    """Return why a prompt is rejected; empty if it has at most `room` ids."""
    if isinstance(prompt, StepError):
        return prompt.reason
    try:
        too_long = len(encoder.prompt(prompt, env.tools, env.chat_template_kwargs)) > room
    except DataError as error:
        return str(error).splitlines()[0]
    return f"prompt longer than {room:,} ids" if too_long else ""


def evaluate_episodes(
    network: PolicyModel,
    encoder: TokenEncoder,
    tasks: Sequence[VerifiableTask],
    config: RLConfig,
    temperature: float = 0.0,
) -> tuple[list[str], list[Grade]]:
    """Return (texts of the replies, grades) of one episode per task with the current weights.

    temperature: 0 decodes greedily.
    """
    engine = open_engine(network.eval_copy(), (64, config.max_seq_len), encoder, with_text=False)
    with closing(make_env_loop(config.environment, tasks)) as loop:
        sampler = EngineSampler(engine, encoder, config.max_completion_tokens)
        runner = EpisodeRunner(sampler, loop, config.environment)
        sampling = SamplingParams(temperature=temperature, top_p=1.0, top_k=0)
        episodes = runner.run(tasks, sampling, seed=config.seed)
    return [episode.text for episode in episodes], [episode.grade for episode in episodes]
