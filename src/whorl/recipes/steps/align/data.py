"""The steps `tasks` and `preferences`: data for the stages after pretraining.

    [steps.tasks]                       # tasks with a verifier, and solutions
    parents = ["ingest", "curate"]      # for source = "python"

    [steps.talks]                       # conversations for `sft`
    uses = "tasks"
    source = "files"
    path = "talks.jsonl"                # or .parquet, or a folder of such files
    shape = "conversations"             # or pairs, or tasks

    [steps.preferences]                 # pairs of completions, one of them preferred
    parents = ["ingest", "curate"]      # or source = "feedback", parents = ["events"] (feedback.py)

The content of the files is part of the address: a changed file gives a new data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from whorl.errors import DOCS_URL, ConfigError, DataError, NotApplicableError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.align.data_config import PreferencesConfig, SetConfig, TasksConfig

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
    from whorl.recipes.steps.align.generated_tasks import generated_tasks, python_tasks

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
    splits = python_tasks(ctx, config) if config.source == "python" else generated_tasks(ctx, config)
    counts = {}
    for split, (found, solutions) in splits.items():
        if not found:
            raise _empty_split_error(ctx, config, f"{split} task")
        counts[split] = write_dataset(ctx.out, "tasks", split, found)
        if solutions:
            kind = "conversations" if hasattr(solutions[0], "messages") else "pairs"
            write_dataset(ctx.out, kind, split, solutions)
    _write_summary(ctx, counts, splits["train"][0])


@step(
    "preferences",
    config=PreferencesConfig,
    parents={**OPTIONAL_CORPUS_PARENTS, "events?": "events"},
    complete_config=_with_content_hashes,
)
def preferences(ctx: StepContext, config: PreferencesConfig) -> None:
    """Make pairs of a preferred and a rejected completion."""
    from whorl.align.data.dataset_files import write_dataset
    from whorl.recipes.steps.align.feedback import feedback_preferences

    if config.source == "files" and not config.path:
        raise NotApplicableError(
            "no file of preferences is given", do=f"--set {ctx.name}.path=preferred.jsonl"
        )
    shape: str = config.shape
    if config.source == "feedback":
        shape, made = feedback_preferences(ctx, config)
    elif config.source == "python":
        made = _python_preferences(ctx, config)
    else:
        made = _read_files(ctx, config, needs_test=True)
    counts = {split: write_dataset(ctx.out, shape, split, items) for split, items in made.items()}
    noun = "pairs" if shape == "preferences" else "labelled completions"
    _write_summary(ctx, counts, made["train"], noun)


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


def _python_preferences(ctx: StepContext, config: PreferencesConfig) -> dict[str, list[Any]]:
    """Pair each function body with a copy that contains one bug."""
    from collections import Counter

    from whorl.align.data.bug_injection import bug_preferences
    from whorl.recipes.steps.align.generated_tasks import python_functions

    made: dict[str, list[Any]] = {}
    bug_kinds = dict[str, dict[str, int]]()
    for split, most in (("train", config.max_train), ("test", config.max_test)):
        counts: Counter[str] = Counter()
        _, found = python_functions(ctx, config, split)
        kinds, each = config.bug_kinds, config.max_pairs_per_function
        made[split] = bug_preferences(found, kinds=kinds, per_function=each, seed=config.seed, counts=counts)[
            :most
        ]
        bug_kinds[split] = dict(sorted(counts.items()))
        if not made[split]:
            raise _empty_split_error(ctx, config, f"{split} pair")
    ctx.summary["bug_kinds"] = bug_kinds
    return made
