"""Items of a task in the training text of the model, and the score without them. See `docs/evals/suites.md`.

The training text is that of the token sets among the model's ancestors, decoded document by document: what it was trained on
after filters, deduplication, rewriting and the split.

An item's text is the longest text field that its template names: the question as published, so that it is found in any
layout. If that has fewer than MIN_WORDS words, it is the prompt, without few-shot examples, and the right answer. An item
is found in a document that has at least MIN_SCORE of its n-grams of N words, each weighted by its rarity
(`whorl.corpus.decontamination`). A shorter item is found as a whole, and one with fewer than MIN_WORDS not at all: it
would be found by chance. Such items are counted.

    METRIC              all items
    METRIC clean        the items that were not found in the training text
    METRIC found        those that were found

The clean figure is that of a model that never saw the items, if contamination does not depend on their difficulty. Where
only easy items are in the training text, both figures differ without any memory: compare with a model of other text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whorl.corpus.decontamination.items import ItemIndex, TestItem
from whorl.corpus.decontamination.match import find_items
from whorl.corpus.decontamination.words import split_words
from whorl.errors import ConfigError, DataError
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.measures import measure
from whorl.evals.results import ItemResult, TaskMeasure, TaskResult
from whorl.evals.suites.held_out import ancestors
from whorl.evals.tasks.records import Item
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Tokenizer

TOKENS, TOKENIZER, SPLIT = "tokens", "tokenizer", "train"


@dataclass(frozen=True)
class TrainingText:
    """Token sets with their tokenizers.

    sets: (name, folder of the token set, folder of the tokenizer).
    """

    sets: Sequence[tuple[str, Path, Path]]

    @property
    def n_documents(self) -> int:
        return sum(TokenSet(folder).split(SPLIT).n_documents for _, folder, _ in self.sets)

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (place, text) of every training document. Raises DataError: a token set is damaged."""
        for name, folder, tokenizer_folder in self.sets:
            tokenizer, split = Tokenizer.load(tokenizer_folder), TokenSet(folder).split(SPLIT)
            paths = split.documents["path"]
            for number, ids in enumerate(split.iter_documents()):
                text = tokenizer.decode(ids, skip_special_tokens=True).decode("utf-8", "replace")
                yield f"{name}: {paths[number].as_py()}", text


def training_text(ref: str, store: Store) -> TrainingText:
    """Return the training text of a model.

    Args:
        ref: an artifact, or a folder that `whorl.train` wrote.

    Raises:
        StoreError: no such artifact. ConfigError: the model has no token set among its ancestors.
    """
    folder = Path(ref)
    if (folder / TOKENS).is_dir():
        return TrainingText([(folder.name, folder / TOKENS, folder)])
    sets = []
    if not folder.is_dir():
        for artifact in ancestors(store, store.open(ref)):
            tokenizer = store.find(artifact.parents.get(TOKENIZER, ""))
            if artifact.kind == TOKENS and tokenizer is not None:
                for each in (artifact, tokenizer):
                    each.check()
                sets.append((artifact.name or artifact.address[:8], artifact.path, tokenizer.path))
    if not sets:
        raise ConfigError(
            f"{ref} has no training tokens among its ancestors, so contamination cannot be searched",
            expected="a model of a recipe, in its store, or a folder of whorl.train",
            do="leave out --contamination",
        )
    return TrainingText(sets)


N = 13  # words of an n-gram, as in GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C)
MIN_WORDS = 8
MIN_SCORE = 0.5


@dataclass(frozen=True)
class FoundItem:
    """Where an item was found. score: share of its n-grams in the document, weighted by rarity."""

    place: str
    score: float


@dataclass(frozen=True)
class ContaminatedItems:
    """Items of one task in the training text.

    Attributes:
        found: id of an item -> where.
        too_short: ids of items with too few words to be searched.
    """

    found: Mapping[str, FoundItem]
    too_short: frozenset[str]


def item_text(task: EvalTask, item: Item) -> str:
    """Return the text by which an item is found; see the top of this file."""
    template = task.kind.template
    fields = [value for name in template.names if isinstance(value := item.fields.get(name), str)]
    longest = max(fields, key=len, default="")
    if len(split_words(longest)) >= MIN_WORDS:
        return longest
    prompt: str = template(item.variables, item.id)
    return prompt + task.kind.example_answer(item) if isinstance(item.gold, str | int) else prompt


def find_contaminated(
    tasks: Iterable[EvalTask], documents: Iterable[tuple[str, str]],
    *, advance: Callable[[int], Any] = lambda documents: None,
) -> dict[str, ContaminatedItems]:  # fmt: skip
    """Return task -> its items in the training text; the text is read once for all tasks.

    Args:
        documents: (place, text) of the training text.
        advance: called with a number of documents that are done.
    """
    tasks = list(tasks)
    items = [
        TestItem(task.config.name, item.id, item_text(task, item)) for task in tasks for item in task.items
    ]
    places: list[str] = []

    def texts() -> Iterable[str]:
        for place, text in documents:
            places.append(place)
            yield text

    found: dict[str, dict[str, FoundItem]] = {task.config.name: {} for task in tasks}
    try:
        index = ItemIndex.build(items, N, MIN_WORDS)
    except DataError:  # all items are too short
        short = items
    else:
        short = list(index.too_short)
        for number, match in find_items(texts(), index, min_score=MIN_SCORE, advance=advance).items():
            item = index.items[number]
            found[item.test_set][item.id] = FoundItem(places[match.row], match.score)
    return {
        name: ContaminatedItems(each, frozenset(item.id for item in short if item.test_set == name))
        for name, each in found.items()
    }


CLEAN, FOUND = "clean", "found"
DETAIL = "contamination"  # key of an item's details


def with_contamination(task: EvalTask, result: TaskResult, contaminated: ContaminatedItems) -> TaskResult:
    """Return the result with figures of the clean and of the found items, a note, and the place of each found item."""
    items = tuple(_marked(item, contaminated) for item in result.items)
    clean = [item for item in items if item.item not in contaminated.found]
    found = [item for item in items if item.item in contaminated.found]
    parts = [(CLEAN, clean, "items not in the training text"), (FOUND, found, "items in the training text")]
    more = [
        _measure(task, name, suffix, part, about)
        for name in task.kind.chosen_metrics()
        for suffix, part, about in parts
        if found
    ]
    shown = [f"{name} {CLEAN}" for name in result.metrics] if found else []
    return replace(
        result, items=items, measures=(*result.measures, *more), metrics=(*result.metrics, *shown),
        notes=(*result.notes, _note(contaminated, len(items))),
    )  # fmt: skip


def _measure(task: EvalTask, name: str, suffix: str, items: Sequence[ItemResult], about: str) -> TaskMeasure:
    chance = task.kind.chance([item for item in task.items if item.id in {each.item for each in items}])
    made = measure(name, task.kind.metrics[name], items, chance.get(name))
    return replace(made, metric=f"{name} {suffix}", about=about)


def _marked(item: ItemResult, contaminated: ContaminatedItems) -> ItemResult:
    place = contaminated.found.get(item.item)
    if place is None:
        return item
    return replace(
        item, details={**item.details, DETAIL: {"place": place.place, "score": round(place.score, 3)}}
    )


def _note(contaminated: ContaminatedItems, n: int) -> str:
    text = f"{len(contaminated.found):,} of {n:,} items were found in the training tokens"
    if contaminated.too_short:
        text += f"; {len(contaminated.too_short):,} have too few words to be searched"
    return text
