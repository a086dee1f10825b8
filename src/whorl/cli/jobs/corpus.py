"""`whorl corpus`: documents from raw files, their selection, and why each one is in or out.

    whorl corpus ingest PAGES/     read files into documents
    whorl corpus filter            measure them, select, split
    whorl corpus stats             what is left, by stage and source
    whorl corpus why ID            why one document is in or out

The verbs run the steps of recipes: `whorl run curate-web` makes the same artifacts in one command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.jobs.train_measures import train_classifier as train_classifier
from whorl.cli.jobs.train_measures import train_importance as train_importance
from whorl.cli.jobs.train_measures import train_perplexity as train_perplexity
from whorl.cli.options import SetOption, StoreOption, format_size
from whorl.cli.text_table import print_table

if TYPE_CHECKING:
    from whorl.corpus.provenance.explain import Explanation

MadeCorpus = Annotated[str, typer.Option("--corpus", metavar="NAME", help="Name of the corpus in the store.")]
ReadCorpus = Annotated[
    str | None,
    typer.Option("--corpus", metavar="NAME", help="Name of the corpus in the store; default: the latest."),
]


def ingest(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Folders, files, globs, URLs, or python-stdlib.")
    ],
    changes: SetOption = None,
    corpus: MadeCorpus = "corpus",
    store: StoreOption = None,
) -> None:
    """Read files into documents; unreadable records go to a quarantine with their reasons.

    A second call reads only what changed.

    Examples:

        whorl corpus ingest pages/

        whorl corpus ingest dump.jsonl.zst --set text_field=body
    """
    _make(store, corpus, "ingest", {"sources": sources}, changes)


def _make(
    store: str | None, corpus: str, step: str, settings: dict[str, Any], changes: list[str] | None = None
) -> None:
    """Make the artifact CORPUS/STEP in the store."""
    from whorl.cli.jobs.corpus_store import run_step
    from whorl.store import Store

    run_step(Store(store), corpus, step, settings, changes or ())


def rewrite(changes: SetOption = None, corpus: MadeCorpus = "corpus", store: StoreOption = None) -> None:
    """Change texts: mask personal data, remove lines and substrings that repeat. `filter` then reads the changed texts.

    Settings: mask (true or false), lines ({keep, normalization, min_characters}), substrings (bytes). `whorl corpus why`
    names the changes of a document.

    Examples:

        whorl corpus rewrite --set lines.keep=first

        whorl corpus rewrite --set mask=false --set substrings=200
    """
    _make(store, corpus, "rewrite", {}, changes)


def filter(
    query: Annotated[
        Path | None, typer.Option(metavar="FILE.sql", help="SQL that gives each row a reason, '' to keep it.")
    ] = None,
    changes: SetOption = None,
    corpus: MadeCorpus = "corpus",
    store: StoreOption = None,
) -> None:
    """Measure the documents, select by a query, and split the selection.

    The settings of the last call are kept. The columns and the default query are in docs/corpus.md.

    Examples:

        whorl corpus filter

        whorl corpus filter --query mine.sql --set validation_bytes=100000
    """
    from whorl.errors import ConfigError

    settings: dict[str, Any] = {}
    if query is not None:
        try:
            settings["query"] = query.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--query {query} cannot be read: {error}", expected="a file with SQL"
            ) from error
    _make(store, corpus, "curate", settings, changes)


def dedup(
    similarity: Annotated[
        float | None,
        typer.Option(min=0.3, max=1.0, help="Jaccard similarity from which one of two is removed."),
    ] = None,
    bands: Annotated[
        int | None, typer.Option(min=1, help="Bands of MinHash: documents that agree in one are compared.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Hashes of a band.")] = None,
    shingle: Annotated[
        int | None, typer.Option(min=1, help="Consecutive words or characters that are compared.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(metavar="words|characters", help="characters: for languages without spaces.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(metavar="SQL", help="The first of duplicates in this order stays.")
    ] = None,
    earlier: Annotated[
        list[str] | None,
        typer.Option(metavar="CORPUS", help="Earlier documents that stay: a folder, or as web/curate."),
    ] = None,
    changes: SetOption = None,
    corpus: MadeCorpus = "corpus",
    store: StoreOption = None,
) -> None:
    """Remove near duplicates with other settings; every removal is verified against a document that stays.

    The other settings of `filter` are kept. Further ones are those of `curate.minhash` (docs/corpus.md).

    Examples:

        whorl corpus dedup --similarity 0.8

        whorl corpus dedup --bands 16 --rows 8 --order "time, n_bytes DESC" --earlier web-2025/curate
    """
    from whorl.cli.jobs.corpus_store import find, run_step
    from whorl.corpus.deduplication.settings import SignatureConfig
    from whorl.store import Store

    opened = Store(store)
    current = find(opened, corpus, "curate")
    minhash = SignatureConfig().model_dump() | (current.config.get("minhash", {}) if current else {})
    minhash |= {
        name: value
        for name, value in {"bands": bands, "rows": rows, "shingle": shingle, "unit": unit}.items()
        if value is not None
    }
    minhash["hashes"] = max(minhash["hashes"], minhash["bands"] * minhash["rows"])
    settings = {
        "near_duplicates": "remove", "near_duplicate_similarity": similarity, "minhash": minhash,
        "near_duplicate_order": order, "earlier": earlier or None,
    }  # fmt: skip
    run_step(opened, corpus, "curate", {k: v for k, v in settings.items() if v is not None}, changes or ())


def decontaminate(
    tests: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Test sets: JSONL, Parquet, Arrow or tar.")
    ],
    field: Annotated[str, typer.Option(help="The text's field in each record.")] = "text",
    n: Annotated[int, typer.Option("-n", min=2, help="Words of an n-gram.")] = 13,
    corpus: MadeCorpus = "corpus",
    store: StoreOption = None,
) -> None:
    """Also drop documents that hold items of a test set.

    The other settings of `filter` are kept.

    Example:

        whorl corpus decontaminate tests.jsonl --field question
    """
    settings = {"tests": [{"files": tests, "field": field}], "n": n}
    _make(store, corpus, "curate", {"decontaminate": settings})


def mix(changes: SetOption = None, corpus: MadeCorpus = "corpus", store: StoreOption = None) -> None:
    """Divide the selection into groups, and fix their shares of training.

    The settings are those of the recipe step `mix` (docs/corpus.md).

    Example:

        whorl corpus mix --set temperature=0.5
    """
    _make(store, corpus, "mix", {}, changes)


def stats(
    rule: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Bias of one rule or filter, such as c4; default: of all."),
    ] = None,
    corpus: ReadCorpus = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: StoreOption = None,
) -> None:
    """Print what each stage left, the splits, what was kept by language, source and domain, and how unequal sources are.

    Examples:

        whorl corpus stats

        whorl corpus stats --rule gopher_quality
    """
    import json
    from dataclasses import asdict

    import numpy as np

    from whorl.cli.jobs.corpus_store import latest
    from whorl.corpus.provenance.figures import count_sources, selection_bias
    from whorl.corpus.provenance.tables import CorpusTables
    from whorl.store import Store
    from whorl.tracking.inequality import gini

    documents, selection = latest(Store(store), corpus)
    made = documents if selection is None else selection
    found: dict[str, Any] = {"corpus": made.name, "funnel": made.summary["funnel"]}
    found["quarantine"] = documents.summary["quarantine"]
    if selection is not None:
        tables = CorpusTables(documents.path, selection.path)
        sources, bias = count_sources(tables), selection_bias(tables, rule or "")
        found["bias"] = {kind: [asdict(group) for group in groups] for kind, groups in bias.items()}
        found["splits"] = selection.summary["splits"]
        found["sources"] = [asdict(source) for source in sources]
        found["gini"] = round(float(gini(np.array([float(source.kept_bytes) for source in sources]))), 4)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['corpus']}\n")
    print_table(
        ["stage", "documents", "size"],
        [[s["stage"], f"{s['documents']:,}", format_size(s["bytes"])] for s in found["funnel"]],
    )
    for key, title in (("quarantine", "quarantine"), ("splits", "split")):
        rows = [[n, f"{c['documents']:,}", format_size(c["bytes"])] for n, c in found.get(key, {}).items()]
        if rows:
            print()
            print_table([title, "documents", "size"], rows)
    if selection is None:
        print("\nnot curated yet: whorl corpus filter")
        return
    print()
    rows = [
        [s["source"], f"{s['documents']:,}", f"{s['kept_documents']:,}", format_size(s["bytes"]),
         format_size(s["kept_bytes"])]
        for s in found["sources"][:20]
    ]  # fmt: skip
    print_table(["source", "documents", "kept", "size", "kept"], rows)
    more = len(found["sources"]) - len(rows)
    print(f"... and {more:,} more" if more > 0 else "", end="\n" if more > 0 else "")
    for kind, groups in found["bias"].items():
        if len(groups) > 1:
            print()
            print_table([kind, "kept", "dropped", "kept size", "dropped size"], [
                [g["value"] or "unknown", f"{g['kept_documents']:,}", f"{g['dropped_documents']:,}",
                 format_size(g["kept_bytes"]), format_size(g["dropped_bytes"])]
                for g in groups[:20]
            ])  # fmt: skip
    print(f"Gini coefficient of the kept bytes by source: {found['gini']:.3f} (0: all equal)")


def show(
    reason: Annotated[
        str | None,
        typer.Argument(metavar="[REASON]", help="Only documents that were dropped for this reason."),
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Documents per rule, and clusters.")] = 3,
    corpus: ReadCorpus = None,
    store: StoreOption = None,
) -> None:
    """Print samples of what each rule dropped, and the largest clusters of near duplicates.

    Examples:

        whorl corpus show

        whorl corpus show too_short -n 10
    """
    from whorl.cli.jobs.corpus_store import latest, require, selection_query
    from whorl.corpus.provenance.figures import dropped_samples, largest_clusters
    from whorl.corpus.provenance.tables import CorpusTables
    from whorl.errors import ConfigError, one_of
    from whorl.store import Store

    opened = Store(store)
    documents, selection = latest(opened, corpus)
    if selection is None:
        selection = require(opened, documents.name.split("/")[0], "curate")
    tables = CorpusTables(documents.path, selection.path)
    dropped = selection.summary["dropped"]
    if reason is not None and reason not in dropped:
        raise ConfigError(f"no document was dropped for {reason!r}", expected=one_of(reason, sorted(dropped)))
    last = ""
    for sample in dropped_samples(tables, selection_query(selection), per_rule=number, reason=reason or ""):
        if sample.reason != last:
            condition = f": {sample.condition}" if sample.condition else ""
            n = dropped[sample.reason]["documents"]
            print(f"{sample.reason}, {n:,} document{'s' if n > 1 else ''}{condition}")
            last = sample.reason
        print(f"  {sample.id[:12]}  {sample.path}")
        print("".join(f"    | {line}\n" for line in sample.excerpt.splitlines()[:6]), end="")
    if not dropped:
        print("no document was dropped")
    if reason is None:
        for cluster in largest_clusters(tables, number):
            print(f"cluster of {len(cluster.paths):,} near duplicates, {cluster.kept:,} kept")
            print("".join(f"  {path}\n" for path in cluster.paths[:5]), end="")


def why(
    document: Annotated[
        str, typer.Argument(metavar="ID", help="An id, the start of one, a path, or PATH:OFFSET.")
    ],
    corpus: ReadCorpus = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: StoreOption = None,
) -> None:
    """Print why a document is in or out: its file, measures, rule or duplicate, and split.

    Examples:

        whorl corpus why 3f2a91

        whorl corpus why encodings/cp1252.py
    """
    import json

    from whorl.cli.jobs.corpus_store import latest, selection_query
    from whorl.corpus.provenance.explain import explain
    from whorl.store import Store

    documents, selection = latest(Store(store), corpus)
    folder = None if selection is None else selection.path
    query = "" if selection is None else selection_query(selection)
    found = explain(document, documents.path, folder, query=query)
    print(json.dumps(found.to_json(), indent=1) if as_json else format_explanation(found))


def format_explanation(found: Explanation) -> str:
    """Return an explanation as text."""
    lines = [f"{found.id or '(no document)'}  {found.verdict}"]
    lines[0] += f", split {found.split}" if found.split else f": {found.reason}" if found.reason else ""
    place = f"{found.source}: {found.path}, offset {found.offset}"
    lines.append(f"  file       {place}" + (f", {found.length:,} bytes" if found.length else ""))
    if found.id and found.verdict != "quarantined":
        lines.append(f"  licence    {found.licence or 'unknown'}; language {found.language or 'unknown'}")
    for edit in found.edits:
        where = f", the same text stays in {edit['matched_id']}" if edit["matched_id"] else ""
        lines.append(f"  rewritten  {edit['count']:,} x {edit['kind']}, {edit['bytes']:,} bytes less{where}")
    if found.detail:
        lines.append(f"  detail     {found.detail}")
    if found.condition:
        lines.append(f"  rule       {found.condition}")
    lines += [f"             {name} = {_format_value(value)}" for name, value in found.values.items()]
    if found.duplicate:
        copy = found.duplicate
        place = f"{copy.get('id', '')} {copy.get('path', '')}".strip()
        place += f" in {copy['corpus']}" if copy.get("corpus") else ""
        lines.append(f"  stays      {place} ({copy['kind']}, similarity {copy['similarity']:.3f})")
    if found.test_item:
        item = found.test_item
        words = f"words {item['begin_word']:,} to {item['end_word']:,}"
        lines.append(
            f"  test item  {item['item']} of {item['test_set']} ({words}, score {item['score']:.3f})"
        )
    lines += [f"  {name:<26} {_format_value(value)}" for name, value in found.measures.items()]
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
