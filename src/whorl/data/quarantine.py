"""Quarantine of bad records: each is stored with its reason; none is dropped silently.

A file of a million records has a few broken ones. Stopping at the first would make the file useless. Skipping them
silently would hide that a whole format was never read. So a bad record is stored with its file, its number, a reason
from `REASONS`, the faulty field and the value, and reasons are counted. The first `max_kept` are held in memory; with a
path, each is also a line of a JSONL file.

A corpus stores documents by source and offset (`corpus/documents.py`, `RejectedDocument`), everything else the line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from whorl.errors import DataError, without_credentials

REASONS = {
    # of a file
    "unreadable": "the operating system refused to read it",
    "not_a_file": "is a pipe, socket, device or broken link",
    "damaged": "compressed or columnar data ends early or does not decode",
    # of a record
    "bad_json": "is not a JSON object",
    "binary": "holds NUL bytes, so it is not text",
    "invalid_utf8": "is not valid UTF-8, or has lone surrogates",
    "too_large": "is longer than the limit",
    "too_costly": "its extraction takes too much memory or time",
    "empty": "a text or field is empty or white space",
    "media_type": "is of a media type that is not read",
    "http_status": "is the response to a failed request",
    "redirect": "is a redirect to another page",
    "no_question": "is an answer whose question is not in the file",
    "no_header": "lacks the header of its format",
    "low_link_score": "has an address whose links score too low, or none",
    "encrypted": "needs a password",
    "not_installed": "needs a package that is not installed",
    "secret": "has the name of a file of passwords or keys, or is a private key",
    "no_text_field": "has no such text field, or no string in it",
    # of an image
    "not_an_image": "is in no image format that is read",
    "bad_channels": "has no grey values or colours of 8 or 16 bits",
    # of a row of CSV or TSV
    "ragged": "has more or fewer fields than the first row",
    "bad_quotes": "a quote is not closed, or text follows one",
    # of a record of alignment data
    "unknown_shape": "matches no known set of fields",
    "bad_field": "a field has the wrong type",
    "bad_role": "a message has an unknown role, or one that cannot follow the message before",
    "no_answer": "no message is from the assistant",
    "no_prompt": "chosen and rejected have no common prefix",
    "identical": "chosen and rejected are equal",
}


class BadRecordError(Exception):
    """A record cannot be used: the value of a `Record`, or raised during conversion.

    Args:
        reason: one of `REASONS`.
        field: faulty field with its index, such as "messages[2].content"; "" for the whole record.
        detail: the value found there.
    """

    def __init__(self, reason: str, field: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{field or 'the record'}: {detail}")
        self.reason, self.field, self.detail = reason, field, detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.field, self.detail)


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A rejected record. line: of JSONL, the row of Parquet, Arrow or a table, or the member of tar; from 1."""

    file: str
    line: int
    reason: str
    field: str
    detail: str

    def __str__(self) -> str:
        field = f", field {self.field!r}" if self.field else ""
        return f"{self.file}, line {self.line}{field}: {self.detail} ({self.reason})"


class Rejected(Protocol):
    """A record in a quarantine: a dataclass with a reason."""

    @property
    def reason(self) -> str: ...


class Quarantine:
    """Bad records and their counts, over any number of files.

    Args:
        path: a JSONL file to append to; None keeps records in memory only.
        max_kept: number held in memory; all are counted.

    rejected: the first `max_kept`. counts: reason -> number. accepted: number of good records.
    """

    def __init__(self, path: Path | None = None, *, max_kept: int = 1000) -> None:
        self.path, self.max_kept = path, max_kept
        self.rejected: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.accepted = 0

    def add(self, file: Path | str, line: int, error: BadRecordError) -> None:
        """Reject one record of a file."""
        self.store(
            RejectedRecord(
                without_credentials(str(file)),
                line,
                error.reason,
                error.field,
                without_credentials(error.detail)[:500],
            )
        )

    def store(self, record: Rejected) -> None:
        """Reject one record, a dataclass."""
        self.counts[record.reason] += 1
        if len(self.rejected) < self.max_kept:
            self.rejected.append(record)
        if self.path is not None:
            fields: Any = record
            with self.path.open("a", encoding="ascii") as stream:  # bad records are few: opened for each
                stream.write(json.dumps(asdict(fields)) + "\n")

    def __len__(self) -> int:
        return self.counts.total()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rejected)

    def summary(self) -> dict[str, int]:
        """Return reason -> count, most frequent first, with "accepted" at the front."""
        return {"accepted": self.accepted, **dict(self.counts.most_common())}

    def no_records_error(self, path: Path, expected: str) -> DataError:
        """Return the error for a `path` without a single good record."""
        counts = ", ".join(f"{reason} {n}" for reason, n in self.counts.most_common())
        first = next((r for r in self.rejected if r.file.startswith(str(path))), None)
        return DataError(
            f"{path} has no usable record: {counts or 'it is empty'}",
            expected=expected,
            do=f"look at the first: {first}" if first else "pass a file with records",
        )
