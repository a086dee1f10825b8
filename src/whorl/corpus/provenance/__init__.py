"""Why each document is in or out: its source, its measures, the rule that dropped it, the copy that stayed, its split."""

from whorl.corpus.provenance.explain import Explanation, explain, rule_condition
from whorl.corpus.provenance.figures import (
    Cluster,
    DroppedSample,
    SourceCount,
    count_sources,
    dropped_samples,
    largest_clusters,
)

__all__ = [
    "Cluster",
    "DroppedSample",
    "Explanation",
    "SourceCount",
    "count_sources",
    "dropped_samples",
    "explain",
    "largest_clusters",
    "rule_condition",
]
