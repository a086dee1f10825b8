"""`whorl search`: passages of an index that fit a query."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.loop.search.passages import LoadEncoder
    from whorl.search.documents import SearchHit
    from whorl.serve.api.sources import SourceSearch
    from whorl.store import Store

SHOWN = 240  # characters of a passage
BOLD, PLAIN = "\033[1m", "\033[0m"


def search(
    query: Annotated[str, typer.Argument(help='Words, "a phrase", -excluded, begin*.')],
    name: Annotated[
        str, typer.Option("--in", metavar="NAME", help="Index of `whorl watch`; or corpus, responses, runs.")
    ],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Documents.")] = 10,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", metavar="FIELD=VALUE", help="Also FIELD=LOW..HIGH.")
    ] = None,
    facets: Annotated[
        list[str] | None, typer.Option("--facet", metavar="FIELD", help="Count the values of a field.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the parts of each score.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Fold the log again into a new index first.")
    ] = False,
    embedder: Annotated[
        str, typer.Option(metavar="EMBEDDER", help="Use its vectors, once all documents have them.")
    ] = "",
    store: StoreOption = None,
) -> None:
    """Search an index: by words, and by vectors if it has an embedder. New records are indexed first.

    --rebuild and --embedder work while `whorl watch` writes the index and others search it: they see the old one, then the
    new one.

    Examples:

        whorl search "parse a date" --in notes

        whorl search '"exit code" -windows' --in docs --filter year=2020.. --facet language --explain

        whorl search "adam learning rate" --in runs --filter kind=pretrain

        whorl search "parse a date" --in notes --embedder embed-corpus/embedder
    """
    from whorl.loop.search.indexer import catch_up, rebuild_index
    from whorl.loop.search.own_indexes import sync_index
    from whorl.loop.search.reader import SearchReader
    from whorl.loop.search.settings import fill_vectors
    from whorl.search.documents import IndexBusyError, SearchQuery
    from whorl.search.query import read_filters
    from whorl.store import Store

    opened = Store(store)
    folder, load = Path(opened.root), encoder_loader(opened)
    asked = SearchQuery(query, k, filters=read_filters(filters or []), facets=facets or [], explain=explain)
    try:
        address = opened.open(embedder).address if embedder else ""
        if not sync_index(opened, name, load, address, rebuild):
            if address:
                fill_vectors(folder, name, address)
            if rebuild:
                rebuild_index(folder, name, load)
            catch_up(folder, name, load)
    except IndexBusyError as busy:
        with SearchReader(folder, name) as reader:
            if lag := reader.lag():
                print(f"{lag:,} records behind; {busy.what}", file=sys.stderr)
    with SearchReader(folder, name, load) as reader:
        found = reader.search(asked)
    bold = sys.stdout.isatty()
    for number, hit in enumerate(found.hits, 1):
        print(
            f"{number:>2}  "
            + " ".join(filter(None, dict.fromkeys([str(hit.fields.get("path", hit.id)), hit.title])))
        )
        print(f"    {snippet(hit, bold)}")
        if explain:
            parts = sorted(hit.explanation.items(), key=lambda part: -part[1])
            print(f"    {hit.score:.4f} = " + " + ".join(f"{name} {value:.4f}" for name, value in parts))
    for field, counts in found.facets.items():
        print(f"{field}: " + ", ".join(f"{value} {count:,}" for value, count in counts.items()))
    print(f"{found.total:,} document{'s' * (found.total != 1)}")


def encoder_loader(store: Store) -> LoadEncoder:
    """Return a function from the address of an embedder to its function from texts to vectors."""

    def load(address: str) -> Any:
        from whorl.embedding.embedder import open_encoder

        return open_encoder(store, address)[1]

    return load


def open_sources(store: str | None, name: str, budget: int) -> SourceSearch:
    """Return the index of a server. budget: tokens of all sources of a prompt. Raises ConfigError: no such index."""
    from whorl.loop.search.reader import SearchReader
    from whorl.serve.api.sources import SourceSearch
    from whorl.store import Store

    opened = Store(store)
    return SourceSearch(SearchReader(opened.root, name, encoder_loader(opened)), budget)


def snippet(hit: SearchHit, bold: bool) -> str:
    """Return the part of a passage around its first match, on one line. bold: the matches."""
    first = hit.marks[0][0] if hit.marks else 0
    begin = max(0, min(first - SHOWN // 4, len(hit.text) - SHOWN))
    end, parts, at = begin + SHOWN, list[str](), begin
    for start, stop in hit.marks if bold else ():
        if at <= start and stop <= end:
            parts += [hit.text[at:start], BOLD, hit.text[start:stop], PLAIN]
            at = stop
    return " ".join("".join([*parts, hit.text[at:end]]).split())
