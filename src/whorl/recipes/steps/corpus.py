"""The steps `ingest` and `curate`: from files to a selected and split corpus."""

from __future__ import annotations

from whorl.corpus import Corpus, CurateConfig, IngestConfig, document_files, fingerprint
from whorl.corpus import curate as curate_documents
from whorl.corpus import ingest as ingest_sources
from whorl.recipes.registry import StepContext, step
from whorl.tokens.pretokens import available_cores

MAX_WORKERS = 8  # processes that read blocks
CORPUS_PARENTS = {"documents": "documents", "selection": "selection"}  # the two parents that form a corpus


def open_corpus(ctx: StepContext) -> Corpus:
    """Return the corpus formed by the parents `documents` and `selection`, with their files checked."""
    for role in CORPUS_PARENTS:
        ctx.parents[role].check()
    return Corpus(ctx.parents["documents"].path, ctx.parents["selection"].path)


def format_counts(documents: int, n_bytes: int) -> str:
    return f"{documents:,} documents, {n_bytes / 1e6:.1f} MB"


def with_fingerprint(config: IngestConfig) -> IngestConfig:
    """Add a hash of the sources' content to the configuration; sources have no address."""
    return config.model_copy(update={"fingerprint": fingerprint(config)})


@step("documents", config=IngestConfig, complete_config=with_fingerprint)
def ingest(ctx: StepContext, config: IngestConfig) -> None:
    """Read the sources into documents; write unreadable records to the quarantine."""
    found = ingest_sources(
        config, ctx.out, ctx.progress, workers=min(MAX_WORKERS, available_cores()), scratch=ctx.scratch
    )
    n_quarantined = sum(reason["documents"] for reason in found["quarantine"].values())
    headline = format_counts(found["documents"], found["bytes"])
    ctx.summary.update(found, headline=f"{headline}; {n_quarantined:,} records in quarantine")


@step("selection", config=CurateConfig, parents={"documents": "documents"})
def curate(ctx: StepContext, config: CurateConfig) -> None:
    """Measure and select documents, and split them without near-duplicates across splits."""
    documents = ctx.parents["documents"]
    documents.check()
    found = curate_documents(config, document_files(documents.path), ctx.out, ctx.progress)
    parts = [
        f"{name} {format_counts(split['documents'], split['bytes'])}"
        for name, split in found["splits"].items()
    ]
    ctx.summary.update(found, headline="; ".join(parts))
