"""Provenance of a batch: the documents it contains, for error reports.

Training stores nothing for this. The data order is a function of the batch number, so the documents are computed on
request. Raw text has no document index; there the blocks read are listed by file and offset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whorl.errors import WhorlError
from whorl.tokens.loader import TokenProducer
from whorl.tokens.stream import StreamProducer
from whorl.train.job import Job, JobStreamConfig, RowShape, row_shape, stream_config

MAX_DOCUMENTS = 20  # listed at most; all are counted


def documents_in_batch(
    job: Job, batch_index: int, stream_state: dict[str, Any] | None, rows: RowShape | None = None
) -> dict[str, Any]:
    """The documents of a batch: {"documents": [{"id", "path", "source", ...}], "n_documents"}.

    rows: of the batch, if the run is behind its plan. stream_state: position at which the batch starts in raw text.
    """
    try:
        found = (
            _from_tokens(job, batch_index, rows or row_shape(job, batch_index))
            if job.stream is None
            else _from_stream(job, job.stream, stream_state)
        )
    except (
        WhorlError,
        OSError,
        ValueError,
        KeyError,
    ) as error:  # an error report must not raise another error
        return {"documents": [], "n_documents": 0, "unknown": str(error)}
    return {"documents": found[:MAX_DOCUMENTS], "n_documents": len(found)}


def _from_tokens(job: Job, batch_index: int, rows: RowShape) -> list[dict[str, Any]]:
    producer = TokenProducer(Path(job.tokens), "train", rows.seq_len, rows.batch_size, job.seed)
    table = producer.stream.documents
    numbers = producer.documents_in_batch(batch_index)
    chosen = table.select(["id", "path", "source", "offset"]).take(numbers)
    return [{"number": int(n), **row} for n, row in zip(numbers, chosen.to_pylist(), strict=True)]


def _from_stream(
    job: Job, stream: JobStreamConfig, stream_state: dict[str, Any] | None
) -> list[dict[str, Any]]:
    producer = StreamProducer(stream_config(job, stream))
    source, blocks = producer.blocks_in_record(int(stream_state["record"]) if stream_state else 0)
    files = producer.files(source)
    return [
        {"path": files.blocks[b].file, "offset": files.blocks[b].begin, "bytes": files.blocks[b].size}
        for b in sorted(blocks)
    ]
