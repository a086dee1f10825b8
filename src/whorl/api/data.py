"""One's own files, texts or token ids as a token set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document
from whorl.corpus.readers import read_documents
from whorl.corpus.sources import list_files
from whorl.errors import DataError
from whorl.tokens.shards import write_shards
from whorl.tokens.token_ids import write_id_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

VALIDATION_FRACTION = 0.05
TextData = str | Path | Sequence[str] | Sequence[Path]
IdData = Tensor | Sequence[Tensor]


def is_token_ids(data: Any) -> bool:
    """Whether data is an integer tensor or a list of tensors."""
    return isinstance(data, Tensor) or (
        isinstance(data, Sequence)
        and not isinstance(data, str)
        and bool(data)
        and isinstance(data[0], Tensor)
    )


def write_id_split(data: Any, vocab_size: int, folder: Path) -> None:
    """Write token ids as a token set with the splits `train` and `validation`."""
    documents = [data] if isinstance(data, Tensor) else list(data)
    arrays = [document.detach().cpu().numpy().astype(np.int64).reshape(-1) for document in documents]
    train_ids, held_out = _split(arrays, lambda ids, at: (ids[:at], ids[at:]))
    for split, part in (("train", train_ids), ("validation", held_out)):
        write_id_shards(part, vocab_size, folder, split)


def write_text_split(
    data: Any,
    tokenizer: Tokenizer | str | Path | None,
    vocab_size: int,
    tokens: Path,
    folder: Path,
    progress: Progress,
) -> Tokenizer:
    """Write texts as a token set in `tokens`, and their tokenizer (given, or learned from them) into `folder`."""
    documents = list(_documents(data))
    if not documents:
        raise DataError(f"{data!r} holds no text", expected="a file, a folder, a glob, or a list of texts")
    train_part, held_out = _split(documents, _cut_document)
    if isinstance(tokenizer, str | Path):
        tokenizer = Tokenizer.load(Path(tokenizer))
    if tokenizer is None:
        tokenizer = Tokenizer.train((document.text for document in train_part), vocab_size)
    tokenizer.save(folder)
    for split, part in (("train", train_part), ("validation", held_out)):
        size = sum(document.n_bytes for document in part)
        write_shards(part, tokenizer, tokens, split, progress=progress, total_bytes=size)
    return tokenizer


def _documents(data: Any) -> Iterable[Document]:
    given = [data] if isinstance(data, str | Path) else list(data)
    config = IngestConfig()
    for number, item in enumerate(given):
        if isinstance(item, Path) or (isinstance(item, str) and _is_source(item)):
            files, _ = list_files(IngestConfig(sources=[str(item)]))
            for file in files:
                for found in read_documents(
                    file, text_field=config.text_field, max_bytes=config.max_document_bytes
                ):
                    if isinstance(found, Document):
                        yield found
        else:
            yield Document(
                f"text-{number}", "texts", f"{number}.txt", None, 0, item, len(item.encode()), None
            )


def _is_source(text: str) -> bool:
    """Whether a text names files: a known source, an existing path, or a glob."""
    if "\n" in text or len(text) > 1000:
        return False
    return (
        text == "python-stdlib"
        or Path(text).expanduser().exists()
        or any(c in text for c in "*?[")
        or text.endswith("/")
    )


def _split(items: list[Any], cut: Any) -> tuple[list[Any], list[Any]]:
    """(training, validation): every 20th item; of fewer than 20 items, the end of the last one."""
    stride = round(1 / VALIDATION_FRACTION)
    if len(items) >= stride:
        held_out = items[::stride]
        return [item for n, item in enumerate(items) if n % stride], held_out
    last = items[-1]
    size = len(last.text) if isinstance(last, Document) else len(last)
    head, tail = cut(last, max(1, int(size * (1 - VALIDATION_FRACTION * 2))))
    return [*items[:-1], head], [tail]


def _cut_document(document: Document, at: int) -> tuple[Document, Document]:
    def part(name: str, text: str) -> Document:
        return Document(f"{document.id}{name}", document.source, document.path, document.licence, document.offset, text,
                        len(text.encode()), document.language)  # fmt: skip

    return part("", document.text[:at]), part("-end", document.text[at:])
