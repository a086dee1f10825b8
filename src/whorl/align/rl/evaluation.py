"""Tasks before and after training: a filter by the length of prompts, and episodes with the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from whorl.align.config import RLConfig
from whorl.align.environments import EnvironmentConfig
from whorl.align.model.example import ExampleTokenizer
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import rollout_engine
from whorl.align.rl.env_loop import make_env_loop
from whorl.align.rl.environment import load_environment
from whorl.align.rl.episodes import EpisodeRunner
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import DataError
from whorl.evals.verify.task import Verdict, VerifiableTask


def filter_by_length(
    example_tokenizer: ExampleTokenizer,
    tasks: Sequence[VerifiableTask],
    length: int,
    max_tokens: int,
    environment: EnvironmentConfig | None = None,
) -> tuple[list[VerifiableTask], dict[str, int]]:
    """Return (tasks whose prompt leaves room for a completion, counts of the others by reason)."""
    make, services = load_environment(environment), make_env_loop(None, [])
    found: list[VerifiableTask] = []
    rejected: dict[str, int] = {}
    for task in tasks:
        try:
            env = make(services)
            n = len(example_tokenizer.prompt(env.reset(task), env.tools))
        except DataError as error:
            reason = str(error).splitlines()[0]
            rejected[reason] = rejected.get(reason, 0) + 1
            continue
        if n + max_tokens <= length:
            found.append(task)
        else:
            reason = f"prompt longer than {length - max_tokens:,} ids"
            rejected[reason] = rejected.get(reason, 0) + 1
    return found, rejected


def evaluate_episodes(
    network: PolicyModel,
    example_tokenizer: ExampleTokenizer,
    tasks: Sequence[VerifiableTask],
    config: RLConfig,
    temperature: float = 0.0,
) -> tuple[list[str], list[Verdict]]:
    """Return (texts of the replies, verdicts) of one episode per task with the current weights.

    temperature: 0 decodes greedily.
    """
    engine = rollout_engine(
        network.eval_copy(), example_tokenizer, sequences=64, max_length=config.max_seq_len
    )
    with closing(make_env_loop(config.environment, tasks)) as loop:
        runner = EpisodeRunner(
            engine, example_tokenizer, loop, config.environment, config.max_completion_tokens
        )
        sampling = SamplingParams(temperature=temperature, top_p=1.0, top_k=0)
        episodes = runner.run(tasks, sampling, seed=config.seed)
    return [episode.text for episode in episodes], [episode.verdict for episode in episodes]
