"""A task with its items: records checked against the configuration, gold answers, few-shot examples, and the hash.

The hash covers the configuration (without paths), the version of the kind's code, and the content of the records and
examples. Two figures with the same hash are comparable; it is shown with every figure.

The subtle point is the examples. They come from the training split, named by id or drawn (`num_fewshot`). An example that is
also in the test split, by its id or by its prompt, is refused: the item would be scored with its own answer in view. Drawn
examples are those of lm-evaluation-harness 0.4: one generator of seed 1234 draws for the items in order. Where both splits
are the same file, it draws one more and leaves the item out.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whorl.errors import ConfigError, DataError, NotApplicableError, shorten
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.tasks.config import TaskConfig, read_task_file
from whorl.evals.tasks.records import Fields, Item, read_records
from whorl.evals.tasks.template import RESERVED, Template

HASH_DIGITS = 12
FEWSHOT_SEED = 1234  # of lm-evaluation-harness
LATER_SETTINGS = ("num_fewshot", "fewshot_sampler", "system_end")  # no part of earlier hashes


def load_task(
    config: TaskConfig | Path | str, *, test: Sequence[str] = (), train: Sequence[str] = (), limit: int | None = None
) -> EvalTask:  # fmt: skip
    """Return a task with the items of its files.

    Args:
        config: or the path of its TOML file.
        test, train: files that replace those of the configuration.
        limit: of items, the first ones; None for all.

    Raises:
        ConfigError: the configuration is wrong. DataError: the records are. The messages name task, setting and record.
    """
    if not isinstance(config, TaskConfig):
        config = read_task_file(Path(config))
    data = config.data
    label = f"task {config.name}"
    test_paths, train_paths = tuple(test) or data.test, tuple(train) or data.train
    if not test_paths:
        raise ConfigError(
            f"{label} has no data", expected="files in data.test",
            do=f"give them with --data PATH (or --data {config.name}=PATH); source: {config.source or 'see its file'}",
        )  # fmt: skip
    if (config.examples or config.num_fewshot) and not train_paths:
        raise ConfigError(
            f"{label} has few-shot examples but no training split", expected="files in data.train",
            do=f"give them with --train PATH (or --train {config.name}=PATH)",
        )  # fmt: skip
    records = read_records(test_paths, label, data.unnest)
    train_records = read_records(train_paths, label, data.unnest)
    return make_task(config, records, train_records, limit=limit, one_split=train_paths == test_paths)


def make_task(
    config: TaskConfig, test: Iterable[Fields], train: Iterable[Fields] = (), *, limit: int | None = None,
    one_split: bool = False,
) -> EvalTask:  # fmt: skip
    """Return a task with the items of given records, such as generated ones. Arguments and errors as `load_task`.

    one_split: the training records are the test records.
    """
    label = f"task {config.name}"
    task = EvalTask(config, [], [])
    records = _select(task, list(test), "test")
    if not records:
        why = f": data.where = {config.data.where!r} keeps none" if config.data.where else ""
        raise NotApplicableError(
            f"{label} has no records{why}", expected="at least one record", do="check data.test"
        )
    fields = {name for record in records.values() for name in record}
    if RESERVED in fields:
        raise DataError(
            f"{label}: a field of the records is named {RESERVED!r}, which templates use for the item itself",
            do="rename the field",
        )
    kind = task.kind
    kind.check_fields(fields)
    if config.examples:
        chosen = _examples(task, records, _select(task, list(train), "train"))
        task.examples = _items(task, chosen)
    everything = list(records.items())
    task.items = _items(task, dict(everything if limit is None else everything[:limit]))
    if config.num_fewshot:
        _draw_examples(task, _select(task, list(train), "train"), one_split)
    _check_examples_unseen(task)
    for item in (*task.examples, *task.items):
        kind.check(item)
    task.hash = task_hash(task)
    return task


def task_hash(task: EvalTask) -> str:
    """Return the hash of configuration, kind and content; see the top of this file."""
    config = task.config.model_dump(mode="json")
    for name in ("about", "source"):
        del config[name]
    for name in ("test", "train"):
        del config["data"][name]
    for settings, names in ((config, LATER_SETTINGS), (config["generation"], ("top_k",))):
        for name in names:
            if settings[name] in (0, "default", None):
                del settings[name]
    content = {
        "config": config,
        "kind": task.kind.version,
        "items": [[item.id, item.fields] for item in task.items],
        "examples": [[item.id, item.fields] for item in task.examples],
    }
    text = json.dumps(content, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def _select(task: EvalTask, records: Sequence[Fields], split: str) -> dict[str, Fields]:
    """Return id -> record of those that `data.where` keeps. Raises DataError: two ids are equal."""
    data = task.config.data
    where = task.template("data.where", data.where, expression=True) if data.where else None
    id_of = task.template("data.id", data.id, expression=True) if data.id else None
    fields = {name for record in records for name in record}
    for template in (where, id_of):
        if template is not None and records:
            template.check_fields(fields)
    found: dict[str, Fields] = {}
    first: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        variables = {**record, RESERVED: SimpleNamespace(fields=record)}
        if where is not None and not where(variables, str(number)):
            continue
        name = str(id_of(variables, str(number))) if id_of is not None else str(record.get("id", number))
        if name in found:
            raise DataError(
                f"task {task.config.name}: records {first[name]} and {number} of the {split} split have the id {name!r}",
                expected="different ids", do="correct the records, or set data.id to an expression that differs",
            )  # fmt: skip
        found[name], first[name] = record, number
    return found


def _examples(task: EvalTask, test: Mapping[str, Fields], train: Mapping[str, Fields]) -> dict[str, Fields]:
    """Return the few-shot examples. Raises DataError: one is in the test split, or not in the training split."""
    label = f"task {task.config.name}"
    for place, name in enumerate(task.config.examples):
        if name in task.config.examples[:place]:
            raise ConfigError(
                f"{label}: the few-shot example {name!r} is named twice", expected="different ids",
                do="correct `examples`",
            )  # fmt: skip
        # Ids that number records are those of a position in their own file.
        numbered = not task.config.data.id and "id" not in next(iter(test.values()))
        if name in test and not (numbered and name in train):
            raise DataError(
                f"{label}: the few-shot example {name!r} is in the test split",
                expected="ids of the training split", do="choose another example",
            )  # fmt: skip
        if name not in train:
            raise DataError(
                f"{label}: the few-shot example {name!r} is not in the training split",
                expected=f"ids such as {', '.join(list(train)[:5])}" if train else "a training split with records",
                do="correct `examples`, or data.train",
            )  # fmt: skip
    return {name: train[name] for name in task.config.examples}


def _draw_examples(task: EvalTask, train: Mapping[str, Fields], one_split: bool) -> None:
    """Give each item its examples. Raises DataError: there are fewer records than examples."""
    n, first, pool = task.config.num_fewshot, task.config.fewshot_sampler == "first_n", list(train)
    if task.config.examples:
        raise ConfigError(f"task {task.config.name} has num_fewshot and examples", expected="one of them")
    if n + one_split > len(pool):
        raise DataError(
            f"task {task.config.name}: {n} few-shot examples of {len(pool):,} records",
            expected=f"at most {max(0, len(pool) - one_split)}", do="lower --num-fewshot, or give more records with --train",
        )  # fmt: skip
    rng, chosen = random.Random(FEWSHOT_SEED), dict[str, list[str]]()
    for item in task.items:
        names = pool[: n + one_split] if first else rng.sample(pool, n + one_split)
        chosen[item.id] = [name for name in names if not (one_split and train[name] == item.fields)][:n]
    used = dict.fromkeys(name for names in chosen.values() for name in names)
    task.examples = _items(task, {name: train[name] for name in used})
    made = dict(zip(used, task.examples, strict=True))
    task.drawn = {item: tuple(made[name] for name in names) for item, names in chosen.items()}


def _check_examples_unseen(task: EvalTask) -> None:
    """Raises DataError: an example has the prompt of an item that it precedes."""
    if not task.examples:
        return
    template = task.template("template", task.config.template)
    prompts = {example.id: template(example.variables, example.id) for example in task.examples}
    for item in task.items:
        own = template(item.variables, item.id)
        for example in task.examples_of(item):
            if prompts[example.id] == own:
                raise DataError(
                    f"task {task.config.name}: the few-shot example {example.id!r} is in the test split, as {item.id!r}",
                    expected="an example with another prompt than the item",
                    do="choose another example, or remove the record from one of the files",
                )  # fmt: skip


def _items(task: EvalTask, records: Mapping[str, Fields]) -> list[Item]:
    """Return the items of records: with choices, gold, cluster and group."""
    config = task.config

    def expression(setting: str, source: str) -> Template | None:
        if not source:
            return None
        made = task.template(setting, source, expression=True)
        made.check_fields({name for record in records.values() for name in record}, required=False)
        return made

    whole = expression("choices", config.choices) if isinstance(config.choices, str) else None
    each = [task.template("choices", text) for text in config.choices] if whole is None else []
    gold = expression("gold", config.gold)
    cluster = expression("data.cluster", config.data.cluster)
    group = expression("data.group", config.data.group)
    items = []
    for name, record in records.items():
        item = Item(name, record)
        variables = item.variables
        choices: Any = ()
        if whole is not None:
            choices = whole(variables, name)
            if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
                raise DataError(
                    f"task {config.name}, item {name!r}: choices are {shorten(repr(choices), 80)}",
                    expected="a list of texts", do="correct the expression `choices`",
                )  # fmt: skip
        elif isinstance(config.choices, tuple):
            choices = [template(variables, name) for template in each]
        item = replace(item, choices=tuple(str(text) for text in choices))
        item = replace(
            item,
            gold=gold(item.variables, name) if gold is not None else None,
            cluster=str(cluster(variables, name)) if cluster is not None else "",
            group=str(group(variables, name)) if group is not None else "",
        )
        items.append(item)
    return [task.kind.prepare(item) for item in items]
