"""The steps `ingest` and `curate`: from files to a selected and split corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whorl.corpus import Corpus, CurateConfig, IngestConfig, document_files
from whorl.corpus import curate as curate_documents
from whorl.corpus import ingest as ingest_sources
from whorl.corpus.deduplication.earlier import find_earlier
from whorl.corpus.mapreduce import ENGINE_FIELDS
from whorl.corpus.mixture import MixConfig, make_mixture
from whorl.corpus.provenance.tables import CorpusTables
from whorl.machine.device_probe import usable_cores
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus_inputs import find_encoder, open_catalog, with_file_hashes, with_fingerprint
from whorl.recipes.steps.corpus_page import selection_blocks
from whorl.report import Bar, Cell, Column, Histogram, StepReport, Table
from whorl.report.format import format_percent, format_si

MAX_WORKERS = 8  # processes that read blocks or measure documents
CORPUS_PARENTS = {"documents": "documents", "selection": "selection"}  # the two parents that form a corpus


def open_corpus(ctx: StepContext) -> Corpus:
    """Return the corpus formed by the parents `documents` and `selection`, with their files checked."""
    for role in CORPUS_PARENTS:
        ctx.parents[role].check()
    return Corpus(ctx.parents["documents"].path, ctx.parents["selection"].path)


def format_counts(documents: int, n_bytes: int) -> str:
    return f"{documents:,} documents, {n_bytes / 1e6:.1f} MB"


def format_reasons(reasons: Mapping[str, Mapping[str, int]]) -> str:
    """Return `32 (27 empty, 5 invalid_utf8)`, most frequent first, or `none`."""
    counts = sorted(((n["documents"], reason) for reason, n in reasons.items()), reverse=True)
    total = sum(count for count, _ in counts)
    return f"{total:,} ({', '.join(f'{count:,} {reason}' for count, reason in counts)})" if total else "none"


@step(
    "documents", config=IngestConfig, complete_config=with_fingerprint, not_hashed=ENGINE_FIELDS, version=2,
)  # fmt: skip
def ingest(ctx: StepContext, config: IngestConfig) -> None:
    """Read the sources into documents; write unreadable records to the quarantine."""
    found = ingest_sources(
        config,
        ctx.out,
        ctx.progress,
        executor=config.executor(min(MAX_WORKERS, usable_cores())),
        units=ctx.store.root / "units",
        catalog=open_catalog(ctx.store),
        address=ctx.out.name,
    )
    headline = format_counts(found["documents"], found["bytes"])
    if n := found["equal_files"]["files"]:
        headline += f"; {n:,} file{'s' if n > 1 else ''} equal to others"
    ctx.summary.update(
        found, headline=f"{headline}; records in quarantine: {format_reasons(found['quarantine'])}"
    )


@step(
    "selection", config=CurateConfig, parents={"documents": "documents"}, complete_config=with_file_hashes,
    not_hashed=ENGINE_FIELDS, version=6,
)  # fmt: skip
def curate(ctx: StepContext, config: CurateConfig) -> None:
    """Measure and select documents, and split them without near-duplicates across splits."""
    documents = ctx.parents["documents"]
    documents.check()
    found = curate_documents(
        config,
        document_files(documents.path),
        ctx.out,
        ctx.progress,
        executor=config.executor(min(MAX_WORKERS, usable_cores())),
        units=ctx.store.root / "units",
        earlier=[find_earlier(e if isinstance(e, str) else e.corpus, ctx.store) for e in config.earlier],
        encoder=find_encoder(config.semantic.encoder, ctx.store) if config.semantic else None,
    )
    parts = [
        f"{name} {format_counts(split['documents'], split['bytes'])}"
        for name, split in found["splits"].items()
    ]
    parts.append(f"left out: {format_reasons(found['dropped'])}")
    if n := found.get("without_spaces"):
        parts.append(
            f"filters skip rules of words for {n:,} of {found['funnel'][0]['documents']:,} documents: no spaces"
        )
    ctx.summary.update(found, headline="; ".join(parts))
    ctx.report = corpus_report(
        found, documents.summary["quarantine"], sources=documents.config.get("sources", [])
    )
    tables, query = CorpusTables(documents.path, ctx.out), config.selection_query
    ctx.report.blocks += selection_blocks(tables, query, found["dropped"], config.minhash_config)


@step("mixture", config=MixConfig, parents=CORPUS_PARENTS)
def mix(ctx: StepContext, config: MixConfig) -> None:
    """Divide the corpus into groups, and fix their shares of training."""
    corpus, selection = open_corpus(ctx), ctx.parents["selection"].path
    made = make_mixture(config, corpus, sorted(selection.glob("attributes-*.parquet")), ctx.out, ctx.progress)
    shares = ", ".join(
        f"{g.name} {g.share:.0%} to {g.final_share:.0%} ({g.epochs:.1f} epochs)" for g in made.groups
    )
    ctx.summary.update(
        digest=made.digest, train_bytes=made.train_bytes, groups=[g.model_dump() for g in made.groups],
        headline=f"{made.train_bytes / 1e6:.1f} MB of training: {shares}",
    )  # fmt: skip
    columns = [
        Column(name="Group"), Column(name="Documents", number=True), Column(name="Size", number=True),
        Column(name="Share at the start", number=True), Column(name="At the end", number=True),
        Column(name="Epochs", number=True),
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            g.name, f"{g.documents:,}", format_si(g.bytes, "B"), format_percent(g.share),
            format_percent(g.final_share), f"{g.epochs:.2f}",
        ]
        for g in made.groups
    ]  # fmt: skip
    ctx.report.blocks.append(Table(section="Corpus", title="Mixture", columns=columns, rows=rows))


def corpus_report(
    found: Mapping[str, Any], quarantine: Mapping[str, Mapping[str, int]], *, sources: Sequence[str]
) -> StepReport:
    """Return what each stage of curation left, what was rejected and why, and the splits.

    Args:
        found: summary of `curate`.
        quarantine: reason -> {"documents": count, ...} of `ingest`.
    """
    numbers = [Column(name="Documents", number=True), Column(name="Size", number=True)]
    share = Column(name="Of the bytes", number=True, optional=True)
    funnel = found["funnel"]
    largest = max((stage["bytes"] for stage in funnel), default=0) or 1
    bars = [
        Bar(
            cells=[
                stage["stage"], f"{stage['documents']:,}", format_si(stage["bytes"], "B"),
                format_percent(stage["bytes"] / largest),
            ],
            value=stage["bytes"], style="main" if stage is funnel[-1] else "",
        )
        for stage in funnel
    ]  # fmt: skip
    note = f"From {', '.join(sources)}. Each row shows what is left after a stage." if sources else ""
    histogram = Histogram(
        section="Corpus", note=note, columns=[Column(name="Stage"), *numbers, share], bars=bars
    )
    parts = ((quarantine, "quarantine"), (found.get("dropped", {}), "selection"))
    counts = [(reason, where, n["documents"]) for reasons, where in parts for reason, n in reasons.items()]
    rejected: list[list[Cell]] = [
        [reason.replace("_", " "), where, f"{n:,}"]
        for reason, where, n in sorted(counts, key=lambda c: -c[2])
    ]
    columns = [Column(name="Reason"), Column(name="Where"), numbers[0]]
    tables = [Table(section="Corpus", title="Rejected documents", columns=columns, rows=rejected)]
    splits: list[list[Cell]] = [
        [name, f"{split['documents']:,}", format_si(split["bytes"], "B")]
        for name, split in found["splits"].items()
    ]
    note = "No two splits share near-duplicate documents."
    columns = [Column(name="Split"), *numbers]
    tables.append(Table(section="Corpus", title="Splits", note=note, columns=columns, rows=splits))
    tables.append(contamination_table(found.get("contamination", {})))
    return StepReport(blocks=[histogram, *(table for table in tables if table.rows)])


def contamination_table(sets: Mapping[str, Mapping[str, int]]) -> Table:
    """Return how many items of each test set occur in the corpus."""
    names = {
        "items": "Items",
        "found": "Found",
        "too_short": "Too short to find",
        "documents": "Documents with one",
    }
    columns = [Column(name="Test set"), *(Column(name=title, number=True) for title in names.values())]
    rows: list[list[Cell]] = [[name, *(f"{n[key]:,}" for key in names)] for name, n in sets.items()]
    return Table(section="Corpus", title="Contamination", columns=columns, rows=rows)
