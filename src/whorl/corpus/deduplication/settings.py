"""Settings of MinHash and the curve of its threshold.

Documents agree in one of the hashes with the probability of their Jaccard similarity s. They agree in all `rows` of a
band with s^rows, and share at least one of the bands with 1 - (1 - s^rows)^bands (Leskovec, Rajaraman & Ullman, Mining
of Massive Datasets, chapter 3.4). The curve is steepest near (1 / bands)^(1 / rows).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.errors import ConfigError


class SignatureConfig(BaseModel):
    """How texts become sets of shingles, and sets signatures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hashes: int = Field(default=128, ge=1, le=4096, description="numbers of a signature")
    bands: int = Field(default=32, ge=1, le=1024, description="documents that agree in a band are compared")
    rows: int = Field(default=4, ge=1, le=64, description="hashes of a band")
    shingle: int = Field(default=5, ge=1, le=64, description="consecutive words or characters of a shingle")
    unit: Literal["words", "characters"] = Field(
        default="words", description="characters: for languages that write no spaces; white space is left out"
    )
    normalization: Literal["none", "lower", "nfkc_lower"] = Field(
        default="none", description="lower: small letters; nfkc_lower: compatibility forms first"
    )
    digits: Literal["keep", "zero"] = Field(default="keep", description="zero: every ASCII digit counts as 0")
    seed: int = Field(default=20240607, ge=0, description="of the hash functions")
    max_document_bytes: int = Field(
        default=2_000_000, ge=1, le=64_000_000, description="longer documents are compared by their beginning"
    )

    @model_validator(mode="after")
    def _check_bands(self) -> SignatureConfig:
        if self.bands * self.rows > self.hashes:
            raise ConfigError(
                f"{self.bands} bands of {self.rows} rows need {self.bands * self.rows} hashes, and there are {self.hashes}",
                expected="bands * rows <= hashes",
                do="raise hashes, or lower bands or rows",
            )
        return self


class MinHashConfig(SignatureConfig):
    """How texts become signatures, and which of them are near duplicates."""

    similarity: float = Field(
        default=0.5, gt=0, le=1, description="exact Jaccard similarity at which a document is removed"
    )

    def signature_fields(self) -> dict[str, Any]:
        """Return the settings on which signatures depend: all but the threshold."""
        return self.model_dump(mode="json", exclude={"similarity"})

    @property
    def join_similarity(self) -> float:
        """Return the estimated similarity from which two documents are candidates: the threshold less 3 standard errors."""
        s = self.similarity
        return max(s - 3 * math.sqrt(s * (1 - s) / self.hashes), 0.0)


class EarlierConfig(BaseModel):
    """One earlier corpus, whose documents stay (`earlier.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str = Field(
        min_length=1,
        description="a folder of documents, or an artifact of ingest (all) or curate (the kept ones)",
    )
    digest: str = Field(default="", description="hash of its documents, set by the step; leave empty")


def collision_probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that documents of this Jaccard similarity share a band: 1 - (1 - s^rows)^bands."""
    return 1.0 - (1.0 - similarity**rows) ** bands
