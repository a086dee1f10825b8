"""Records of task files, read by the formats of `whorl.data.formats`, and the items that tasks make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from whorl.data.files import format_suffix, open_decompressed
from whorl.data.formats import open_format
from whorl.data.quarantine import BadRecordError
from whorl.errors import ConfigError, DataError
from whorl.evals.tasks.template import RESERVED

Fields = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Item:
    """One record of a task.

    Attributes:
        id: unique within the task.
        fields: of the record.
        gold: value of the expression `gold`; for a choice task the index of the right choice.
        choices: texts; empty if the task has none.
        cluster, group: see `whorl.evals.results.ItemResult`.
    """

    id: str
    fields: Fields
    gold: Any = None
    choices: tuple[str, ...] = ()
    cluster: str = ""
    group: str = ""

    @cached_property
    def variables(self) -> dict[str, Any]:
        """The variables of templates: the fields, and `item`."""
        letters = LETTERS[: len(self.choices)]
        about = SimpleNamespace(
            id=self.id, gold=self.gold, choices=self.choices, letters=letters, fields=self.fields
        )
        return {**self.fields, RESERVED: about}


def read_records(paths: Sequence[str], label: str, unnest: str = "") -> Iterator[Fields]:
    """Yield the records of files, in order.

    Args:
        label: for messages, such as "task arc".
        unnest: field that holds the list of records; "" if a record of the file is one.

    Raises:
        DataError: a file is missing, or a record is damaged or lacks `unnest`.
    """
    for path in paths:
        if format_suffix(path) in ("", ".txt"):
            expected = "a file .jsonl, .json, .parquet, .csv or .tsv, also .gz"
            raise ConfigError(f"{label}: {path} has no format of records", expected=expected)
        if unnest and format_suffix(path) == ".json" and (whole := _whole_object(path)) is not None:
            yield from _nested(whole, unnest, f"{label}: {path}")
            continue
        for record in open_format(path, {".json": "jsonl"}).records(path):
            value = record.value
            if isinstance(value, BadRecordError):
                missing = value.reason == "unreadable"
                raise DataError(
                    f"{label}: {path}{'' if missing else f', record {record.number},'} cannot be read: {value.detail}",
                    expected="a file of records: JSONL, JSON or Parquet",
                    do="check the path" if missing else "correct or remove the record",
                )
            if not unnest:
                yield value
                continue
            yield from _nested(value, unnest, f"{label}: {path}, record {record.number},")


def _whole_object(path: str) -> Fields | None:
    """Return the one object of a JSON file of several lines; None if it holds something else."""
    try:
        with open_decompressed(path) as stream:
            found = json.loads(stream.read())
    except (OSError, ValueError):
        return None  # the reader of lines names the damage
    return found if isinstance(found, dict) else None


def _nested(value: Fields, unnest: str, where: str) -> list[Fields]:
    found = value.get(unnest)
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise DataError(
            f"{where} has no list of records in the field {unnest!r}",
            expected=f"one of the fields {', '.join(list(value)[:10])}",
            do="correct data.unnest",
        )
    return found
