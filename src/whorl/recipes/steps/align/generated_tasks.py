"""Tasks of the step `tasks` that a program makes: Python functions, arithmetic, numbered sources, or items of a package."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext

if TYPE_CHECKING:
    from whorl.evals.grading.task import VerifiableTask
    from whorl.evals.suites.python_functions import PythonFunction
    from whorl.recipes.steps.align.data_config import SetConfig, TasksConfig

Splits = dict[str, tuple[list["VerifiableTask"], list[Any]]]


def generated_tasks(ctx: StepContext, config: TasksConfig) -> Splits:
    """Return the tasks of each split, and their solutions as pairs or conversations."""
    if config.source == "arithmetic":
        return _arithmetic_tasks(config)
    if config.source == "sources":
        return _cited_tasks(config)
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


def _cited_tasks(config: TasksConfig) -> Splits:
    """Make questions with numbered sources."""
    from whorl.align.data.formats import Conversation
    from whorl.evals.grading.task import VerifiableTask
    from whorl.evals.suites.cited_sources import cited_questions

    splits: Splits = {}
    for split, n in (("train", config.max_train), ("test", config.max_test)):
        found, talks = list["VerifiableTask"](), list[Any]()
        for one in cited_questions(n, config.seed, held_out=split == "test"):
            asked = {"role": "user", "content": one["prompt"]}
            found.append(VerifiableTask(one["id"], messages=(asked,), verifier="cited", answer=one["answer"]))
            talks.append(
                Conversation((asked, {"role": "assistant", "content": one["reply"]}), "sources", one["id"])
            )
        splits[split] = found, talks
    return splits


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


def python_functions(
    ctx: StepContext, config: SetConfig, split: str
) -> tuple[list[Any], list[PythonFunction]]:
    """Return (Python files of a split, functions in some of them)."""
    from whorl.evals.suites.python_functions import extract_functions, parse_or_none
    from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
    from whorl.tracking.seeds import derive

    missing = [role for role in CORPUS_PARENTS if role not in ctx.parents]
    if missing:
        raise ConfigError(
            f"{ctx.name} with the source python needs the corpus, but has no parent {missing[0]!r}",
            expected='parents = ["ingest", "curate"]',
        )
    corpus = open_corpus(ctx)
    sources = [(d.path, d.text) for d in corpus.documents(split) if d.path.endswith(".py")]
    if not sources:  # records of JSONL and Parquet have no suffix that gives their language
        records = (d for d in corpus.documents(split) if d.language is None and "def " in d.text)
        parsed = ((f"{d.path}#{d.offset}", d.text) for d in records if parse_or_none(d.text) is not None)
        sources = list(islice(parsed, config.max_files))
    files = sorted(sources, key=lambda file: derive(config.seed, file[0]))[: config.max_files]
    found = extract_functions(
        files,
        seed=config.seed,
        body_bytes=(20, config.max_completion_bytes),
        header_bytes=config.max_prompt_bytes,
    )
    return sources, found


def python_tasks(ctx: StepContext, config: TasksConfig) -> dict[str, tuple[list[Any], list[Any]]]:
    """Make tasks of the functions of the corpus, with their bodies as solutions."""
    from whorl.align.data.formats import PromptCompletion
    from whorl.evals.grading import grade_tasks
    from whorl.evals.suites.code_tasks import body_tasks, doctest_tasks, filter_solvable
    from whorl.sandbox import Sandbox

    made = {}
    with Sandbox() as sandbox:
        for split, most in (("train", config.max_train), ("test", config.max_test)):
            sources, found = python_functions(ctx, config, split)
            mined = body_tasks(one for one in found if ">>>" not in one.docstring)[:most]
            if split == "train":  # doctests are rare, so all of them are used for training
                examples = doctest_tasks(sources, seed=config.seed, context_bytes=config.max_prompt_bytes)
                short = [m for m in examples if len(m.task.prompt.encode()) <= 2 * config.max_prompt_bytes]
                kept, _ = filter_solvable(
                    short, lambda tasks, solutions: grade_tasks(tasks, solutions, sandbox)
                )
                mined = [*kept, *mined][:most]
                if n_run := min(len(kept), most):
                    ctx.progress.log(
                        f"    {n_run} functions have examples (doctests): their tasks run them and compare the output, the "
                        "others only parse the code"
                    )
            pairs = [PromptCompletion(m.task.prompt, m.solution, "python", m.task.id) for m in mined]
            made[split] = ([m.task for m in mined], pairs)
    return made
