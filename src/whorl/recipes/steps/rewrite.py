"""The step `rewrite`: change the texts of documents between `ingest` and `curate`."""

from __future__ import annotations

from typing import Any

from whorl.corpus import document_files
from whorl.corpus.ingest import COPIES_FILE
from whorl.corpus.mapreduce import LocalPool
from whorl.corpus.mapreduce.units import link_or_copy
from whorl.corpus.rewrite import RewriteConfig
from whorl.corpus.rewrite import rewrite as rewrite_documents
from whorl.machine.device_probe import usable_cores
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import MAX_WORKERS, format_counts
from whorl.report import Cell, Column, Table
from whorl.report.format import format_si


@step("documents", config=RewriteConfig, parents={"documents": "documents"})
def rewrite(ctx: StepContext, config: RewriteConfig) -> None:
    """Mask personal data, and remove bad lines, and lines and substrings that repeat in the corpus."""
    documents = ctx.parents["documents"]
    documents.check()
    found = rewrite_documents(
        config, document_files(documents.path), ctx.out, ctx.progress,
        executor=LocalPool(min(MAX_WORKERS, usable_cores())), units=ctx.store.root / "units",
    )  # fmt: skip
    for name in ("quarantine.jsonl", COPIES_FILE):  # of what was never a document
        if (documents.path / name).is_file():
            link_or_copy(documents.path / name, ctx.out / name)
    rows: list[list[Cell]] = [
        [kind, f"{n['documents']:,}", f"{n['count']:,}", format_si(n["bytes"], "B")]
        for kind, n in found["edits"].items()
    ]
    numbers = [Column(name=name, number=True) for name in ("Documents", "Count", "Removed")]
    ctx.report.blocks.append(
        Table(
            section="Corpus", title="Changes of texts", columns=[Column(name="Change"), *numbers], rows=rows
        )
    )
    less = sum(n["bytes"] for n in found["edits"].values())
    changes = (
        ", ".join(f"{n['count']:,} x {kind}" for kind, n in found["edits"].items()) or "nothing to change"
    )
    inherited: dict[str, Any] = {
        k: documents.summary[k] for k in ("funnel", "quarantine") if k in documents.summary
    }
    ctx.summary.update(
        inherited, **found,
        headline=f"{format_counts(found['documents'], found['bytes'])}; {less / 1e6:.2f} MB less: {changes}",
    )  # fmt: skip
