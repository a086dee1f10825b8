"""Find the items of a task in training text, by word n-grams.

An item's text is the longest text field that its template names: the question as published, so that it is found in any
layout. If that has fewer than MIN_WORDS words, it is the prompt, without few-shot examples, and the right answer. An item
is found in a document that has at least MIN_SCORE of its n-grams of N words, each weighted by its rarity
(`whorl.corpus.decontamination`). A shorter item is found as a whole, and one with fewer than MIN_WORDS not at all: it
would be found by chance. Such items are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from whorl.corpus.decontamination import ItemIndex, TestItem, find_items, split_words
from whorl.errors import DataError
from whorl.evals.tasks import EvalTask
from whorl.evals.tasks.task import Item

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


def item_text(task: EvalTask, item: Item, min_words: int = MIN_WORDS) -> str:
    """Return the text by which an item is found; see the top of this file."""
    template = task.kind.template
    fields = [value for name in template.names if isinstance(value := item.fields.get(name), str)]
    longest = max(fields, key=len, default="")
    if len(split_words(longest)) >= min_words:
        return longest
    prompt: str = template(item.variables, item.id)
    return prompt + task.kind.example_answer(item) if isinstance(item.gold, str | int) else prompt


def find_contaminated(
    tasks: Iterable[EvalTask], documents: Iterable[tuple[str, str]], *, n: int = N, min_words: int = MIN_WORDS,
    min_score: float = MIN_SCORE, advance: Callable[[int], Any] = lambda documents: None,
) -> dict[str, ContaminatedItems]:  # fmt: skip
    """Return task -> its items in the training text; the text is read once for all tasks.

    Args:
        documents: (place, text) of the training text.
        n, min_words, min_score: see the top of this file.
        advance: called with a number of documents that are done.
    """
    tasks = list(tasks)
    items = [
        TestItem(task.config.name, item.id, item_text(task, item, min_words))
        for task in tasks
        for item in task.items
    ]
    places: list[str] = []

    def texts() -> Iterable[str]:
        for place, text in documents:
            places.append(place)
            yield text

    found: dict[str, dict[str, FoundItem]] = {task.config.name: {} for task in tasks}
    try:
        index = ItemIndex.build(items, n, min_words)
    except DataError:  # all items are too short
        short = items
    else:
        short = list(index.too_short)
        for number, match in find_items(texts(), index, min_score=min_score, advance=advance).items():
            item = index.items[number]
            found[item.test_set][item.id] = FoundItem(places[match.row], match.score)
    return {
        name: ContaminatedItems(each, frozenset(item.id for item in short if item.test_set == name))
        for name, each in found.items()
    }
