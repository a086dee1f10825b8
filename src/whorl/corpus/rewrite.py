"""Rewrite documents: mask personal data, then remove bad lines, lines that repeat, and substrings that repeat.

    rewrite(RewriteConfig(lines=LineConfig(), substrings=200, mask=True), document_files(ingest), out, progress)

The documents keep their ids, rows and row groups; only their text changes, perhaps to an empty one. `edits-*.parquet` has
one row for each document and kind of change, with the document in which the same text stays. Each pass is a map stage over
the document files, so a changed file rewrites itself and the files with which it shares text (`mapreduce/units.py`).

Memory: lines need 8 bytes each, in partitions by hash; substrings need the whole corpus (`deduplication/substrings.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.deduplication.lines import LineConfig, repeated_lines
from whorl.corpus.deduplication.substrings import MAX_BYTES, repeated_spans
from whorl.corpus.mapreduce import Executor, Input, Output, Stage, Unit, UnitStore
from whorl.corpus.mapreduce.units import link_or_copy
from whorl.corpus.rewrite_stages import DOCUMENTS, EDITS, FIRST, HASHES, C4LineConfig
from whorl.errors import DataError

if TYPE_CHECKING:
    from whorl.tracking.progress import Progress

STAGES = "whorl.corpus.rewrite_stages"
LINES_PER_PARTITION = 1 << 24
VERSION = 2


class RewriteConfig(BaseModel):
    """Which changes are made to the texts, in this order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mask: bool = Field(
        default=True,
        description="replace e-mail and IP addresses, phone and card numbers, and keys by <KIND>",
    )
    c4_lines: C4LineConfig | None = Field(
        default=None,
        description="remove lines by the rules of C4: no terminal punctuation, few words, Javascript, policies",
    )
    lines: LineConfig | None = Field(default=None, description="remove lines that repeat in the corpus")
    substrings: int | None = Field(
        default=None,
        ge=16,
        description="remove substrings of at least so many bytes that repeat in the corpus",
    )

    @model_validator(mode="after")
    def _check_some(self) -> RewriteConfig:
        if not self.mask and self.c4_lines is None and self.lines is None and self.substrings is None:
            raise ValueError("nothing to change; set mask, c4_lines, lines or substrings")
        return self


def rewrite(
    config: RewriteConfig, files: Sequence[Path], out: Path, progress: Progress, *, executor: Executor, units: Path
) -> dict[str, Any]:  # fmt: skip
    """Write the changed documents and the record of the changes into `out`; return counts.

    Args:
        files: `documents-*.parquet`.
        units: folder of finished units, which later runs use again.

    Returns:
        `documents`, `bytes` (after), and `edits`: kind -> documents, count, bytes.

    Raises:
        DataError: the corpus is too large for substrings.
    """
    store, current, made = UnitStore(units), [Input.of(path) for path in files], list[list[Output]]()
    plans = out / "plans"
    single: dict[str, Stage] = {}  # passes that read one file at a time, without a plan
    if config.mask:
        single["mask"] = Stage(f"{STAGES}:mask_documents", VERSION)
    if config.c4_lines is not None:
        single["c4_lines"] = Stage(f"{STAGES}:drop_c4_lines", VERSION, config.c4_lines.model_dump())
    passes = [*single, *(n for n, on in (("line", config.lines), ("substring", config.substrings)) if on)]
    with progress.task("Rewriting", total=len(passes) * len(files), unit="files") as task:
        for kind in passes:
            if kind in single:
                stage, work = single[kind], [Unit((one,)) for one in current]
            else:
                plan = (
                    _plan_lines(config.lines, current, plans, store, executor)
                    if kind == "line" and config.lines is not None
                    else _plan_substrings(config.substrings or 0, current, plans)
                )
                stage = Stage(f"{STAGES}:cut_documents", VERSION, {"kind": kind})
                work = [Unit((one, Input.of(path))) for one, path in zip(current, plan, strict=True)]
            made.append(store.run(stage, work, executor, lambda _: task.advance()))
            current = [output.input(DOCUMENTS) for output in made[-1]]
    shutil.rmtree(plans, ignore_errors=True)
    counts: dict[str, dict[str, int]] = {}
    for number, one in enumerate(current):
        link_or_copy(Path(one.path), out / f"documents-{number:05d}.parquet")
    for step, outputs in enumerate(made):
        for number, output in enumerate(outputs):
            link_or_copy(output.folder / EDITS, out / f"edits-{step}-{number:05d}.parquet")
            for kind, found in output.summary["edits"].items():
                total = counts.setdefault(kind, dict.fromkeys(found, 0))
                counts[kind] = {name: total[name] + n for name, n in found.items()}
    last = [output.summary for output in made[-1]]
    return {
        "documents": sum(s["documents"] for s in last), "bytes": sum(s["bytes"] for s in last), "edits": counts,
    }  # fmt: skip


