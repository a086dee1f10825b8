"""Where bad records go: each is named with its reason, none is dropped unseen.

A file of a million conversations has a few that are broken. Stopping at the first would make the file useless, and
passing over them would hide that one shape of record was never read at all. So a bad record is set aside with its file,
its line, a reason out of `REASONS`, the field at fault and what was found there; the reasons are counted. In memory the
first `keep` are held; with a path, each is also a line of a JSONL file.

The corpus has a quarantine of its own, whose records are places in bytes. Here a record is a line (of JSONL) or a row
(of Parquet and Arrow), both counted from 1, and what is wrong with it is as a rule one field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from whorl.errors import DataError

REASONS = {
    "bad_json": "a line is not a JSON object",
    "bad_text": "holds characters that are no text (lone surrogates), or bytes that are not UTF-8",
    "too_large": "a line is longer than the limit",
    "damaged": "compressed or columnar data ends early or does not decode",
    "unknown_shape": "has none of the sets of fields that are known",
    "bad_field": "a field has another type than its shape asks for",
    "bad_role": "a message is spoken by nobody we know",
    "empty": "a field holds nothing but white space",
    "no_answer": "no message is the assistant's, so there is nothing to learn",
    "no_prompt": "chosen and rejected have no beginning in common",
    "identical": "chosen and rejected are the same, so neither is preferred",
}


class BadRecordError(Exception):
    """One record cannot be used: raised by what shapes a record, caught where records are read.

    Args:
        reason: one of `REASONS`.
        field: the field at fault, with places inside of it, as "messages[2].content"; "" for the whole record.
        detail: what was found there.
    """

    def __init__(self, reason: str, field: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{field or 'the record'}: {detail}")
        self.reason, self.field, self.detail = reason, field, detail


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A record set aside. line: of JSONL, or the row of Parquet and Arrow; from 1."""

    file: str
    line: int
    reason: str
    field: str
    detail: str

    def __str__(self) -> str:
        field = f", field {self.field!r}" if self.field else ""
        return f"{self.file}, line {self.line}{field}: {self.detail} ({self.reason})"


class Quarantine:
    """Bad records and their counts, over as many files as one likes.

    Args:
        path: a JSONL file to which each is appended; None keeps them in memory alone.
        keep: how many are held in memory. All are counted.

    records: the first `keep`; counts: reason -> how many; accepted: how many records were good.
    """

    def __init__(self, path: Path | None = None, *, max_kept: int = 1000) -> None:
        self.path, self.max_kept = path, max_kept
        self.rejected: list[RejectedRecord] = []
        self.counts: Counter[str] = Counter()
        self.accepted = 0

    def add(self, file: Path | str, line: int, error: BadRecordError) -> None:
        """Set one record aside."""
        record = RejectedRecord(str(file), line, error.reason, error.field, error.detail[:500])
        self.counts[error.reason] += 1
        if len(self.rejected) < self.max_kept:
            self.rejected.append(record)
        if self.path is not None:
            with self.path.open("a", encoding="ascii") as stream:  # bad records are few: opened for each
                stream.write(json.dumps(asdict(record)) + "\n")

    def __len__(self) -> int:
        return self.counts.total()

    def __iter__(self) -> Iterator[RejectedRecord]:
        return iter(self.rejected)

    def summary(self) -> dict[str, int]:
        """Reason -> count, the most frequent first, with "accepted" at the head."""
        return {"accepted": self.accepted, **dict(self.counts.most_common())}

    def no_records_error(self, path: Path, expected: str) -> DataError:
        """What to raise where not one record of `path` was good."""
        counts = ", ".join(f"{reason} {n}" for reason, n in self.counts.most_common())
        first = next((r for r in self.rejected if r.file.startswith(str(path))), None)
        return DataError(
            f"{path} holds not one record that can be used: {counts or 'it is empty'}",
            expected=expected,
            do=f"look at the first: {first}" if first else "give a file with records in it",
        )
