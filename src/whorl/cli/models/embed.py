"""`whorl embed`: vectors of texts or images, or those nearest to a query."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption, open_artifact, standard_input

if TYPE_CHECKING:
    from whorl.embedding.embedder import Vectors
    from whorl.store import Artifact

Source = dict[str, str | int]  # {"file": path} or {"line": number}
Group = tuple[list[tuple[Source, bytes]], "Vectors"]  # sources with their texts, and vectors [n, d]
READ_BATCH = 1024
MAX_LINE_CHARS = 100  # shown characters of a matching line


def embed(
    artifact: RefArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]",
            help="One text or image per file; without files, one text per line of standard input.",
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option("--query", "-q", metavar="TEXT", help="Print the texts or images nearest to this one."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of nearest texts or images.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Windows of texts per batch.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy", help="Write the vectors [n, d] as a numpy file; only the sources are printed."
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Turn texts or images into unit vectors, or find those nearest to a query.

    Prints one JSON object per line: the source ("file" or "line") and its "vector". With --query it prints the nearest texts
    with their cosines, best first. A text longer than the window of the embedder becomes the average over its windows. Empty
    and unreadable texts are skipped, listed and counted on standard error.

    An image model (of `classify-digits` or `caption-scenes`, or imported) embeds image files. A CLIP compares them with a
    query in words.

    Examples:

        whorl embed embedder notes/*.md > vectors.jsonl

        whorl embed embedder src/*.py --query "parse a date from a string" -k 3

        git log --format=%s | whorl embed embedder --query "make it faster"

        whorl embed caption-scenes/clip photos/*.png --out vectors.npy
    """
    import numpy as np

    from whorl.embedding.embedder import nearest
    from whorl.errors import ConfigError

    found = open_artifact(artifact, store, ("embedder", "vision"), "an embedder, or an image model")
    if query is not None and not query.strip():
        raise ConfigError("--query is empty", expected="a text")
    if query is not None and out is not None:
        raise ConfigError("--query and --out are both given", expected="one of them")
    if out is not None and (out.suffix != ".npy" or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}", expected="a name that ends in .npy, in an existing folder")
    inputs = _Texts(found, files or [], batch) if found.kind == "embedder" else _Images(found, files or [])
    wanted = inputs.embed_query(query) if query is not None else None
    names: list[str] = []
    rows: list[Vectors] = []
    for group, vectors in inputs:
        if query is None and out is None:
            _print_vectors([source for source, _ in group], vectors)
            continue
        if out is not None:
            _print_sources([source for source, _ in group], len(names))
        names += [_display_name(source, text) for source, text in group]
        rows.append(vectors)
    if wanted is not None:
        for row, cosine in nearest(np.concatenate(rows), wanted, k):
            print(f"{cosine:6.3f}  {names[row]}")
    if out is not None:
        _save(np.concatenate(rows), out)


class _Texts:
    """Groups of (source, text) with their vectors; skipped texts are counted on standard error."""

    def __init__(self, found: Artifact, files: Sequence[Path], batch: int) -> None:
        from whorl.embedding.embedder import Embedder
        from whorl.machine.device_probe import probe
        from whorl.tokens.tokenizer import Tokenizer

        found.check()
        machine = probe()
        machine.apply()
        self.embedder = Embedder.load(found.path, Tokenizer.load(found.path), machine.device)
        self.texts, self.batch = TextReader(files), batch

    def embed_query(self, text: str) -> Vectors:
        """Return the vector [d] of a query."""
        vector: Vectors = self.embedder.embed([text])[0]
        return vector

    def __iter__(self) -> Iterator[Group]:
        """Raises DataError: there is no text."""
        from whorl.errors import DataError

        texts = self.texts
        while group := list(islice(texts, READ_BATCH)):
            yield group, self.embedder.embed([text for _, text in group], self.batch)
        if texts.skipped:
            print(f"{texts.skipped:,} of {texts.seen:,} texts skipped", file=sys.stderr)
        if texts.skipped == texts.seen:
            raise DataError("no text to embed", expected="a non-empty file or line")


class _Images:
    """As `_Texts`, for image files."""

    def __init__(self, found: Artifact, files: Sequence[Path]) -> None:
        from whorl.cli.images import open_vision
        from whorl.errors import ConfigError

        if not files:
            raise ConfigError(
                f"{found.name} embeds images, and no file is given", expected="image files",
                do=f"whorl embed {found.name} photos/*.png",
            )  # fmt: skip
        self.model, self.files = open_vision(found), files

    def embed_query(self, text: str) -> Vectors:
        """Return the vector [d] of a query. Raises ConfigError: the model is no CLIP."""
        vector: Vectors = self.model.embed_texts([text])[0]
        return vector

    def __iter__(self) -> Iterator[Group]:
        """Raises DataError: no file is an image."""
        from whorl.cli.images import read_files

        good, pixels = read_files(self.files, self.model.preprocessing.shape)
        yield [({"file": str(path)}, b"") for path in good], self.model.embed(pixels)


def _save(vectors: Vectors, out: Path) -> None:
    """Write a numpy file. Raises ConfigError: the file cannot be written."""
    import numpy as np

    from whorl.errors import ConfigError

    try:
        np.save(out, vectors)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
    print(f"{vectors.shape[0]:,} vectors of {vectors.shape[1]}: {out}", file=sys.stderr)


def _print_sources(sources: Sequence[Source], first: int) -> None:
    """Print one JSON object per line: the row of the numpy file, and its source."""
    import orjson

    for row, source in enumerate(sources, first):
        sys.stdout.write(orjson.dumps({"row": row, **source}).decode() + "\n")


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


class TextReader:
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
        for number, line in enumerate(standard_input().buffer, start=1):
            yield {"line": number}, line.rstrip(b"\r\n"), ""
