"""Why each document is in or out: its source, its measures, the rule that dropped it, the copy that stayed, its split."""

from whorl.corpus.provenance.explain import Explanation, explain, rule_condition
from whorl.corpus.provenance.figures import (
    Cluster,
    DroppedSample,
    GroupCount,
    SourceCount,
    count_sources,
    dropped_samples,
    largest_clusters,
    selection_bias,
)

__all__ = [
    "Cluster",
    "DroppedSample",
    "Explanation",
    "GroupCount",
    "SourceCount",
    "count_sources",
    "dropped_samples",
    "explain",
    "largest_clusters",
    "rule_condition",
    "selection_bias",
]
