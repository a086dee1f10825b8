"""Events as Parquet in folders by day, for questions that no view answers.

    FOLDER/feedback/date=2026-11-30/part-2-000000100000.parquet       partition 2, offsets from 100,000 on
    FOLDER/offsets.json                                               "feedback/2" -> next offset

A file has the events of one range of offsets and one day. The last range of a partition is written again until it is full,
under the same name and by a rename, so an export that was killed leaves nothing twice. The offsets move last.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whorl.files import write_atomic
from whorl.log.event import LogRecord, UnreadableRecordError
from whorl.log.port import Log, OffsetRemovedError
from whorl.loop.events import COMPLETIONS, FEEDBACK, SCHEMAS

RANGE = 100_000  # offsets of one file
_PLACE = {
    "id": pa.string(),
    "type": pa.string(),
    "time": pa.float64(),
    "partition": pa.int32(),
    "offset": pa.int64(),
}
_DATA = {
    FEEDBACK: ("actor", "completion", "choice", "kind", "over", "over_choice", "via"),
    COMPLETIONS: ("actor", "model", "digest", "pair", "side", "arm"),
}  # as text


def export_events(log: Log, folder: Path) -> None:
    """Write the events that are new since the last export.

    Raises:
        OffsetRemovedError: retention removed events that were not exported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "offsets.json"
    done: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    for topic in _DATA:
        for partition, (first, end) in enumerate(log.bounds(topic)):
            name = f"{topic}/{partition}"
            if (offset := done.get(name, first)) < first:
                raise OffsetRemovedError(topic, partition, offset, first - 1)
            while offset < end:
                start = offset - offset % RANGE
                until = min(end, start + RANGE)
                start = max(
                    start, offset if start < first else 0
                )  # a range without its beginning is continued
                _write_range(log, folder / topic, topic, partition, start, until)
                done[name] = offset = until
                write_atomic(path, json.dumps(done))


def _write_range(log: Log, folder: Path, topic: str, partition: int, start: int, end: int) -> None:
    days: dict[str, list[dict[str, Any]]] = {}
    offset = start
    while offset < end and (records := log.fetch(topic, partition, offset, end - offset)):
        offset = records[-1].offset + 1
        for record in records:
            if record.offset < end and (row := _row(record)) is not None:
                day = datetime.fromtimestamp(row["time"], UTC).date().isoformat()
                days.setdefault(day, []).append(row)
    schema = pa.schema([*_PLACE.items(), *((name, pa.string()) for name in _DATA[topic])])
    for day, rows in days.items():
        target = folder / f"date={day}" / f"part-{partition}-{start:012d}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        content = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema), content)
        write_atomic(target, content.getvalue().to_pybytes())


def _row(record: LogRecord) -> dict[str, Any] | None:
    try:
        event = record.event(SCHEMAS)
    except UnreadableRecordError:
        return None  # is in the quarantine
    data = {name: str((event.data or {}).get(name, "")) for name in _DATA[record.topic]}
    place = event.id, event.type, min(event.time, record.recorded), record.partition, record.offset
    return dict(zip(_PLACE, place, strict=True)) | data


def likes_per_day(folder: Path) -> list[tuple[str, str, int, int]]:
    """Return (day, model, likes, dislikes) of the last click of each actor on each answer, sorted."""
    import duckdb

    feedback, completions = (f"{folder}/{topic}/*/*.parquet" for topic in (FEEDBACK, COMPLETIONS))
    query = """
        WITH clicks AS (
            SELECT date, completion, kind FROM read_parquet(?, hive_partitioning = true)
            WHERE type = 'feedback.given' AND kind IN ('like', 'dislike', 'none')
            QUALIFY row_number() OVER (PARTITION BY actor, completion, choice ORDER BY "offset" DESC) = 1
        )
        SELECT CAST(date AS VARCHAR), model, count(*) FILTER (kind = 'like'), count(*) FILTER (kind = 'dislike')
        FROM clicks JOIN (SELECT DISTINCT id, model FROM read_parquet(?)) made ON made.id = completion
        GROUP BY ALL ORDER BY ALL"""
    return duckdb.execute(query, [feedback, completions]).fetchall()
