"""Tasks before and after training: a filter by the length of prompts, and episodes with the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.align.environments import EnvironmentConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.reward_model import load_reward_verifier
from whorl.align.stage.io import read_tasks
from whorl.errors import ConfigError, DataError
from whorl.evals.episodes.config import make_environment
from whorl.evals.episodes.env_loop import StepError, make_env_loop
from whorl.evals.episodes.environment import Prompt, TextEnv
from whorl.evals.episodes.samplers import PolicyBackend
from whorl.evals.grading import Completion, VerifiableTask
from whorl.evals.kinds.episodes import episode_task
from whorl.evals.model.sampling import open_engine
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.tokens.token_encoder import TokenEncoder

RESETS = 64  # environments that start at a time


@dataclass(frozen=True)
class FittingTasks:
    """Tasks whose prompt leaves room for a completion; rejected: reason -> number of training tasks."""

    train: list[VerifiableTask]
    test: list[VerifiableTask]
    rejected: dict[str, int]


def read_fitting_tasks(folder: Path, encoder: TokenEncoder, step: str, **limits: Any) -> FittingTasks:
    """Return the tasks of a data set whose prompts fit. step: for messages. limits: of `filter_by_length`.

    Raises:
        DataError: no task has a verifier, or none fits.
    """
    train, rejected = filter_by_length(encoder, read_tasks(folder, "train"), **limits)
    test, _ = filter_by_length(encoder, read_tasks(folder, "test"), **limits)
    if not train and not rejected:
        raise DataError(
            f"{folder} has texts to learn from, but no tasks with a verifier",
            expected='tasks with a verifier (source = "files": shape = "tasks")',
        )
    if not train or not test:
        raise DataError(
            "no task fits its prompt and a completion",
            expected=f"prompts of at most {limits['length'] - limits['max_tokens']:,} ids",
            do=f"raise {step}.max_seq_len",
        )
    return FittingTasks(train, test, rejected)


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


def evaluate_policy(
    network: PolicyModel,
    encoder: TokenEncoder,
    tests: Sequence[VerifiableTask],
    *,
    temperature: float,
    reward_model: Path | None = None,
    **limits: Any,
) -> tuple[dict[str, float], TaskResult]:
    """Return the metrics of greedy and sampled answers to held-out tasks, and the sampled answers.

    reward_model: folder of a model that also scores the answers; accuracy still comes from the verifiers.
    limits: of `evaluate_tasks`.
    """
    greedy = evaluate_tasks(network, encoder, tests, **limits)
    sampled = evaluate_tasks(network, encoder, tests, temperature=temperature, **limits)
    answers = [item.answers[0] for item in sampled.items]
    found = {
        "accuracy": sampled.measure("passed").value, "reward": sampled.measure("reward").value,
        "median_characters": float(sorted(map(len, answers))[len(answers) // 2]),
        "accuracy_greedy": greedy.measure("passed").value,
    }  # fmt: skip
    if reward_model is not None:
        dtype = str(network.model.dtype).removeprefix("torch.")
        verifier = load_reward_verifier(reward_model, dtype, str(network.device))
        grades = verifier(tests, [Completion(text) for text in answers])
        found["reward_model_score"] = sum(grade.value for grade in grades) / len(grades)
    return found, sampled


def evaluate_tasks(
    network: PolicyModel,
    encoder: TokenEncoder,
    tasks: Sequence[VerifiableTask],
    *,
    max_tokens: int,
    length: int,
    temperature: float = 0.0,
    seed: int = 0,
    environment: EnvironmentConfig | None = None,
) -> TaskResult:
    """Return the result of one episode per task with the current weights (`evals/kinds/episodes.py`).

    Args:
        max_tokens: ids of a reply. length: ids of a row. temperature: 0 decodes greedily.
    """
    engine = open_engine(network.eval_copy(), (64, length), encoder, with_text=False)
    generation = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    task = episode_task("held-out", tasks, generation, environment)
    return evaluate(PolicyBackend(engine, encoder), [task])[0]
