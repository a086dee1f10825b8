"""Tasks of the step `tasks` that a program generates: arithmetic, reasoning-gym, tasksets of verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whorl.recipes.registry import StepContext

if TYPE_CHECKING:
    from whorl.evals.grading.task import VerifiableTask
    from whorl.recipes.steps.align.data_config import TasksConfig

Splits = dict[str, tuple[list["VerifiableTask"], list[Any]]]


def generated_tasks(ctx: StepContext, config: TasksConfig) -> Splits:
    """Return the tasks of each split, and their solutions as pairs or conversations."""
    if config.source == "arithmetic":
        return _arithmetic_tasks(config)
    if config.source == "reasoning_gym":
        return _reasoning_gym_tasks(ctx, config)
    return _verifiers_tasks(config)


def _arithmetic_tasks(config: TasksConfig) -> Splits:
    from whorl.align.data.arithmetic import ANSWER_PREFIX, Arithmetic
    from whorl.align.data.formats import PromptCompletion
    from whorl.tracking.seeds import numpy_rng

    source = Arithmetic(seed=config.seed, weights=config.levels, digit_by_digit=config.columns)
    rng = numpy_rng(config.seed, "tasks", "short")

    def pair(problem: Any) -> PromptCompletion:
        if rng.random() < config.answer_only_fraction:
            return PromptCompletion(
                source.prompt(problem), f"{ANSWER_PREFIX}{problem.answer}", "arithmetic", problem.id
            )
        return source.prompt_completion(problem)

    train, test = source.problems(config.first_problem, config.max_train), source.distinct(config.max_test)
    return {
        "train": ([source.task(p) for p in train], [pair(p) for p in train]),
        "test": ([source.task(p) for p in test], [source.prompt_completion(p) for p in test]),
    }


def _reasoning_gym_tasks(ctx: StepContext, config: TasksConfig) -> Splits:
    """Make tasks of reasoning-gym. Solutions are those that the package's scorer accepts."""
    from whorl.align.data.formats import Conversation, PromptCompletion
    from whorl.align.data.reasoning_gym import reasoning_gym_tasks

    made = reasoning_gym_tasks(
        config.dataset, config.levels, n_train=config.max_train, n_test=config.max_test, seed=config.seed,
        options=config.options, chat=config.chat,
    )  # fmt: skip
    splits: Splits = {}
    for split, found in made.items():
        solutions: list[Any] = []
        for task, answer in found:
            if answer is not None and config.chat:
                reply = {"role": "assistant", "content": answer}
                solutions.append(Conversation((*task.messages, reply), "reasoning-gym", task.id))
            elif answer is not None:
                solutions.append(PromptCompletion(task.prompt, answer, "reasoning-gym", task.id))
        splits[split] = [task for task, _ in found], solutions
        if len(solutions) < len(found):
            ctx.progress.log(
                f"    {split}: {len(found) - len(solutions):,} tasks without a solution to train on"
            )
    return splits


def _verifiers_tasks(config: TasksConfig) -> Splits:
    """Make tasks of a taskset of verifiers; it has no solutions."""
    from whorl.align.rl.environments.verifiers import verifiers_tasks

    made = verifiers_tasks(config.dataset, config.options, n_train=config.max_train, n_test=config.max_test)
    return {split: (found, []) for split, found in made.items()}
