"""What is learnt after pretraining: the steps `tasks` and `preferences`.

    [steps.tasks]                       # what is to be learnt, and what says whether it was
    parents = ["ingest", "curate"]      # for source = "python"

    [steps.talks]                       # conversations of one's own, for `sft`
    uses = "tasks"
    source = "files"
    path = "talks.jsonl"                # or .parquet, or a folder of such files
    shape = "conversations"             # or pairs, or tasks

    [steps.preferences]                 # of two answers one is the better
    parents = ["ingest", "curate"]

The files' content is part of the address: a set is made anew when what stands in a file changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.errors import ConfigError, DataError
from whorl.recipes.registry import StepContext, step

if TYPE_CHECKING:
    from whorl.align.data.code.functions import Function
    from whorl.corpus import Corpus

CORPUS = {"documents?": "documents", "selection?": "selection"}
Fault = Literal["syntax", "operator", "variable", "constant", "return"]


class SetConfig(BaseModel):
    """Where a set comes from, and how much of it is used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    n: int = Field(default=2000, ge=1, description="to train on, at most")
    n_test: int = Field(default=128, ge=1, description="held out, at most")
    files: int = Field(default=700, ge=1, description="python: files of a split to look into, at most")
    prompt_bytes: int = Field(default=600, ge=1, description="python: the longest signature and docstring")
    answer_bytes: int = Field(default=240, ge=20, description="python: the longest body")
    path: str = Field(default="", description="files: a JSONL or Parquet file, or a folder of them")
    test_path: str = Field(default="", description="files: what is held out; default: a share of the prompts")
    test_share: float = Field(
        default=0.1, ge=0, lt=1, description="files: of the prompts, where there is no test_path"
    )
    content: list[str] = Field(default=[], description="files: hashes of them; found by looking at them")

    @model_validator(mode="after")
    def _whole(self) -> SetConfig:
        source = getattr(self, "source", "")
        if (source == "files") != bool(self.path):
            raise ValueError('path goes with source = "files", and that with a path')
        return self


class TasksConfig(SetConfig):
    """What is to be learnt."""

    source: Literal["python", "arithmetic", "files"] = "python"
    shape: Literal["conversations", "pairs", "tasks"] = Field(
        default="conversations", description="files: what a record is"
    )
    levels: dict[int, float] = Field(
        default={1: 2.0, 2: 1.0, 5: 1.0},
        description="arithmetic: how often each level (align/data/arithmetic.py)",
    )
    columns: bool = Field(default=True, description="arithmetic: solutions digit by digit")
    short: float = Field(
        default=0.0, ge=0, le=1, description="arithmetic: share of solutions that are the answer alone"
    )
    start: int = Field(default=0, ge=0, description="arithmetic: number of the first problem")


class PreferencesConfig(SetConfig):
    """Which of two answers is the better."""

    source: Literal["python", "files"] = "python"
    shape: Literal["preferences", "judged"] = Field(
        default="preferences", description="files: pairs of answers, or single ones with a label (for KTO)"
    )
    faults: tuple[Fault, ...] = Field(
        default=("syntax", "operator", "variable", "constant", "return"),
        min_length=1,
        description="python: what is wrong with the rejected body (align/data/code/bug_injection.py)",
    )
    per_function: int = Field(default=1, ge=1, description="python: pairs of a function, at most")


def _with_content(config: Any) -> Any:
    """With the hashes of its files."""
    if not config.path:
        return config
    from whorl.align.data.dataset_files import content_of

    paths = [path for path in (config.path, config.test_path) if path]
    return config.model_copy(update={"content": [content_of(Path(path)) for path in paths]})


