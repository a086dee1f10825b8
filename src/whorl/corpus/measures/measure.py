"""A measure: a function of a batch of texts that returns one value per text for each of its columns.

    WORDS = Measure("words", 1, "Rae et al. 2021, Gopher, appendix A1", {"n_words": "int64"},
                    lambda: lambda batch: {"n_words": [len(t.split()) for t in batch.texts]})

A measure with a model (a classifier, an n-gram model) is built from the model's file. Its content is part of the key of
the results, so a model that was trained again is applied again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from whorl.errors import ConfigError
from whorl.registry import Registry

if TYPE_CHECKING:
    import pyarrow as pa

MEASURES = Registry(
    "measure",
    {
        "text": "whorl.corpus.measures.text:TEXT",
        "rules": "whorl.corpus.measures.rules:RULES",
        "language": "whorl.corpus.measures.language:LANGUAGE",
        "bad_words": "whorl.corpus.measures.bad_words:BAD_WORDS",
        "personal_data": "whorl.corpus.measures.personal_data:PERSONAL_DATA",
        "classifier": "whorl.corpus.measures.trained.classifier:CLASSIFIER",
        "perplexity": "whorl.corpus.measures.trained.perplexity:PERPLEXITY",
        "importance": "whorl.corpus.measures.trained.importance:IMPORTANCE",
    },
)

Columns = Mapping[str, Any]  # column -> one value per text: an array or a sequence
Types = {
    "int64": lambda pa: pa.int64(),
    "float64": lambda pa: pa.float64(),
    "bool": lambda pa: pa.bool_(),
    "string": lambda pa: pa.string(),
}


@dataclass
class Texts:
    """A batch of texts, a few megabytes, and their UTF-8."""

    texts: Sequence[str]
    shared: dict[str, Any] = field(default_factory=dict)  # for products that several functions need

    @cached_property
    def data(self) -> list[bytes]:
        """The texts in UTF-8."""
        return [text.encode() for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Measure:
    """A function of texts.

    Args:
        name: as in the registry; results are kept under it.
        version: to be raised when the results change.
        source: the publication that defines the values.
        columns: name -> "int64", "float64", "bool", "string" or "binary[N]".
        build: returns the function of a batch; called with the path of the model if `needs_model`.
    """

    name: str
    version: int
    source: str
    columns: Mapping[str, str]
    build: Callable[..., Callable[[Texts], Columns]]
    needs_model: bool = False

    def open(self, model: str | None = None) -> Callable[[Texts], Columns]:
        """Return the function of a batch. Raises ConfigError: a model is missing, or not needed."""
        if self.needs_model != (model is not None):
            raise ConfigError(
                f"the measure {self.name!r} {'needs a' if self.needs_model else 'has no'} model",
                expected=f'{{ name = "...", measure = "{self.name}"{", model = FILE" * self.needs_model} }}',
            )
        return self.build() if model is None else self.build(model)

    def schema(self, prefix: str = "") -> pa.Schema:
        """Return the columns, with `prefix` before their names."""
        import pyarrow as pa

        return pa.schema([(prefix + name, arrow_type(kind)) for name, kind in self.columns.items()])


class MeasureConfig(BaseModel):
    """One use of a measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$",
        description="columns of a measure with a model begin with this name and `_`",
    )
    measure: Annotated[str, AfterValidator(MEASURES.check)] = Field(
        description="one of whorl.corpus.measures, or 'module:attribute' of your own"
    )
    model: Path | None = Field(default=None, description="file of the measure's model")
    digest: str = Field(default="", description="hash of the model's file, set by the step; leave empty")

    @property
    def prefix(self) -> str:
        """Prefix of the columns' names."""
        return "" if self.model is None else f"{self.name}_"

    def resolve(self) -> Measure:
        """Return the measure. Raises ConfigError: it cannot be imported, or is none."""
        found = MEASURES.get(self.measure)
        if not isinstance(found, Measure):
            raise ConfigError(
                f"{self.measure} is no measure", expected="an object of whorl.corpus.measures.Measure"
            )
        return found


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a column. Raises ConfigError: it is unknown."""
    import pyarrow as pa

    if kind.startswith("binary[") and kind.endswith("]") and kind[7:-1].isdecimal():
        return pa.binary(int(kind[7:-1]))
    if kind not in Types:
        raise ConfigError(
            f"a measure has a column of type {kind!r}", expected=f"{', '.join(Types)} or binary[N]"
        )
    return Types[kind](pa)


def measure_texts(name: str, texts: Sequence[str], model: str | None = None) -> list[dict[str, Any]]:
    """Return a measure's columns for each of these texts: the plain function of a text.

    Args:
        name: of the registry, or "module:attribute".
        model: path of the model of a measure that needs one.
    """
    measure = MeasureConfig(name="measure", measure=name).resolve()
    found = measure.open(model)(Texts(texts))
    values = [list(found[column]) for column in measure.columns]
    return [dict(zip(measure.columns, row, strict=True)) for row in zip(*values, strict=True)]
