"""Settings of semantic duplicates."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.deduplication.semantic.kmeans import MAX_POINTS, MIN_POINTS


class SearchConfig(BaseModel):
    """How similar vectors are found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    similarity: float = Field(default=0.95, gt=0, le=1, description="cosine from which a document is removed")
    cells: int | None = Field(
        default=None,
        ge=1,
        description="centroids of k-means; default: the square root of the number of vectors",
    )
    probes: int = Field(default=3, ge=1, description="nearest cells with which a vector is compared")
    points_per_centroid: int = Field(
        default=64, ge=MIN_POINTS, le=MAX_POINTS, description="vectors per centroid that train k-means"
    )
    seed: int = Field(default=0, ge=0)


class SemanticConfig(SearchConfig):
    """Semantic duplicates of the step `curate`: the encoder, and the search."""

    encoder: str = Field(
        min_length=1, description="an artifact of the step `embedder`, by name (search/embedder) or address"
    )
    max_characters: int = Field(
        default=8000, ge=1, description="longer documents are embedded by their beginning"
    )
    digest: str = Field(default="", description="address of the encoder, set by the step; leave empty")
