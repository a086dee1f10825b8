"""The steps `tasks` and `preferences`: data for the stages after pretraining.

    [steps.tasks]                       # tasks with a verifier, and solutions
    parents = ["ingest", "curate"]      # for source = "python"

    [steps.talks]                       # conversations for `sft`
    uses = "tasks"
    source = "files"
    path = "talks.jsonl"                # or .parquet, or a folder of such files
    shape = "conversations"             # or pairs, or tasks

    [steps.preferences]                 # pairs of completions, one of them preferred
    parents = ["ingest", "curate"]

The content of the files is part of the address: a changed file gives a new data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import DOCS_URL, ConfigError, DataError, NotApplicableError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.align.data_config import PreferencesConfig, SetConfig, TasksConfig

if TYPE_CHECKING:
    from whorl.evals.suites.python_functions import PythonFunction

OPTIONAL_CORPUS_PARENTS = {"documents?": "documents", "selection?": "selection"}


def _with_content_hashes(config: Any, store: object) -> Any:
    """Add the hashes of the files."""
    if not config.path:
        return config
    from whorl.align.data.dataset_files import content_hash

    paths = [path for path in (config.path, config.test_path) if path]
    return config.model_copy(update={"content_hashes": [content_hash(Path(path)) for path in paths]})


@step("tasks", config=TasksConfig, parents=OPTIONAL_CORPUS_PARENTS, complete_config=_with_content_hashes)
def tasks(ctx: StepContext, config: TasksConfig) -> None:
    """Make tasks with a verifier, and solutions to train on."""
    from whorl.align.data.dataset_files import write_dataset
    from whorl.recipes.steps.align.generated_tasks import generated_tasks

    if config.source == "files" and not config.path:
        raise ConfigError(
            f"{ctx.name}.path is not given", expected=f"a file or folder of records ({DOCS_URL}/data.md)",
            do=f"--set {ctx.name}.path=talks.jsonl",
        )  # fmt: skip
    if config.source == "files":
        made = _read_files(ctx, config, needs_test=config.shape == "tasks")
        counts = {
            split: write_dataset(ctx.out, config.shape, split, items)
            for split, items in made.items()
            if items
        }
        _write_summary(ctx, counts, made["train"], config.shape)
        return
    splits = _python_tasks(ctx, config) if config.source == "python" else generated_tasks(ctx, config)
    counts = {}
    for split, (found, solutions) in splits.items():
        if not found:
            raise _empty_split_error(ctx, config, f"{split} task")
        counts[split] = write_dataset(ctx.out, "tasks", split, found)
        if solutions:
            write_dataset(ctx.out, "conversations" if config.chat else "pairs", split, solutions)
    _write_summary(ctx, counts, splits["train"][0])


@step(
    "preferences",
    config=PreferencesConfig,
    parents=OPTIONAL_CORPUS_PARENTS,
    complete_config=_with_content_hashes,
)
def preferences(ctx: StepContext, config: PreferencesConfig) -> None:
    """Make pairs of a preferred and a rejected completion."""
    from whorl.align.data.dataset_files import write_dataset

    if config.source == "files" and not config.path:
        raise NotApplicableError(
            "no file of preferences is given", do=f"--set {ctx.name}.path=preferred.jsonl"
        )
    made = (
        _python_preferences(ctx, config)
        if config.source == "python"
        else _read_files(ctx, config, needs_test=True)
    )
    counts = {split: write_dataset(ctx.out, config.shape, split, items) for split, items in made.items()}
    _write_summary(
        ctx, counts, made["train"], "pairs" if config.shape == "preferences" else "labelled completions"
    )


def _write_summary(ctx: StepContext, counts: dict[str, int], train: Sequence[Any], noun: str = "") -> None:
    """Write the counts, the number of quarantined records, and a prompt of `train` into the summary and the headline."""
    headline = ", ".join(
        f"{n:,}{f' {noun}' if noun and number == 0 else ''} to {split}"
        for number, (split, n) in enumerate(counts.items())
    )
    n_quarantined = sum(n for reason, n in ctx.summary.get("quarantine", {}).items() if reason != "accepted")
    headline += (
        f"; {n_quarantined:,} record{'s' * (n_quarantined != 1)} in quarantine" if n_quarantined else ""
    )
    ctx.summary.update(counts=counts, headline=headline, sample_prompt=_short_prompt(train))


def _short_prompt(items: Iterable[Any]) -> str:
    """Return the shortest prompt, or first question of a conversation, of the first items; "" for none."""
    found = []
    for item in islice(items, 100):
        asked = [message["content"] for message in getattr(item, "messages", ()) if message["role"] == "user"]
        found += [getattr(item, "prompt", ""), *asked[:1]]
    return min((text for text in found if isinstance(text, str) and text.strip()), key=len, default="")


def _empty_split_error(ctx: StepContext, config: SetConfig, what: str) -> DataError:
    if getattr(config, "source", "") != "python":
        return DataError(f"there is no {what}", expected="at least one", do=f"raise {ctx.name}.max_train")
    return NotApplicableError(
        f"the corpus has no Python function for a {what}",
        expected=f"functions with a docstring, a header of at most {config.max_prompt_bytes} bytes and a body of at most "
        f"{config.max_completion_bytes}",
        do=f"give Python code or raise {ctx.name}.max_prompt_bytes and {ctx.name}.max_completion_bytes; for other texts, "
        f'set {ctx.name}.source = "files"',
    )


def _read_files(ctx: StepContext, config: Any, *, needs_test: bool) -> dict[str, list[Any]]:
    """Read the records of files; unusable ones are written to `quarantine.jsonl`."""
    from whorl.align.data import read
    from whorl.align.data.dataset_files import split_by_prompt
    from whorl.data.quarantine import Quarantine
    from whorl.evals.grading import read_tasks

    quarantine = Quarantine(ctx.out / "quarantine.jsonl")
    reader = read_tasks if config.shape == "tasks" else getattr(read, config.shape)
    with ctx.progress.task("Reading", total=None, unit="records") as bar:

        def items(path: str, split: str) -> list[Any]:
            found = []
            for item in reader(Path(path), quarantine, split=split):
                found.append(item)
                if len(found) % 1000 == 0:
                    bar.update(done=quarantine.accepted, note=f"{len(quarantine):,} in quarantine")
            return found

        if config.test_path:
            train = split_by_prompt(items(config.path, "train"), 0.0, config.seed)["train"]
            made = {"train": train, "test": items(config.test_path, "test")}
        else:
            made = split_by_prompt(items(config.path, "train"), config.test_fraction, config.seed)
        bar.update(done=quarantine.accepted, note=f"{len(quarantine):,} in quarantine")
    for first in list(quarantine)[:3]:
        ctx.progress.log(f"    in quarantine: {first}")
    ctx.summary["quarantine"] = quarantine.summary()
    made = {"train": made["train"][: config.max_train], "test": made["test"][: config.max_test]}
    for split, found in made.items():
        if not found and (split == "train" or needs_test):
            raise DataError(
                f"{config.path}: no record is left to {split}", expected="records with at least two prompts",
                do=f"set {ctx.name}.test_path, or raise {ctx.name}.test_fraction",
            )  # fmt: skip
    return made


def _python_functions(
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


def _python_tasks(ctx: StepContext, config: TasksConfig) -> dict[str, tuple[list[Any], list[Any]]]:
    """Make tasks of the functions of the corpus, with their bodies as solutions."""
    from whorl.align.data.formats import PromptCompletion
    from whorl.evals.grading import grade_tasks
    from whorl.evals.suites.code_tasks import body_tasks, doctest_tasks, filter_solvable
    from whorl.sandbox import Sandbox

    made = {}
    with Sandbox() as sandbox:
        for split, most in (("train", config.max_train), ("test", config.max_test)):
            sources, found = _python_functions(ctx, config, split)
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


def _python_preferences(ctx: StepContext, config: PreferencesConfig) -> dict[str, list[Any]]:
    """Pair each function body with a copy that contains one bug."""
    from collections import Counter

    from whorl.align.data.bug_injection import bug_preferences

    made: dict[str, list[Any]] = {}
    bug_kinds = dict[str, dict[str, int]]()
    for split, most in (("train", config.max_train), ("test", config.max_test)):
        counts: Counter[str] = Counter()
        _, found = _python_functions(ctx, config, split)
        kinds, each = config.bug_kinds, config.max_pairs_per_function
        made[split] = bug_preferences(found, kinds=kinds, per_function=each, seed=config.seed, counts=counts)[
            :most
        ]
        bug_kinds[split] = dict(sorted(counts.items()))
        if not made[split]:
            raise _empty_split_error(ctx, config, f"{split} pair")
    ctx.summary["bug_kinds"] = bug_kinds
    return made
