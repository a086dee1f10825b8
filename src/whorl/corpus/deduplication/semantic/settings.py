"""Settings of semantic duplicates."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.deduplication.semantic.kmeans import MAX_POINTS, MIN_POINTS
from whorl.errors import ConfigError


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
    projection: Literal["none", "pca", "random"] = Field(
        default="none", description="compare in fewer dimensions first; no pair is lost by it"
    )
    dimensions: int = Field(default=64, ge=1, description="of the projection")
    pq_bytes: int = Field(
        default=0,
        ge=0,
        le=256,
        description="bytes of a vector's product quantization (PQ); 0: the vector itself",
    )
    index: Literal["own", "faiss"] = Field(
        default="own",
        description="faiss: its IVF index (pip install 'whorl[faiss]'), with the same centroids",
    )
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check_faiss(self) -> SearchConfig:
        if self.index == "faiss" and self.projection != "none":
            raise ConfigError(
                f"semantic duplicates with index = faiss and projection = {self.projection}",
                expected='projection = "none"', do="use pq_bytes to save memory, or index = own",
            )  # fmt: skip
        return self


class SemanticConfig(SearchConfig):
    """Semantic duplicates of the step `curate`: the encoder, and the search."""

    encoder: str = Field(
        min_length=1, description="an artifact of the step `embedder`, by name (search/embedder) or address"
    )
    max_characters: int = Field(
        default=8000, ge=1, description="longer documents are embedded by their beginning"
    )
    digest: str = Field(default="", description="address of the encoder, set by the step; leave empty")
