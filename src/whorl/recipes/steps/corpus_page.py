"""The part of a report that explains a selection: samples of each rule, clusters, the LSH threshold curve, sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whorl.corpus.deduplication.settings import MinHashConfig, collision_probability
from whorl.corpus.provenance.figures import (
    GroupCount,
    SourceCount,
    count_sources,
    dropped_samples,
    largest_clusters,
    selection_bias,
)
from whorl.corpus.provenance.tables import CorpusTables
from whorl.report import Cell, Column, Curve, Line, Table
from whorl.report.blocks import Block, Folded
from whorl.report.format import format_percent, format_si
from whorl.tracking.inequality import gini, lorenz_curve

SECTION = "Corpus"
SHOWN_SOURCES = 20
SHOWN_GROUPS = 10
SAMPLES = 3
CLUSTERS = 5


def selection_blocks(
    tables: CorpusTables, query: str, dropped: Mapping[str, Mapping[str, int]], minhash: MinHashConfig
) -> list[Block]:
    """Return the blocks.

    Args:
        query: the selection's SQL. dropped: reason -> {"documents": count, ...}.
        minhash: settings of near duplicates.
    """
    blocks: list[Block] = []
    if dropped:
        blocks.append(_samples(tables, query, dropped))
    clusters = largest_clusters(tables, CLUSTERS)
    if clusters:
        rows: list[list[Cell]] = [
            [Folded(text=c.paths[0], lines=[*c.paths[:50]]), f"{len(c.paths):,}", f"{c.kept:,}"]
            for c in clusters
        ]
        names = [Column(name="First document"), Column(name="Documents", number=True)]
        blocks.append(
            Table(
                section=SECTION, title="Largest clusters of near duplicates",
                columns=[*names, Column(name="Kept", number=True)], rows=rows,
            )
        )  # fmt: skip
    bias = bias_table(selection_bias(tables))
    blocks += [bias] if bias.rows else []
    return [*blocks, threshold_curve(minhash), *source_blocks(count_sources(tables))]


def bias_table(groups: Mapping[str, Sequence[GroupCount]]) -> Table:
    """Return what the selection kept and dropped of the largest languages, sources and domains."""
    rows: list[list[Cell]] = [
        [
            kind, group.value or "unknown", f"{group.kept_documents:,}", f"{group.dropped_documents:,}",
            format_si(group.kept_bytes, "B"), format_si(group.dropped_bytes, "B"),
            format_percent(group.kept_bytes / max(group.kept_bytes + group.dropped_bytes, 1)),
        ]
        for kind, found in groups.items() if len(found) > 1
        for group in found[:SHOWN_GROUPS]
    ]  # fmt: skip
    names = ("Kept", "Dropped", "Kept size", "Dropped size", "Kept of the bytes")
    return Table(
        section=SECTION, title="What the selection keeps and drops", rows=rows,
        columns=[Column(name="By"), Column(name="Value"), *(Column(name=name, number=True) for name in names)],
        note=f"The {SHOWN_GROUPS} largest of each kind. Unequal shares show a bias of the rules.",
    )  # fmt: skip


def _samples(tables: CorpusTables, query: str, dropped: Mapping[str, Mapping[str, int]]) -> Table:
    rows: list[list[Cell]] = [
        [
            Folded(text=sample.path, lines=[sample.id, *sample.excerpt.splitlines()[:8]]),
            sample.reason.replace("_", " "), f"{dropped[sample.reason]['documents']:,}", sample.condition or "–",
        ]
        for sample in dropped_samples(tables, query, per_rule=SAMPLES)
    ]  # fmt: skip
    columns = [Column(name="Document"), Column(name="Reason"), Column(name="Dropped for it", number=True)]
    return Table(
        section=SECTION, title="Samples of dropped documents", rows=rows,
        columns=[*columns, Column(name="Rule", code=True, optional=True)],
        note=f"Up to {SAMPLES} of each rule, chosen by a hash. A row opens to the id and the beginning; "
        "`whorl corpus why ID` gives all measures.",
    )  # fmt: skip


def threshold_curve(minhash: MinHashConfig) -> Curve:
    """Return the probability that locality-sensitive hashing compares two documents, against their similarity."""
    bands, rows = minhash.bands, minhash.rows
    s = np.linspace(0, 1, 101)
    found = [collision_probability(similarity, bands, rows) for similarity in s.tolist()]
    return Curve(
        section=SECTION, title="Pairs that are compared", x_label="Jaccard similarity", unit="share", height=170,
        note=f"1 - (1 - s^{rows})^{bands}: the probability that two documents of similarity s share one of {bands} bands.",
        lines=[Line(name="compared", x=s.tolist(), y=found)], y_range=(0.0, 1.0), x_range=(0.0, 1.0),
        mark=(minhash.similarity, "threshold"), label="Probability of a comparison against the similarity of two documents",
    )  # fmt: skip


def source_blocks(sources: Sequence[SourceCount]) -> list[Block]:
    """Return the table of the sources and, of several, the Lorenz curve of their kept bytes."""
    rows: list[list[Cell]] = [
        [s.source, f"{s.documents:,}", f"{s.kept_documents:,}", format_si(s.bytes, "B"), format_si(s.kept_bytes, "B")]
        for s in sources[:SHOWN_SOURCES]
    ]  # fmt: skip
    names = ("Documents", "Kept", "Size", "Kept size")
    columns = [Column(name="Source"), *(Column(name=name, number=True) for name in names)]
    more = len(sources) - len(rows)
    note = f"The {len(rows)} largest of {len(sources):,}." if more > 0 else ""
    blocks: list[Block] = [Table(section=SECTION, title="Sources", note=note, columns=columns, rows=rows)]
    kept: Any = np.array([float(source.kept_bytes) for source in sources])
    if len(sources) > 1 and kept.sum() > 0:
        x, y = lorenz_curve(kept.tolist())
        equal = Line(name="all equal", x=[0.0, 1.0], y=[0.0, 1.0], style="faint")
        blocks.append(
            Curve(
                section=SECTION, title="Lorenz curve of the sources", x_label="share of the sources, smallest first",
                note=f"Share of the kept bytes. Gini coefficient {float(gini(kept)):.3f}; 0 if all sources gave the same.",
                lines=[Line(name="kept bytes", x=x, y=y), equal], unit="share", height=190,
                x_range=(0.0, 1.0), y_range=(0.0, 1.0), label="Share of the kept bytes against share of the sources",
            )
        )  # fmt: skip
    return blocks
