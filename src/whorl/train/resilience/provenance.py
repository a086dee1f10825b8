"""Witnesses: which documents a batch was made of, asked when something went wrong with it.

Nothing is kept during training for that. The data's order is a function of the batch's number, so the question is answered
by asking it again: which rows, which stretches of the token stream, which documents. Raw text has no index of documents;
there the blocks that were read are named, by file and place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whorl.errors import WhorlError
from whorl.tokens.loader import TokenProducer
from whorl.tokens.stream import StreamProducer
from whorl.train.job import Job, RawText, stream_config

MOST = 20  # are named; all are counted


def documents_of(job: Job, number: int, place: dict[str, Any] | None) -> dict[str, Any]:
    """The documents of batch `number`: {"documents": [{"id", "path", "source", ...}], "n_documents"}.

    place: where that batch begins in raw text.
    """
    try:
        found = _of_tokens(job, number) if job.raw is None else _of_raw(job, job.raw, place)
    except (
        WhorlError,
        OSError,
        ValueError,
        KeyError,
    ) as error:  # what is asked in trouble must not make more
        return {"documents": [], "n_documents": 0, "unknown": str(error)}
    return {"documents": found[:MOST], "n_documents": len(found)}


def _of_tokens(job: Job, number: int) -> list[dict[str, Any]]:
    producer = TokenProducer(Path(job.tokens), "train", job.length, job.batch_rows, job.seed)
    table = producer.stream.documents
    numbers = producer.documents_of(number)
    chosen = table.select(["id", "path", "source", "offset"]).take(numbers)
    return [{"number": int(n), **row} for n, row in zip(numbers, chosen.to_pylist(), strict=True)]


def _of_raw(job: Job, raw: RawText, place: dict[str, Any] | None) -> list[dict[str, Any]]:
    producer = StreamProducer(stream_config(job, raw))
    source, blocks = producer.blocks_of(int(place["record"]) if place else 0)
    files = producer.files(source)
    return [
        {"path": files.blocks[b].file, "offset": files.blocks[b].begin, "bytes": files.blocks[b].size}
        for b in sorted(blocks)
    ]
