"""Data sets as files of an artifact: what one step made and another learns from.

    tasks.train.jsonl           something to be answered, and what judges it
    pairs.train.jsonl           texts and what continues them
    conversations.train.jsonl   messages, of which every turn of the assistant is learnt
    preferences.train.jsonl     prompts with two answers, the first the better
    judged.train.jsonl          prompts with an answer, and whether it is good

and the same with `test`: what is held out. A set has those files that it has items for.

What people bring is read by `data/read.py`, which knows many shapes and looks for where a prompt ends. What is written here
was read already, so preferences and conversations are read back as they stand: nothing is looked for a second time. (Tasks
and pairs have one shape, and are read back by the readers; `stage.py`.)

The subtle part is what is held out. A file often has the same prompt several times, with other answers, and a prompt on both
sides would be measured by heart. So sides are drawn by the prompt (`apart`): all that was said to it goes together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from whorl.align.data.code.functions import stable_hash
from whorl.align.data.formats import (
    Conversation,
    Messages,
    Preference,
    PromptCompletion,
    TextOrMessages,
    UnpairedPreference,
)
from whorl.errors import DataError
from whorl.evals.verify.task import VerifiableTask
from whorl.store.address import file_sha256

Item = Conversation | PromptCompletion | Preference | UnpairedPreference | VerifiableTask
ItemT = TypeVar("ItemT", bound=Item)
T = TypeVar("T")


def write_dataset(folder: Path, name: str, split: str, items: Iterable[Item]) -> int:
    """JSON lines of items, in `folder/name.split.jsonl`; -> how many. Of none there is no file."""
    given = ({k: v for k, v in asdict(item).items() if v not in ("", ())} for item in items)
    lines = [json.dumps(record) + "\n" for record in given]
    if lines:
        (folder / f"{name}.{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read_conversations(folder: Path, split: str) -> list[Conversation]:
    """Those of `write_set`; none where there is no file. Raises DataError: a line is damaged."""
    return _read(
        folder / f"conversations.{split}.jsonl", lambda r: Conversation(**r | _restore_tuples(r, "messages"))
    )


def read_preferences(folder: Path, split: str) -> list[Preference]:
    """As `read_conversations`."""
    sides = ("prompt", "chosen", "rejected")
    return _read(
        folder / f"preferences.{split}.jsonl", lambda r: Preference(**r | _restore_tuples(r, *sides))
    )


def read_unpaired(folder: Path, split: str) -> list[UnpairedPreference]:
    """As `read_conversations`."""
    return _read(
        folder / f"unpaired.{split}.jsonl",
        lambda r: UnpairedPreference(**r | _restore_tuples(r, "prompt", "completion")),
    )


def _restore_tuples(record: Mapping[str, Any], *names: str) -> dict[str, TextOrMessages]:
    """Fields that are texts, or messages: which JSON makes a list of."""
    return {name: record[name] if isinstance(record[name], str) else tuple(record[name]) for name in names}


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(make(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: {error}", expected="what `write_set` wrote", do="make the set again"
            ) from error
    return found


def prompt_text(item: Item) -> str:
    """What is asked in it, as a text to compare: of a conversation all before the assistant's first word."""
    if isinstance(item, Conversation):
        first = next(
            (n for n, message in enumerate(item.messages) if message["role"] == "assistant"),
            len(item.messages),
        )
        return _as_text(item.messages[:first])
    if isinstance(item, VerifiableTask):
        return item.prompt or _as_text(item.messages)
    return item.prompt if isinstance(item.prompt, str) else _as_text(item.prompt)


def _as_text(messages: Messages) -> str:
    return json.dumps([[message["role"], message.get("content", "")] for message in messages])


def split_by_prompt(items: Sequence[ItemT], test_fraction: float, seed: int) -> dict[str, list[ItemT]]:
    """{"train": ..., "test": ...}, both in an order of the seed's; `share` of the prompts are held out, one at least where
    there are two."""
    by_prompt: dict[str, list[ItemT]] = {}
    for item in items:
        by_prompt.setdefault(prompt_text(item), []).append(item)
    prompts = sorted(by_prompt, key=lambda prompt: (stable_hash(seed, prompt), prompt))
    held = max(1, round(test_fraction * len(prompts))) if test_fraction and len(prompts) > 1 else 0
    return {
        "train": [item for prompt in prompts[held:] for item in by_prompt[prompt]],
        "test": [item for prompt in prompts[:held] for item in by_prompt[prompt]],
    }


def content_hash(path: Path) -> str:
    """A hash of a file, or of all files of a folder with their names: what stands there decides what is learnt.

    Raises:
        DataError: there is nothing.
    """
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        raise DataError(f"{path} is not there", expected="a JSONL or Parquet file, or a folder of them")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return "\n".join(f"{file.relative_to(path)} {file_sha256(file)}" for file in files)
