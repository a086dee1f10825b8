"""Data sets as files of an artifact: written by one step, read by another.

    tasks.train.jsonl           prompts with a verifier
    pairs.train.jsonl           prompts with completions
    conversations.train.jsonl   messages; every assistant turn is in the loss
    preferences.train.jsonl     prompts with two completions, chosen and rejected
    unpaired.train.jsonl        prompts with a completion and a label

and the same with `test`, the held-out split. A data set has files only for the items it contains.

Data of users are read by `data/read.py`, which recognizes many formats and detects where a prompt ends. The files here
have one format and are read back unchanged. (Tasks and pairs are read back by `read.py`; see `stage/io.py`.)

The subtle point is the held-out split. A file often has several completions of one prompt. A prompt in both splits
would measure memorization. So `split_by_prompt` assigns prompts, with all their completions, to a split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from whorl.align.data.formats import (
    Conversation,
    Preference,
    PromptCompletion,
    TextOrMessages,
    UnpairedPreference,
)
from whorl.data.record_fields import Messages
from whorl.errors import DataError
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.suites.python_functions import stable_hash
from whorl.store.address import file_sha256

Item = Conversation | PromptCompletion | Preference | UnpairedPreference | VerifiableTask
TEXTS = ("chosen", "rejected", "completion")  # written even if they are empty
ItemT = TypeVar("ItemT", bound=Item)
T = TypeVar("T")


def write_dataset(folder: Path, name: str, split: str, items: Iterable[Item]) -> int:
    """Write items as JSON lines to `folder/name.split.jsonl` and return their number; no file for no items."""
    given = ({k: v for k, v in asdict(item).items() if v not in ("", (), {}) or k in TEXTS} for item in items)
    lines = [json.dumps(record) + "\n" for record in given]
    if lines:
        (folder / f"{name}.{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read_conversations(folder: Path, split: str) -> list[Conversation]:
    """Return the conversations of `write_dataset`; empty if there is no file. Raises DataError: a line is damaged."""
    return _read(
        folder / f"conversations.{split}.jsonl", lambda r: Conversation(**r | _restore_tuples(r, "messages"))
    )


def read_preferences(folder: Path, split: str) -> list[Preference]:
    """Return the preferences; otherwise as `read_conversations`."""
    sides = ("prompt", "chosen", "rejected")
    return _read(
        folder / f"preferences.{split}.jsonl", lambda r: Preference(**r | _restore_tuples(r, *sides))
    )


def read_unpaired(folder: Path, split: str) -> list[UnpairedPreference]:
    """Return the labelled completions; otherwise as `read_conversations`."""
    return _read(
        folder / f"unpaired.{split}.jsonl",
        lambda r: UnpairedPreference(**r | _restore_tuples(r, "prompt", "completion")),
    )


def _restore_tuples(record: Mapping[str, Any], *names: str) -> dict[str, TextOrMessages]:
    """Return fields that are strings, messages or ids, with lists as tuples (JSON makes them lists)."""
    present = [*names, *(name for name in record if name == "tools" or name.endswith("_ids"))]
    return {name: record[name] if isinstance(record[name], str) else tuple(record[name]) for name in present}


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(make(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: {error}",
                expected="a line of `write_dataset`",
                do="write the data set again",
            ) from error
    return found


def prompt_text(item: Item) -> str:
    """Return the prompt of an item as a string to compare.

    Of a conversation all messages before the assistant's first one.
    """
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
    """Return {"train": ..., "test": ...} in a seeded order; at least one of two or more prompts is held out."""
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
    """Return a hash of a file, or of all files of a folder with their names.

    Raises:
        DataError: the path does not exist.
    """
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        raise DataError(f"{path} does not exist", expected="a JSONL or Parquet file, or a folder of them")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return "\n".join(f"{file.relative_to(path)} {file_sha256(file)}" for file in files)
