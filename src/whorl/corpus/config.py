"""Configuration of a corpus: its sources, and the selection of documents.

There is one pydantic model per step. The fields are part of the artifact's address, since they change the result. The
engine and its workers (`ExecutorConfig`) are not.

The subtle part is `IngestConfig.fingerprint`. An address is a hash of configuration and parents, and `ingest` has no
parents. Without the fingerprint, an edited source file would not change the address. The step therefore sets
`fingerprint` from the input bytes before it computes the address (`whorl.corpus.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.deduplication.semantic.settings import SemanticConfig
from whorl.corpus.deduplication.settings import EarlierConfig, MinHashConfig, SignatureConfig
from whorl.corpus.mapreduce import ExecutorConfig
from whorl.corpus.measures.filters import FILTERS, check_filter, filtered_query
from whorl.corpus.measures.measure import MEASURES, MeasureConfig
from whorl.data.formats import FORMATS
from whorl.errors import ConfigError, one_of

# Folders of tools and caches. A pattern without "/" matches a name at any depth.
DEFAULT_EXCLUDE = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "node_modules",
    ".venv",
    ".tox",
    ".mypy_cache",
    ".whorl",
    ".ipynb_checkpoints",
)

# A reason and the condition that drops a document. The thresholds are loose: a rule should only catch text that no reader
# would accept.
DEFAULT_RULES = {
    "exact_duplicate": "exact_duplicate",
    "too_short": "n_bytes < 100",
    "generated": "generated",
    "long_lines": "is_code AND (max_line_length > 20000 OR mean_line_length > 300)",
    "few_letters": "alnum_fraction < 0.3",
    "mostly_digits": "digit_fraction > 0.4",
    "repeated_lines": "repeated_line_fraction > 0.9",
}


def rules_query(rules: Mapping[str, str]) -> str:
    """Return SQL that maps each row to the first reason whose condition holds; '' keeps the document."""
    cases = "".join(
        f"  WHEN {condition} THEN '{reason}'\n" for reason, condition in rules.items() if condition
    )
    return f"SELECT row, CASE\n{cases}  ELSE '' END AS reason\nFROM attributes"


DEFAULT_QUERY = rules_query(DEFAULT_RULES)


MeasureName = Annotated[str, AfterValidator(MEASURES.check)]


class IngestConfig(ExecutorConfig):
    """Which bytes become documents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[str] = Field(
        default=["python-stdlib"],
        min_length=1,
        description="known names ('python-stdlib'), folders, files or globs ('notes/**/*.md'), also as fsspec URLs",
    )
    include: list[str] = Field(default=["*"], description="keep only files that match one of these globs")
    exclude: list[str] = Field(
        default=list(DEFAULT_EXCLUDE), description="leave out files and folders that match one of these globs"
    )
    text_field: str = Field(
        default="text", min_length=1, description="the text's field in records of JSONL, Parquet and tables"
    )
    formats: dict[str, Annotated[str, AfterValidator(FORMATS.check)]] = Field(
        default={},
        description="suffix -> format: one of whorl.data.formats, or 'module:attribute' of your own",
    )
    max_document_bytes: int = Field(
        default=4_000_000,
        ge=1,
        le=64_000_000,
        description="longer text files are divided, records quarantined",
    )
    split_bytes: int | None = Field(
        default=None,
        ge=0,
        description="divide longer text files that are no code into documents of about this size; 0: never; default: only "
        "if there are few files. Those over `max_document_bytes` are divided but for 0",
    )
    normalise: list[Literal["mojibake", "line_ends", "control_characters", "nfc"]] | None = Field(
        default=None,
        description="steps that change the text of documents; default: all for text extracted from HTML and PDF, none for "
        "the text of files and records",
    )
    licences: dict[str, str] = Field(
        default={}, description="source -> SPDX licence, for documents without a licence field"
    )
    equal_files: Literal["once", "all"] = Field(
        default="once",
        description="once: of files with equal content, suffix and licence, read the first; all: read each",
    )
    links: list[str] = Field(
        default=[],
        description="files of records with url and score; documents are kept whose url has a link of `min_link_score`",
    )
    min_link_score: float = Field(default=3, description="lowest score of a link in `links`")
    fingerprint: str = Field(default="", description="hash of the input bytes, set by the step; leave empty")


class TestSetConfig(BaseModel):
    """Files whose records must not be in the training data."""

    __test__ = False  # no class of tests
    model_config = ConfigDict(extra="forbid", frozen=True)

    files: list[str] = Field(
        min_length=1, description="JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed"
    )
    field: str = Field(default="text", min_length=1, description="the text's field in each record")


