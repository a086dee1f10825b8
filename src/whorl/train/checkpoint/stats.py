"""Statistics of the checkpoints of one run, for its summary and its report. Each checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from whorl.train.checkpoint.size_report import format_line


@dataclass
class CheckpointStats:
    """Statistics over all starts of a run."""

    written: int = 0
    deferred: int = 0  # due while the previous one was being written
    stall_seconds: float = 0.0  # total stall of training steps for copies
    max_stall_seconds: float = 0.0
    write_seconds: float = 0.0  # of the writer, in total
    last_bytes: int = 0  # size of the last one
    remote_written: int = 0
    remote_failed: int = 0
    last_remote_time: float = 0.0  # of the last upload request, in seconds since 1970
    remote_error: str = ""  # of the last failure; empty after a success
    resumes: int = 0
    rejected: list[str] = field(default_factory=list)
    size_report: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return all figures, and the two lines that a report shows."""
        return {**asdict(self), "line": self.summary(), "size_report": format_line(self.size_report)}

    def summary(self) -> str:
        """One line for a report."""
        text = (
            f"{self.written:,} of {self.last_bytes / 1e6:,.1f} MB; stalls {self.stall_seconds:.2f} s in total"
        )
        if self.deferred:
            text += f"; {self.deferred:,} deferred during an earlier write"
        if self.resumes:
            text += f"; resumed {self.resumes:,} times"
        if self.rejected:
            text += f"; rejected: {self.rejected[-1]}"
        if self.remote_written or self.remote_failed:
            text += f"; {self.remote_written:,} in remote storage"
        if self.remote_failed:
            last = f", the last: {self.remote_error}" if self.remote_error else ", and succeeded later"
            text += f" ({self.remote_failed:,} failed{last})"
        return text

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from the statistics of a checkpoint; a field that it lacks keeps its value."""
        rejected = [*saved["rejected"], *self.rejected]
        for each in fields(self):
            setattr(self, each.name, saved.get(each.name, getattr(self, each.name)))
        self.rejected, self.resumes = rejected, self.resumes + 1
