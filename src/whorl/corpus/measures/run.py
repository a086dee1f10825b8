"""Measuring of document files: each measure of each file is a unit of work.

A unit's key has the content of the file and of the measure's model, the measure's name and version. So a new measure reads
the text once, and other thresholds, other files or a killed run read none that is measured. A unit's Parquet file has one
row per document, in the same order and the same row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whorl.corpus.mapreduce import Executor, Input, Stage, Unit, UnitStore
from whorl.corpus.measures.measure import MeasureConfig, Texts
from whorl.errors import ConfigError, DataError

FILE = "columns.parquet"
BATCH_CHARACTERS = 2_000_000


def measure_files(
    measures: Sequence[MeasureConfig], documents: Sequence[Path], units: UnitStore, executor: Executor,
    advance: Callable[[int], Any] = lambda n: None,
) -> dict[str, list[Path]]:  # fmt: skip
    """Return the Parquet files of each measure's columns, one per document file.

    Args:
        advance: called with the number of documents that were measured, or found.

    Returns:
        name of a measure -> files in the order of `documents`.

    Raises:
        ConfigError: a measure is unknown or needs a model, or two have a column in common.
        DataError: a text cannot be measured, or a measure returns the wrong columns.
    """
    import pyarrow.parquet as pq

    check_columns(measures)
    inputs = [Input.of(path) for path in documents]
    rows = {path.digest: pq.ParquetFile(path.path).metadata.num_rows for path in inputs}
    found = {}
    for config in measures:
        model = (_model_input(config.model),) if config.model is not None else ()
        stage = Stage(
            f"{__name__}:measure_file",
            config.resolve().version,
            {"measure": config.measure},
            isolate=bool(model),
        )
        outputs = units.run(
            stage, [Unit((path, *model)) for path in inputs], executor,
            advance=lambda unit: advance(rows[unit.inputs[0].digest]),
        )  # fmt: skip
        found[config.name] = [output.folder / FILE for output in outputs]
    return found


def check_columns(measures: Sequence[MeasureConfig], taken: Sequence[str] = ()) -> None:
    """Raise ConfigError if two measures, or a measure and the other columns, have a column or a name in common."""
    owners, names = dict.fromkeys(taken, "whorl"), set[str]()
    for config in measures:
        if config.name in names:
            raise ConfigError(f"two measures have the name {config.name!r}", expected="different names")
        names.add(config.name)
        for column in config.resolve().schema(config.prefix).names:
            if column in owners:
                raise ConfigError(
                    f"the measures {owners[column]} and {config.name} both have the column {column!r}",
                    expected="different columns", do="leave one of them out, or give it another name",
                )  # fmt: skip
            owners[column] = config.name


def with_model_digest(config: MeasureConfig) -> MeasureConfig:
    """Add the hash of the model's file, so that an address changes with its content. Raises ConfigError: no such file."""
    if config.model is None:
        return config
    return config.model_copy(update={"digest": _model_input(config.model).digest})


def _model_input(path: Path) -> Input:
    try:
        return Input.of(path)
    except OSError as error:
        raise ConfigError(f"the model {path} cannot be read: {error.strerror}", expected="a file") from error


def measure_file(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a measure's columns of a document file into `out` (a unit's function); return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, *models = inputs
    measure = MeasureConfig(name="measure", measure=config["measure"]).resolve()
    function, schema = measure.open(*models), measure.schema()
    # Hashes do not compress.
    compression = {
        name: "none" if kind.startswith("binary") else "zstd" for name, kind in measure.columns.items()
    }
    with (
        pq.ParquetFile(path) as file,
        pq.ParquetWriter(out / FILE, schema, compression=compression) as writer,
    ):
        for group in range(file.num_row_groups):
            parts = []
            for texts in text_batches(file.read_row_group(group, columns=["text"])["text"].to_pylist()):
                found = function(Texts(texts))
                if set(found) != set(schema.names) or any(len(v) != len(texts) for v in found.values()):
                    raise DataError(
                        f"the measure {config['measure']} returned {sorted(found)} for {len(texts)} texts of {path}",
                        expected=f"one value per text for each of {', '.join(schema.names)}",
                    )
                parts.append(pa.table([pa.array(found[f.name], f.type) for f in schema], schema=schema))
            writer.write_table(pa.concat_tables(parts or [schema.empty_table()]))
        return {"rows": file.metadata.num_rows}


def text_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in batches of at most BATCH_CHARACTERS, or one longer text."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
