"""One's own files, texts or token ids as a token set."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.api.arguments import as_path, invalid, require_encodable
from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document
from whorl.corpus.readers import read_file
from whorl.corpus.sources import KNOWN_SOURCES, list_files
from whorl.data.files import is_url
from whorl.errors import ConfigError, DataError, shorten
from whorl.tokens.shards import write_shards
from whorl.tokens.token_ids import write_id_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

VALIDATION_FRACTION = 0.05
TextData = str | Path | Sequence[str] | Sequence[Path]
IdData = Tensor | NDArray[np.integer] | Sequence[Tensor] | Sequence[NDArray[np.integer]]


def check_data(data: Any) -> Any:
    """Return data whose parts have one of the types of `TextData` and `IdData`; iterables as lists.

    Raises:
        ConfigError: another type, or ids that are no integers.
    """
    expected = "a file, a folder or a glob; a list of those; a list of texts; or integer tensors or arrays"
    if not isinstance(data, Iterable | Path) or isinstance(data, bytes | Mapping):
        raise invalid("data", data, expected)
    data = _as_tensor(data)
    parts = [data] if isinstance(data, str | Path | Tensor) else [_as_tensor(part) for part in data]
    kinds = (Tensor,) if parts and isinstance(parts[0], Tensor) else (str, Path)
    for part in parts:
        if not isinstance(part, kinds):
            raise invalid("data", part, expected)
        if isinstance(part, str):
            require_encodable("data", part)
        if isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()):
            raise ConfigError(f"data has a tensor of {part.dtype}", expected="integer token ids")
    return data if isinstance(data, str | Path | Tensor) else parts


def _as_tensor(value: Any) -> Any:
    is_ids = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
    return torch.from_numpy(value.astype(np.int64)) if is_ids else value


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
    if sum(map(len, arrays)) < 2:
        raise DataError("the tensors hold fewer than 2 token ids", expected="ids to train on and to hold out")
    train_ids, held_out = _split(arrays, lambda ids, at: (ids[:at], ids[at:]))
    for split, part in (("train", train_ids), ("validation", held_out)):
        write_id_shards(part, vocab_size, folder, split)


def write_text_split(
    data: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    tokens: Path,
    folder: Path,
    progress: Progress,
) -> Tokenizer:
    """Write texts as a token set in `tokens`, and their tokenizer (given, or learned from them) into `folder`."""
    documents = list(_documents(data))
    if sum(len(document.text) for document in documents) < 2:
        found = shorten(repr(data))
        raise DataError(f"{found} holds no text", expected="a file, a folder, a glob, or a list of texts")
    train_part, held_out = _split(documents, _cut_document)
    if tokenizer is None:
        tokenizer = Tokenizer.train((document.text for document in train_part), vocab_size)
    tokenizer.save(folder)
    for split, part in (("train", train_part), ("validation", held_out)):
        size = sum(document.n_bytes for document in part)
        write_shards(part, tokenizer, tokens, split, progress=progress, total_bytes=size)
    return tokenizer


def _documents(data: Any) -> Iterable[Document]:
    given = [data] if isinstance(data, str | Path) else list(data)
    config = IngestConfig(split_bytes=IngestConfig().max_document_bytes)
    for number, item in enumerate(given):
        if isinstance(item, Path) or _is_source(item, alone=item is data):
            files, _ = list_files(IngestConfig(sources=[as_path("data", item)]))
            for file in files:
                yield from (found for found in read_file(file, config) if isinstance(found, Document))
        else:
            yield Document(
                f"text-{number}", "texts", f"{number}.txt", None, 0, item, len(item.encode()), None
            )


def _is_source(text: str, alone: bool) -> bool:
    """Whether a text names files: a known source, an existing path, a URL, or a glob of existing files.

    A single word that is not in a list names files too, so that a misspelt path is an error and not a text.
    """
    if "\n" in text or "\0" in text or len(text) > 1000:
        return False
    path = os.path.expanduser(text)  # noqa: PTH111 - unlike pathlib, os.path accepts any text
    is_word = len(text.split()) == 1
    return (
        text in KNOWN_SOURCES
        or os.path.exists(path)  # noqa: PTH110
        or (is_word and (alone or is_url(text) or text.endswith("/")))
        or (any(c in text for c in "*?[") and next(glob.iglob(path, recursive=True), None) is not None)  # noqa: PTH207
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
