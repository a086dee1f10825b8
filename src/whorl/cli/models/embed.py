"""`whorl embed`: texts to vectors, or the nearest of some texts to a question."""

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
READ_BATCH = (
    1024  # texts that are read before they are embedded: what a stream waits for, and what memory holds
)
MAX_LINE_CHARS = 100  # characters of a line that is found


def embed(
    artifact: RefArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", help="A text each; without any, lines of standard input."),
    ] = None,
    query: Annotated[
        str | None, typer.Option("--query", "-q", metavar="TEXT", help="Show the nearest to this text.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many of the nearest to show.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Windows that are computed together.")] = 64,
    store: StoreOption = None,
) -> None:
    """Turn texts into unit vectors, or find the nearest of them to a text.

    Prints a JSON object a line: where the text came from ("file" or "line") and its "vector". With --query: the nearest
    texts, best first, each with its cosine. A text longer than the embedder's window is the average of its windows. What
    is empty or cannot be read is passed over, named and counted on standard error.

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
            f"{found.name} is a {found.kind}", expected="an embedder", do="list what there is with `whorl ls`"
        )
    if query is not None and not query.strip():
        raise ConfigError("--query is empty", expected="the text to look for")
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
        print(f"{texts.skipped:,} of {texts.seen:,} texts passed over", file=sys.stderr)
    if texts.skipped == texts.seen:
        raise DataError("there is no text to embed", expected="a file or a line that is not empty")
    if query is not None:
        for row, cosine in nearest(np.concatenate(rows), embedder.embed([query])[0], k):
            print(f"{cosine:6.3f}  {sources[row]}")


def _print_vectors(sources: Sequence[Source], vectors: Vectors) -> None:
    """A JSON object a line, with as many digits as an fp32 number has."""
    import orjson

    for source, vector in zip(sources, vectors, strict=True):
        line = orjson.dumps({**source, "vector": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        sys.stdout.write(line.decode() + "\n")


def _display_name(source: Source, text: bytes) -> str:
    """What a text is called in an answer: its file, or the line itself."""
    if "file" in source:
        return str(source["file"])
    shown = text.decode("utf-8", "replace").strip()
    return f"{source['line']}: {shown[:MAX_LINE_CHARS]}" + ("..." if len(shown) > MAX_LINE_CHARS else "")


class _TextReader:
    """(where from, bytes) of each file or line that holds anything; the others are named, and counted in `skipped`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.seen, self.skipped = files, 0, 0
        self._iterator = self._nonempty()

    def __iter__(self) -> Iterator[tuple[Source, bytes]]:
        return self._iterator

    def _nonempty(self) -> Iterator[tuple[Source, bytes]]:
        for source, text, wrong in self._files() if self.files else self._lines():
            self.seen += 1
            if not wrong and not text.strip():
                wrong = "empty"
            if wrong:
                self.skipped += 1
                print(
                    f"passed over {' '.join(f'{kind} {name}' for kind, name in source.items())}: {wrong}",
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
