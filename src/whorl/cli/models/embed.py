"""`whorl embed`: vectors of texts, or the texts nearest to a query."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption

if TYPE_CHECKING:
    from whorl.embedding.embedder import Vectors

Source = dict[str, str | int]  # {"file": path} or {"line": number}
READ_BATCH = 1024
MAX_LINE_CHARS = 100  # shown characters of a matching line


def embed(
    artifact: RefArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="One text per file; without files, one per line of standard input."
        ),
    ] = None,
    query: Annotated[
        str | None, typer.Option("--query", "-q", metavar="TEXT", help="Print the texts nearest to this one.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of nearest texts.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Windows per batch.")] = 64,
    store: StoreOption = None,
) -> None:
    """Turn texts into unit vectors, or find the texts nearest to a query.

    Prints one JSON object per line: the source ("file" or "line") and its "vector". With --query it prints the nearest texts
    with their cosines, best first. A text longer than the window of the embedder becomes the average over its windows. Empty
    and unreadable texts are skipped, listed and counted on standard error.

    Examples:

        whorl embed embedder notes/*.md > vectors.jsonl

        whorl embed embedder src/*.py --query "parse a date from a string" -k 3

        git log --format=%s | whorl embed embedder --query "make it faster"
    """
    import numpy as np

    from whorl.embedding.embedder import Embedder, nearest
    from whorl.errors import ConfigError, DataError
    from whorl.machine.device_probe import probe
    from whorl.store import Store
    from whorl.tokens.tokenizer import Tokenizer

    found = Store(store).open(artifact)
    if found.kind != "embedder":
        raise ConfigError(
            f"{found.name} is a {found.kind}", expected="an embedder", do="list the artifacts with `whorl ls`"
        )
    if query is not None and not query.strip():
        raise ConfigError("--query is empty", expected="a text")
    found.check()
    machine = probe()
    machine.apply()
    embedder = Embedder.load(found.path, Tokenizer.load(found.path), machine.device)
    texts = _TextReader(files or [])
    sources: list[str] = []
    rows: list[Vectors] = []
    while group := list(islice(texts, READ_BATCH)):
        vectors = embedder.embed([text for _, text in group], batch)
        if query is None:
            _print_vectors([source for source, _ in group], vectors)
        else:
            sources += [_display_name(source, text) for source, text in group]
            rows.append(vectors)
    if texts.skipped:
        print(f"{texts.skipped:,} of {texts.seen:,} texts skipped", file=sys.stderr)
    if texts.skipped == texts.seen:
        raise DataError("no text to embed", expected="a non-empty file or line")
    if query is not None:
        for row, cosine in nearest(np.concatenate(rows), embedder.embed([query])[0], k):
            print(f"{cosine:6.3f}  {sources[row]}")


def _print_vectors(sources: Sequence[Source], vectors: Vectors) -> None:
    """Print one JSON object per line with full fp32 precision."""
    import orjson

    for source, vector in zip(sources, vectors, strict=True):
        line = orjson.dumps({**source, "vector": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        sys.stdout.write(line.decode() + "\n")


def _display_name(source: Source, text: bytes) -> str:
    """Return the name of a text in the results: its file, or the start of its line."""
    if "file" in source:
        return str(source["file"])
    shown = text.decode("utf-8", "replace").strip()
    return f"{source['line']}: {shown[:MAX_LINE_CHARS]}" + ("..." if len(shown) > MAX_LINE_CHARS else "")


class _TextReader:
    """Iterates over (source, bytes) of non-empty texts; the others are listed on stderr and counted in `skipped`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.seen, self.skipped = files, 0, 0
        self._iterator = self._nonempty()

    def __iter__(self) -> Iterator[tuple[Source, bytes]]:
        return self._iterator

    def _nonempty(self) -> Iterator[tuple[Source, bytes]]:
        for source, text, problem in self._files() if self.files else self._lines():
            self.seen += 1
            if not problem and not text.strip():
                problem = "empty"
            if problem:
                self.skipped += 1
                print(
                    f"skipped {' '.join(f'{kind} {name}' for kind, name in source.items())}: {problem}",
                    file=sys.stderr,
                )
            else:
                yield source, text

    def _files(self) -> Iterator[tuple[Source, bytes, str]]:
        for path in self.files:
            try:
                yield {"file": str(path)}, path.read_bytes(), ""
            except OSError as error:
                yield {"file": str(path)}, b"", error.strerror or str(error)

    def _lines(self) -> Iterator[tuple[Source, bytes, str]]:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            yield {"line": number}, line.rstrip(b"\r\n"), ""