@step("tasks", config=TasksConfig, parents=CORPUS, resolve=_with_content)
def tasks(ctx: StepContext, config: TasksConfig) -> None:
    """Make tasks whose answers can be checked, and solutions to learn from."""
    from whorl.align.data.dataset_files import write_set

    if config.source == "files":
        made = _from_files(ctx, config, needs_test=config.shape == "tasks")
        counts = {
            split: write_set(ctx.out, config.shape, split, items) for split, items in made.items() if items
        }
        _tell(ctx, counts, config.shape)
        return
    mined = _python(ctx, config) if config.source == "python" else _arithmetic(config)
    counts = {}
    for split, (found, solutions) in mined.items():
        if not found:
            raise _nothing(ctx, f"{split} task")
        counts[split] = write_set(ctx.out, "tasks", split, found)
        write_set(ctx.out, "pairs", split, solutions)
    _tell(ctx, counts)


@step("preferences", config=PreferencesConfig, parents=CORPUS, resolve=_with_content)
def preferences(ctx: StepContext, config: PreferencesConfig) -> None:
    """Make pairs of answers of which one is the better."""
    from whorl.align.data.dataset_files import write_set

    made = _broken(ctx, config) if config.source == "python" else _from_files(ctx, config, needs_test=True)
    counts = {split: write_set(ctx.out, config.shape, split, items) for split, items in made.items()}
    _tell(ctx, counts, "pairs" if config.shape == "preferences" else "judged answers")


def _tell(ctx: StepContext, counts: dict[str, int], noun: str = "") -> None:
    """Counts, and what is aside, in the summary and the headline."""
    headline = ", ".join(
        f"{n:,}{f' {noun}' if noun and number == 0 else ''} to {split}"
        for number, (split, n) in enumerate(counts.items())
    )
    aside = sum(n for reason, n in ctx.summary.get("quarantine", {}).items() if reason != "accepted")
    headline += f"; {aside:,} record{'s' * (aside != 1)} in quarantine" if aside else ""
    ctx.summary.update(counts=counts, headline=headline)


def _nothing(ctx: StepContext, what: str) -> DataError:
    return DataError(
        f"there is no {what}", expected="one at least",
        do=f"give more text, or raise {ctx.name}.prompt_bytes and {ctx.name}.answer_bytes",
    )  # fmt: skip


def _from_files(ctx: StepContext, config: Any, *, needs_test: bool) -> dict[str, list[Any]]:
    """Records of files, those that cannot be used in `quarantine.jsonl`."""
    from whorl.align.data import read
    from whorl.align.data.dataset_files import apart
    from whorl.align.data.quarantine import Quarantine

    aside = Quarantine(ctx.out / "quarantine.jsonl")
    reader = getattr(read, config.shape)
    with ctx.progress.task("Reading", total=None, unit="records") as bar:

        def items(path: str, split: str) -> list[Any]:
            found = []
            for item in reader(Path(path), aside, split=split):
                found.append(item)
                if len(found) % 1000 == 0:
                    bar.update(done=aside.accepted, note=f"{len(aside):,} in quarantine")
            return found

        if config.test_path:
            train = apart(items(config.path, "train"), 0.0, config.seed)["train"]
            made = {"train": train, "test": items(config.test_path, "test")}
        else:
            made = apart(items(config.path, "train"), config.test_share, config.seed)
        bar.update(done=aside.accepted, note=f"{len(aside):,} in quarantine")
    for first in list(aside)[:3]:
        ctx.progress.say(f"    in quarantine: {first}")
    ctx.summary["quarantine"] = aside.summary()
    made = {"train": made["train"][: config.n], "test": made["test"][: config.n_test]}
    for split, found in made.items():
        if not found and (split == "train" or needs_test):
            raise DataError(
                f"{config.path}: nothing is left to {split}", expected="records with two prompts at least",
                do=f"name a {ctx.name}.test_path, or raise {ctx.name}.test_share",
            )  # fmt: skip
    return made