class DecontaminationConfig(BaseModel):
    """Which documents count as contaminated with test items."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tests: list[TestSetConfig] = Field(min_length=1, description="the test sets: files and their field")
    n: int = Field(default=13, ge=2, description="words of an n-gram")
    min_words: int | None = Field(
        default=None,
        ge=1,
        description="items of fewer than n words, but at least so many, are matched whole; default n",
    )
    min_score: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="fraction of an item's n-grams, weighted by rarity, that marks a document",
    )
    fingerprint: str = Field(default="", description="hash of the items, set by the step; leave empty")


class CurateConfig(ExecutorConfig):
    """Which documents are selected, and which of them are held out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    query: str = Field(
        default=DEFAULT_QUERY, description="SQL over `attributes`: columns row and reason ('' = keep)"
    )
    rules: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], str] = Field(
        default={},
        description="reason -> SQL condition, in place of that of the default query ('' = no such rule), or one more",
    )
    measures: list[MeasureName | MeasureConfig] = Field(
        default=[],
        description="further columns of `attributes`: names, or { name, measure, model } for one with a model",
    )
    filters: list[Annotated[str, AfterValidator(check_filter)]] = Field(
        default=[],
        description=f"published rules for the documents that the query keeps: {', '.join(FILTERS)}",
    )
    near_duplicate_similarity: float = Field(
        default=0.5,
        ge=0.3,
        le=1.0,
        description="estimated Jaccard similarity (of five-word shingles) that makes two documents a cluster",
    )
    near_duplicates: Literal["remove", "keep"] = Field(
        default="remove",
        description="remove: of selected documents whose exact similarity reaches that threshold, one stays; keep: all",
    )
    near_duplicate_order: str = Field(
        default="",
        description="SQL ordering of `attributes`, such as 'licence IS NULL, n_bytes DESC': the first of exact or near "
        "duplicates stays, of equal ones the smallest id; default: the first row",
    )
    minhash: SignatureConfig = Field(
        default=SignatureConfig(), description="hashes, bands, shingles and normalization of near duplicates"
    )
    earlier: list[str | EarlierConfig] = Field(
        default=[],
        description="earlier corpora: folders of documents, or artifacts as 'web/curate'; their documents stay",
    )
    semantic: SemanticConfig | None = Field(
        default=None,
        description="an encoder: of documents whose embeddings are similar, one stays; the others are dropped",
    )
    decontaminate: DecontaminationConfig | None = Field(
        default=None, description="test sets; documents that hold their items are dropped as 'contaminated'"
    )
    validation_bytes: int = Field(default=1_000_000, ge=0)
    test_bytes: int = Field(default=1_000_000, ge=0)
    max_held_out_fraction: float = Field(
        default=0.1,
        gt=0,
        le=0.4,
        description="maximum fraction of the selected bytes in validation, and in test",
    )
    max_cluster_fraction: float = Field(
        default=0.1, gt=0, le=1.0, description="maximum fraction of a held-out split in one cluster"
    )
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check_rules(self) -> CurateConfig:
        if self.rules and self.query != DEFAULT_QUERY:
            raise ConfigError(
                "curate.rules changes the default query, and curate.query replaces it",
                expected="one of the two",
            )
        for reason, condition in self.rules.items():
            if not condition and reason not in DEFAULT_RULES:
                raise ConfigError(
                    f"curate.rules removes the rule {reason!r}", expected=one_of(reason, list(DEFAULT_RULES))
                )
        return self

    @property
    def selection_query(self) -> str:
        """The SQL of the selection: `query`, or the default rules changed by `rules`; and the filters."""
        query = rules_query({**DEFAULT_RULES, **self.rules}) if self.rules else self.query
        return filtered_query(query, self.filters)

    @model_validator(mode="after")
    def _check_earlier(self) -> CurateConfig:
        if self.earlier and self.near_duplicates == "keep" and self.semantic is None:
            raise ConfigError(
                "curate.earlier names corpora, but near duplicates are kept",
                expected='near_duplicates = "remove"',
            )
        return self

    @property
    def minhash_config(self) -> MinHashConfig:
        """`minhash` with the threshold."""
        return MinHashConfig(similarity=self.near_duplicate_similarity, **self.minhash.model_dump())

    @property
    def measure_configs(self) -> list[MeasureConfig]:
        """The measure `text`, `measures` and those of the filters, names as configurations."""
        needed = {FILTERS[name].measure for name in self.filters} - set(map(str, self.measures))
        return [
            MeasureConfig(name=m.rpartition(":")[2].lower(), measure=m) if isinstance(m, str) else m
            for m in ["text", *self.measures, *sorted(needed)]
        ]