def edits_of(folder: Path, document: str) -> list[dict[str, Any]]:
    """Return the changes of a document: kind, count, bytes, matched_id; [] for documents that were not rewritten."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("edits-*.parquet")):
        rows += pq.read_table(path, filters=[("id", "=", document)]).to_pylist()
    return [{name: value for name, value in row.items() if name != "id"} for row in rows]


def _plan_lines(
    config: LineConfig, documents: Sequence[Input], folder: Path, store: UnitStore, executor: Executor
) -> list[Path]:
    """Write which lines go, a file for each document file, and return the files."""
    stage = Stage(f"{STAGES}:hash_lines", VERSION, config.model_dump(exclude={"keep"}))
    outputs = store.run(stage, [Unit((one,)) for one in documents], executor)
    hashes = [np.load(output.folder / HASHES, mmap_mode="r") for output in outputs]
    firsts = [np.load(output.folder / FIRST) for output in outputs]
    ids = [_ids(one) for one in documents]
    begin = np.cumsum([0, *map(len, hashes)])
    n_partitions = 1 + int(begin[-1]) // LINES_PER_PARTITION
    parts: list[
        tuple[NDArray[np.int64], NDArray[np.int64]]
    ] = []  # removed lines, the first line equal to each
    for number in range(n_partitions):
        found = [np.flatnonzero(some % np.uint64(n_partitions) == number) for some in hashes]
        lines = np.concatenate([where + start for where, start in zip(found, begin, strict=False)])
        values = np.concatenate([some[where] for some, where in zip(hashes, found, strict=True)])
        _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        gone = repeated_lines(values, config.keep)
        parts.append((lines[gone], lines[first[inverse[gone]]]))
    removed, kept = (np.concatenate(side) for side in zip(*parts, strict=True))
    order = np.argsort(removed)
    removed, kept = removed[order], kept[order]
    row_of = [np.concatenate([[0], first]) for first in firsts]

    def place(line: int) -> tuple[int, int]:
        """Return the file and the row of a line."""
        file = int(np.searchsorted(begin, line, side="right")) - 1
        return file, int(np.searchsorted(row_of[file][1:], line - begin[file], side="right")) - 1

    plans = []
    for number in range(len(documents)):
        low, high = np.searchsorted(removed, [begin[number], begin[number + 1]])
        own = removed[low:high] - begin[number]
        rows = np.searchsorted(firsts[number], own, side="right") - 1
        starts = own - firsts[number][rows]
        matched = ["" if config.keep == "none" else ids[f][r] for f, r in map(place, kept[low:high].tolist())]
        plans.append(_write_plan(folder / f"lines-{number:05d}", rows, starts, starts + 1, matched))
    return plans


def _plan_substrings(min_bytes: int, documents: Sequence[Input], folder: Path) -> list[Path]:
    """Write which bytes go, a file for each document file, and return the files."""
    import pyarrow.parquet as pq

    texts, size = list[list[str]](), 0
    for one in documents:
        texts.append(pq.read_table(one.path, columns=["text"])["text"].to_pylist())
        size += sum(map(len, texts[-1]))
        if size > MAX_BYTES:
            raise DataError(
                f"the corpus has more than {MAX_BYTES:,} characters",
                expected="less for repeated substrings, which are found in memory",
                do="leave rewrite.substrings out, or make several corpora",
            )
    ids = [name for one in documents for name in _ids(one)]
    spans = repeated_spans([text for some in texts for text in some], min_bytes)
    plans, begin = [], 0
    for number, some in enumerate(texts):
        low, high = np.searchsorted(spans.document, [begin, begin + len(some)])
        matched = [ids[row] for row in spans.matched_document[low:high].tolist()]
        rows = spans.document[low:high] - begin
        name = folder / f"substrings-{number:05d}"
        plans.append(_write_plan(name, rows, spans.start[low:high], spans.end[low:high], matched))
        begin += len(some)
    return plans


def _write_plan(
    path: Path, rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], matched: Sequence[str]
) -> Path:  # fmt: skip
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"row": rows, "start": starts, "end": ends, "matched_id": pa.array(matched, pa.string())}
    pq.write_table(pa.table(columns), path)
    return path


def _ids(documents: Input) -> list[str]:
    import pyarrow.parquet as pq

    found: list[str] = pq.read_table(documents.path, columns=["id"])["id"].to_pylist()
    return found