def _functions(ctx: StepContext, config: SetConfig, split: str) -> tuple[list[Any], list[Function]]:
    """(files, functions in some of them): those of training files to learn from, those of test files to be held out."""
    from whorl.align.data.code.functions import functions
    from whorl.tracking.seeds import derive

    every = [(d.path, d.text) for d in _corpus(ctx).documents(split) if d.path.endswith(".py")]
    files = sorted(every, key=lambda file: derive(config.seed, file[0]))[: config.files]
    found = functions(
        files, seed=config.seed, body_bytes=(20, config.answer_bytes), header_bytes=config.prompt_bytes
    )
    return every, found


def _python(ctx: StepContext, config: TasksConfig) -> dict[str, tuple[list[Any], list[Any]]]:
    """Functions of the corpus as tasks, and their bodies as solutions."""
    from whorl.align.data.code.tasks import body_tasks, doctest_tasks, solvable
    from whorl.align.data.formats import Pair
    from whorl.evals.verify import verify_all
    from whorl.sandbox import Sandbox

    made = {}
    with Sandbox() as sandbox:
        for split, most in (("train", config.n), ("test", config.n_test)):
            every, found = _functions(ctx, config, split)
            mined = body_tasks(one for one in found if ">>>" not in one.docstring)[:most]
            if split == "train":  # there are few: none is spared for the test
                examples = doctest_tasks(every, seed=config.seed, context_bytes=config.prompt_bytes)
                short = [m for m in examples if len(m.task.prompt.encode()) <= 2 * config.prompt_bytes]
                kept, _ = solvable(short, lambda given, said: verify_all(given, said, sandbox))
                mined = [*kept, *mined][:most]
                ctx.progress.say(f"    {len(kept)} functions come with examples that can be run")
            pairs = [Pair(m.task.prompt, m.solution, "python", m.task.id) for m in mined]
            made[split] = ([m.task for m in mined], pairs)
    return made


def _broken(ctx: StepContext, config: PreferencesConfig) -> dict[str, list[Any]]:
    """Functions of the corpus with their body, and with a body that has one fault."""
    from collections import Counter

    from whorl.align.data.code.bug_injection import preferences as broken

    made: dict[str, list[Any]] = {}
    faults = dict[str, dict[str, int]]()
    for split, most in (("train", config.n), ("test", config.n_test)):
        counts: Counter[str] = Counter()
        _, found = _functions(ctx, config, split)
        kinds, each = config.faults, config.per_function
        made[split] = broken(found, kinds=kinds, per_function=each, seed=config.seed, counts=counts)[:most]
        faults[split] = dict(sorted(counts.items()))
        if not made[split]:
            raise _nothing(ctx, f"function to {split} with that offers a spot for a fault")
    ctx.summary["faults"] = faults
    return made


def _arithmetic(config: TasksConfig) -> dict[str, tuple[list[Any], list[Any]]]:
    from whorl.align.data.arithmetic import ANSWER, Arithmetic
    from whorl.align.data.formats import Pair
    from whorl.tracking.seeds import numpy_rng

    source = Arithmetic(seed=config.seed, weights=config.levels, columns=config.columns)
    rng = numpy_rng(config.seed, "tasks", "short")

    def pair(problem: Any) -> Pair:
        if rng.random() < config.short:
            return Pair(source.prompt(problem), f"{ANSWER}{problem.answer}", "arithmetic", problem.id)
        return source.pair(problem)

    train, test = source.problems(config.start, config.n), source.distinct(config.n_test)
    return {
        "train": ([source.task(p) for p in train], [pair(p) for p in train]),
        "test": ([source.task(p) for p in test], [source.pair(p) for p in test]),
    }


def _corpus(ctx: StepContext) -> Corpus:
    from whorl.recipes.steps.corpus import SOURCES, open_corpus

    missing = [role for role in SOURCES if role not in ctx.parents]
    if missing:
        raise ConfigError(
            f"{ctx.name} from Python code needs the corpus, and there is no parent {missing[0]!r}",
            expected='parents = ["ingest", "curate"]',
        )
    return open_corpus(ctx)
